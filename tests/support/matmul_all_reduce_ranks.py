"""Norms of matmul_all_reduce for tiny shapes, on CPU processes and on GPUs. This function runs on the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.operators.gemms import Following, MatmulAllReduceCall


def normed_alike(group: dist.ProcessGroup) -> None:
    """Check norms for tiny shapes, eager and compiled, with a non-contiguous weight of the norm."""
    for shape, n in (((6, 8), 5), ((0, 8), 5), ((6, 0), 5), ((6, 8), 0), ((2, 3, 8), 1)):
        torch._dynamo.reset()
        for eps in (1e-6, 0.5):
            call = MatmulAllReduceCall(Following(shape, n, bias=True, eps=eps), group, 3)
            inputs = [*call.mine[:-1], call.mine[-1].repeat_interleave(2)[::2]]

            def run(*inputs: torch.Tensor, call: MatmulAllReduceCall = call) -> list[torch.Tensor]:
                return call(group.group_name, *inputs)

            call.check(group, run(*inputs))
            if eps == 0.5:
                call.check(group, torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs))
