"""Test that kernels of embedding_all_to_all return if a rank fails, with an error that names the rank and the missing
signal.

The CPU does not wait for peers, so errors are raised by `check()` or by the next call. Tests that miss a deadline set a
short one. A rank that is notified of a failure must not wait for its own deadline: otherwise it raises DeadlineError,
and the test fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from typing import Any

import gpu_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import FUSED, assert_right
from support.on_ranks import assert_error, error_of
from support.reference import Problem, problem

import weft
from weft import symm
from weft.errors import WeftError
from weft.kernels.signals import R_STATUS
from weft.launch import Pool, RankDiedError
from weft.runtime.cuda.watch import watch

pytestmark = ranks.MARKS
PROBLEM = problem(2, (64,) * 4, 64, longest=20)
BAD_RANK = 1


def wait_for_failure(group: dist.ProcessGroup) -> None:
    """Wait until this rank is notified that its group has failed."""
    until = time.monotonic() + 15
    with contextlib.suppress(WeftError):
        while time.monotonic() < until:
            symm.communicator(group, ranks.device()).check()
            time.sleep(0.01)
        raise AssertionError("the group did not fail")


def call_and_synchronize(group: dist.ProcessGroup, p: Problem, operator: Any, **options: Any) -> None:
    output = ranks.call(group, p, **options)
    ranks.synchronize(operator)
    del output


def then(group: dist.ProcessGroup, p: Problem, options: dict[str, Any]) -> tuple[str, str]:
    """Return the error of another call on the failed group. Assert that a call on a new group is right."""
    again = error_of(lambda: ranks.call(group, p, **options))
    fresh = dist.new_group([0, 1])
    assert_right(fresh, p, ranks.call(fresh, p, **options), "a new group after a failure")
    return again


def assert_over(again: tuple[str, str]) -> None:
    assert_error(again, "PoisonedGroupError", "make a new process group")


def absent(group: dist.ProcessGroup, p: Problem, options: dict[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    """Make one call on both ranks, and a second call on rank 0 only. Return this rank's error, and the error of the
    call after it.
    """
    own = dist.new_group([0, 1])
    assert_right(own, p, ranks.call(own, p, **options))
    operator = ranks.operator_of(own, p, **options)
    error = ("", "")
    if group.rank() == BAD_RANK:
        wait_for_failure(own)
    else:
        error = error_of(lambda: call_and_synchronize(own, p, operator, deadline_s=1.0, **options))
    return error, then(own, p, options)


@pytest.mark.parametrize("transport", FUSED)
def test_a_rank_that_never_calls(pair: Pool, transport: str) -> None:
    answers = pair.run(absent, PROBLEM, {"transport": transport}, timeout_s=30)
    assert_error(
        answers[0][0],
        "DeadlineError",
        match=r"rank 0: .*signal 'ready' of rank 1 in .*wanted 2, found 1, in launch 2 of",
    )
    for _, again in answers:
        assert_over(again)


def no_call_begins_behind_a_failed_one(group: dist.ProcessGroup, p: Problem, transport: str) -> tuple[str, str]:
    """Let rank 0 miss its deadline and then call another operator. Return the error of that call.

    Rank 1 has called the other operator already. Data of the two calls must not mix.
    """
    own = dist.new_group([0, 1])
    x, w = (torch.randn(*size, device=ranks.device()) for size in ((256, 64), (64, 128)))

    def product() -> None:
        weft.matmul_reduce_scatter(x, w, "sum", 0, own, schedule="scatter")
        torch.cuda.synchronize()
        symm.communicator(own, ranks.device()).check()

    assert_right(own, p, ranks.call(own, p, transport=transport))
    operator = ranks.operator_of(own, p, transport=transport)
    product()
    watch._look = lambda: None  # the watchdog's thread finds nothing yet
    try:
        if own.rank() == 0:
            ranks.call(own, p, transport=transport, deadline_s=1.0)
            torch.cuda.synchronize()
            assert operator._failures.record[R_STATUS]
        return error_of(product)
    finally:
        del watch._look


@pytest.mark.parametrize("transport", FUSED)
def test_no_call_begins_behind_a_failed_one(pair: Pool, transport: str) -> None:
    for kind, text in pair.run(no_call_begins_behind_a_failed_one, PROBLEM, transport, timeout_s=60):
        assert kind == "PoisonedGroupError"
        # The error is that of the rank whose watchdog looks first.
        assert "missed its deadline" in text or "ranks have made different calls" in text


def stuck(group: dist.ProcessGroup, p: Problem, options: dict[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    """Let rank 1 signal that it is ready for the second call and then store nothing. Return the errors as `absent`
    does.
    """
    own = dist.new_group([0, 1])
    assert_right(own, p, ranks.call(own, p, **options))
    operator = ranks.operator_of(own, p, **options)
    error = ("", "")
    if group.rank() == BAD_RANK:
        words = operator._signals.tensor(0, (6,), torch.int64)  # the words on rank 0: (fingerprint, ready) of each rank
        words[2 * BAD_RANK + 1] = (2 << 8) + operator.outputs._free[-1]
        torch.cuda.synchronize()
        wait_for_failure(own)
    else:
        error = error_of(lambda: call_and_synchronize(own, p, operator, deadline_s=1.0, **options))
    return error, then(own, p, options)


@pytest.mark.parametrize(
    ("transport", "said"), [("direct", "signal 'done' of rank 1"), ("put", r"signal 'slice flag' number \d+")]
)
def test_a_rank_that_stores_nothing(pair: Pool, transport: str, said: str) -> None:
    answers = pair.run(stuck, PROBLEM, {"transport": transport}, timeout_s=30)
    assert_error(answers[0][0], "DeadlineError", match=rf"rank 0: .*{said} in .*wanted 2, found 1, in launch 2 of")
    for _, again in answers:
        assert_over(again)


def refused(group: dist.ProcessGroup, p: Problem, bad: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Call with invalid input on rank 1. Rank 0 must be notified before its deadline. Return the errors as `absent`
    does.
    """
    own = dist.new_group([0, 1])
    options = {"transport": "direct", "bounds_check": "fatal" if bad == "index" else "warning"}
    operator = ranks.operator_of(own, p, **options)  # made first, because after the bad call the group may have failed
    assert_right(own, p, ranks.call(own, p, **options))
    values, offsets = ranks.here(p.tupled(group.rank()))
    if group.rank() == BAD_RANK and bad == "dtype":
        values = values.float()
    elif group.rank() == BAD_RANK:
        values[0] = 10**6
    error = error_of(lambda: call_and_synchronize(own, p, operator, features=(values, offsets), **options))
    try:
        assert_right(own, p, ranks.call(own, p, **options), "after a refusal")
        return error, ("", "")
    except WeftError:
        return error, then(own, p, options)


