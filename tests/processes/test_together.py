"""Errors on a single rank in a call of a known shape, on CPU: the others are notified, and no call pairs with another
call.

Cheapest first: errors before a rank has joined (refused, and the group stays usable) and after it has joined (the group
fails). Then a training loop that one rank leaves in the middle, and pauses of a process, which are no errors. Each
result is compared with the result of its own step, so that a result of another step is noticed.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import failure_of
from support.on_ranks import assert_error, error_of, own_group
from support.slow import mostly

import weft
from weft.launch import Pool
from weft.operator.cache import _OfGroup

BAD_RANK = 1
K, N, ROWS = 16, 8, 4
SCHEDULES = ["serial", "gather[by=kernel]", "shard[chunks=1,send=in_turn,by=dma]"]


def shard(rank: int, step: int) -> torch.Tensor:
    return torch.full((ROWS, K), float(100 * rank + step))


def call(group: dist.ProcessGroup, step: int, schedule: str, **options: Any) -> torch.Tensor:
    w = torch.ones(K, N)
    return weft.all_gather_matmul(shard(group.rank(), step), [w], 0, group, schedule=schedule, **options)[1][0]


def right(group: dist.ProcessGroup, step: int, schedule: str, **options: Any) -> bool:
    wanted = torch.cat([shard(rank, step) for rank in range(group.size())]) @ torch.ones(K, N)
    return torch.equal(call(group, step, schedule, **options), wanted)


def failing(group: dist.ProcessGroup, error: BaseException) -> Any:
    """Return a context in which calls of known shapes raise `error` on one rank, before the rendezvous."""
    fails = mock.Mock(side_effect=error)
    return mock.patch.object(_OfGroup, "called", fails) if group.rank() == BAD_RANK else nullcontext()


# --- before a rank has joined the call ---


def fails_early(group: dist.ProcessGroup, schedule: str, error: str) -> tuple[tuple[str, str], list[bool]]:
    own = own_group(group)
    assert right(own, 0, schedule)
    kinds = {"memory": MemoryError("on purpose"), "runtime": RuntimeError("on purpose")}
    with failing(group, kinds[error]):
        found = error_of(lambda: call(own, 1, schedule))
    return found, [right(own, step, schedule) for step in (2, 3)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("error", "kind"), [("memory", "MemoryError"), ("runtime", "RefusedError")])
def test_an_error_before_anything_is_begun_is_a_refusal(pool: Pool, schedule: str, error: str, kind: str) -> None:
    for rank, ((found, text), after) in enumerate(pool.run(fails_early, schedule, error, ranks=3)):
        assert found == (kind if rank == BAD_RANK else "RefusedError")
        assert "on purpose" in text
        assert after == [True, True]


def odd_input(group: dist.ProcessGroup, schedule: str) -> tuple[tuple[str, str], bool]:
    """Pass a sparse tensor of a known shape on rank 1. Many of its methods raise errors."""
    own = own_group(group)
    assert right(own, 0, schedule)
    x = shard(group.rank(), 1)
    x = x.to_sparse() if group.rank() == BAD_RANK else x
    found = error_of(lambda: weft.all_gather_matmul(x, [torch.ones(K, N)], 0, own, schedule=schedule))
    return found, right(own, 2, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES[:2])
def test_odd_input_of_a_known_shape_is_refused(pool: Pool, schedule: str) -> None:
    for error, after in pool.run(odd_input, schedule, ranks=2):
        assert_error(error, "RefusedError", "rank 1: ")
        assert after


# --- later ---


def interrupted(group: dist.ProcessGroup, schedule: str) -> list[tuple[str, str]]:
    """Interrupt rank 1 with Ctrl-C inside a call, before it has published anything."""
    own = own_group(group)
    assert right(own, 0, schedule)
    with failing(group, KeyboardInterrupt()):
        first = failure_of(lambda: call(own, 1, schedule))
    return [first, failure_of(lambda: call(own, 2, schedule))]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ctrl_c_in_a_call_ends_the_group(pool: Pool, schedule: str) -> None:
    for rank, (first, second) in enumerate(pool.run(interrupted, schedule, ranks=2)):
        assert first[0] == ("KeyboardInterrupt" if rank == BAD_RANK else "PoisonedGroupError")
        assert_error(second, "PoisonedGroupError", "rank 1: all_gather_matmul: KeyboardInterrupt()")


def interrupted_at_once(group: dist.ProcessGroup, module: str, function: str, is_first: bool) -> list[tuple[str, str]]:
    """Interrupt rank 1 with Ctrl-C before its call is counted. The program catches it and makes its next call."""
    own, where = own_group(group), importlib.import_module(module)
    assert is_first or right(own, 0, "serial")
    native = getattr(where, function)

    def ctrl_c(*_: Any) -> Any:
        setattr(where, function, native)
        raise KeyboardInterrupt

    if group.rank() == BAD_RANK:
        setattr(where, function, ctrl_c)
    # With a timeline, the call runs through its public function, and is not replayed.
    return [failure_of(lambda step=step: call(own, step, "serial", timeline=weft.Timeline())) for step in (1, 2)]


@pytest.mark.parametrize(
    ("module", "function", "is_first"),
    [
        ("weft.operator.calls", "group_of", False), ("weft.operator.together", "calls_of", False),
        ("weft.operator.calls", "group_of", True),
    ],
)  # fmt: skip
def test_ctrl_c_before_a_call_is_counted_ends_the_group(pool: Pool, module: str, function: str, is_first: bool) -> None:
    for rank, (first, second) in enumerate(pool.run(interrupted_at_once, module, function, is_first, ranks=2)):
        assert first[0] == ("KeyboardInterrupt" if rank == BAD_RANK else "PoisonedGroupError")
        assert_error(second, "PoisonedGroupError", "rank 1: all_gather_matmul: KeyboardInterrupt()")


def train(group: dist.ProcessGroup, operator: str, schedule: str) -> list[tuple[str, str]]:
    """Train for some steps. Rank 1 has an error between forward and backward of step 1. All ranks catch errors and
    continue.
    """
    own, found, rank = own_group(group), [], group.rank()
    for step in range(4):
        try:
            x = shard(rank, step).requires_grad_()
            if operator == "all_gather_matmul":
                y = weft.all_gather_matmul(x, [torch.ones(K, N)], 0, own, schedule=schedule)[1][0]
            else:
                splits = torch.full((own.size(),), ROWS // own.size())
                y = weft.all_to_all_matmul(x, torch.ones(1, K, N), splits, group=own, schedule=schedule)
            if step == 1 and rank == BAD_RANK:
                raise ArithmeticError("the user's")
            y.sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, float(N * (own.size() if operator[4] == "g" else 1))))
            found.append(("", ""))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


@pytest.mark.parametrize(
    ("operator", "schedule"),
    [
        ("all_gather_matmul", "serial"),
        ("all_gather_matmul", "shard[chunks=1,send=in_turn,by=dma]"),
        ("all_to_all_matmul", "serial"),
        ("all_to_all_matmul", "dispatch[by=dma,rest=each]"),
    ],
)
def test_no_step_pairs_with_another_one(pool: Pool, operator: str, schedule: str) -> None:
    good, bad = pool.run(train, operator, schedule, ranks=2)
    assert [kind for kind, _ in good] == ["", "DisagreementError", "PoisonedGroupError", "PoisonedGroupError"]
    assert [kind for kind, _ in bad] == ["", "ArithmeticError", "DisagreementError", "PoisonedGroupError"]
    assert "make a new process group" in good[1][1]


# --- pauses ---


def paused(group: dist.ProcessGroup, schedule: str, seconds: float) -> int:
    """Compare results while another process repeatedly stops this process for a moment."""
    own, end, count = own_group(group), threading.Event(), 0
    assert right(own, 0, schedule)
    if group.rank() == BAD_RANK:
        pid = os.getpid()
        if (child := os.fork()) == 0:
            for _ in range(4):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.15)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.2)
            os._exit(0)
        threading.Thread(target=lambda: (os.waitpid(child, 0), end.set()), daemon=True).start()
    going_on = torch.ones(1)
    while going_on.item():
        count += 1
        assert right(own, count, schedule, deadline_s=20), count
        going_on = torch.tensor([0.0 if end.is_set() else 1.0])
        dist.broadcast(going_on, BAD_RANK, group=group)
    return count


@pytest.mark.parametrize("schedule", mostly(SCHEDULES, "serial", SCHEDULES[-1]))
def test_a_pause_is_no_failure(pool: Pool, schedule: str) -> None:
    """The wait for gloo may have timed out when the process continues. This is no error if the collective has ended
    meanwhile.
    """
    first, second = pool.run(paused, schedule, 1.5, ranks=2)
    assert first == second > 3
