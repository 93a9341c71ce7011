"""The rule by which steps of a lane become one launch: for each part of a launch, steps that belong to it and steps
that do not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from weft.builders import AllToAllMatmul, MatmulAllToAll, named
from weft.builders.all_to_all_matmul import dispatch_by_expert
from weft.builders.matmul_all_to_all import combine_by_expert
from weft.builders.problem import described
from weft.runtime.cuda.context import rank_schedule
from weft.schedule import RANK, Buffer, Compute, Copy, Draft, Expr, Region, Set, Step, Wait, total
from weft.schedule.kernels import PooledBags, SortedMatmul, TileKernel, TrackedMatmul
from weft.schedule.launches import Launch, crosses, launches, launches_of_rank, setters, units_of_dynamic_copies
from weft.schedule.steps import COPY_UNITS, DYNAMIC_COPY_UNITS, Tiles
from weft.schedule.verify.issue_order import issue_order

d = Draft("buffers", 2)
X, Y = d.buffer("x", 8, 8, "fp32", "input"), d.buffer("y", 8, 8, "fp32", "output")
BOX, WIDE = d.buffer("box", 8, 8, "fp32", "symmetric"), d.buffer("wide", 8, 16, "fp32", "symmetric")
COUNTS = d.buffer("counts", 1, 2, "int64", "symmetric")
BUFFERS = {one.name: one for one in (X, Y, BOX, WIDE, COUNTS)}
SET, LOCAL, WAIT, WITHIN = Set("far", 0, 1), Set("near", 0, 0), Wait("far"), Wait("near")
AWAITED = {("far", 0)}


def copy(dst: Region, src: Region | None = None, accumulate: bool = False) -> Copy:
    return Copy(src or X.part(), dst, "kernel", accumulate)


def grouped(*steps: Step, **options: bool) -> list[str]:
    """Return the launches of rank 0's only lane. Each launch is a string with a letter per step: w (wait), s (set), c
    (copy).
    """
    found = launches(steps, [crosses(step, 0, AWAITED) for step in steps], BUFFERS, **options)  # type: ignore[arg-type]
    assert [step for one in found for step in one.steps] == list(steps)
    assert [one.first for one in found] == [sum(len(o.steps) for o in found[:i]) for i in range(len(found))]
    for one in found:
        assert {*one.sets_before, *one.waits, *one.body, *one.sets, *one.waits_after} == set(one.steps)
    return ["".join(step.kind[0] for step in one.steps) for one in found]


def test_a_copy_by_kernel_takes_signals_between_ranks_with_it() -> None:
    steps = WAIT, WAIT, copy(BOX.part()), SET, SET, WAIT
    (one,) = launches(steps, [True, True, False, True, True, True], BUFFERS)
    assert (one.waits, one.body, one.sets, one.waits_after) == (steps[:2], steps[2:3], steps[3:5], steps[5:])
    assert (one.first_wait, one.begin, one.first_wait_after, one.last, one.anchor) == (0, 2, 5, 5, 5)
    assert one.units == COPY_UNITS
    assert list(one.carried()) == [False, False, False, True, True, False]


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ((WITHIN, copy(BOX.part()), LOCAL), ["w", "c", "s"]),
        ((WAIT, WAIT, SET, SET, WITHIN, LOCAL), ["ww", "ss", "w", "s"]),
        ((WAIT, Copy(X.part(), BOX.part(), "dma"), SET), ["w", "c", "s"]),
        ((copy(BOX.part()), SET, copy(BOX.part(at=1)), SET), ["cscs"]),
        ((copy(BOX.part()), copy(BOX.part(), src=WIDE.part())), ["c", "c"]),  # another source
        ((copy(BOX.part()), copy(WIDE.part())), ["c", "c"]),  # another row pitch
        ((copy(BOX.part()), copy(BOX.part(), accumulate=True)), ["c", "c"]),
        ((copy(BOX.part(), accumulate=True), copy(BOX.part(at=1), accumulate=True)), ["cc"]),  # the same source
        ((*(copy(BOX.part(rows=(4, 4), at=1), X.part(rows=(i, 4))) for i in (0, 4)), SET, WAIT), ["ccsw"]),
        ((*(copy(BOX.part(at=1), X.part(rows=(i, 4)), accumulate=True) for i in (0, 4)), SET), ["c", "cs"]),
        (
            (*(copy(Y.part(rows=(i, 4)), BOX.part(rows=(i, 4))) for i in (0, 4)), SET),
            ["ccs"],
        ),  # one tensor of the caller
        (
            (copy(BOX.part(rows=(0, 4)), X.part(rows=(0, 4))), copy(Y.part(rows=(4, 4)), X.part(rows=(4, 4)))),
            ["c", "c"],
        ),
        (
            (copy(BOX.part(rows=(0, 4)), X.part(rows=(0, 4))), copy(BOX.part(rows=(4, 3)), X.part(rows=(4, 3)))),
            ["c", "c"],
        ),
        (
            (*(copy(BOX.part(rows=(i + 1, 1)), BOX.part(rows=(i, 1))) for i in (0, 1)),),
            ["c", "c"],
        ),  # may depend on each other
        ((copy(BOX.part()), LOCAL, copy(BOX.part())), ["c", "s", "c"]),
        ((copy(Y.part()), SET, copy(Y.part()), WAIT), ["cs", "c", "w"]),  # the caller's tensor has no fixed place
        ((SET, WAIT, copy(BOX.part())), ["s", "wc"]),
    ],
)
def test_what_belongs_to_a_launch(steps: tuple[Step, ...], wanted: list[str]) -> None:
    assert grouped(*steps) == wanted


def test_sets_open_a_launch_only_on_a_rank_with_one_lane() -> None:
    assert grouped(SET, WAIT, copy(BOX.part()), alone=True) == ["swc"]
    assert grouped(SET, WAIT, Compute("relu", Y.part(), (X.part(),)), alone=True) == ["s", "w", "c"]


@pytest.mark.parametrize("kernel", [TrackedMatmul(), SortedMatmul("counts", "x", "w", "y", 2, 0, 2), PooledBags()])
def test_tiles_go_on_only_where_that_is_assumed(kernel: TileKernel) -> None:
    body = Compute("relu", Y.part(rows=(Expr("t"), 1)), (X.part(rows=(Expr("t"), 1)),))
    tiles = Tiles(kernel, "t", 4, (body,))
    assert grouped(tiles, SET, LOCAL, WAIT, tiles) == ["t", "s", "s", "w", "t"]
    assert grouped(tiles, SET, LOCAL, WAIT, tiles, tiles_go_on=True) == ["tss", "w", "t"]
    found = launches((tiles, WAIT, tiles), [False, True, False], BUFFERS, tiles_go_on=True)
    assert [one.continues for one in found] == [False, False, kernel == PooledBags()]


def test_dynamic_copies_share_few_units_and_a_launch() -> None:
    """Copies of one buffer that follow each other are one launch, unless a set separates them."""
    draft = Draft("dynamic", 2)
    x, box = draft.buffer("x", 8, 8, "fp32", "input"), draft.buffer("box", 8, 8, "fp32", "symmetric")
    counts = draft.buffer("counts", 1, 2, "int64", "symmetric")
    draft.holds(counts, [(1, 2), (3, 4)])
    rows = (0, total(counts.name, 0, 2))
    draft.lane("compute").read(counts).copy(x.part(rows=rows), box.part(rows=rows), "kernel")
    for name in ("first", "second"):
        lane = draft.lane(name, "copy").read(counts)
        for _ in range(2):
            lane.copy(x.part(rows=rows), box.part(rows=rows, at=(RANK + 1) % 2), "kernel")
        lane.set(draft.signals(name, 1), at=(RANK + 1) % 2)
        lane.copy(x.part(rows=rows), box.part(rows=rows, at=(RANK + 1) % 2), "kernel")
    schedule = draft.schedule()
    assert units_of_dynamic_copies(schedule, "copy") == DYNAMIC_COPY_UNITS // 2
    lanes, buffers = [lane.name for lane in schedule.lanes], {b.name: b for b in schedule.buffers}
    found = launches_of_rank(schedule, 0, lanes, issue_order(schedule)[0], (), buffers)
    few = DYNAMIC_COPY_UNITS // 2
    assert sorted((one.lane, one.units, len(one.body)) for one in found if one.copies) == [
        (0, COPY_UNITS, 1), (1, few, 1), (1, few, 2), (2, few, 1), (2, few, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("rows", "wanted"), [(8, ["cc"]), (9, ["c", "c"])])
def test_dynamic_copies_into_buffers_of_unequal_heights_are_two_launches(rows: int, wanted: list[str]) -> None:
    """The kernel clamps the sizes of all parts to the height of one buffer."""
    draft = Draft("dynamic", 2)
    box, other = (draft.buffer(name, n, 8, "fp32", "scratch") for name, n in (("box", 8), ("other", rows)))
    some = (0, total(COUNTS.name, 0, 2))
    steps = [copy(buffer.part(rows=some), X.part(rows=some)) for buffer in (box, other)]
    found = launches(steps, [False, False], {**BUFFERS, "box": box, "other": other}, held=[COUNTS.name])
    assert ["".join(step.kind[0] for step in one.steps) for one in found] == wanted


@pytest.mark.parametrize(("world", "wanted"), [(8, [7]), (9, [1] * 8)])
def test_one_launch_of_scatter_stores_the_rows_of_up_to_seven_peers(world: int, wanted: list[int]) -> None:
    schedule = named(
        described("matmul_reduce_scatter", m=8 * world, n=16, k=16, ranks=world, dtype="bf16"), "scatter"
    ).build()
    (lane,) = schedule.of_rank(0)
    (awaited, *_), buffers = setters([schedule.of_rank(rank) for rank in range(world)]), schedule.buffers_of_rank(0)
    crossing = [crosses(step, 0, awaited) for step in lane.steps]
    found = launches(lane.steps, crossing, {b.name: b for b in buffers}, alone=True)
    assert [len(one.body) for one in found if one.copies] == wanted


def test_counters_that_peers_or_tiles_set_are_awaited() -> None:
    draft = Draft("set", 2)
    x, y = draft.buffer("x", 8, 8, "fp32", "input"), draft.buffer("y", 8, 8, "fp32", "output")
    far, near, own = draft.signals("far", 1), draft.signals("near", 1), draft.signals("own", 1)
    body = Compute("relu", y.part(rows=(Expr("t"), 1)), (x.part(rows=(Expr("t"), 1)),)), Set(own.name, 0)
    draft.lane("compute").tiles(TrackedMatmul(), "t", 8, *body).set(far, 0, at=(RANK + 1) % 2).set(near)
    schedule = draft.schedule()
    assert setters([schedule.of_rank(rank) for rank in range(2)]) == [
        {("own", 0): 0, ("far", 0): 1}, {("far", 0): 0, ("own", 0): 1},
    ]  # fmt: skip


@pytest.fixture(scope="module")
def exchange() -> tuple[list[Step], list[bool], dict[str, Buffer]]:
    """The steps of rank 0 of a combine in one lane: copies of two tables, a read, a GEMM, and an exchange of rows."""
    p = MatmulAllToAll(3, 2, (8, 8, 8), 16, 16, "bf16", most=8, exact=False)
    mine = rank_schedule(combine_by_expert(p, chunks=1, by="kernel"), 0)
    steps = [step for _, step in mine.order]
    awaited = {flag.key for flag in mine.flags[0].values()}
    return steps, [crosses(step, 0, awaited) for step in steps], mine.buffers


def test_an_exchange_of_rows_is_one_launch_on_a_rank_with_one_lane(
    exchange: tuple[list[Step], list[bool], dict[str, Buffer]],
) -> None:
    steps, crossing, buffers = exchange
    sizes, gemm, one = launches(steps, crossing, buffers, alone=True, held={"counts"}, round_trips=True)
    assert [step.kind for step in sizes.steps] == ["copy", "copy", "read"]
    assert sizes.read is sizes.steps[-1]
    assert gemm.steps == (steps[3],)
    trip = one.trip
    assert trip is not None
    assert one.steps == tuple(steps[4:])
    assert one.steps == trip.steps
    assert [len(part) for part in trip[:-2]] == [2, 3, 2, 2, 0, 2, 2]
    assert {*one.waits, *one.body, *one.sets, *one.waits_after} == set(one.steps)
    begin, places = 2, 2 + 3 + 2 + 2 + 2  # the first copy, and the first copy after the second waits
    late = [*range(begin + 1), places, places + 2]
    assert [i for i, carried in enumerate(one.carried()) if not carried] == late
    several = launches(steps, crossing, buffers, held={"counts"})
    assert not any(launch.trip or launch.read for launch in several)
    assert len(several) > 5


@pytest.mark.parametrize("returns", [False, True])
def test_an_exchange_whose_rows_stay_where_they_arrive_ends_with_a_wait(returns: bool) -> None:
    """A dispatch in one lane: read the own splits, exchange tokens and splits, read all splits, multiply, release the tokens."""
    p = AllToAllMatmul(3, 2, (8, 8, 8), 16, 16, "bf16", most=8, exact=False, return_x=returns)
    mine = rank_schedule(dispatch_by_expert(p, by="kernel", chunks=1, send="together"), 0)
    steps, awaited = [step for _, step in mine.order], {flag.key for flag in mine.flags[0].values()}
    crossing = [crosses(step, 0, awaited) for step in steps]

    def found(steps: list[Step]) -> list[Launch]:
        return launches(steps, crossing, mine.buffers, alone=True, held={"counts", "mine"}, round_trips=True)

    sizes, one, read, gemm, *others = found(steps)
    assert [step.kind for step in sizes.steps] == ["copy", "read"]
    trip = one.trip
    assert trip is not None
    assert one.steps == trip.steps
    assert [len(part) for part in (*trip[:-2], trip.sets_after)] == [2, 3, 2, 2, 0, 2, 0, 0]
    assert trip.agree is None
    assert [i for i, carried in enumerate(one.carried()) if not carried] == [0, 1, 2]
    assert [step.kind for step in (*read.steps, *gemm.steps)] == ["read", "tiles"]
    assert len(others) == 1 + 2 * returns  # own and arrived tokens; the copy of the received counts, with the signals
    assert [step.kind for step in others[-1].steps] == ["copy", "set", "set"]
    sends = [i for i, step in enumerate(steps) if step in trip.sends]
    changed = list(steps)
    another = replace(trip.sends[0].src, buffer="w")  # a second tensor of the caller
    changed[sends[0]] = replace(trip.sends[0], src=another)
    assert not any(launch.trip for launch in found(changed))


def test_an_exchange_whose_copies_depend_on_each_other_is_several_launches(
    exchange: tuple[list[Step], list[bool], dict[str, Buffer]],
) -> None:
    steps, crossing, buffers = exchange
    sends = [i for i, step in enumerate(steps) if isinstance(step, Copy) and step.src.buffer == "outbox"]
    places = [i for i, step in enumerate(steps) if isinstance(step, Copy) and step.src.buffer == "inbox"]
    last_read = next(i for i, step in enumerate(steps) if step.kind == "read")

    def has_trip(at: int, step: Step | None) -> bool:
        changed = [s for s in (*steps[:at], step, *steps[at + 1 :]) if s is not None]
        kept = [c for i, c in enumerate(crossing) if step is not None or i != at]
        found = launches(changed, kept, buffers, alone=True, held={"counts"}, round_trips=True)
        return any(launch.trip for launch in found)

    copy, place = (cast(Copy, steps[i]) for i in (sends[0], places[0]))
    assert has_trip(sends[0], copy)
    assert has_trip(sends[0], None)  # fewer ranges
    assert not has_trip(sends[0], replace(copy, accumulate=True))
    assert not has_trip(sends[0], replace(copy, dst=replace(copy.dst, at=0)))  # a later copy reads what it writes
    assert not has_trip(
        places[0], replace(place, dst=replace(place.dst, buffer="outbox"))
    )  # it overwrites what is sent
    assert not has_trip(places[0], replace(place, src=replace(place.src, buffer="y")))
    assert not has_trip(sends[0], replace(copy, src=replace(copy.src, cols=8), dst=replace(copy.dst, cols=8)))
    agree = len(steps) - 1 - next(i for i, step in enumerate(reversed(steps)) if step.kind == "agree")
    assert not has_trip(agree, None)
    found = launches(steps[1:], crossing[1:], buffers, alone=True, held={"counts"}, round_trips=True)
    assert found[1].read is None  # the copies do not fill the buffer
    assert steps[last_read] in found[1].steps
