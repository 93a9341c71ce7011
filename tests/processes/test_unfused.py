"""Unfused calls (schedule "serial") of known shapes: ranks that make different calls, or do not take part, and
timelines.

Nothing hangs, no process is aborted, and no result is wrong. First come calls that differ between ranks, then a rank
that does not arrive or does not continue, then the state afterwards (at exit: `test_exit.py`). Deadlines are short if
one must be missed, and long if another event must end the wait.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import assert_deadline, assert_over, failure_of, misbehave, wait_for_failure
from support.on_ranks import assert_errors, error_of, own_group, waits_end_after

import weft
from weft import symm
from weft.launch import Pool, RankDiedError
from weft.operator import select
from weft.runtime.meeting import DATA_BYTES
from weft.symm import Exchange
from weft.timeline import Timeline

BAD_RANK = 1
LONG_S = 30.0
K, N, EXPERTS = 16, 32, 2
ROWS_OF_TWO_ROUNDS = 3 * DATA_BYTES // (2 * 4 * K)  # of a rank, in fp32
OPERATORS = ["all_gather_matmul", "all_gather_scaled_matmul", "all_to_all_matmul"]
COLLECTIVE = {
    "all_gather_matmul": "all_gather A_shard -> A",
    "all_gather_scaled_matmul": "all_gather A_shard -> A",
    "all_to_all_matmul": "exchange splits -> received",
}


def call(group: dist.ProcessGroup, operator: str, rows: int = 4, width: int = N, **options: Any) -> torch.Tensor:
    """Call the operator with operands of ones."""
    options = {"schedule": "serial", **options}
    x, w = torch.ones(rows, K), torch.ones(K, width)
    if operator == "all_gather_matmul":
        return weft.all_gather_matmul(x, [w], 0, group, **options)[1][0]
    if operator == "all_gather_scaled_matmul":
        A, B, one = x.to(torch.float8_e4m3fn), w.t().contiguous().to(torch.float8_e4m3fn).t(), torch.ones(1)
        return weft.all_gather_scaled_matmul(A, [B], one, [one], 0, group, **options)[1][0]
    splits = torch.zeros(group.size() * EXPERTS, dtype=torch.int64)
    splits[0] = rows
    return weft.all_to_all_matmul(x, w.expand(EXPERTS, K, width).contiguous(), splits, group=group, **options)


def right(group: dist.ProcessGroup, operator: str, **options: Any) -> bool:
    rows = 0 if operator == "all_to_all_matmul" and group.rank() else 4 * group.size()
    return torch.equal(call(group, operator, **options).float(), torch.full((rows, N), float(K)))


def again(group: dist.ProcessGroup, operator: str) -> tuple[str, str]:
    """Return the error of the next call on a failed group. Check that a new group works."""
    error = error_of(lambda: call(group, operator))
    assert right(own_group(group), operator)
    return error


# --- calls that differ ---


def differ(group: dist.ProcessGroup, operator: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Let the last rank call another known shape than the others. Then let all call the same shape, with one rank a
    call behind.
    """
    own = own_group(group)
    for width in (N, 2 * N):
        call(own, operator, width=width)
    other = group.rank() == group.size() - 1
    error = error_of(lambda: call(own, operator, width=2 * N if other else N, deadline_s=LONG_S))
    return error, again(own, operator)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("operator", OPERATORS)
def test_known_shapes_that_differ(pool: Pool, operator: str, world: int) -> None:
    answers = pool.run(differ, operator, ranks=world)
    for (kind, text), _ in answers:
        assert kind == "DisagreementError"
        assert text.count(f"{COLLECTIVE[operator]} of {operator}") == 2
    assert_over([last for _, last in answers])


def other_rows(group: dist.ProcessGroup) -> tuple[str, str]:
    own = own_group(group)
    for rows in (6, 10):
        call(own, "all_gather_matmul", rows)
    return error_of(lambda: call(own, "all_gather_matmul", 10 if group.rank() else 6))


