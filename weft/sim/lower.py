"""A schedule in numbers for a model: tasks by lane, with their costs, and counters in place of named signals.

Most schedules are one program turned around the ring of ranks: at rank r everything happens as at rank 0, r ranks further
on. On a machine whose GPUs are alike, all ranks then do the same at the same time, and rank 0 is enough: what it sends to
rank d it also receives, from rank -d, and each resource stands for those of all ranks. That makes the simulation as many
times faster as there are ranks. Where sizes or signals do not turn around like that, every rank is lowered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, cast

from weft.schedule import Compute, Copy, For, Schedule, Set, Step, Tiles, Wait
from weft.schedule.dispatch import LIBRARY_GEMMS
from weft.schedule.spans import span_name
from weft.sim.costs import Cost, How, Operand, Place, What, cost, cost_of_tiles
from weft.sim.fair import Load
from weft.sim.model import Model
from weft.sim.numbers import Item, Numbers, Origin, SetBy, at_rank, regions_of
from weft.sim.symmetry import turns_around


class Work(NamedTuple):
    what: What
    latency_us: float
    work_us: float
    load: int  # which of the program's loads
    joins: bool
    sent_bytes: int
    raises: tuple[tuple[int, int, float], ...] = ()  # (counter, times, delay) of signals that are set as it goes on


class Raise(NamedTuple):
    counter: int
    delay_us: float
    remote: bool  # at another rank


class Await(NamedTuple):
    counter: int
    sets: int
    sets_per_run: int
    previous: bool


Task: TypeAlias = Work | Raise | Await


@dataclass
class LaneProgram:
    rank: int
    name: str
    number: int  # among the rank's lanes
    tasks: list[Task] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)


@dataclass
class Program:
    schedule: Schedule
    symmetric: bool
    ranks: tuple[int, ...]
    lanes: list[LaneProgram]
    loads: dict[int, Load]
    counters: int

    def name_of(self, lane: LaneProgram, task: int, rank: int | None = None) -> str:
        """What a task is called in a timeline; of `rank`, where the lane stands for several."""
        origin, whose = lane.origins[task], lane.rank if rank is None else rank
        numbers = {**dict(origin.turn), "rank": whose}  # no name depends on what a buffer holds
        return span_name(origin.step, whose, numbers)


def lower(schedule: Schedule, model: Model, *, alike: bool = True, captured: bool = False) -> Program:
    """alike: ranks may be represented by rank 0, if the schedule allows it. captured: as runs of a graph."""
    return _Lowering(schedule, model, captured).program(alike)


class _Lowering:
    def __init__(self, schedule: Schedule, model: Model, captured: bool) -> None:
        self.schedule, self.model, self.world, self.captured = schedule, model, schedule.world_size, captured
        self._buffers = {b.name: b for b in schedule.buffers}
        self._costs: dict[object, tuple[Cost, dict[int, int]]] = {}  # with its load at each rank
        self._load_ids: dict[Load, int] = {}
        self._places: dict[Place, int] = {}

    def program(self, alike: bool) -> Program:
        numbers = Numbers(self.schedule)
        items = [numbers.items(lane.steps) for lane in self.schedule.lanes]
        symmetric = alike and self.world > 1 and turns_around(list(itertools.chain(*items)), self.world)
        ranks = (0,) if symmetric else tuple(range(self.world))
        counters: dict[tuple[int, str, int], int] = {}
        sets = self._count_sets(items, symmetric, counters)
        lanes = []
        for rank in ranks:
            for number, (lane, its) in enumerate(zip(self.schedule.lanes, items, strict=True)):
                program = LaneProgram(rank, lane.name, number)
                for item in its:
                    if at_rank(item.present, rank):
                        program.tasks.append(self._task(item, rank, symmetric, counters, sets))
                        program.origins.append(item.origin)
                lanes.append(program)
        loads = {number: load for load, number in self._load_ids.items()}
        return Program(self.schedule, symmetric, ranks, lanes, loads, len(counters))

    # -- tasks

    def _counters(self, item: Item, rank: int, symmetric: bool) -> Iterator[tuple[tuple[int, str, int], SetBy]]:
        """(counter, what it sets) of an item at a rank."""
        if isinstance(item.origin.step, Set):
            distance, place = item.numbers
            sets: tuple[SetBy, ...] = (SetBy(item.signal, at_rank(distance, rank), at_rank(place, rank), 1),)
        else:
            place, sets = None, item.tiled[rank].sets if item.tiled else ()
        for i, one in enumerate(sets):
            if not symmetric:
                yield ((rank + one.distance) % self.world, one.signal, one.place), one
                continue
            by = -one.distance % self.world  # what rank 0 does to a peer, another peer does to rank 0
            yield (0, one.signal, item.tiled[by].sets[i].place if place is None else at_rank(place, by)), one

    def _count_sets(
        self, items: list[list[Item]], symmetric: bool, counters: dict[tuple[int, str, int], int]
    ) -> dict[int, int]:
        sets: dict[int, int] = {}
        for rank in (0,) if symmetric else range(self.world):
            for lane in items:
                for item in lane:
                    for counter, one in self._counters(item, rank, symmetric) if at_rank(item.present, rank) else ():
                        number = counters.setdefault(counter, len(counters))
                        sets[number] = sets.get(number, 0) + one.times
        return sets

    def _task(
        self, item: Item, rank: int, symmetric: bool, counters: dict[tuple[int, str, int], int], sets: dict[int, int]
    ) -> Task:
        step = item.origin.step
        remote_us = self.model.signal_kernel_us if item.carried or item.tiled else self.model.signal_remote_us
        raises = tuple(
            (counters[counter], one.times, remote_us if one.distance else self.model.signal_local_us)
            for counter, one in self._counters(item, rank, symmetric)
        )
        if isinstance(step, Set):
            counter, _, delay = raises[0]
            return Raise(counter, delay, at_rank(item.numbers[0], rank) != 0)
        if isinstance(step, Tiles):
            parts = [
                (cast(Copy | Compute, step.body[place]), numbers, times)
                for place, numbers, times in item.tiled[rank].parts
            ]
            priced = [(inner, self._operands(inner, numbers), times) for inner, numbers, times in parts]
            model = self.model
            compute, memory = model.library_grouped
            rates = (compute / model.grouped_efficiency, memory) if step.kernel == LIBRARY_GEMMS else (1.0, 1.0)
            all_tiles = cost_of_tiles(model, self.world, priced, item.tiled[rank].read_bytes, rates)
            load = self._load(all_tiles, rank, symmetric)
            latency_us = 0.0 if item.carried else all_tiles.latency_us
            return Work(all_tiles.what, latency_us, all_tiles.work_us, load, False, all_tiles.sent_bytes, raises)
        if isinstance(step, Wait):
            number = counters.setdefault((rank, step.signal, at_rank(item.numbers[0], rank)), len(counters))
            return Await(number, at_rank(item.numbers[1], rank), sets.get(number, 0), step.previous)
        assert not isinstance(step, For)  # they are written out
        operands = self._operands(step, tuple(at_rank(n, rank) for n in item.numbers))
        key = (type(step), step.settings, operands)
        if key not in self._costs:
            self._costs[key] = cost(self.model, self.world, step, operands), {}
        found, loads = self._costs[key]
        if rank not in loads:
            loads[rank] = self._load(found, rank, symmetric)
        load = loads[rank]
        latency_us = 0.0 if item.carried else found.latency_us
        if self.captured and step.meets:
            latency_us += self.model.graph_collective_us
        return Work(found.what, latency_us, found.work_us, load, found.joins, found.sent_bytes)

    def _operands(self, step: Step, numbers: tuple[int, ...]) -> tuple[Operand, ...]:
        operands = []
        regions = regions_of(step)
        for i in range(len(numbers) // 3):
            rows, cols, at = numbers[3 * i : 3 * i + 3]
            buffer = self._buffers[
                regions[i if i < len(regions) else 0].buffer
            ]  # parts of an exchange are its source's
            operands.append(Operand(rows, cols, buffer.dtype, at, cols == buffer.cols))
        return tuple(operands)

    def _load(self, found: Cost, rank: int, symmetric: bool) -> int:
        by_how: dict[How, dict[int, float]] = {"share": {}, "hold": {}, "disturb": {}}
        for how, (kind, at, other), amount in found.uses:
            if symmetric:
                place = (kind, 0, (other - at) % self.world if kind == "link" else 0)
            else:
                place = (kind, (rank + at) % self.world, (rank + other) % self.world if kind == "link" else 0)
            number = self._places.setdefault(place, len(self._places))
            by_how[how][number] = by_how[how].get(number, 0.0) + amount
        load = Load(*(tuple(sorted(amounts.items())) for amounts in by_how.values()))
        return self._load_ids.setdefault(load, len(self._load_ids))
