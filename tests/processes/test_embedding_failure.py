"""embedding_all_to_all when a rank fails: the other ranks do not hang, and report which rank failed, how, and after how
long.

First ranks that are late or raise, in groups of their own inside the shared pool; then ranks that are killed, in pools
of their own. Deadlines are short in tests that miss them. Elsewhere, with `deadline_s=5`, a rank that notices a death
only by waiting gets the wrong error, so the test fails.
"""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import embedding_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from embedding_ranks import TRANSPORTS, assert_same_bits
from pool import assert_deadline, assert_left, failure_of, misbehave, wait_for_failure
from support.on_ranks import assert_error, assert_errors, error_of
from support.reference import Problem, problem, tables_of

from weft import _core, symm
from weft.launch import Pool, RankDiedError
from weft.runtime.cpu import embedding as cpu

# Every rank owns a table and has samples, so that each rank waits for each other rank.
PROBLEM = Problem(tables_of((8, 3, 16)), (0, 1, 2), (4, 5, 2))
BAD_RANK = 1


def then(group: dist.ProcessGroup, p: Problem, options: dict[str, Any]) -> tuple[tuple[str, str], torch.Tensor]:
    """Return the error of the next call on a failed group, and the result on a new group."""
    again = error_of(lambda: ranks.call(group, p, **options))
    fresh = dist.new_group(list(range(group.size())))
    return again, ranks.call(fresh, p, **options).clone()


def absent(group, p, options):
    """Let rank 1 raise an error before its second call, which it never makes."""
    own = dist.new_group(list(range(group.size())))
    ranks.call(own, p, **options)
    if group.rank() == BAD_RANK:
        wait_for_failure(symm.communicator(own, "cpu"))
        error = ("", "")
    else:
        error = error_of(lambda: ranks.call(own, p, deadline_s=0.5, **options))
    return error, *then(own, p, options)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_never_calls(pool: Pool, transport: str) -> None:
    answers = pool.run(absent, PROBLEM, {"transport": transport}, ranks=3)
    errors = [answers[rank][0] for rank in (0, 2)]
    missed = 4 if transport == "serial" else 3  # ranks synchronise twice in such a call
    assert_deadline(
        errors,
        rf"rank [02] waited 0.5 s for embedding_all_to_all \(rendezvous {missed}\) from rank 1 .*: wanted {missed}, "
        f"found {missed - 1}",
    )
    assert any("(each call, forward, backward or refused, has one or more rendezvous)" in text for _, text in errors)
    assert any("Check whether a missing rank raised an error" in text for _, text in errors)
    assert_over(answers)


def assert_over(answers: list[tuple[Any, tuple[str, str], torch.Tensor]]) -> None:
    """Check that the next call on the failed group raises on every rank, and that a new group works."""
    assert_errors([error for _, error, _ in answers], "PoisonedGroupError", "make a new process group")
    assert_same_bits([output for *_, output in answers], PROBLEM)


def stuck(group, p, options, doing):
    """Let rank 1 join its second call and then store nothing: it waits until the others have given up, or raises."""
    own = dist.new_group(list(range(group.size())))
    ranks.call(own, p, **options)
    native = cpu.run_native

    def run_native(*args: Any, **kwargs: Any) -> Any:
        misbehave(doing, symm.communicator(own, "cpu"))
        dist.barrier(group)  # a rank that has not given up yet would still use data that arrive later
        return native(*args, **kwargs)

    if group.rank() == BAD_RANK:
        cpu.run_native = run_native
    # A rank that raises notifies the others; a rank that hangs does not, and they wait until the deadline.
    deadline_s = 0.5 if doing == "hang" else 30.0
    error = failure_of(lambda: ranks.call(own, p, deadline_s=deadline_s, **options))
    cpu.run_native = native
    if doing == "hang" and group.rank() != BAD_RANK:
        dist.barrier(group)
    return error, *then(own, p, options)