@pytest.mark.parametrize(("bad", "said"), [("dtype", "values is torch.float32"), ("index", "index 1000000 is not in")])
def test_bad_input_on_one_rank(pair: Pool, bad: str, said: str) -> None:
    answers = pair.run(refused, PROBLEM, bad, timeout_s=30)
    first, second = (error[0] for error, _ in answers)
    assert second == "RefusedError"
    # With a bad dtype, rank 0 refuses the call too, unless it has made the call already.
    assert first in (["RefusedError", "PoisonedGroupError"] if bad == "dtype" else ["PoisonedGroupError"])
    for (_, text), again in answers:
        assert said in text
        assert "rank 1" in text
        if first == "RefusedError":
            assert again == ("", "")
        else:
            assert_over(again)


def disagree(group: dist.ProcessGroup, p: Problem) -> tuple[tuple[str, str], tuple[str, str]]:
    """Call with batch sizes that differ between the ranks but have the same sum. Return the errors as `absent` does."""
    own, options = dist.new_group([0, 1]), {"transport": "direct"}
    assert_right(own, p, ranks.call(own, p, **options))
    operator = ranks.operator_of(own, p, **options)
    sizes = (30, 34) if group.rank() else (34, 30)
    error = error_of(lambda: call_and_synchronize(own, p, operator, batch_sizes=sizes, **options))
    return error, then(own, p, options)


def test_other_batch_sizes_on_one_rank(pair: Pool) -> None:
    answers = pair.run(disagree, PROBLEM, timeout_s=30)
    kinds = [error[0] for error, _ in answers]
    # Raised by the rank that finds the difference first; it notifies the other rank.
    assert "DisagreementError" in kinds
    assert set(kinds) <= {"DisagreementError", "PoisonedGroupError"}
    for (_, text), again in answers:
        assert "other batch_sizes" in text
        assert_over(again)


def killed(group: dist.ProcessGroup, p: Problem, options: dict[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    """Kill rank 1 while rank 0's kernel waits for it. Return rank 0's error, and the error of its next call. The
    deadline is long.
    """
    assert_right(group, p, ranks.call(group, p, **options))
    operator = ranks.operator_of(group, p, **options)
    if group.rank() == BAD_RANK:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(lambda: call_and_synchronize(group, p, operator, deadline_s=25.0, **options))
    again = error_of(lambda: ranks.call(group, p, **options))
    everything = ranks.pooled_alone(p)  # computed to see that this GPU still works
    assert not everything.isnan().any()
    return error, again


@pytest.mark.parametrize("transport", FUSED)
def test_a_rank_that_is_killed(pair: Pool, transport: str) -> None:
    with Pool(2, backend="nccl") as mortals:
        answers = mortals.run(killed, PROBLEM, {"transport": transport}, return_exceptions=True, timeout_s=40)
    assert isinstance(answers[BAD_RANK], RankDiedError)
    assert not isinstance(answers[0], BaseException), answers[0]
    (kind, text), (kind_again, text_again) = answers[0]
    assert kind == "PeerLostError"
    assert kind_again == "PoisonedGroupError"
    for said in (text, text_again):
        assert re.search(r"rank 1 \(pid \d+\) died", said), said
