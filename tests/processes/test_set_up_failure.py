"""Failures in first calls of a shape, on CPU.

If a single rank fails, in an exchange or between exchanges, the group fails on all ranks, at once and with the cause.
Errors that all ranks raise leave the group unchanged. Functions with a `group` argument run on the ranks. Deadlines are
long, because no wait may end by them.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import failure_of, wait_for_failure
from support import made_up
from support.on_ranks import assert_error, error_of

import weft
from weft import plan, symm
from weft.builders import AllGatherMatmul
from weft.launch import Pool
from weft.operator import select
from weft.schedule import Schedule

BAD_RANK = 1
LONG_S = 50.0


def call(group: dist.ProcessGroup, width: int = 3, **options: Any) -> torch.Tensor:
    """Call the operator with operands of ones."""
    x, w = torch.ones(4, 8), torch.ones(8, width)
    return weft.all_gather_matmul(x, [w], 0, group, deadline_s=LONG_S, **options)[1][0]


def interrupted(group: dist.ProcessGroup, where: str) -> list[tuple[str, str]]:
    """Interrupt rank 1 with Ctrl-C while it waits for the others in a set-up exchange. They arrive after rank 1 has
    handled it; then all try again.
    """
    own = dist.new_group(list(range(group.size())))
    comm = symm.communicator(own, "cpu")
    native, waiting, late = comm.all_gather_files, threading.Event(), where

    def gather(obj: Any, file: int | None, *, what: str, **options: Any) -> Any:
        if late in what:
            if group.rank() != BAD_RANK:
                wait_for_failure(comm)
            waiting.set()
        return native(obj, file, what=what, **options)

    comm.all_gather_files = gather  # type: ignore[method-assign]
    if group.rank() == BAD_RANK:

        def ctrl_c() -> None:
            waiting.wait()
            threading.Event().wait(0.2)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=ctrl_c, daemon=True).start()
    return [failure_of(lambda: call(own, 5, schedule="shard[chunks=1,send=in_turn,by=dma]")) for _ in range(2)]


@pytest.mark.parametrize("where", ["for Exchange", "schedules to run", "checks of schedule"])
def test_ctrl_c_in_an_exchange(where: str) -> None:
    with Pool(3) as alone:
        found = alone.run(interrupted, where, timeout_s=30)
    for rank, (first, second) in enumerate(found):
        assert first[0] == ("KeyboardInterrupt" if rank == BAD_RANK else "PoisonedGroupError")
        assert second[0] == "PoisonedGroupError"
        for _, text in [second] if rank == BAD_RANK else [first, second]:
            assert "rank 1: " in text
            assert where in text
            assert "KeyboardInterrupt()" in text


def fails_alone(group: dist.ProcessGroup, error: str) -> list[tuple[str, str]]:
    """Let rank 1 fail between two exchanges. Then all try again."""
    own = dist.new_group(list(range(group.size())))
    native = plan.autotune

    def fail(*arguments: Any, **options: Any) -> Any:
        raise {"memory": MemoryError("on purpose"), "file": ValueError("no TOML file: on purpose")}[error]

    if group.rank() == BAD_RANK:
        select.plan.autotune = fail
    try:
        return [error_of(lambda: call(own)) for _ in range(2)]
    finally:
        select.plan.autotune = native


@pytest.mark.parametrize(("error", "kind"), [("memory", "MemoryError"), ("file", "ValueError")])
def test_an_error_of_one_rank_between_exchanges(pool: Pool, error: str, kind: str) -> None:
    found = pool.run(fails_alone, error, ranks=3, timeout_s=30)
    for rank, (first, second) in enumerate(found):
        assert first[0] == (kind if rank == BAD_RANK else "PoisonedGroupError")
        assert_error(second, "PoisonedGroupError", "rank 1: choosing a schedule of all_gather_matmul", "on purpose")


def picky(p: AllGatherMatmul) -> Schedule:
    """Refuse every problem."""
    raise weft.builders.NotApplicableError("on principle")


def errors_of_all(group: dist.ProcessGroup) -> list[str]:
    own = dist.new_group(list(range(group.size())))
    kinds = []
    for function in (made_up.hasty, picky):
        with made_up.registered(function):
            kinds.append(error_of(lambda name=function.__name__: call(own, schedule=name))[0])
    assert torch.equal(call(own), torch.full((4 * group.size(), 3), 8.0))
    return kinds


def test_what_all_raise_alike_ends_nothing(pool: Pool) -> None:
    for kinds in pool.run(errors_of_all, ranks=2, timeout_s=60):
        assert kinds == ["ScheduleError", "RefusedError"]


def late_for_the_first_call(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """Let rank 1 make its first call after the others have given up waiting for it, while they make their second call."""
    own, found = dist.new_group(list(range(group.size()))), []
    late = group.rank() == BAD_RANK
    for number in range(2):
        if late and not number:
            threading.Event().wait(1.5)
        x, w = torch.full((4, 8), float(number)), torch.ones(8, 3)
        deadline_s = 0.5 if not late and not number else LONG_S
        found.append(error_of(lambda x=x, w=w, s=deadline_s: weft.all_gather_matmul(x, [w], 0, own, deadline_s=s)))
    return found


def test_a_rank_that_is_a_call_behind_in_the_set_up(pool: Pool) -> None:
    found = pool.run(late_for_the_first_call, ranks=3, timeout_s=30)
    for rank, ((first, _), (second, _)) in enumerate(found):
        assert first == ("DisagreementError" if rank == BAD_RANK else "DeadlineError")
        assert second == ("PoisonedGroupError" if rank == BAD_RANK else "DisagreementError")
    assert (
        "in different calls of weft's operators: call 2 of rank 0, call 1 of rank 1, call 2 of rank 2, counted on this group since "
        "its first call or since the last call that a rank refused"
    ) in found[BAD_RANK][0][1]