@pytest.mark.parametrize(("transport", "signal_name"), [("direct", "done"), ("put", r"slice flag \d+")])
def test_a_rank_that_hangs_inside_a_call(pool: Pool, transport: str, signal_name: str) -> None:
    answers = pool.run(stuck, PROBLEM, {"transport": transport}, "hang", ranks=3)
    errors = [answers[rank][0] for rank in (0, 2)]
    text = rf"rank [02] waited 0.5 s for embedding_all_to_all {signal_name} from rank 1\b.*: wanted 2, found 1"
    assert_deadline(errors, text)
    # The others have stored all data that rank 1 waits for. So rank 1 gets a complete result, or is notified of the
    # failure first.
    assert answers[BAD_RANK][0][0] in ("", "PoisonedGroupError")
    assert_over(answers)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_raises_inside_a_call(pool: Pool, transport: str) -> None:
    answers = pool.run(stuck, PROBLEM, {"transport": transport}, "raise", ranks=3)
    assert answers[BAD_RANK][0] == ("ArithmeticError", "on purpose")
    for rank in (0, 2):
        assert_error(
            answers[rank][0],
            "PoisonedGroupError",
            match=r"rank 1: embedding_all_to_all.*: ArithmeticError\('on purpose'\)",
        )
    assert_over(answers)


def left(group, p, options):
    """Let rank 1 close its communicator. The other ranks make another call."""
    own = dist.new_group(list(range(group.size())))
    ranks.call(own, p, **options)
    if group.rank() == BAD_RANK:
        symm.communicator(own, "cpu").close()
        return "", ""
    return error_of(lambda: ranks.call(own, p, deadline_s=30.0, **options))


def test_a_rank_that_leaves_in_order(pool: Pool) -> None:
    assert_left(pool.run(left, PROBLEM, {}, ranks=3))


# --- ranks that are killed ---


def killed(group, p, options, where):
    """Let rank 1 be killed before its second call, or inside it before or after it stores."""
    ranks.call(group, p, **options)
    native = cpu.run_native

    def run_native(*args: Any, **kwargs: Any) -> Any:
        if where == "after storing":
            native(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    if group.rank() == BAD_RANK:
        if where == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        cpu.run_native = run_native
    error = error_of(lambda: ranks.call(group, p, deadline_s=5.0, **options))
    again = error_of(lambda: ranks.call(group, p, **options))
    survivors = dist.new_group([0, 2], use_local_synchronization=True)
    pair = problem(2)
    return error, again, ranks.call(survivors, pair, **options).clone()


@pytest.mark.parametrize(
    ("transport", "where"),
    [("direct", "before"), ("direct", "inside"), ("put", "inside"), ("direct", "after storing")],
)
def test_a_rank_that_is_killed(mortals: Pool, transport: str, where: str) -> None:
    answers = mortals.run(killed, PROBLEM, {"transport": transport}, where, return_exceptions=True, timeout_s=60)
    assert isinstance(answers[BAD_RANK], RankDiedError)
    outputs = []
    for rank in (0, 2):
        assert not isinstance(answers[rank], BaseException), answers[rank]
        (kind, text), (kind_again, text_again), output = answers[rank]
        assert kind == "PeerLostError"
        for said in (text, text_again):
            assert re.search(r"rank 1 \(pid \d+\) died", said), said
        assert kind_again == "PoisonedGroupError"
        outputs.append(output)
    assert_same_bits(outputs, problem(2))


def stands_still(group, p, options):
    """Let rank 0 pause between its last check of the flags and its reading of the clock. Meanwhile rank 1 sets its
    flags.
    """
    own = dist.new_group(list(range(group.size())))
    ranks.call(own, p, **options)
    native, pool_and_store, looks = _core.wait_flags, cpu.run_native, []

    def look_once(*given: Any) -> Any:
        *flags, _, failed = given
        found = native(*flags, 0.0, failed) if not looks else native(*given)
        if not looks:
            time.sleep(3.3)
        looks.append(found)
        return found

    def pool_late(*given: Any, **named: Any) -> Any:
        time.sleep(0.2)
        return pool_and_store(*given, **named)

    try:
        if group.rank() == 0:
            _core.wait_flags = look_once
        if group.rank() == BAD_RANK:
            cpu.run_native = pool_late
        output = ranks.call(own, p, deadline_s=3.0 if group.rank() == 0 else 30.0, **options).clone()
    finally:
        _core.wait_flags, cpu.run_native = native, pool_and_store
    return output, [status for status, *_ in looks]


def test_flags_that_came_while_a_rank_stood_still_count(pool: Pool) -> None:
    answers = pool.run(stands_still, PROBLEM, {"transport": "put"}, ranks=3)
    assert_same_bits([output for output, _ in answers], PROBLEM)
    assert answers[0][1][0] == 1  # the flags were not set before
