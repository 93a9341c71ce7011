"""Occupancy deadlocks: lanes that poll may hold all compute units of a rank while the step that they wait for needs one.

On GPUs most waits are stream waits, and hold no unit. But a copy by kernel polls for the waits between ranks around it
in its own launch (`weft.schedule.launches`). All its programs poll for the waits before it, on up to COPY_UNITS compute
units. Its last program polls for the waits after its sets. NCCL's collectives poll until all ranks have reached them.
Such a launch is open from the end of the step before it on its lane until its waits have ended. A step that computes,
copies by kernel, or is a collective needs a unit, and gets it if the launches that are open on its rank leave one.

A set of steps Y can never be scheduled under one condition. For each y in Y, all units are held by launches that may be
open when y is to begin, and that all wait for some step of Y:

    open    in y's run on its rank, on other lanes; not certain to begin after y, nor to have ended before it
    waits   for a step that is certain to come before the waits end, and not certain to have come before the launch begins

The largest such Y is the greatest fixed point: start with all steps that need a unit, and remove those that get one, until
nothing changes. If Y is empty, there is no deadlock. Launches that are never open together count as open together, which errs on
the safe side.

Waits for the previous run are harmless, for any number of polling lanes. In run e they wait for steps of run e - 1, and
so on down to the first run, which waits for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from weft.schedule.launches import Key, crosses, launches, setters
from weft.schedule.regions import Buffer
from weft.schedule.steps import Lane
from weft.schedule.verify.happens_before import HappensBefore
from weft.schedule.verify.issue_order import Event


class _Polling(NamedTuple):
    """A launch that polls. begun: bit set of events before it begins; wanted: bit set of events it waits for. last: number of its
    last event."""

    lane: int
    units: int
    begun: int
    wanted: int
    last: int


def occupancy_deadlock(
    happened: HappensBefore, buffers: Sequence[Mapping[str, Buffer]], compute_units: int
) -> dict[int, list[int]]:
    """Return, by number of event, the steps that may never get a compute unit, and the lanes of their rank that then hold all
    units. buffers: the buffers by name, for each rank."""
    polling = _polling(happened, buffers, compute_units)
    if not polling:
        return {}
    standing = {n: list[int]() for n, event in enumerate(happened.events) if happened.step(event).needs_unit}
    while True:
        left: dict[int, list[int]] = {}
        mask = sum(1 << n for n in standing)
        for n in standing:
            event, units = happened.events[n], defaultdict[int, int](int)
            for one in polling.get((event.run, event.rank), ()):
                may_be_open = not (one.begun >> n & 1 or happened.ancestors(n) >> one.last & 1)
                if one.lane != event.lane and may_be_open and one.wanted & mask:
                    units[one.lane] = max(units[one.lane], one.units)
            if sum(units.values()) >= compute_units:
                left[n] = sorted(units)
        if len(left) == len(standing):
            return left
        standing = left


def _polling(
    happened: HappensBefore, buffers: Sequence[Mapping[str, Buffer]], compute_units: int
) -> dict[tuple[int, int], list[_Polling]]:
    """Return the polling launches by run and rank, for ranks whose lanes together can hold `compute_units` units."""
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
                    begun = happened.ancestors(numbers[Event(run, rank, i, first - 1)]) if first else 0
                    end = numbers[Event(run, rank, i, last)]
                    found[run, rank].append(
                        _Polling(i, units, begun, happened.ancestors(end) & ~(begun | 1 << end), end)
                    )
    return found


def _polled(
    lane: Lane, rank: int, awaited: Collection[Key], buffers: Mapping[str, Buffer]
) -> set[tuple[int, int, int]]:
    """Return (units, first step, last polling step) of each polling launch of a lane.

    Waits between two launches belong to either, depending on the order of issue. Both cases count.
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
