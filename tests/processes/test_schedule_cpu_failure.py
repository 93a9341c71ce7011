"""Schedules on CPU processes when a rank fails: the other ranks do not hang, and report which rank failed, how, and
after how long.

First ranks that are late, raise or leave, in groups of their own inside the shared pool; then ranks that are killed, in
pools of their own. Deadlines are short if they must be missed, and long if another event must end the wait.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import pytest
import schedule_cpu_ranks as ranks
import torch.distributed as dist
from pool import assert_deadline, assert_left, assert_over, failure_of, misbehave, wait_for_failure
from schedule_cpu_ranks import assert_right, build, comm_of, tensors_of
from support.on_ranks import error_of, own_group

from weft.builders import AllGatherMatmul
from weft.launch import Pool, RankDiedError
from weft.runtime.cpu.schedule import CpuSchedule

BAD_RANK = 1
THREE = AllGatherMatmul(3, (4, 4, 4), (5,), 8, "fp32")
LONG_S = 30.0
# Steps of rank 1: on a lane's own thread, on the caller's thread, and a collective of gloo.
STEPS = [("shard", "copy x_shard -> box@2"), ("shard", "matmul y0"), ("serial", "all_gather x_shard -> gathered")]


def again(group: dist.ProcessGroup, executor: CpuSchedule, tensors: ranks.Tensors) -> tuple[str, str]:
    """Return the error of the next run on a failed group. Check that a new group works."""
    error = error_of(lambda: executor.run(tensors))
    executor.close()
    fresh = comm_of(own_group(group))
    with CpuSchedule(executor.schedule, fresh) as new:
        new.run(tensors)
        assert_right(THREE, tensors, 0, "on a new group")
        fresh.all_gather(None, what="all are done")
    fresh.close()
    return error


def absent(group, builder):
    """Let rank 1 skip the second call."""
    comm, tensors = comm_of(own_group(group)), tensors_of(THREE, group.rank(), 0)
    executor = CpuSchedule(build(THREE, builder), comm)
    ranks.run_once(executor, tensors, BAD_RANK)
    started = time.monotonic()
    if group.rank() == BAD_RANK:
        wait_for_failure(comm)
        error = "", ""
    else:
        error = error_of(lambda: executor.run(tensors, deadline_s=0.5))
    return error, time.monotonic() - started, again(group, executor, tensors)


@pytest.mark.parametrize("builder", ["shard", "serial"])
def test_a_rank_that_never_calls(pool: Pool, builder: str) -> None:
    answers = pool.run(absent, builder, ranks=3)
    errors = [answers[rank][0] for rank in (0, 2)]
    missed = (
        rf"rank [02] waited 0.5 s for schedule '{builder}' of number 1 \(rendezvous 2\) from rank 1 \(pid \d+\): wanted 2, "
        "found 1"
    )
    assert_deadline(errors, missed)
    assert all(seconds < 20 for _, seconds, _ in answers)
    assert_over([answer[-1] for answer in answers])


def stuck(group, builder, step, doing):
    """Let rank 1 call. At one of its steps it raises, gets Ctrl-C, leaves, or does nothing until the others have given
    up.
    """
    comm, tensors = comm_of(own_group(group)), tensors_of(THREE, group.rank(), 0)
    executor = CpuSchedule(build(THREE, builder), comm)
    ranks.run_once(executor, tensors, BAD_RANK)

    if group.rank() == BAD_RANK:
        ranks.intercept(executor, step, before=lambda: misbehave(doing, comm))
    error = failure_of(lambda: executor.run(tensors, deadline_s=2.0 if doing == "hang" else LONG_S))
    return error, again(group, executor, tensors)


@pytest.mark.parametrize(
    ("builder", "step", "text"),
    [
        (
            "shard",
            "copy x_shard -> box@2",
            r"rank [02] waited 2 s for signal arrived\[1\] of schedule shard from rank 1 .*: wanted 2, found 1",
        ),
        ("serial", "all_gather x_shard -> gathered", r"rank [02] waited 2 s for all_gather of schedule serial"),
    ],
)
def test_a_rank_that_hangs_in_a_run(pool: Pool, builder: str, step: str, text: str) -> None:
    answers = pool.run(stuck, builder, step, "hang", ranks=3)
    # Rank 0 may have all data that it waits for before it is notified of the failure.
    assert_deadline([error for rank, (error, _) in enumerate(answers) if rank != BAD_RANK and error[0]], text)
    assert_over([last for _, last in answers])


@pytest.mark.parametrize(("builder", "step"), STEPS)
@pytest.mark.parametrize(
    ("doing", "error"), [("raise", ("ArithmeticError", "on purpose")), ("interrupt", ("KeyboardInterrupt", ""))]
)
def test_a_rank_that_raises_in_a_run(pool: Pool, builder: str, step: str, doing: str, error: tuple[str, str]) -> None:
    answers = pool.run(stuck, builder, step, doing, ranks=3)
    assert answers[BAD_RANK][0] == error
    for rank in (0, 2):
        kind, text = answers[rank][0]
        # A rank that has all data of rank 1 may end its run before it is notified.
        assert kind in ("PoisonedGroupError", "")
        assert not kind or re.search(rf"rank 1: schedule {builder}, .*: {error[0]}\(.*{error[1]}", text)
    assert_over([last for _, last in answers])


@pytest.mark.parametrize(("builder", "step"), STEPS[:2])
def test_a_rank_whose_communicator_is_closed_in_a_run(pool: Pool, builder: str, step: str) -> None:
    answers = pool.run(stuck, builder, step, "leave", ranks=3)
    for rank, ((kind, text), _) in enumerate(answers):
        if rank == BAD_RANK:
            assert kind in ("", "ValueError")
            assert not kind or "closed" in text
        else:  # the rank may already have had all data that it needs
            assert kind in ("", "PeerLostError", "PoisonedGroupError")
            assert not kind or re.search(r"rank 1 \(pid \d+\) has left the group", text)


def left(group, builder):
    """Let rank 1 close its communicator instead of making the second call."""
    comm, tensors = comm_of(own_group(group)), tensors_of(THREE, group.rank(), 0)
    with CpuSchedule(build(THREE, builder), comm) as executor:
        ranks.run_once(executor, tensors, BAD_RANK)
        if group.rank() == BAD_RANK:
            comm.close()
            return "", ""
        return error_of(lambda: executor.run(tensors, deadline_s=LONG_S))


@pytest.mark.parametrize("builder", ["shard", "serial"])
def test_a_rank_that_leaves_in_order(pool: Pool, builder: str) -> None:
    assert_left(pool.run(left, builder, ranks=3))


# --- ranks that are killed ---


def killed(group, builder, step):
    """Let rank 1 be killed before its second run (without a step) or at a step of it."""
    tensors = tensors_of(THREE, group.rank(), 0)
    executor = CpuSchedule(build(THREE, builder), comm_of(group))
    ranks.run_once(executor, tensors, BAD_RANK)
    if group.rank() == BAD_RANK:
        if not step:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.intercept(executor, step, before=lambda: os.kill(os.getpid(), signal.SIGKILL))
    errors = []
    for _ in range(3):  # rank 1 may have done its whole part before it dies; then the next run reports it
        with contextlib.suppress(AssertionError):
            errors.append(error_of(lambda: executor.run(tensors, deadline_s=LONG_S)))
    executor.close()
    survivors = dist.new_group([0, 2], use_local_synchronization=True)
    p = AllGatherMatmul.even(4, 3, 5, 2, "fp32")
    tensors = tensors_of(p, survivors.rank(), 0)
    with CpuSchedule(build(p, builder), comm_of(survivors)) as new:
        new.run(tensors)
        assert_right(p, tensors, 0, "survivors")
    return errors


@pytest.mark.parametrize(("builder", "step"), [("shard", ""), *STEPS])
def test_a_rank_that_is_killed(mortals: Pool, builder: str, step: str) -> None:
    answers = mortals.run(killed, builder, step, return_exceptions=True, timeout_s=60)
    assert isinstance(answers[BAD_RANK], RankDiedError)
    for rank in (0, 2):
        assert not isinstance(answers[rank], BaseException), answers[rank]
        kinds = [kind for kind, _ in answers[rank]]
        assert kinds in (["PeerLostError", *["PoisonedGroupError"] * n] for n in (1, 2))
        for _, text in answers[rank]:
            assert re.search(r"rank 1 \(pid \d+\) died", text)
