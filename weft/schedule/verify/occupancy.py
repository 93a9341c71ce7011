"""Occupancy deadlocks: kernels that poll may hold all compute units of a rank, while the step that they wait for needs
a unit.

On GPUs most waits are stream waits, which hold no compute unit. Two kinds of launches poll:

    copies by kernel    The kernel also runs the waits before and after the copy (`weft.schedule.launches`). All programs poll for
                        the waits before the copy, on up to COPY_UNITS compute units. One program polls for the waits after it
    NCCL's collectives  They poll until all ranks have reached the collective

Below, such a launch is called open from the end of the previous step of its lane until its waits have ended. Computing
steps, copies by kernel and collectives need a unit. A step gets a unit if the open launches of its rank do not hold all
units.

The check computes Y, the largest set of steps that may never run. A step y is in Y if other launches can hold all
compute units when y could begin, and each of these launches waits for steps in Y. Only launches that may be open at
this time count:

    - they are in the same run and on the same rank as y, but on another lane
    - they do not always begin after y, and do not always end before y

A launch waits for a step if the step happens before the launch's waits end, but not before the launch begins.

Y is a greatest fixed point: start with all steps that need a unit, and remove steps that get a unit until nothing
changes. If Y is empty, there is no deadlock. The check is conservative: it treats launches as open together even if
they never are.

Waits for the previous run (`previous=True`) cannot cause a deadlock. In run e they wait for steps of run e - 1, and in
the first run they wait for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weft.schedule.launches import Key, crosses, launches, setters
from weft.schedule.regions import Buffer
from weft.schedule.steps import Lane
from weft.schedule.verify.happens_before import HappensBefore
from weft.schedule.verify.issue_order import Event


class _Polling(NamedTuple):
    """A launch that polls.

    units: the number of compute units that the launch holds.
    before: the number of the event that precedes the launch on its lane; None if the launch is the lane's first in the run.
    last: the number of the launch's last event.
    """

    lane: int
    units: int
    before: int | None
    last: int


def occupancy_deadlock(
    happened: HappensBefore, buffers: Sequence[Mapping[str, Buffer]], compute_units: int
) -> dict[int, list[int]]:
    """Return {event number: lanes} for each step that may never get a compute unit.

    lanes: the indices of the lanes of the step's rank whose launches together may hold all compute units.

    happened: the order of all events that signals enforce.
    buffers: for each rank, its buffers by name.
    """
    polling = _polling(happened, buffers, compute_units)
    standing = {place: list[int]() for place in polling}
    for n, event in enumerate(happened.events):
        if (event.run, event.rank) in standing and happened.step(event).needs_unit:
            standing[event.run, event.rank].append(n)
    while True:
        every, held = np.array([n for here in standing.values() for n in here], np.int64), dict[int, list[int]]()
        left = {place: list[int]() for place in standing}
        for place, here in standing.items():
            waiting = [one for one in polling[place] if _waits_for_any(happened, one, every)]
            for n, lanes in _lanes_that_hold(happened, here, waiting, compute_units):
                left[place].append(n)
                held[n] = lanes
        if len(held) == len(every):
            return dict(sorted(held.items()))
        standing = left


def _waits_for_any(happened: HappensBefore, one: _Polling, events: np.ndarray) -> bool:
    """True if the launch `one` waits for any of the events (the top of this file defines when a launch waits for a step)."""
    is_ahead = happened.each_before(events, one.last)
    if one.before is not None:
        is_ahead &= (events != one.before) & ~happened.each_before(events, one.before)
    return bool(is_ahead.any())


def _lanes_that_hold(
    happened: HappensBefore, events: list[int], polling: list[_Polling], compute_units: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield (event, lanes) for each of `events` whose step may never get a compute unit.

    lanes: the indices of the lanes whose launches together may hold all units.
    polling: the polling launches of the same rank and run.
    """
    if not events or not polling:
        return
    numbers, lane = np.array(events), np.array([happened.events[n].lane for n in events])
    units = np.zeros((len(events), 1 + max(one.lane for one in polling)), np.int64)
    for one in polling:
        may_be_open = (lane != one.lane) & ~happened.each_before(one.last, numbers)
        if one.before is not None:
            may_be_open &= ~happened.each_before(numbers, one.before)
        units[may_be_open, one.lane] = np.maximum(units[may_be_open, one.lane], one.units)
    for place in np.flatnonzero(units.sum(1) >= compute_units).tolist():
        yield events[place], np.flatnonzero(units[place]).tolist()


def _polling(
    happened: HappensBefore, buffers: Sequence[Mapping[str, Buffer]], compute_units: int
) -> dict[tuple[int, int], list[_Polling]]:
    """Return {(run, rank): polling launches}, for ranks whose lanes together can hold all compute units."""
    found: dict[tuple[int, int], list[_Polling]] = defaultdict(list)
    awaited = setters(happened.ranks)
    polled = [
        [_polled(lane, rank, awaited[rank], buffers[rank]) for lane in lanes]
        for rank, lanes in enumerate(happened.ranks)
    ]
    most = [sum(max([units for units, _, _ in of_lane], default=0) for of_lane in lanes) for lanes in polled]
    if max(most) < compute_units:
        return found
    numbers = {event: n for n, event in enumerate(happened.events)}
    for run in {event.run for event in happened.events}:
        for rank in (rank for rank, units in enumerate(most) if units >= compute_units):
            for i, of_lane in enumerate(polled[rank]):
                for units, first, last in of_lane:
                    before = numbers[Event(run, rank, i, first - 1)] if first else None
                    found[run, rank].append(_Polling(i, units, before, numbers[Event(run, rank, i, last)]))
    return found


def _polled(
    lane: Lane, rank: int, awaited: Collection[Key], buffers: Mapping[str, Buffer]
) -> set[tuple[int, int, int]]:
    """Return (number of compute units, first step, last polling step) for each launch of a lane that polls.

    Waits between two copies by kernel belong to the first or the second launch, depending on the order of issue. The
    result has the launches of both cases.
    """
    found = set()
    crossing = [crosses(step, rank, awaited) for step in lane.steps]
    for may_answer in (lambda first, end: False, lambda first, end: True):
        for one in launches(lane.steps, crossing, buffers, may_answer=may_answer):
            if one.units and (one.waits or one.body[0].meets):
                found.add((one.units, one.first_wait, one.begin))
            if one.waits_after:
                found.add((1, one.first_wait_after, one.last))
    return found
