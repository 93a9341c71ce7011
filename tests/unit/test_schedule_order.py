"""The order in which one thread issues a rank's steps, and the happens-before relation.

The tests compare known orders of issue, find cycles, and compare `HappensBefore` with its definition: x is before y if
y never runs while x is blocked. test_schedule_gemms.py checks that every candidate can be issued.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.builders import AllGatherMatmul, candidates
from weft.errors import ScheduleError, WeftError
from weft.schedule import RANK, Draft, Lane, Schedule, Set, Step, Wait
from weft.schedule.text import describe
from weft.schedule.verify.happens_before import HappensBefore
from weft.schedule.verify.issue_order import Event, issue_order, play


def in_words(schedule: Schedule, rank: int) -> list[str]:
    return [f"{lane}: {describe(step, rank)}" for lane, step in issue_order(schedule)[rank]]


def test_who_changes_what_a_step_sets_changes_no_other_step() -> None:
    lanes = next(c for c in candidates(AllGatherMatmul.even(12, 2, 4, 3), ("shard",))).build().of_rank(0)
    steps = [step for lane in lanes for step in lane.steps]
    before = [dict(step.sets()) for step in steps]
    assert {len(sets) for sets in before} == {0, 1}
    for step in steps:
        with contextlib.suppress(TypeError):  # only reads are allowed
            step.sets()[0, "credit", 0] = 7  # type: ignore[index]
    assert [dict(step.sets()) for step in steps] == before


def test_first_chunks_leave_first_and_nothing_stands_behind_a_wait() -> None:
    problem = AllGatherMatmul.even(12, 2, 4, 3)
    parameters = {"chunks": 2, "send": "at_once", "by": "dma"}
    schedule = next(c for c in candidates(problem, ("shard",)) if dict(c.parameters) == parameters).build()
    assert [line.split("[")[0] for line in in_words(schedule, 0)] == [
        "to +1: wait credit",
        "to +1: copy x_shard",
        "to +1: set arrived@1",
        "to +2: wait credit",
        "to +2: copy x_shard",
        "to +2: set arrived@2",
        "compute: matmul y0",
        "to +1: copy x_shard",
        "to +1: set arrived@1",
        "to +2: copy x_shard",
        "to +2: set arrived@2",
        *["compute: wait arrived", "compute: matmul y0"] * 2,
        "compute: set credit@2",
        *["compute: wait arrived", "compute: matmul y0"] * 2,
        "compute: set credit@1",
    ]


def test_a_step_that_waits_for_a_peer_is_behind_what_the_peer_waits_for() -> None:
    """Lane a comes first and waits for lane b of the peer. If steps were issued lane by lane, the queues of both ranks
    would block.
    """
    d = Draft("crossed", 2)
    ready = d.signals("ready", 1)
    d.lane("a").wait(ready)
    d.lane("b").set(ready, at=1 - RANK)
    assert in_words(d.schedule(), 0) == ["b: set ready@1[0]", "a: wait ready[0]"]


def test_collectives_are_called_in_one_order() -> None:
    d = Draft("two gathers", 2)
    x = d.buffer("x", 2, 2, "fp32", "input")
    ys = [d.buffer(f"y{i}", 4, 2, "fp32", "output") for i in range(2)]
    ready = d.signals("ready", 2)
    d.lane("a").wait(ready, RANK).all_gather(x.part(), ys[0].part())
    d.lane("b").all_gather(x.part(), ys[1].part()).set(ready, RANK).set(ready, 1 - RANK, at=1 - RANK)
    orders = [[line.split("->")[-1] for line in in_words(d.schedule(), rank) if "gather" in line] for rank in range(2)]
    assert orders == [[" y1[0:+4, 0:+2]", " y0[0:+4, 0:+2]"]] * 2


def test_a_circle_is_named() -> None:
    d = Draft("circle", 2)
    ready = d.signals("ready", 2)
    d.lane("a").wait(ready, RANK).set(ready, 1 - RANK, at=1 - RANK)
    with pytest.raises(ScheduleError, match=r"schedule circle deadlocks\. These lanes wait forever") as error:
        issue_order(d.schedule())
    assert "rank 0, lane a, step 1: wait ready[0]: only 0 of the 1 steps that set its signal can run" in str(
        error.value
    )
    assert "rank 1, lane a, step 1: wait ready[1]: only 0 of the 1 steps that set its signal can run" in str(
        error.value
    )
    assert isinstance(error.value, WeftError)
    assert isinstance(error.value, ValueError)


def test_a_collective_that_not_all_ranks_come_to_is_named() -> None:
    d = Draft("alone", 2)
    x = d.buffer("x", 2, 2, "fp32", "input")
    y = d.buffer("y", 4, 2, "fp32", "output")
    d.lane("a").wait(d.signals("never", 1)).all_gather(x.part(), y.part())
    schedule = d.schedule()
    ranks = [schedule.of_rank(0), (Lane("a", "compute", schedule.of_rank(1)[0].steps[1:]),)]
    _, stuck = play(ranks)
    assert stuck == {Event(1, 0, 0, 0): 0, Event(1, 1, 0, 0): 1}


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[Lane, ...]]:
    """Draw two or three ranks with two lanes, which set and wait for two counters each. Steps are drawn in an order in
    which they can run.
    """
    world = draw(st.integers(2, 3))
    lanes: list[list[list[Step]]] = [[[], []] for _ in range(world)]
    total: Counter[tuple[int, int]] = Counter()
    previous = []
    for _ in range(draw(st.integers(3, 12))):
        rank, index = draw(st.integers(0, world - 1)), draw(st.integers(0, 1))
        lane = lanes[rank][draw(st.integers(0, 1))]
        kind = draw(st.sampled_from(("set", "wait", "previous")))
        if kind == "set":
            at = draw(st.integers(0, world - 1))
            total[at, index] += 1
            lane.append(Set("s", index, at))
        elif kind == "wait" and total[rank, index]:
            lane.append(Wait("s", index, draw(st.integers(1, total[rank, index]))))
        elif kind == "previous":
            previous.append((lane, len(lane), rank, index))
    for lane, place, rank, index in reversed(previous):
        if total[rank, index]:
            lane.insert(place, Wait("s", index, draw(st.integers(1, total[rank, index])), previous=True))
    return [tuple(Lane(f"lane {i}", "compute", tuple(steps)) for i, steps in enumerate(of_rank)) for of_rank in lanes]


def reached(ranks: list[tuple[Lane, ...]], runs: int, held: Event) -> set[Event]:
    """Return the events that can still happen if `held` never happens, in any order."""
    steps = {
        Event(0, r, i, n): s
        for r, lanes in enumerate(ranks)
        for i, ln in enumerate(lanes)
        for n, s in enumerate(ln.steps)
    }
    happened: set[Event] = set()

    def sets(rank: int, wait: Wait) -> int:
        counter = Set(wait.signal, wait.index, rank)
        return sum(steps[event._replace(run=0)] == counter for event in happened)

    def may(event: Event, step: Step) -> bool:
        mine = {e for e in happened if e.rank == event.rank}
        a_run = sum(len(lane.steps) for lane in ranks[event.rank])
        if sum(e.run < event.run for e in mine) < a_run * (event.run - 1):
            return False
        if event.step and event._replace(step=event.step - 1) not in mine:
            return False
        if isinstance(step, Wait):
            a_run = sum(s == Set(step.signal, step.index, event.rank) for s in steps.values())
            before = event.run - 1 - step.previous
            return before < 0 or sets(event.rank, step) >= before * a_run + step.count
        return True

    events = [event._replace(run=run) for event in steps for run in range(1, runs + 1)]
    while new := {e for e in events if e not in happened and e != held and may(e, steps[e._replace(run=0)])}:
        happened |= new
    return happened


@settings(max_examples=60)
@given(programs())
def test_before_means_that_it_cannot_come_without(ranks: list[tuple[Lane, ...]]) -> None:
    happened = HappensBefore(ranks, 3)
    for a, event in enumerate(happened.events):
        without = reached(ranks, 3, event)
        for b, other in enumerate(happened.events):
            assert happened.before(a, b) == (a != b and other not in without), (event, other)


def test_a_fast_ranks_second_set_may_stand_in_for_a_slow_ranks_first() -> None:
    """Rank 2 waits for two sets. Ranks 0 and 1 set once per run and wait for nothing, so rank 0 alone may make both
    sets.
    """
    lanes = {
        "free": [(Lane("a", "compute", (Set("both", 0, 2),)),)] * 2,
        "bound": [(Lane("a", "compute", (Set("both", 0, 2), Wait("both", 1))),)] * 2,
    }
    back = (Set("both", 1, 0), Set("both", 1, 1))
    for name, ordered in (("free", False), ("bound", True)):
        ranks = [*lanes[name], (Lane("a", "compute", (Wait("both", 0, 2), *back)),)]
        happened = HappensBefore(ranks, 3)
        wait = happened.events.index(Event(1, 2, 0, 0))
        for rank in range(2):
            assert happened.before(happened.events.index(Event(1, rank, 0, 0)), wait) == ordered
