"""Lowering of a schedule for a model: tasks by lane, with their costs, and counters in place of named signals.

Most schedules are rotationally symmetric: rank r does what rank 0 does, with all ranks shifted by r. If GPUs and links are also
alike, all ranks do the same at the same time, and rank 0 represents them. It receives from rank -d what it sends to rank d, and
each of its resources stands for those of all ranks. That divides the cost of a simulation by the number of ranks. If links
repeat only every p ranks (p GPUs in a host), the first p ranks represent the others. If sizes or signals are not symmetric,
every rank is lowered.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias, cast

from weft.schedule import Compute, Copy, Schedule, Step, Tiles
from weft.schedule.spans import span_name
from weft.schedule.steps import COPY_UNITS
from weft.sim.costs import Cost, How, Links, Operand, ResourcePlace, What, cost, cost_of_tiles, rates
from weft.sim.max_min import Load
from weft.sim.model import Model
from weft.sim.symmetry import turns_around
from weft.sim.vectorised import NumberedStep, Numbers, Origin, SetBy, at_rank

PULSES = 16
"""Parts into which a kernel's work is divided: after each, the signals that its tiles have set by then are raised."""


class Raising(NamedTuple):
    """The sets of one counter by a kernel: `times` sets, spread evenly between the shares `first` and `last` of its work.

    at_once: True if all waits for the counter want all its sets, so that it can be raised when the last of these is due.
    """

    counter: int
    times: int
    delay_us: float
    first: float
    last: float
    at_once: bool = False

    def due(self, share: float) -> int:
        """Return the number of sets that are due at `share` of the work."""
        if share >= self.last:
            return self.times
        if self.at_once:
            return 0
        return max(0, int(self.times * (share - self.first) / (self.last - self.first)))


class Work(NamedTuple):
    what: What
    latency_us: float
    work_us: float
    load: int  # index into the program's loads
    joins: bool
    sent_bytes: int
    raises: tuple[Raising, ...] = ()  # signals that it sets while it runs
    pulses: tuple[int, ...] = ()  # the parts of its work, of `PULSES`, at whose ends sets are due
    holds: float = 0.0  # share of its rank's units that it needs to begin
    fills: float = 0.0  # share of them that later kernels do not get until it ends
    least_us: float = 0.0  # the time that links need for a collective, whatever its algorithm


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
class LoweredSchedule:
    schedule: Schedule
    ranks: tuple[int, ...]
    """The simulated ranks. With p of them, rank r also represents ranks r + p, r + 2 p, ..."""
    lanes: list[LaneProgram]
    loads: list[Load]
    counters: int
    places: dict[ResourcePlace, int]
    """The number of each used resource in `loads`. Here `ResourcePlace` holds a rank in place of a distance."""

    @property
    def symmetric(self) -> bool:
        return len(self.ranks) < self.schedule.world_size

    def name_of(self, lane: LaneProgram, task: int, rank: int | None = None) -> str:
        """Return the name of a task in a timeline. rank: whose task, if the lane represents several ranks."""
        origin, whose = lane.origins[task], lane.rank if rank is None else rank
        numbers = {**dict(origin.turn), "rank": whose}  # names do not depend on the contents of buffers
        return span_name(origin.step, whose, numbers)


def lower(schedule: Schedule, model: Model, *, alike: bool = True, captured: bool = False) -> LoweredSchedule:
    """Lower `schedule` for `model`.

    alike: let the first ranks represent the others, if schedule and topology allow it. captured: with the costs of a CUDA graph.
    """
    key = id(schedule), id(model), alike, captured
    found = _lowered.get(key)
    if found is None:
        found = _Lowering(schedule, model, captured).program(alike)
        _lowered.add(key, found, model)
    return found


