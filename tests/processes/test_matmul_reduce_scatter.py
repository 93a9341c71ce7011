"""Operands whose memory does not hold their values, on CPU processes: views that are negated, and storage that was freed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.on_ranks import told
from support.operators.gemms import Gemm, MatmulReduceScatterCall

from weft.launch import Pool


def memory_of_other_values(group: dist.ProcessGroup) -> tuple[str, str]:
    """Return the errors for operands whose memory was freed, between calls with views whose memory holds their negatives."""
    call = MatmulReduceScatterCall(
        Gemm((4 * group.size(), 6), 1, schedule="direct[chunks=1,by=dma,add=gemm]"), group, 1
    )
    A, B = call.mine
    negated = torch.complex(torch.zeros_like(B), -B).conj().imag
    assert negated.is_neg()
    assert torch.equal(negated, B)
    freed = [A.clone(), B.clone()]
    for one in freed:
        one.untyped_storage().resize_(0)

    def check(A: torch.Tensor, B: torch.Tensor) -> None:
        with call.poisoned():
            call.check(group, call(group, A, B))

    check(A, negated)
    check(torch._neg_view(-A), B)
    found = told(lambda: call(group, freed[0], B)), told(lambda: call(group, A, freed[1]))
    check(A, B)
    return found


def test_memory_that_does_not_hold_the_values(pool: Pool) -> None:
    for freed in pool.run(memory_of_other_values, ranks=2, timeout_s=60):
        for name, error in zip("xw", freed, strict=True):
            assert error.startswith(f"RefusedError: ranks 0, 1: {name} has no memory: its storage was freed")
