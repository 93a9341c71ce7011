"""Sizes that do not recur run unfused, and are not compiled; sizes that recur are compiled. On CPU, ranks still refuse
calls that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.compile_at_once import at_once
from support.experts_of_any_size import many_sizes
from support.slow import slow
from test_replay import long_ways, patient

import weft
from weft.errors import DisagreementError, PoisonedGroupError, RefusedError
from weft.launch import Pool
from weft.operator import calls, select
from weft.operator.cache import PASSING
from weft.symm import compilations
from weft.symm.calls import calls_of

K, N = 8, 6


LONG = "matmul_all_reduce with more"
"""The operator whose unfused calls always take the slow path."""


def products(
    group: dist.ProcessGroup,
) -> dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], list[torch.Tensor]]]:
    """Return, by operator, a call with x [rows, K], w [K, N] and a residual, on every rank."""
    following = {"bias": torch.ones(N), "norm": torch.ones(N)}
    return {
        "all_gather_matmul": lambda x, w, _: weft.all_gather_matmul(x, [w, w * 2], 0, group)[1],
        "matmul_reduce_scatter": lambda x, w, _: [weft.matmul_reduce_scatter(x, w, "sum", 0, group)],
        "an average": lambda x, w, _: [weft.matmul_reduce_scatter(x, w, "avg", 0, group)],
        "matmul_all_reduce": lambda x, w, _: [weft.matmul_all_reduce(x, w, group)],
        "matmul_all_reduce with more": lambda x, w, r: [*weft.matmul_all_reduce(x, w, group, residual=r, **following)],
        "matmul_all_gather": lambda x, w, _: [weft.matmul_all_gather(x, w, 0, group)],
        "matmul_all_gather of columns": lambda x, w, _: [weft.matmul_all_gather(x, w, 1, group)],
    }  # fmt: skip


def expected(
    operator: str, xs: list[torch.Tensor], w: torch.Tensor, residual: torch.Tensor, rank: int
) -> list[torch.Tensor]:
    xs, w = [x.double() for x in xs], w.double()
    if operator == "all_gather_matmul":
        return [torch.cat(xs) @ w, torch.cat(xs) @ w * 2]
    total = torch.stack([x @ w for x in xs]).sum(0)
    if operator == "matmul_reduce_scatter":
        return [total.chunk(2)[rank]]
    if operator == "an average":
        return [total.chunk(2)[rank] / 2]
    if operator == "matmul_all_reduce":
        return [total]
    if operator == "matmul_all_reduce with more":
        total = total + 1 + residual.double()
        return [torch.nn.functional.rms_norm(total, (N,), eps=1e-6), total]
    return [torch.cat([x @ w for x in xs], dim=int(operator.endswith("columns")))]


@patient
@at_once
def passing(group: dist.ProcessGroup, operator: str, wanted: bool) -> None:
    """Call sizes that do not recur, and sizes that do. wanted: True to compute gradients too."""
    own = dist.new_group([0, 1])
    call, rank = products(own)[operator], group.rank()
    op = calls.OPERATORS[
        operator.partition(" with")[0].partition(" of")[0].replace("an average", "matmul_reduce_scatter")
    ]

    def count() -> int:
        return len(calls.prepared_calls(op, own))

    def one(rows: int) -> None:
        generator = torch.Generator().manual_seed(rows)
        xs = [torch.randn(rows, K, generator=generator) for _ in range(2)]
        w, residual = torch.randn(K, N, generator=generator), torch.randn(rows, N, generator=generator)
        x = xs[rank].requires_grad_(wanted)
        found = call(x, w, residual)
        for y, right in zip(found, expected(operator, [t.detach() for t in xs], w, residual, rank), strict=True):
            torch.testing.assert_close(y.double(), right, rtol=1e-4, atol=1e-4)
        if wanted and "more" not in operator:
            grads = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) for y in found]
            sum((y * g).sum() for y, g in zip(found, grads, strict=True)).backward()
            whole = [t.detach().double().requires_grad_() for t in xs]
            losses = []
            for r in range(2):
                right = expected_of(operator, whole, w, r)
                losses += [(y * g.double()).sum() for y, g in zip(right, grads, strict=True)]
            sum(losses).backward()
            torch.testing.assert_close(x.grad.double(), whole[rank].grad, rtol=1e-4, atol=1e-4)

    for i in range(PASSING + 10):
        with long_ways() as ways:
            one(2 * (i + 1))
        if operator != LONG and not wanted:
            assert bool(ways) == (i <= PASSING), i  # the first that passes shows how
    assert count() == PASSING
    one(2 * (PASSING + 3))  # the size recurs
    assert count() == PASSING + 1
    one(2 * (PASSING + 3))
    # A new size is not compiled, because as many compiled sizes as before have not recurred.
    one(2 * (PASSING + 40))
    assert count() == PASSING + 1
    one(2)  # now one compiled size less has not recurred
    one(2 * (PASSING + 41))
    assert count() == PASSING + 2
    dist.destroy_process_group(own)


def expected_of(operator: str, xs: list[torch.Tensor], w: torch.Tensor, rank: int) -> list[Any]:
    return expected(operator, xs, w, torch.zeros(1, N), rank)


@at_once
def in_another_layout(group: dist.ProcessGroup) -> None:
    """Let sizes recur on both ranks, on rank 1 with other layouts and arguments. Both ranks must compile them."""
    own, rank = dist.new_group([0, 1]), group.rank()
    op, w = calls.OPERATORS["all_gather_matmul"], torch.randn(K, N)

    def call(rows: int, other: bool) -> None:
        x = torch.randn(K, rows).t() if other else torch.randn(rows, K)
        given = {"group": own.group_name, "gather_dim": 0} if other else {"group": own, "gather_dim": 0}
        weft.all_gather_matmul(x, [w], return_A=False, deadline_s=10.0, **given)

    for rows in range(1, PASSING + 8):
        call(rows, other=False)
    assert len(calls.prepared_calls(op, own)) == PASSING
    for rows in (PASSING + 1, PASSING + 4, PASSING + 6):
        call(rows, other=rank == 1)
    assert len(calls.prepared_calls(op, own)) == PASSING + 3
    dist.destroy_process_group(own)


def test_ranks_prepare_the_same_sizes_whatever_their_layouts(pool: Pool) -> None:
    pool.run(in_another_layout, ranks=2, timeout_s=60)


@at_once
@mock.patch.dict(select._CLEARLY_US, cpu=1e12)  # serial is the choice, whatever is measured
def between(group: dist.ProcessGroup) -> None:
    """Let sizes recur between sizes for which serial was chosen, on rank 1 also in another layout. Refuse some of the calls."""
    own, rank = dist.new_group([0, 1]), group.rank()
    op, w, bad = calls.OPERATORS["all_gather_matmul"], torch.randn(K, N), torch.randn(K + 1, N)

    def call(rows: int, w: torch.Tensor = w, *, transposed: bool = False) -> None:
        xs = [torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)) for _ in range(2)]
        x = xs[rank].t().contiguous().t() if transposed else xs[rank]
        found = weft.all_gather_matmul(x, [w], 0, own, return_A=False, deadline_s=10.0)[1][0]
        torch.testing.assert_close(found, torch.cat(xs) @ w, rtol=1e-4, atol=1e-4)

    def count() -> int:
        return len(calls.prepared_calls(op, own))

    for rows in range(2, 2 * PASSING + 2, 2):
        call(rows)
    assert count() == PASSING
    assert all(one.runs_unfused for one in calls.prepared_calls(op, own))
    for times in range(3):
        for rows in (3, 5, 11):
            with long_ways() as ways:
                call(rows)
            assert times == 0 or not ways, (rows, times)
    call(5, transposed=rank == 1)
    for rows in (5, 7):  # a size that recurs, and a new size
        for transposed in (False, True):
            with pytest.raises(RefusedError, match=r"rank 1: .*9"):
                call(rows, *([bad] if rank == 1 else []), transposed=transposed)
        call(rows)
        call(rows)
    assert count() == PASSING, "no size between two unfused ones is compiled"
    call(100)
    assert count() == PASSING, "only its second call compiles it"
    call(100)
    assert count() == PASSING + 1
    call(50)
    call(50)
    assert count() == PASSING + 1
    dist.destroy_process_group(own)


def test_sizes_between_unfused_sizes_are_not_compiled_when_they_recur(pool: Pool) -> None:
    pool.run(between, ranks=2, timeout_s=60)


def warmed_up(group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """Call sizes that do not recur until a new size runs unfused. Return the function that makes a call."""
    w = torch.randn(K, N)

    def call(rows: int, *, transposed: bool = False, w: torch.Tensor = w, wanted: bool = False) -> torch.Tensor:
        x = torch.randn(K, rows).t() if transposed else torch.randn(rows, K)
        x.requires_grad_(wanted)
        return weft.all_gather_matmul(x, [w], 0, group, return_A=False, deadline_s=10.0)[1][0]

    for rows in range(1, PASSING + 3):
        call(rows)
    assert len(calls.prepared_calls(calls.OPERATORS["all_gather_matmul"], group)) == PASSING
    return call


def differing(group: dist.ProcessGroup, how: str) -> str:
    """Make a call of a new size that differs on rank 1. Return the text of the error."""
    own, other = dist.new_group([0, 1]), group.rank() == 1
    call = warmed_up(own)
    for rows in range(100, 103 + PASSING):
        call(rows, wanted=True).sum().backward()
    mine: dict[str, Callable[[], Any]] = {
        "sizes": lambda: call(40 + other),
        "sizes and layouts": lambda: call(40 + other, transposed=other),
        "known sizes": lambda: call(3 if other else 40),
        "gradients": lambda: call(40, wanted=other),
        "backward": lambda: call(40, wanted=True).sum().backward() if other else [call(40, wanted=True), call(41)],
        "operators": lambda: weft.matmul_all_reduce(torch.randn(40, K), torch.randn(K, N), own) if other else call(40),
    }
    text = ""
    try:
        mine[how]()
    except DisagreementError as error:
        text = str(error)
    assert text, "the call was not refused"
    with pytest.raises(PoisonedGroupError):
        call(50)
    return text


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("sizes", ["[80, 8]", "[82, 8]", "pass rows"]), slow("sizes and layouts", ["[80, 8]", "[82, 8]", "pass rows"]),
        ("known sizes", ["[80, 8]", "[6, 8]"]), ("gradients", ["(True, False)", "(False, False)"]),
        ("backward", ["[82, 8]", "matmul_reduce_scatter"]),
        ("operators", ["all_gather_matmul", "matmul_all_reduce"]),
    ],
)  # fmt: skip
def test_calls_of_new_sizes_that_differ_are_refused_by_every_rank(pool: Pool, how: str, words: list[str]) -> None:
    for text in pool.run(differing, how, ranks=2, timeout_s=60):
        assert all(word in text for word in words), text


@at_once
def refused(group: dist.ProcessGroup) -> None:
    """Refuse a call on rank 1 only: of a new size, of a size that recurs, and in backward. Both ranks must count alike
    afterwards.
    """
    own, other = dist.new_group([0, 1]), group.rank() == 1
    call, op = warmed_up(own), calls.OPERATORS["all_gather_matmul"]
    bad = torch.randn(K + 1, N)

    def count() -> int:
        return len(calls.prepared_calls(op, own))

    for rows in (40, 1):  # a new size, and a size that recurs
        for transposed in (False, True):  # the fast and the slow path
            with pytest.raises(RefusedError, match=r"rank 1: .*9"):
                call(rows, transposed=transposed, **({"w": bad} if other else {}))
    try:
        for rows in (40, 41):
            call(rows)
            assert count() == PASSING, "new sizes still run unfused"
        call(40)
        assert count() == PASSING + 1, "only the second call of a size compiles it"
        for rows in range(100, 103 + PASSING):
            call(rows, wanted=True).sum().backward()
        y = call(200, wanted=True)
        if other:
            y.grad_fn.saved_tensors[0].untyped_storage().resize_(0)
        with pytest.raises(RefusedError, match=r"rank 1: .*saved for backward"):
            y.sum().backward()
        for rows in (200, 201, 200, 201):
            call(rows, wanted=True).sum().backward()
    except DisagreementError as error:
        raise AssertionError("ranks count differently") from error
    dist.destroy_process_group(own)


def test_a_refused_call_is_counted_alike_by_every_rank(pool: Pool) -> None:
    pool.run(refused, ranks=2, timeout_s=60)


@mock.patch.object(compilations, "LEAST_CALLS", 3)
def rarely(group: dist.ProcessGroup) -> list[tuple[int, bool]]:
    """Call two sizes in turn. Let the clocks of ranks differ: rank 1 wants 4 calls more before it compiles. Return, for each call,
    the number of compiled sizes, and True if ranks have compared the call as the first of its size.
    """
    own, rank = dist.new_group([0, 1]), group.rank()
    call, op = warmed_up(own), calls.OPERATORS["all_gather_matmul"]
    for rows in range(100, 103 + PASSING):
        call(rows, wanted=True)  # each size of a differentiated call is compiled, also between sizes that run unfused
    known, found, asked = calls_of(own).compilations, list[tuple[int, bool]](), list[int]()
    first = len(calls.prepared_calls(op, own))

    def calls_to_wait() -> int:
        asked.append(1)
        return 4 if rank == 1 and len(asked) == 1 else 0

    known.wait(2)
    with mock.patch.object(known, "calls_to_wait", calls_to_wait):
        for number in range(16):
            before = len(asked)
            call(40 + number % 2, wanted=True)
            found.append((len(calls.prepared_calls(op, own)) - first, len(asked) > before))
    dist.destroy_process_group(own)
    return found


def test_a_recurring_size_is_compiled_when_all_ranks_have_time_for_it(pool: Pool) -> None:
    one, other = pool.run(rarely, ranks=2, timeout_s=60)
    assert one == other
    compiled = [0] * 7 + [1] * 5 + [2] * 4  # after 2 + 1 + 4 calls, and after 3 calls more the other size
    assert [count for count, _ in one] == compiled
    assert [number for number, (_, compared) in enumerate(one) if compared] == [2, 7, 12]


@pytest.mark.parametrize("wanted", [slow(False), True], ids=["forward", "gradients"])
@pytest.mark.parametrize("operator", list(products(None)))  # type: ignore[arg-type]
def test_sizes_that_do_not_come_back_are_run_in_turn(pool: Pool, operator: str, wanted: bool) -> None:
    pool.run(passing, operator, wanted, ranks=2, timeout_s=120)


@pytest.mark.parametrize("wanted", [False, True])
def test_experts_take_the_fast_path_at_any_size(pool: Pool, wanted: bool) -> None:
    sizes = [*range(5, 29), 7, 7, 11]
    for slow_calls in pool.run(many_sizes, "cpu", wanted, sizes, ranks=2):
        assert slow_calls[0] == 2
        # A call is not recorded if two tensors happen to have equal sizes. On a busy machine, the watchdog may have paused so long
        # that one call takes the slow path, which checks the group.
        assert sum(slow_calls[3:]) <= 1, slow_calls