class _LastLowered:
    """The last lowered schedules, limited by their number and by their tasks: a plan simulates its best candidates again
    for their losses. More would only slow down garbage collection."""

    def __init__(self, schedules: int, tasks: int) -> None:
        self.schedules, self.most_tasks, self.tasks = schedules, tasks, 0
        self._kept: dict[tuple, tuple[LoweredSchedule, Model, int]] = {}

    def get(self, key: tuple) -> LoweredSchedule | None:
        found = self._kept.get(key)
        return None if found is None else found[0]

    def add(self, key: tuple, lowered: LoweredSchedule, model: Model) -> None:
        tasks = sum(len(lane.tasks) for lane in lowered.lanes)
        self._kept[key] = lowered, model, tasks  # references, so that the ids in keys are not reused
        self.tasks += tasks
        while len(self._kept) > (self.schedules if self.tasks <= self.most_tasks else 1):
            self.tasks -= self._kept.pop(next(iter(self._kept)))[2]


_lowered = _LastLowered(schedules=256, tasks=1 << 18)


def _pulses(raises: Sequence[Raising]) -> tuple[int, ...]:
    """Return the parts of a kernel's work at whose ends sets are due."""
    found = set[int]()
    for one in raises:
        if one.at_once:
            found.add(max(1, math.ceil(one.last * PULSES)))
        else:
            due = [one.due(part / PULSES) for part in range(PULSES + 1)]
            found |= {part for part in range(1, PULSES + 1) if due[part] > due[part - 1]}
    return tuple(sorted(found))


Raised: TypeAlias = tuple[tuple[int, SetBy], ...]
"""The sets of one task: (counter, how the rank sets it)."""


_KNOWN_COSTS = 1 << 16
"""Capacity of a model's cache of costs."""


