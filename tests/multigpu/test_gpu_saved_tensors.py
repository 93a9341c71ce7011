"""A saved tensor that one rank changes in place before backward, or a graph that every rank has freed, on GPUs."""

from __future__ import annotations

import contextlib
import time

import gpu_ranks as ranks
import torch
import torch.distributed as dist
from support.on_ranks import assert_error, error_of, own_group

import weft
from weft import symm
from weft.errors import WeftError
from weft.launch import Pool

pytestmark = ranks.MARKS


def scattered(group: dist.ProcessGroup) -> torch.Tensor:
    x, w = (torch.ones(*size, device=ranks.device(), requires_grad=True) for size in ((256, 64), (64, 128)))
    return weft.matmul_reduce_scatter(x, w, "sum", 0, group)


def freed_everywhere(group: dist.ProcessGroup) -> tuple[str, str]:
    """Run backward twice on every rank. Return the second error. Then make a right call and its backward."""
    own = own_group(group)
    y = scattered(own).sum()
    y.backward()
    error = error_of(y.backward)
    again = scattered(own)
    again.sum().backward()
    torch.cuda.synchronize()
    assert torch.equal(again, torch.full_like(again, 64.0 * own.size()))
    return error


def test_a_second_backward_on_every_rank_leaves_the_group_usable(pair: Pool) -> None:
    for error in pair.run(freed_everywhere, timeout_s=60):
        assert_error(error, "RefusedError", "backward through the graph a second time")


def changed_on_one(group: dist.ProcessGroup) -> tuple[str, str]:
    """Change a saved tensor on rank 1 before backward. Return this rank's error."""
    own = own_group(group)
    y = scattered(own)
    if own.rank() == 1:
        assert y.grad_fn is not None
        torch.autograd.graph.increment_version(y.grad_fn.saved_tensors[0])  # type: ignore[attr-defined]

    def backward() -> None:
        y.sum().backward()
        torch.cuda.synchronize()
        until = time.monotonic() + 8  # less than the deadline, which all waits for the other rank have
        comm = symm.communicator(own, ranks.device())
        while time.monotonic() < until:
            comm.check()
            time.sleep(0.01)

    found = error_of(backward)
    with contextlib.suppress(WeftError):
        dist.barrier(group)
    return found


def test_the_peers_of_a_rank_that_cannot_read_a_saved_tensor_learn_of_it(pair: Pool) -> None:
    for error in pair.run(changed_on_one, timeout_s=60):
        assert_error(error, ("RefusedError", "PoisonedGroupError"), "modified by an inplace operation")