def test_known_numbers_of_rows_that_differ(pool: Pool) -> None:
    """gloo alone would abort one rank, and give the other a wrong result."""
    assert_errors(
        pool.run(other_rows, ranks=2),
        "DisagreementError",
        "rank 0: all_gather A_shard -> A of all_gather_matmul, [12, 16] gathered from 2 ranks",
        "rank 1: all_gather A_shard -> A of all_gather_matmul, [20, 16] gathered from 2 ranks",
    )


def empty_and_not(group: dist.ProcessGroup) -> tuple[str, str]:
    """The last rank makes a known call without rows while the others make a known call with rows."""
    own, world = own_group(group), group.size()

    def summed(rows: int) -> torch.Tensor:
        x, w = torch.ones(rows * world, K), torch.ones(K, N)
        return weft.matmul_reduce_scatter(x, w, "sum", 0, own, schedule="serial", deadline_s=LONG_S)

    for rows in (0, 2, 0, 2):
        assert torch.equal(summed(rows), torch.full((rows, N), float(K * world)))
    return error_of(lambda: summed(0 if group.rank() == world - 1 else 2))


def test_an_empty_call_meets_the_peers_call(pool: Pool) -> None:
    """An empty call has no collective. Without a rendezvous, the rank's next call would be paired with this one."""
    assert_errors(
        pool.run(empty_and_not, ranks=3, timeout_s=60),
        "DisagreementError",
        "rank 2: an empty call of matmul_reduce_scatter",
    )


def other_parts(group: dist.ProcessGroup) -> tuple[str, str]:
    own, rank, w = own_group(group), group.rank(), torch.eye(K)

    def gather(rows: tuple[int, int]) -> None:
        weft.all_gather_matmul(torch.ones(rows[rank], K), [w], 0, own, schedule="serial", rows=rows, deadline_s=LONG_S)

    gather((2, 4))
    gather((4, 2))
    return error_of(lambda: gather((4, 2) if rank else (2, 4)))


def test_known_parts_of_as_many_rows_in_all(pool: Pool) -> None:
    assert_errors(
        pool.run(other_parts, ranks=2),
        "DisagreementError",
        "[6, 16] gathered from 2 ranks (2, 4 rows)",
        "[6, 16] gathered from 2 ranks (4, 2 rows)",
    )


def same_now_and_then_late(group: dist.ProcessGroup, calls: int) -> None:
    """Alternate serial calls and runs of a schedule. Ranks are delayed now and then, and one rank sometimes refuses."""
    own, rank = own_group(group), group.rank()
    same, late = random.Random(5), random.Random(6 + rank)
    kinds = [(operator, {}) for operator in OPERATORS] + [("all_gather_matmul", {"schedule": "gather[by=kernel]"})]
    for operator, options in kinds:
        assert right(own, operator, **options)
    for number in range(calls):
        (operator, options), who = kinds[same.randrange(4)], same.randrange(3 * group.size())
        if late.random() < 0.3:
            time.sleep(0.003 * late.random())
        if who < group.size():
            wrong = {"schedule": "no such one"} if who == rank else {}
            assert error_of(lambda o=operator, w={**options, **wrong}: call(own, o, **w))[0] == "RefusedError", number
        else:
            assert right(own, operator, **options), number


def test_refusals_now_and_then(pool: Pool) -> None:
    pool.run(same_now_and_then_late, 80, ranks=3, timeout_s=60)


