"""Test the schedules that compute all gradients of weft.all_gather_matmul, on two GPUs."""

from __future__ import annotations

import gpu_ranks
import product_ranks
import pytest
import torch
import torch.distributed as dist
from support.on_ranks import close

import weft
from weft.builders import AllGatherMatmulGradients
from weft.launch import Pool
from weft.operator.calls import prepared_calls
from weft.ops.all_gather_matmul_gradients import OPERATOR

pytestmark = gpu_ranks.MARKS
SIZES = {
    "one weight": (2048, (512,), 256),
    "three weights": (1024, (384, 128, 128), 512),
    "odd": (602, (19, 7), 43),
    "odd, one weight": (602, (19,), 43),
}
BY_GEMM = [("direct[add=gemm]", sizes) for sizes in ("one weight", "odd, one weight")]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("schedule", "sizes"), [*(("direct", sizes) for sizes in SIZES), *BY_GEMM])
def test_behind_stragglers_and_replayed(pair: Pool, schedule: str, sizes: str, dtype: str) -> None:
    pair.run(product_ranks.on_streams, AllGatherMatmulGradients(2, *SIZES[sizes], dtype), schedule, timeout_s=60)


def _backward(group: dist.ProcessGroup) -> set[str]:
    """Run backward with sizes that change from call to call, and check all gradients. Return the builders of the chosen
    schedules.
    """
    rank, world, device = group.rank(), group.size(), torch.device("cuda", torch.cuda.current_device())
    for number, m in enumerate((2048, 1024, 2048, 3072)):
        torch.manual_seed(number)
        xs, k, n = torch.randn(world, m // world, 4096, device=device).bfloat16(), 4096, 3072
        weights = [torch.randn(world, n, k, device=device).bfloat16() for _ in range(2)]
        grads = [torch.randn(world, m, n, device=device).bfloat16() for _ in range(2)]
        x = xs[rank].clone().requires_grad_()
        ws = [w[rank].clone().requires_grad_() for w in weights]
        _, ys = weft.all_gather_matmul(x, [w.t() for w in ws], 0, group, return_A=False)
        torch.autograd.backward(ys, [grad[rank] for grad in grads])
        whole, mine = xs.flatten(0, 1).double(), slice(rank * m // world, (rank + 1) * m // world)
        exact = torch.zeros(m // world, k, dtype=torch.float64, device=device)
        for grad, w in zip(grads, weights, strict=True):
            for g, one in zip(grad, w, strict=True):
                exact += g[mine].double() @ one.double()
        assert x.grad is not None
        # The usual sum rounds both products of each rank before it adds them.
        usual = sum(
            g[mine] @ one for grad, w in zip(grads, weights, strict=True) for g, one in zip(grad, w, strict=True)
        )
        close(x.grad, exact, usual)
        for w, grad in zip(ws, grads, strict=True):
            assert w.grad is not None
            assert w.grad.is_contiguous()
            close(w.grad, grad[rank].t().double() @ whole, grad[rank].t() @ xs.flatten(0, 1))
    return {one.taken[0] for one in prepared_calls(OPERATOR, group)}


def test_chosen_unasked(pair: Pool) -> None:
    taken = pair.run(_backward, timeout_s=60)
    # The choice depends on measured times of GEMMs. It means nothing on ranks that share a GPU, and may differ on other
    # machines.
    known = torch.cuda.get_device_name() == "NVIDIA H200" and torch.cuda.device_count() > 1
    assert not known or taken == [{"direct"}] * 2
