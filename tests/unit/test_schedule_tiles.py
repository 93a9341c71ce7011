"""Tiles, a persistent kernel as one step: their number, their order, their faults, and the times of their signals."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import faults
from support.made_up import Kernel
from support.sim_toys import SWITCH

from weft.errors import ScheduleError
from weft.schedule import RANK, Compute, Copy, Draft, Expr, Schedule, Set, Tiles, Wait, lookup
from weft.schedule.steps.loops import counted
from weft.schedule.text import describe, from_json, to_json
from weft.schedule.verify import SAMPLE, verify
from weft.schedule.verify.issue_order import issue_order, sets_per_run
from weft.sim import simulate

T = Expr("t")


def pushed(rows: int = 4, extent: int | None = None, wait: int | None = None, shift: int = 0) -> Schedule:
    """Return a schedule in which each of two ranks puts x row by row into the other's box, and computes when all rows
    have arrived.
    """
    d = Draft("pushed", 2)
    x, y = d.buffer("x", rows, 8, "fp32", "input"), d.buffer("y", rows, 8, "fp32", "output")
    box = d.buffer("box", rows, 8, "fp32", "symmetric")
    arrived, credit = d.signals("arrived", 1), d.signals("credit", 1)
    peer = 1 - RANK
    row = box.part(rows=((T + shift) // (shift + 1), 1), at=peer)
    body = Copy(x.part(rows=(T, 1)), row, "kernel"), Set(arrived.name, 0, peer)
    d.lane("push").wait(credit, previous=True).tiles(Kernel("push"), "t", rows if extent is None else extent, *body)
    d.lane("compute").wait(arrived, 0, rows if wait is None else wait).compute("relu", y.part(), box.part()).set(
        credit, at=peer
    )
    return d.schedule()


@pytest.mark.parametrize("rows", [1, 4, SAMPLE, SAMPLE + 1, 100_000])
def test_right_ones_verify(rows: int) -> None:
    verify(pushed(rows))


@pytest.mark.parametrize("rows", [4, 10 * SAMPLE])
def test_a_wait_for_some_of_the_tiles_is_too_early(rows: int) -> None:
    text = faults(pushed(rows, wait=rows - 1))
    assert "race on box@" in text
    assert "lane compute, step 2: relu y" in text  # as printed in the table
    assert "times, but a run sets the signal" in faults(pushed(rows, wait=rows + 1))


def test_a_row_that_no_tile_writes() -> None:
    assert "it reads box@1[3:+1, 0:+8], which no step has written before in this run" in faults(
        pushed(4, extent=3, wait=3)
    )


@pytest.mark.parametrize("rows", [4, 10 * SAMPLE])
def test_tiles_are_not_ordered_among_each_other(rows: int) -> None:
    text = faults(pushed(rows, shift=1))
    assert "race on box@" in text
    assert re.search(r"lane push, push, t = \d+, step 1: copy x\[", text)
    assert "no signal orders them" in text


def test_what_precedes_the_tiles_is_before_all_of_them_and_what_follows_after() -> None:
    d = Draft("in turn", 1)
    x, s = d.buffer("x", 4, 8, "fp32", "input"), d.buffer("s", 4, 8, "fp32", "scratch")
    y = d.buffer("y", 4, 8, "fp32", "output")
    row = (T, 1)
    relu = Compute("relu", y.part(rows=row), (s.part(rows=row),))
    d.lane("a").copy(x.part(), s.part()).tiles(Kernel("relu"), "t", 4, relu).compute("silu", y.part(), y.part())
    verify(d.schedule())
    schedule = d.schedule()
    (lane,) = schedule.lanes
    beside = replace(lane, name="b", steps=lane.steps[:1])
    assert "race on s@0" in faults(replace(schedule, lanes=(replace(lane, steps=lane.steps[1:]), beside)))


def test_tiles_do_not_wait() -> None:
    with pytest.raises(ValueError, match="kernel k: tiles may only copy, compute and set, not 'wait    s\\[0\\]'"):
        Tiles(Kernel("k"), "t", 3, (Wait("s"),))


def test_text_and_json() -> None:
    schedule = pushed(900)
    assert from_json(to_json(schedule)) == schedule
    for text in (schedule.table(), schedule.table(1)):
        assert "   2  tiles of push, t in 0 .. 900 - 1\n        copy    x[t:+1, :] -> box@" in text


def test_of_a_rank_only_the_tiles_own_number_is_open() -> None:
    tiles = pushed().of_rank(1)[0].steps[1]
    assert isinstance(tiles, Tiles)
    assert describe(tiles, 1) == (
        "tiles of push, t in 0..4: copy x[t:+1, 0:+8] -> box@0[t:+1, 0:+8] by kernel; set arrived@0[0]"
    )
    assert [str(step) for step in tiles.tile(3)] == [
        "copy    x@1[3:+1, 0:+8] -> box@0[3:+1, 0:+8] by kernel",
        "set     arrived@0[0]",
    ]


def test_sets_are_counted_and_an_order_for_one_queue_is_found() -> None:
    schedule = pushed(1000)
    counts = sets_per_run([schedule.of_rank(rank) for rank in range(2)])
    assert counts == {(0, "arrived", 0): 1000, (1, "arrived", 0): 1000, (0, "credit", 0): 1, (1, "credit", 0): 1}
    assert [type(step) for _, step in issue_order(schedule)[0]] == [Wait, Tiles, Wait, Compute, Set]


@settings(max_examples=100)
@given(
    extent=st.integers(0, 40),
    entries=st.lists(st.integers(-3, 3), min_size=2, max_size=4),
    a=st.integers(-3, 3),
    b=st.integers(1, 5),
)
def test_counts_are_those_of_one_tile_after_the_other(extent: int, entries: list[int], a: int, b: int) -> None:
    numbers = (lookup(entries, T % len(entries)), (T * a + b) // b, 7)
    tiles = Tiles(Kernel("k"), "t", extent, ())
    one_by_one = Counter(
        tuple(n.evaluate({"t": t}) if isinstance(n, Expr) else n for n in numbers) for t in range(extent)
    )
    assert dict(counted(tiles, *numbers)) == one_by_one


@settings(max_examples=50)
@given(extent=st.integers(1, 60), p=st.integers(1, 6), q=st.integers(1, 6))
def test_counts_of_what_repeats_are_those_of_one_tile_after_the_other(extent: int, p: int, q: int) -> None:
    a, b = lookup((5, 3, 8, 3, 1, 0), T % p), (T % q) * 2 + 1
    tiles = Tiles(Kernel("k"), "t", extent, ())
    one_by_one = Counter(tuple(int(Expr(str(n)).evaluate({"t": t})) for n in (a, b)) for t in range(extent))
    assert dict(counted(tiles, a, b)) == one_by_one
    assert [Expr(text).period("t") for text in ("t", "t // 4", "rank % 4", "(t + 1) % 4", "t % 4 + t % 6")] == [
        0, 0, 1, 0, 12,
    ]  # fmt: skip


def test_an_expression_with_some_of_its_variables() -> None:
    expr = lookup((5, 3, 8), RANK) * 2 + T
    assert isinstance(expr, Expr)
    assert str(expr.partially_evaluated({"rank": 2})) == "16 + t"
    assert expr.partially_evaluated({"rank": 2, "t": 1}) == 17


def test_signals_come_as_the_kernel_goes_on() -> None:
    """1600 rows of 32 bytes take 512 us over a link of 100 bytes/us. A wait for half of the rows ends after half of
    this time.
    """
    half, whole = (
        {s.name: s.end_us for s in simulate(pushed(1600, wait=count), SWITCH).timeline if s.rank == 0}
        for count in (800, 1600)
    )
    assert whole["push"] == pytest.approx(512, rel=1e-6)
    assert half["wait arrived[0]"] == pytest.approx(256, rel=1e-6)
    assert whole["wait arrived[0]"] == pytest.approx(512, rel=1e-6)
    late = {s.name: s.end_us for s in simulate(pushed(1600, wait=801), SWITCH).timeline if s.rank == 0}
    # The kernel's signals have a resolution of one sixteenth.
    assert late["wait arrived[0]"] == pytest.approx(512 * 9 / 16, rel=1e-6)


def test_tiles_with_too_few_sets_hang_in_the_simulator() -> None:
    with pytest.raises(ScheduleError, match=r"wait arrived\[0\] has 4 of 5 sets"):
        simulate(pushed(4, wait=5), SWITCH)
