"""Operands whose memory does not contain their values, on CPU processes: negated views, and freed storage."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import told
from support.operators.gemms import Gemm, MatmulReduceScatterCall

from weft.launch import Pool


def memory_of_other_values(group: dist.ProcessGroup) -> tuple[str, str]:
    """Return the errors for operands whose memory was freed. In between, make calls with negated views, whose memory
    has the values with the opposite sign.
    """
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
        for name, error in zip("AB", freed, strict=True):
            assert error.startswith(f"RefusedError: ranks 0, 1: {name} has no memory: its storage holds 0 of ")


def freed_before_backward(group: dist.ProcessGroup, schedule: str) -> str:
    """Free a saved tensor of rank 1 between forward and backward. Then check gradients of a good call."""
    call = MatmulReduceScatterCall(Gemm((4 * group.size(), 6), 5, schedule=schedule), group, 1)
    A, B = (t.clone().requires_grad_() for t in call.mine)
    (y,) = call(group, A, B)
    if group.rank() == 1:
        B.untyped_storage().resize_(0)
    found = told(y.sum().backward)
    A, B = (t.clone().requires_grad_() for t in call.mine)
    (y,) = call(group, A, B)
    y.sum().backward()
    assert A.grad is not None
    torch.testing.assert_close(A.grad, B.detach().sum(1).expand_as(A))
    return found


@pytest.mark.parametrize("schedule", ["serial", "direct[chunks=1,by=dma,add=gemm]"])
def test_memory_that_was_freed_before_backward(pool: Pool, schedule: str) -> None:
    for error in pool.run(freed_before_backward, schedule, ranks=2, timeout_s=60):
        assert error.startswith(
            "RefusedError: rank 1: a tensor of shape (6, 5) that matmul_reduce_scatter saved for backward"
        )
        assert "has no memory: its storage holds 0 of 120 bytes" in error
