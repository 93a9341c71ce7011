"""The form of a schedule that the engine simulates: lanes of tasks with costs, and numbered counters instead of named signals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias, TypeGuard

from weft.schedule import Schedule
from weft.schedule.spans import span_name
from weft.sim.max_min import Load
from weft.sim.scarce import parts_of, scarce_only
from weft.sim.uses import ResourcePlace, What
from weft.sim.vectorised import Origin

PULSES = 16
"""A kernel's work is divided into this many parts. After each part, the counters that its tiles have set are incremented."""


class Raising(NamedTuple):
    """The increments of one counter by the tiles of a kernel, while the kernel runs.

    The tiles make `times` increments, spread evenly between the fractions `first` and `last` of the kernel's work.

    delay_us: the time from an increment until a lane that waits for it continues.
    at_once: True if every wait is for all increments, so that the simulator may make all of them at `last`.
    """

    counter: int
    times: int
    delay_us: float
    first: float
    last: float
    at_once: bool = False

    def due(self, share: float) -> int:
        """Return the number of increments that have been made when the fraction `share` of the work is done."""
        if share >= self.last:
            return self.times
        if self.at_once:
            return 0
        return max(0, int(self.times * (share - self.first) / (self.last - self.first)))


def pulses(raises: Sequence[Raising]) -> tuple[int, ...]:
    """Return the pulses of a kernel: the points in its work at which the simulator increments counters.

    Pulse i is the end of the i-th of `PULSES` equal parts of the work, i = 1, 2, ...
    """
    found = set[int]()
    for one in raises:
        if one.at_once:
            found.add(max(1, math.ceil(one.last * PULSES)))
        else:
            due = [one.due(part / PULSES) for part in range(PULSES + 1)]
            found |= {part for part in range(1, PULSES + 1) if due[part] > due[part - 1]}
    return tuple(sorted(found))


class Work(NamedTuple):
    what: What
    latency_us: float
    work_us: float
    load: int  # index into `LoweredSchedule.loads`
    joins: bool
    sent_bytes: int
    raises: tuple[Raising, ...] = ()  # the sets that the kernel makes while it runs
    pulses: tuple[int, ...] = ()  # the parts of its work, out of `PULSES`, after which the kernel makes sets
    holds: float = 0.0  # the fraction of the rank's compute units that must be free before it begins
    fills: float = 0.0  # the fraction of the compute units that it keeps until it ends
    least_us: float = 0.0  # for a collective: a lower bound for any algorithm, from the links' bandwidth
    programs: float = 0.0  # if its programs divide its tiles in advance: the fraction of the units that they need


class Raise(NamedTuple):
    counter: int
    delay_us: float
    remote: bool  # True if the counter is on another rank


class Await(NamedTuple):
    counter: int
    sets: int
    sets_per_run: int
    previous: bool


Task: TypeAlias = Work | Raise | Await


def _computes(task: Task) -> TypeGuard[Work]:
    return isinstance(task, Work) and task.what != "peer"


@dataclass
class LaneProgram:
    rank: int
    name: str
    number: int  # index among the rank's lanes
    tasks: list[Task] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)


@dataclass
class LoweredSchedule:
    schedule: Schedule
    ranks: tuple[int, ...]
    """The simulated ranks. With p simulated ranks, rank r also represents ranks r + p, r + 2 p, ..."""
    lanes: list[LaneProgram]
    loads: list[Load]
    counters: int
    places: dict[ResourcePlace, int]
    """{resource: its number in `loads`}. Keys have a rank in place of the distance of a `ResourcePlace`."""

    @property
    def symmetric(self) -> bool:
        return len(self.ranks) < self.schedule.world_size

    @cached_property
    def links(self) -> frozenset[int]:
        """The numbers of the resources that are links."""
        return frozenset(n for (kind, _), n in self.places.items() if kind not in ("hbm", "compute", "engine"))

    @cached_property
    def scarce(self) -> tuple[list[Load], list[int]]:
        """The input of the solver of speeds (`weft.sim.max_min`): (loads, parts).

        loads: `self.loads` without the resources that never slow a lane down (`weft.sim.scarce`).
        parts: for each lane, the number of its part: the group of lanes that can slow it down.
        """
        of_lanes = [{task.load for task in lane.tasks if isinstance(task, Work)} for lane in self.lanes]
        loads = scarce_only(self.loads, of_lanes)
        return loads, parts_of(loads, of_lanes)

    def only_communication(self) -> LoweredSchedule:
        """Return this lowered schedule without computation: only transfers between ranks, collectives, and signals.

        A kernel whose tiles set signals is kept, but its work takes no time.
        """
        idle = len(self.loads)
        lanes = []
        for lane in self.lanes:
            kept = [
                (task._replace(work_us=0.0, load=idle, fills=0.0, programs=0.0), origin)
                if _computes(task)
                else (task, origin)
                for task, origin in zip(lane.tasks, lane.origins, strict=True)
                if not _computes(task) or task.raises
            ]
            lanes.append(
                LaneProgram(lane.rank, lane.name, lane.number, [task for task, _ in kept], [one for _, one in kept])
            )
        return replace(self, lanes=lanes, loads=[*self.loads, Load(())])

    def name_of(self, lane: LaneProgram, task: int, rank: int | None = None) -> str:
        """Return the name of a task in a timeline.

        rank: if the lane represents the lanes of several ranks, the rank for which to name the task.
        """
        origin, whose = lane.origins[task], lane.rank if rank is None else rank
        numbers = {**dict(origin.turn), "rank": whose}  # names do not depend on the contents of buffers
        return span_name(origin.step, whose, numbers)