class _Lowering:
    def __init__(self, schedule: Schedule, model: Model, captured: bool) -> None:
        self.schedule, self.model, self.world, self.captured = schedule, model, schedule.world_size, captured
        self._buffers = {b.name: b for b in schedule.buffers}
        self._topology = model.wiring.of(self.world)
        self._period = self.world  # rank r also represents ranks r + period, r + 2 period, ...
        self._costs: dict[object, tuple[Cost, dict[int, int]]] = {}  # with its load at each rank
        self._load_ids: dict[Load, int] = {}
        self._places: dict[ResourcePlace, int] = {}
        self._counters: dict[tuple, int] = {}
        self._in_parts: set[int] = set()  # counters that some wait for before all their sets
        self._tile_costs: dict[tuple, Cost] = {}
        self._models = {model.kernel_copy_units: model}  # by the units of copying kernels
        self._for_engines = {  # signals
            wait.signal
            for lane in schedule.lanes
            if any(step.copies_by == "dma" for step in lane.steps)
            for step in lane.steps
            if (wait := step.awaits)
        }

    def program(self, alike: bool) -> LoweredSchedule:
        numbers = Numbers(self.schedule)
        items = [numbers.items(lane) for lane in self.schedule.lanes]
        on_compute = [item for lane, of_lane in zip(self.schedule.lanes, items, strict=True)
                      if lane.resource == "compute" for item in of_lane]  # fmt: skip
        waits = {item.signal for item in on_compute if item.awaited is not None and not (item.previous or item.units)}
        # Signals of this run that streams of compute lanes both set and wait for.
        self._by_streams = waits & {item.signal for item in on_compute if item.distance is not None}
        if alike and self._topology.period < self.world and turns_around(list(itertools.chain(*items)), self.world):
            self._period = self._topology.period
        ranks = tuple(range(self._period))
        different = [{item.same: item for item in of_lane} for of_lane in items]
        placed: list[tuple[LaneProgram, list[NumberedStep], dict[int, Raised]]] = []
        sets: Counter[int] = Counter()
        for rank in ranks:
            for number, (lane, its) in enumerate(zip(self.schedule.lanes, items, strict=True)):
                there = {same: at_rank(item.present, rank) for same, item in different[number].items()}
                here = [item for item in its if there[item.same]]
                times = Counter([item.same for item in here])
                raised = {same: self._raised(different[number][same], rank) for same in times}
                for same, of_one in raised.items():
                    for counter, one in of_one:
                        sets[counter] += one.times * times[same]
                placed.append((LaneProgram(rank, lane.name, number, [], [item.origin for item in here]), here, raised))
        for program, _, raised in placed:
            for item in (different[program.number][same] for same in raised):
                if item.awaited is not None:
                    counter = self._counter(program.rank, item.signal, at_rank(item.place, program.rank))
                    if at_rank(item.awaited, program.rank) != sets[counter]:
                        self._in_parts.add(counter)
        for program, here, raised in placed:
            alike_items = different[program.number]
            tasks = {same: self._task(alike_items[same], program.rank, sets, of_one) for same, of_one in raised.items()}
            program.tasks = [tasks[item.same] for item in here]
        lanes = [program for program, _, _ in placed]
        return LoweredSchedule(self.schedule, ranks, lanes, list(self._load_ids), len(self._counters), self._places)

    # -- tasks

    def _raised(self, item: NumberedStep, rank: int) -> Raised:
        """Return the sets of an item at `rank`."""
        if item.distance is not None:
            to = at_rank(item.distance, rank)
            owner, setter = self._owner_and_setter(rank, to)
            place = at_rank(item.place, setter)
            return ((self._counter(owner, item.signal, place), SetBy(item.signal, to, place, 1)),)
        raised = []
        for i, one in enumerate(item.tiled[rank].sets if item.tiled else ()):
            owner, setter = self._owner_and_setter(rank, one.distance)
            raised.append((self._counter(owner, one.signal, item.tiled[setter].sets[i].place), one))
        return tuple(raised)

    def _owner_and_setter(self, rank: int, distance: int) -> tuple[int, int]:
        """Return the simulated rank for the peer at `distance`, and the rank that sets its counters as `rank` sets the peer's."""
        owner = (rank + distance) % self.world % self._period
        return owner, (owner - distance) % self.world

    def _counter(self, rank: int, signal: str, place: int) -> int:
        return self._counters.setdefault((rank, signal, place), len(self._counters))

    def _task(self, item: NumberedStep, rank: int, sets: Mapping[int, int], raised: Raised) -> Task:
        if item.distance is not None:
            ((counter, one),) = raised
            return Raise(counter, self._delay_us(item, rank, one.distance), one.distance != 0)
        if item.awaited is not None:
            number = self._counter(rank, item.signal, at_rank(item.place, rank))
            return Await(number, at_rank(item.awaited, rank), sets.get(number, 0), item.previous)
        if not item.tiled:
            return self._work(item, rank)
        step = cast(Tiles, item.origin.step)
        count = sum(times for _, _, times in item.tiled[rank].parts)
        raises = tuple(
            Raising(
                counter, one.times, self._delay_us(item, rank, one.distance), *self._stored(step, count, one),
                at_once=counter not in self._in_parts,
            )
            for counter, one in raised
        )  # fmt: skip
        return self._tiles(item, step, rank)._replace(raises=raises, pulses=_pulses(raises))

    def _delay_us(self, item: NumberedStep, rank: int, distance: int) -> float:
        if not distance:
            engine = self.captured and item.signal in self._for_engines
            return self.model.signal_local_us + (self.model.graph_signal_us if engine else 0.0)
        by_kernel = item.carried or item.tiled
        us = self.model.signal_kernel_us if by_kernel else self.model.signal_remote_us
        if self.captured and not by_kernel and item.signal in self._by_streams:
            us += self.model.graph_remote_us
        return us + Links(self._topology, rank).latency_us(0, distance)

    def _stored(self, step: Tiles, count: int, tiles: SetBy) -> tuple[float, float]:
        """Return the shares of the kernel's work, of `count` tiles, between which these tiles end.

        Whole tiles end in waves of one tile per unit."""
        if not rates(step.kernel, self.model).whole or not count:
            return tiles.first, tiles.last
        waves = -(-count // self.model.compute_units)
        first, last = (share * count / self.model.compute_units for share in (tiles.first, tiles.last))
        return math.floor(first + 1e-9) / waves, math.ceil(last - 1e-9) / waves

    def _tiles(self, item: NumberedStep, step: Tiles, rank: int) -> Work:
        tiled = item.tiled[rank]
        local = all(type(inner) in (Copy, Compute) for inner in step.work) and not any(
            any(numbers[2::3]) for _, numbers, _ in tiled.parts
        )
        seen_from = 0 if local else self._seen_from(rank)
        key = (id(step), tiled.parts, tiled.read_bytes, seen_from)
        if key not in self._tile_costs:
            priced = [
                (step.work[place], self._operands(step.work[place], numbers), times)
                for place, numbers, times in tiled.parts
            ]
            of_kernel = rates(step.kernel, self.model)
            self._tile_costs[key] = cost_of_tiles(
                self.model, self.world, priced, tiled.read_bytes, of_kernel, seen_from
            )
        all_tiles = self._tile_costs[key]
        load = self._load(all_tiles, rank)
        latency_us = 0.0 if item.carried else all_tiles.latency_us
        return Work(all_tiles.what, latency_us, all_tiles.work_us, load, False, all_tiles.sent_bytes)

    def _work(self, item: NumberedStep, rank: int) -> Work:
        step, carried = item.origin.step, item.carried
        operands = self._operands(step, tuple([at_rank(number, rank) for number in item.numbers]))
        few = item.units if 0 < item.units < COPY_UNITS else 0
        # What stays on its rank costs the same on all.
        local = type(step) in (Copy, Compute) and not any(operand.at for operand in operands)
        seen_from = 0 if local else self._seen_from(rank)
        key = (type(step), step.settings, operands, seen_from, few)
        if key not in self._costs:
            units = min(self.model.kernel_copy_units, few) if few else self.model.kernel_copy_units
            if units not in self._models:
                self._models[units] = replace(self.model, kernel_copy_units=units)
            known, kept = self._models[units].costs, (self.world, *key)
            if kept not in known:
                if len(known) >= _KNOWN_COSTS:
                    known.clear()
                known[kept] = cost(self._models[units], self.world, step, operands, seen_from)
            self._costs[key] = known[kept], {}
        found, loads = self._costs[key]
        if rank not in loads:
            loads[rank] = self._load(found, rank)
        latency_us = 0.0 if carried else found.latency_us
        if self.captured and step.meets:
            first = any(lane.steps[0] is step for lane in self.schedule.lanes)
            latency_us += self.model.graph_collective_us if first else self.model.graph_run_us
        holds = 0.0 if carried else found.holds  # the kernel that carries it has its units already
        return Work(
            found.what, latency_us, found.work_us, loads[rank], found.joins, found.sent_bytes, (), (), holds, found.fills,
            found.least_us,
        )  # fmt: skip

    def _seen_from(self, rank: int) -> int:
        """Return the first rank whose steps cost the same as those of `rank`."""
        return rank % self._topology.period

    def _operands(self, step: Step, numbers: tuple[int, ...]) -> tuple[Operand, ...]:
        operands = []
        regions = step.regions
        for i in range(len(numbers) // 3):
            rows, cols, at = numbers[3 * i : 3 * i + 3]
            buffer = self._buffers[
                regions[i if i < len(regions) else 0].buffer
            ]  # parts of an exchange are its source's
            operands.append(Operand(rows, cols, buffer.dtype, at, cols == buffer.cols))
        return tuple(operands)

    def _load(self, found: Cost, rank: int) -> int:
        # If one resource represents those of several ranks, amounts of different ranks stay separate entries: each gives its part.
        by_how: dict[How, list[tuple[int, float]]] = {"share": [], "hold": [], "disturb": []}
        for how, (kind, at), amount in found.uses:
            place = (kind, (rank + at) % self.world % self._period)
            number = self._places.setdefault(place, len(self._places))
            by_how[how].append((number, amount))
        load = Load(*(tuple(sorted(amounts)) for amounts in by_how.values()))
        return self._load_ids.setdefault(load, len(self._load_ids))
