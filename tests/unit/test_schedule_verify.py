"""Hangs, races, unwritten memory and occupancy deadlocks that are planted in schedules: `verify` finds each, and the error
gives rank, lane, step and region.

`test_schedule_well_formed.py` has steps and declarations that are not well formed. `test_schedule_gemms.py` tests that
all candidates pass. Faults that not every run shows (races, early reuse) are also planted in real schedules.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import pytest
from schedule_checks import faults
from schedule_interpreter import edited
from schedule_push import X, Y, push, with_steps
from support.slow import mostly, slow

from weft.builders import AllGatherMatmul, AllToAllMatmul, NotApplicableError, candidates
from weft.errors import ScheduleError
from weft.schedule import (
    RANK,
    Copy,
    Draft,
    Lane,
    Region,
    Schedule,
    Set,
    Signals,
    Wait,
)
from weft.schedule.expr import Index
from weft.schedule.steps import CopyBy
from weft.schedule.verify import verify
from weft.schedule.verify.forked_tiles import forked
from weft.schedule.verify.happens_before import HappensBefore
from weft.schedule.verify.occupancy import occupancy_deadlock


def assert_verifies(schedule: Schedule) -> None:
    try:
        verify(schedule)
    except ScheduleError as error:
        pytest.fail(f"nothing is wrong with it: {error}")


def without(schedule: Schedule, kind: type, **values: object) -> Schedule:
    return edited(
        schedule, lambda s: None if isinstance(s, kind) and all(getattr(s, k) == v for k, v in values.items()) else s
    )


def test_push_is_right() -> None:
    verify(push())


def test_missing_set() -> None:
    text = faults(without(push(), Set, signal="arrived"))
    assert "1 fault" in text
    assert re.search(r"rank 0, lane compute, step 1: wait arrived\[0\].* no step of a run sets the signal: add", text)
    assert text.endswith("(1 more of this kind)"), "the same on rank 1"


def test_a_wait_for_more_than_is_set_in_the_previous_run() -> None:
    text = faults(edited(push(), lambda s: replace(s, count=2) if isinstance(s, Wait) and s.previous else s))
    assert (
        "lane out, step 1: wait credit[0] x2 of the previous run | it waits until its signal is set 2 times, but a run sets the "
        "signal 1 time" in text
    )


def test_a_circle() -> None:
    text = faults(edited(push(), lambda s: replace(s, previous=False) if isinstance(s, Wait) else s))
    assert text.startswith("schedule push hangs:")
    for rank in range(2):
        assert (
            f"rank {rank}, lane out, step 1: wait credit[0]: only 0 of the 1 steps that set its signal can run" in text
        )
        assert (
            f"rank {rank}, lane compute, step 1: wait arrived[0]: only 0 of the 1 steps that set its signal can run"
            in text
        )


def test_a_wait_in_front_of_its_own_set() -> None:
    schedule = with_steps(Wait("here"), Set("here"))
    text = faults(replace(schedule, signals=(*schedule.signals, Signals("here", 1))))
    assert "rank 0, lane more, step 1: wait here[0]: only 0 of the 1 steps that set its signal can run" in text
    assert "arrived" not in text


def test_early_reuse() -> None:
    text = faults(without(push(), Wait, previous=True))
    assert re.search(
        r"race on box@\d: the first step reads and the second writes the same elements, in different runs, and no "
        r"signal orders them",
        text,
    )
    assert "lane out, step 1 of run 2: copy x[0:+4, 0:+8] -> box@" in text
    assert "lane compute, step 2: silu y[0:+4, 0:+8] = box[0:+4, 0:+8]" in text


def test_a_missing_wait_is_a_race_and_not_a_read_of_nothing_as_well() -> None:
    text = faults(without(push(), Wait, signal="arrived"))
    assert re.search(
        r"race on box@\d: the first step reads and the second writes the same elements, and no signal orders them", text
    )
    assert "no step has written" not in text


def test_two_writers() -> None:
    text = faults(with_steps(Copy(X, Y)))
    assert text.startswith("schedule push has 1 fault:\n  rank 0, lane ")
    assert "lane compute, step 2: silu y[0:+4, 0:+8] = box[0:+4, 0:+8]" in text
    assert "lane more, step 1: copy x[0:+4, 0:+8] -> y[0:+4, 0:+8] by dma" in text
    assert (
        "race on y@0: the first step writes and the second writes the same elements, and no signal orders them" in text
    )


def check_race(schedule: Schedule, buffer: str, copies: tuple[str, ...]) -> None:
    """Check that `verify` finds the race of these two copies by kernel, or no fault if there are none."""
    if not copies:
        verify(schedule)
        return
    text = faults(schedule)
    assert f"race on {buffer}@0: consecutive copies by kernel write the same elements, and may run concurrently" in text
    assert all(f"{copy} by kernel" in text for copy in copies)


@pytest.mark.parametrize(("first", "by", "races"), [(2, "kernel", True), (4, "kernel", False), (2, "dma", False)])
def test_consecutive_copies_by_kernel_that_write_the_same_rows(first: int, by: CopyBy, races: bool) -> None:
    """The two copies may be one launch, which copies all parts concurrently."""
    d = Draft("twice", 2)
    x, y = d.buffer("x", 8, 8, "fp32", "input"), d.buffer("y", 8, 8, "fp32", "output")
    lane = d.lane("compute").copy(x.part(rows=(0, 4)), y.part(rows=(0, 4)), by)
    lane.copy(x.part(rows=(first, 8 - first)), y.part(rows=(first, 8 - first)), by)
    copies = ("step 1: copy x[0:+4, 0:+8] -> y[0:+4, 0:+8]", "step 2: copy x[2:+6, 0:+8] -> y[2:+6, 0:+8]")
    check_race(d.schedule(), "y", copies if races else ())


@pytest.mark.parametrize(
    ("first", "at", "races"), [(2, (RANK + 1) % 2, True), (2, RANK, False), (4, (RANK + 1) % 2, False)]
)
def test_copies_of_one_region_with_a_signal_to_a_peer_between_them(first: int, at: Index, races: bool) -> None:
    """The two copies are one launch, unless the signal stays on the rank."""
    d = Draft("twice", 2)
    x, box = d.buffer("x", 4, 8, "fp32", "input"), d.buffer("box", 8, 8, "fp32", "scratch")
    y, signal = d.buffer("y", 8, 8, "fp32", "output"), d.signals("done", 1)
    lane = d.lane("compute").copy(x.part(), box.part(rows=(0, 4)), "kernel").set(signal, at=at)
    lane.copy(x.part(), box.part(rows=(first, 4)), "kernel").wait(signal)
    for row in range(0, 8, 4):
        lane.copy(box.part(rows=(row * first // 4, 4)), y.part(rows=(row, 4)))
    copies = ("step 1: copy x[0:+4, 0:+8] -> box[0:+4, 0:+8]", "step 3: copy x[0:+4, 0:+8] -> box[2:+4, 0:+8]")
    check_race(d.schedule(), "box", copies if races else ())


def test_neighbours_that_do_not_overlap_are_no_race() -> None:
    halves = [Region("y", 0, 4, col, 4) for col in (0, 4)]
    schedule = without(push(), Copy)
    schedule = edited(schedule, lambda s: None if getattr(s, "op", "") == "silu" else s)
    copies = [(Copy(replace(half, buffer="x"), half),) for half in halves]
    verify(replace(schedule, lanes=(*schedule.lanes, *(Lane(f"half {i}", "copy", c) for i, c in enumerate(copies)))))


def test_an_output_that_is_not_covered() -> None:
    part = Region("y", 0, 3, 0, 8)
    text = faults(
        edited(push(), lambda s: replace(s, out=part, inputs=(replace(part, buffer="box"),)) if hasattr(s, "op") else s)
    )
    assert "output y@0[3:+1, 0:+8] is never written: add a step that writes it (1 more of this kind)" in text
    assert text.startswith("schedule push has 1 fault:")


def test_an_uninitialised_read() -> None:
    part = Region("x", 0, 4, 2, 6)
    text = faults(
        edited(push(), lambda s: replace(s, src=part, dst=replace(s.dst, col=2, cols=6)) if isinstance(s, Copy) else s)
    )
    fault = r"rank (\d), lane compute, step 2: silu y\[0:\+4, 0:\+8\] = box\[0:\+4, 0:\+8\] \| it reads box@\1\[0:\+4, 0:\+2\]"
    assert re.search(fault + ", which no step has written before in this run", text)


def test_what_an_earlier_run_has_written_is_nothing() -> None:
    """Each of two ranks reads elements that it writes only later in the same run, in each of three runs."""
    d = Draft("late", 2)
    x, y, box = (d.buffer(n, 4, 8, "fp32", role) for n, role in (("x", "input"), ("y", "output"), ("box", "scratch")))
    d.lane("compute").compute("silu", y.part(), box.part()).copy(x.part(), box.part())
    text = faults(d.schedule())
    assert "it reads box@0[0:+4, 0:+8], which no step has written before in this run" in text
    assert text.endswith("(5 more of this kind)")


def test_a_rank_that_is_two_runs_ahead() -> None:
    """Rank 0 waits for three sets, two of its own and one of rank 1. Its lanes that set do not wait for rank 1.

    So the three sets may all be rank 0's own, from this run and from later runs.
    """
    d = Draft("ahead", 2)
    x, y = d.buffer("x", 4, 8, "fp32", "input"), d.buffer("y", 4, 8, "fp32", "output")
    box = d.buffer("box", 4, 8, "fp32", "scratch")
    d.signals("arrived", 1)
    d.signals("filled", 1)
    first = 1 - RANK  # how often rank 0 repeats a step that rank 1 omits
    d.lane("fill").repeat("i", first, Copy(x.part(), box.part()), Set("filled"), Set("arrived"))
    d.lane("after").repeat("i", first, Wait("filled"), Set("arrived"))
    d.lane("other").repeat("i", RANK, Set("arrived", 0, 0))
    d.lane("compute").repeat("i", first, Wait("arrived", 0, 3)).compute("silu", y.part(), x.part())
    verify(d.schedule())
    d.lane("compute").repeat("i", first, Copy(box.part(), y.part()))
    assert (
        "race on box@0: the first step writes and the second reads the same elements, and no signal orders them"
        in faults(d.schedule())
    )


def test_adding_to_what_is_not_there() -> None:
    text = faults(edited(push(), lambda s: replace(s, accumulate=True) if hasattr(s, "op") else s))
    assert "silu y[0:+4, 0:+8] += box[0:+4, 0:+8] | it reads y@" in text


def test_a_run_begins_when_all_lanes_of_its_rank_have_ended_the_one_before() -> None:
    d = Draft("two lanes", 1)
    x, y, box = (d.buffer(n, 4, 8, "fp32", role) for n, role in (("x", "input"), ("y", "output"), ("box", "scratch")))
    filled = d.signals("filled", 1)
    d.lane("fill", "copy").copy(x.part(), box.part()).set(filled)
    d.lane("compute").wait(filled).compute("silu", y.part(), box.part())
    assert_verifies(d.schedule())


def test_what_ranks_do_before_a_collective_is_done_when_it_ends() -> None:
    """Two ranks write into each other's memory. One collective signals that data have arrived, and another that they
    have been read.
    """

    def exchange(heard: bool) -> Schedule:
        d = Draft("exchange", 2)
        x, y, whole = (
            d.buffer("x", 4, 8, "fp32", "input"),
            d.buffer("y", 4, 8, "fp32", "output"),
            d.buffer("all", 8, 8, "fp32", "scratch"),
        )
        box = d.buffer("box", 4, 8, "fp32", "symmetric")
        lane = d.lane("compute").copy(x.part(), box.part(at=1 - RANK)).all_gather(x.part(), whole.part())
        lane.compute("silu", y.part(), box.part())
        if heard:
            lane.all_gather(x.part(), whole.part())
        return d.schedule()

    assert_verifies(exchange(True))
    assert "in different runs" in faults(exchange(False))


def test_the_first_ten_of_many_faults() -> None:
    text = faults(with_steps(*[Set("departed")] * 40))
    assert text.startswith("schedule push has 40 faults:\n")
    assert len(text.splitlines()) == 11


def polling(lanes: int, by: CopyBy = "kernel") -> Schedule:
    """Return a schedule in which each of two ranks computes, and has `lanes` lanes that copy when the other rank has
    computed.
    """
    d, peer = Draft("polling", 2), 1 - RANK
    x, y = d.buffer("x", 4, 8, "fp32", "input"), d.buffer("y", 4, 8, "fp32", "output")
    box, z = (d.buffer(name, 4 * lanes, 8, "fp32", role) for name, role in (("box", "symmetric"), ("z", "output")))
    ready, arrived = d.signals("ready", lanes), d.signals("arrived", lanes)
    compute = d.lane("compute").compute("silu", y.part(), x.part())
    for i in range(lanes):
        compute.set(ready, i, at=peer)
        sender = d.lane(f"to {i}", "copy").wait(ready, i)
        sender.copy(x.part(), box.part(rows=(4 * i, 4), at=peer), by).set(arrived, i, at=peer)
    for i in range(lanes):
        compute.wait(arrived, i)
    compute.copy(box.part(), z.part(), "kernel")
    return d.schedule()


def test_lanes_that_poll_on_all_compute_units_for_what_needs_one() -> None:
    text = faults(polling(3))
    assert "rank 0, lane compute, step 1: silu y[0:+4, 0:+8] = x[0:+4, 0:+8]" in text
    assert (
        "this step may never get a compute unit (SM): kernels of other lanes (to 0, to 1, to 2) may occupy all 132 units, "
        "and wait" in text
    )
    verify(polling(2))
    verify(polling(3), compute_units=304)
    verify(polling(3, "dma"), compute_units=1)


@pytest.mark.parametrize("world", [2, 3, slow(4), slow(8)])
def test_no_schedule_of_the_house_polls_for_what_it_keeps_from_coming(world: int) -> None:
    """No schedule of weft can deadlock on any GPU. Most launches poll only for the previous run.

    If a launch polls for its own run, only one of its programs polls, while copies by kernel need another unit.
    """
    rows, polls = world * max(4, world), 0
    for p in (AllGatherMatmul.even(rows, 2, 8, world), AllToAllMatmul.even(8, 2, 2, 2, world)):
        for candidate in candidates(p):
            if ("by", "dma") in candidate.parameters or ("steps", 4) in candidate.parameters:
                continue
            with contextlib.suppress(NotApplicableError):
                schedule = candidate.build()
                happened = HappensBefore(forked(schedule, 8)[1], 3)
                buffers = [{b.name: b for b in schedule.buffers_of_rank(rank)} for rank in range(world)]
                assert occupancy_deadlock(happened, buffers, 2) == {}, candidate.name
                polls += bool(occupancy_deadlock(happened, buffers, 1))
    assert polls, "with one unit fused GEMMs of FiCCO's stand still"


REAL = [
    candidate.build()
    for candidate in candidates(AllGatherMatmul.even(16, 2, 8, 4))
    if ("by", "dma") in candidate.parameters and ("steps", 0) not in candidate.parameters
]


@pytest.mark.parametrize("schedule", mostly(REAL, *REAL[::2]), ids=lambda s: s.name)
def test_real_schedules_need_each_of_their_waits(schedule: Schedule) -> None:
    """If any single wait is removed, the schedule has a race."""
    for i, lane in enumerate(schedule.lanes):
        for number, step in enumerate(lane.steps):
            if isinstance(step, Wait):
                steps = lane.steps[:number] + lane.steps[number + 1 :]
                lanes = (*schedule.lanes[:i], replace(lane, steps=steps), *schedule.lanes[i + 1 :])
                assert "race on box@" in faults(replace(schedule, lanes=lanes)), (lane.name, str(step))