def other_operator(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    errors = []
    for pair in pairwise(OPERATORS):
        own = own_group(group)
        for operator in OPERATORS:
            call(own, operator)
        errors.append(error_of(lambda pair=pair, own=own: call(own, pair[group.rank()])))
    return errors


def test_operators_that_differ(pool: Pool) -> None:
    for errors in pool.run(other_operator, ranks=2):
        assert [kind for kind, _ in errors] == ["DisagreementError"] * 2


def other_schedule(group: dist.ProcessGroup, operator: str, schedule: str) -> tuple[tuple[str, str], tuple[str, str]]:
    own = own_group(group)
    for name in ("serial", schedule):
        call(own, operator, schedule=name)
    name = schedule if group.rank() == BAD_RANK else "serial"
    error = error_of(lambda: call(own, operator, schedule=name, deadline_s=LONG_S))
    with contextlib.suppress(weft.errors.WeftError):
        wait_for_failure(symm.communicator(own, "cpu"))
    return error, again(own, operator)


@pytest.mark.parametrize(
    ("operator", "schedule"),
    [
        ("all_gather_matmul", "shard[chunks=1,send=in_turn,by=dma]"),
        ("all_gather_matmul", "gather[by=kernel]"),
        ("all_to_all_matmul", "dispatch[by=dma,rest=each]"),
    ],
)
def test_known_schedules_that_differ(pool: Pool, operator: str, schedule: str) -> None:
    answers = pool.run(other_schedule, operator, schedule, ranks=2)
    assert_errors(
        [error for error, _ in answers], "DisagreementError", f"schedule '{schedule.split('[')[0]} of {operator}'"
    )
    assert_over([last for _, last in answers])


def known_here_alone(group: dist.ProcessGroup) -> tuple[tuple[str, str], tuple[str, str]]:
    """Let rank 1 pass another number of experts for the first time. No rank may wait for a deadline."""
    own = own_group(group)
    call(own, "all_to_all_matmul")
    x, w, experts = torch.ones(4, K), torch.ones(3, K, N), 3 if group.rank() == BAD_RANK else EXPERTS
    splits = torch.tensor([4] + [0] * (experts * group.size() - 1))

    def other() -> None:
        weft.all_to_all_matmul(x, w[:experts], splits, group=own, schedule="serial", deadline_s=LONG_S)

    return error_of(other), again(own, "all_to_all_matmul")


def test_a_shape_that_one_rank_does_not_know(pool: Pool) -> None:
    answers = pool.run(known_here_alone, ranks=2)
    assert_errors(
        [error for error, _ in answers],
        "DisagreementError",
        "rank 0: exchange splits -> received of all_to_all_matmul",
        "rank 1: all_to_all_matmul of a shape that is new here: tokens [T, 16]",
    )
    assert_over([last for _, last in answers])


# --- a rank that does not do its part ---


def absent(group: dist.ProcessGroup, operator: str) -> tuple[tuple[str, str], tuple[str, str]]:
    own = own_group(group)
    call(own, operator)
    error = "", ""
    if group.rank() == BAD_RANK:
        wait_for_failure(symm.communicator(own, "cpu"))
    else:
        error = error_of(lambda: call(own, operator, deadline_s=0.5))
    return error, again(own, operator)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_rank_that_never_comes(pool: Pool, operator: str) -> None:
    answers = pool.run(absent, operator, ranks=3)
    missed = rf"rank [02] waited 0.5 s for {COLLECTIVE[operator]} of {operator}, .* from rank 1 \(pid \d+\): wanted"
    assert_deadline([answers[rank][0] for rank in (0, 2)], missed)
    assert_over([last for _, last in answers])


def no_backward(group: dist.ProcessGroup, operator: str, schedule: str | None) -> tuple[str, str]:
    """Let rank 1 skip its backward pass."""
    own, rank = own_group(group), group.rank()
    x, w = torch.ones(4, K, requires_grad=True), torch.ones(1, K, N, requires_grad=True)
    if operator == "all_gather_matmul":
        _, (y,) = weft.all_gather_matmul(x, [w[0]], 0, own, return_A=False, schedule=schedule)
    elif operator == "matmul_all_gather":
        y = weft.matmul_all_gather(x, w[0], 0, own, schedule=schedule)
    else:
        splits = torch.tensor([4] + [0] * (group.size() - 1))
        y = weft.all_to_all_matmul(x, w, splits, group=own, schedule=schedule)
    if rank == BAD_RANK:
        wait_for_failure(symm.communicator(own, "cpu"))
        return "", ""
    with waits_end_after(0.5):
        return error_of(lambda: y.sum().backward())


@pytest.mark.parametrize(
    ("operator", "schedule", "what"),
    [
        ("all_gather_matmul", "serial", "backward of all_gather_matmul of a shape that is new here"),
        ("all_gather_matmul", "gather[by=kernel]", "backward of all_gather_matmul of a shape that is new here"),
        ("matmul_all_gather", "serial", "backward of matmul_all_gather of a shape that is new here"),
        ("all_to_all_matmul", "serial", r"\w+ \w+ again of all_to_all_matmul"),
    ],
)
def test_a_rank_that_makes_no_backward_pass(pool: Pool, operator: str, schedule: str, what: str) -> None:
    error, _ = pool.run(no_backward, operator, schedule, ranks=2)
    assert_deadline([error], rf"rank 0 waited 0.5 s for {what}.* from rank 1")


def known_backward(group: dist.ProcessGroup, taken: str, doing: str) -> tuple[str, str]:
    """Run backward of a known shape with schedule `taken`. Rank 1 skips its backward pass, or makes another call
    instead.
    """
    own, rank = own_group(group), group.rank()
    w = torch.ones(K, N, requires_grad=True)

    def forward() -> torch.Tensor:
        x = torch.ones(4, K, requires_grad=True)
        return weft.all_gather_matmul(x, [w], 0, own, return_A=False, schedule="serial")[1][0]

    native, select._fastest = select._fastest, lambda p, *_: (taken, taken)
    try:
        forward().sum().backward()
    finally:
        select._fastest = native
    y = forward()
    if rank != BAD_RANK:
        with waits_end_after(0.5 if doing == "nothing" else LONG_S):
            return error_of(lambda: y.sum().backward())
    if doing == "nothing":
        wait_for_failure(symm.communicator(own, "cpu"))
        return "", ""
    return error_of(forward)


@pytest.mark.parametrize(
    ("taken", "what"),
    [("serial", "all_gather A_shard again of backward of all_gather_matmul, "),
     ("direct", "schedule 'direct of backward of all_gather_matmul' of gradients of ")],
)  # fmt: skip
def test_errors_in_backward_name_the_operator_that_was_called(pool: Pool, taken: str, what: str) -> None:
    """The error must not name an internal operator."""
    missed, _ = pool.run(known_backward, taken, "nothing", ranks=2)
    assert_deadline([missed], f"rank 0 waited 0.5 s for {what}.* from rank 1")
    for kind, text in pool.run(known_backward, taken, "something else", ranks=2):
        assert kind == "DisagreementError"
        assert what in text
        assert "all_gather_matmul_gradients" not in text


def stuck(group: dist.ProcessGroup, doing: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Let rank 1 arrive, but not finish the collective, which takes two rounds: it raises, gets Ctrl-C, or does nothing until
    the others give up.
    """
    own, options = own_group(group), {"deadline_s": 2.0 if doing == "hang" else LONG_S}
    call(own, "all_gather_matmul", ROWS_OF_TWO_ROUNDS)
    finish = Exchange.finish

    def instead(*_: Any, **__: Any) -> None:
        misbehave(doing, symm.communicator(own, "cpu"))

    if group.rank() == BAD_RANK:
        Exchange.finish = instead  # type: ignore[method-assign]
        options["timeline"] = Timeline()  # no native code makes such a call
    error = failure_of(lambda: call(own, "all_gather_matmul", ROWS_OF_TWO_ROUNDS, **options))
    Exchange.finish = finish  # type: ignore[method-assign]
    return error, again(own, "all_gather_matmul")


@pytest.mark.parametrize("doing", ["hang", "raise", "interrupt"])
def test_a_rank_that_comes_and_does_not_go_on(doing: str) -> None:
    with Pool(3) as alone:
        answers = alone.run(stuck, doing)
    errors = [answers[rank][0] for rank in (0, 2)]
    if doing == "hang":
        assert_deadline(errors, r"rank [02] waited 2 s for all_gather A_shard -> A of all_gather_matmul")
    else:
        assert answers[BAD_RANK][0][0] == {"raise": "ArithmeticError", "interrupt": "KeyboardInterrupt"}[doing]
        assert_errors(errors, "PoisonedGroupError", "rank 1: all_gather A_shard -> A of all_gather_matmul")
    assert_over([last for _, last in answers])


def killed(group: dist.ProcessGroup, when: str) -> list[tuple[str, str]]:
    call(group, "all_gather_matmul", ROWS_OF_TWO_ROUNDS)
    options: dict[str, Any] = {"deadline_s": LONG_S}

    def instead(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if group.rank() == BAD_RANK:
        if when == "before":
            instead()
        Exchange.finish = instead  # type: ignore[method-assign]
        options["timeline"] = Timeline()  # no native code makes such a call
    return [error_of(lambda: call(group, "all_gather_matmul", ROWS_OF_TWO_ROUNDS, **options)) for _ in range(2)]


@pytest.mark.parametrize("when", ["before", "in it"])
def test_a_rank_that_is_killed(when: str) -> None:
    with Pool(3) as mortals:
        answers = mortals.run(killed, when, return_exceptions=True, timeout_s=60)
    assert isinstance(answers[BAD_RANK], RankDiedError)
    for rank in (0, 2):
        assert [kind for kind, _ in answers[rank]] == ["PeerLostError", "PoisonedGroupError"]
        assert all(re.search(r"rank 1 \(pid \d+\) died", text) for _, text in answers[rank])


# --- timelines ---


def timelines(group: dist.ProcessGroup, operator: str, everywhere: bool) -> dict[str, int]:
    """Return {name of a step: bytes sent}."""
    timeline = weft.Timeline() if everywhere or group.rank() == 0 else None
    for _ in range(2):
        assert right(group, operator, timeline=timeline)
    spans = [] if timeline is None else list(timeline)
    assert all(span.rank == group.rank() and span.lane == "compute" for span in spans)
    assert all(before.end_us <= after.start_us for before, after in pairwise(spans))
    assert len(spans) == 2 * len({span.name for span in spans})
    return {span.name: span.bytes for span in spans}


STEPS: dict[str, Callable[[int], dict[str, int]]] = {
    "all_gather_matmul": lambda world: {"all_gather x_shard -> x": (world - 1) * 4 * K * 4, "matmul y0": 0},
    "all_gather_scaled_matmul": lambda world: {"all_gather x_shard -> x": (world - 1) * 4 * K, "scaled_matmul y0": 0},
}


@pytest.mark.parametrize("everywhere", [True, False], ids=["on all ranks", "on one"])
@pytest.mark.parametrize("operator", STEPS)
def test_timelines(pool: Pool, operator: str, everywhere: bool) -> None:
    first, second, _ = pool.run(timelines, operator, everywhere, ranks=3)
    assert first == STEPS[operator](3)
    assert second == (first if everywhere else {})


def test_timelines_of_one_rank(pool: Pool) -> None:
    assert pool.run(timelines, "all_gather_matmul", True, ranks=1) == [{"matmul y0": 0}]
    assert pool.run(timelines, "all_to_all_matmul", True, ranks=1)[0].keys() == {"library_grouped_matmul"}


def test_timelines_of_experts(pool: Pool) -> None:
    """All tokens go to rank 0, so rank 0 sends only splits. Tokens are copied in the order of experts, without a step `permute`."""
    tokens = "exchange tokens -> unordered"
    sent = {"exchange splits -> received": 2 * EXPERTS * 8, tokens: 0, "library_grouped_matmul": 0}
    first, second, _ = pool.run(timelines, "all_to_all_matmul", True, ranks=3)
    assert first == sent
    assert second == {**sent, tokens: 4 * K * 4}
