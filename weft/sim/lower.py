"""Lowering of a schedule to a form that the engine simulates: tasks with costs, and numbered counters instead of named
signals.

Most schedules are rotationally symmetric: rank r has the steps of rank 0, with all ranks shifted by r. If GPUs and
links are equal too, all ranks do the same at the same time. Then only rank 0 is simulated, and each of its resources
represents the resources of all ranks. When rank 0 sends data to rank d, rank -d sends the same data to rank 0. If the
links are symmetric only for shifts by p ranks, as with hosts of p GPUs, the first p ranks are simulated. If sizes or
signals are not symmetric, every rank is simulated.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias, cast

from weft.schedule import Compute, Copy, Schedule, Step, Tiles
from weft.schedule.steps import COPY_UNITS, SPARED_UNITS
from weft.sim.costs import kept_cost
from weft.sim.distances import distances
from weft.sim.lowered import Await, LaneProgram, LoweredSchedule, Raise, Raising, Task, Work, pulses
from weft.sim.max_min import Load
from weft.sim.model import Model
from weft.sim.symmetry import turns_around
from weft.sim.tile_costs import cost_of_tiles, rates
from weft.sim.tiles import SetBy, Tiled
from weft.sim.uses import Cost, How, Operand, ResourcePlace
from weft.sim.vectorised import NumberedStep, Numbers, at_rank


def lower(schedule: Schedule, model: Model, *, alike: bool = True, captured: bool = False) -> LoweredSchedule:
    """Lower `schedule` for `model`.

    alike: True to simulate only the first ranks, if schedule and topology are symmetric.
    captured: True for a run in a CUDA graph, which has other costs.
    """
    key = id(schedule), id(model), alike, captured
    found = _lowered.get(key)
    if found is None:
        found = _Lowering(schedule, model, captured).program(alike)
        _lowered.add(key, found, model)
    return found


class _LastLowered:
    """A cache of the latest lowered schedules, because a plan simulates its best candidates again to find their losses.

    Schedules and tasks are limited in number, because many objects slow down garbage collection.
    """

    def __init__(self, schedules: int, tasks: int) -> None:
        self.schedules, self.most_tasks, self.tasks = schedules, tasks, 0
        self._kept: dict[tuple, tuple[LoweredSchedule, Model, int]] = {}

    def get(self, key: tuple) -> LoweredSchedule | None:
        found = self._kept.get(key)
        return None if found is None else found[0]

    def add(self, key: tuple, lowered: LoweredSchedule, model: Model) -> None:
        tasks = sum(len(lane.tasks) for lane in lowered.lanes)
        self._kept[key] = lowered, model, tasks  # keeps the objects alive, so that the ids in keys are not reused
        self.tasks += tasks
        while len(self._kept) > (self.schedules if self.tasks <= self.most_tasks else 1):
            self.tasks -= self._kept.pop(next(iter(self._kept)))[2]


_LONG_K = 1024
"""The programs of a grouped GEMM wait for units (`weft.sim.engine`) only if K is less than this. The reason is not known. Without
the limit, six recorded combines on two H200s with K = 2048 are predicted 17 to 30% too long, and with it at most 4%. Combines
with K of 768 and 896 on H100s and H200s are predicted up to 36% too short without these waits.
"""

_EXCHANGE_US = 7.0
"""The time of a launch that is a whole exchange of rows, in addition to its copies and signals. All its programs arrive twice, and
poll for flags. On two H100s, six dispatches and combines of 26 to 73 us took 4 to 11 us longer than their copies and signals.
"""

_lowered = _LastLowered(schedules=256, tasks=1 << 20)


class _Evaluated:
    """The steps of a schedule with evaluated expressions. They do not depend on the model.

    items: the steps of each lane.
    """

    def __init__(self, schedule: Schedule) -> None:
        numbers = Numbers(schedule)
        self.schedule, self.items = schedule, [numbers.items(lane) for lane in schedule.lanes]

    @cached_property
    def turns_around(self) -> bool:
        """True if the steps of all ranks are rotationally symmetric."""
        return turns_around(list(itertools.chain(*self.items)), self.schedule.world_size)


_last_evaluated: list[_Evaluated] = []


def _evaluated(schedule: Schedule) -> _Evaluated:
    """Return the evaluated steps of `schedule`. They are kept for the last schedule, because studies simulate a schedule with
    many models, one after the other.
    """
    kept = next(iter(_last_evaluated), None)
    if kept is None or kept.schedule is not schedule:
        kept = _Evaluated(schedule)
        _last_evaluated[:] = [kept]
    return kept


Raised: TypeAlias = tuple[tuple[int, SetBy], ...]
"""For each counter that the tiles of a task increment: (number of the counter, the increments)."""


def _k_of(step: Tiles, tiled: Tiled) -> int:
    """Return the largest K of the matmuls of a step with tiles. The first operand of a matmul has K columns."""
    return max((numbers[1] for place, numbers, _ in tiled.parts if step.work[place].multiplies), default=0)


class _RankItems:
    """The items of a lane that are present on one rank. An item is a step with evaluated expressions (`NumberedStep`).

    A loop may repeat an item. Items that are equal except for their loop iteration have equal keys
    (`NumberedStep.same`). `sets`, `tiled`, `waits` and `works` have only one item of each key.

    order: the key of each item, in the order of the lane. A repeated item has an entry for each iteration.
    sets: the items that set a signal, each as (item, number of its repetitions).
    tiled: the items with tiles, each as (item, number of its repetitions).
    waits: the items that wait for a signal.
    works: the items that take time, including the items with tiles.
    """

    __slots__ = ("order", "origins", "sets", "tiled", "waits", "works")

    def __init__(self, items: list[NumberedStep], different: dict[int, NumberedStep]) -> None:
        self.order, self.origins = [item.same for item in items], [item.origin for item in items]
        self.sets: list[tuple[NumberedStep, int]] = []
        self.tiled: list[tuple[NumberedStep, int]] = []
        self.waits: list[NumberedStep] = []
        self.works: list[NumberedStep] = []
        for same, times in Counter(self.order).items():
            item = different[same]
            if item.distance is not None:
                self.sets.append((item, times))
            elif item.awaited is not None:
                self.waits.append(item)
            else:
                self.works.append(item)
                if item.tiled:
                    self.tiled.append((item, times))


class _LaneItems:
    """The items of a lane on all ranks."""

    def __init__(self, items: list[NumberedStep], different: dict[int, NumberedStep]) -> None:
        self._items, self._different = items, different
        self._everywhere = all(isinstance(item.present, int) for item in different.values())
        self._found: _RankItems | None = None

    def at(self, rank: int) -> _RankItems:
        """Return the items that are present on `rank`. If all ranks have the same items, all calls return one object."""
        if self._found is None or not self._everywhere:
            there = {same: at_rank(item.present, rank) for same, item in self._different.items()}
            self._found = _RankItems([item for item in self._items if there[item.same]], self._different)
        return self._found


class _Lowering:
    def __init__(self, schedule: Schedule, model: Model, captured: bool) -> None:
        self.schedule, self.model, self.world, self.captured = schedule, model, schedule.world_size, captured
        self._buffers = {b.name: b for b in schedule.buffers}
        self._topology = model.wiring.of(self.world)
        self._period = self.world  # rank r also represents ranks r + period, r + 2 period, ...
        self._kinds: dict[object, int] = {}  # see `_kind_of`
        self._kinds_found: dict[
            int, tuple[int, tuple[Operand, ...], int]
        ] = {}  # results of `_kind_of` that hold for all ranks
        self._works: dict[tuple[int, int, int, int, bool], Work] = {}
        self._load_ids: dict[Load, int] = {}
        self._places: dict[ResourcePlace, int] = {}
        self._counters: dict[tuple, int] = {}
        self._delays: dict[tuple, float] = {}
        self._in_parts: set[int] = set()  # counters with a wait for fewer than all sets
        self._tile_costs: dict[tuple, Cost] = {}
        self._models = {model.kernel_copy_units: model}  # compute units of copy kernels -> model
        self._for_engines = {  # signals
            wait.signal
            for lane in schedule.lanes
            if any(step.copies_by == "dma" for step in lane.steps)
            for step in lane.steps
            if (wait := step.awaits)
        }

    def program(self, alike: bool) -> LoweredSchedule:
        evaluated = _evaluated(self.schedule)
        items = evaluated.items
        on_compute = [item for lane, of_lane in zip(self.schedule.lanes, items, strict=True)
                      if lane.resource == "compute" for item in of_lane]  # fmt: skip
        waits = {item.signal for item in on_compute if item.awaited is not None and not (item.previous or item.units)}
        # Signals that compute lanes both set and wait for, in the same run.
        self._by_streams = waits & {item.signal for item in on_compute if item.distance is not None}
        if alike and self._topology.period < self.world and evaluated.turns_around:
            self._period = self._topology.period
        self._distances = distances(self._topology, self._period)
        ranks = tuple(range(self._period))
        placed: list[tuple[LaneProgram, _RankItems, dict[int, int], dict[int, Raised]]] = []
        sets: defaultdict[int, int] = defaultdict(int)
        present = [_LaneItems(of_lane, {item.same: item for item in of_lane}) for of_lane in items]
        for rank in ranks:
            for number, lane in enumerate(self.schedule.lanes):
                here = present[number].at(rank)
                raised = {item.same: self._raised(item, rank) for item, _ in here.tiled}
                for item, times in here.tiled:
                    for counter, one in raised[item.same]:
                        sets[counter] += one.times * times
                counters = {item.same: self._set(item, rank) for item, _ in here.sets}
                for item, times in here.sets:
                    sets[counters[item.same]] += times
                program = LaneProgram(rank, lane.name, number, [], here.origins)
                placed.append((program, here, counters, raised))
        for program, here, counters, _ in placed:
            rank = program.rank
            for item in here.waits:
                counter = counters[item.same] = self._counter(rank, item.signal, at_rank(item.place, rank))
                if at_rank(item.awaited, rank) != sets[counter]:  # type: ignore[arg-type]
                    self._in_parts.add(counter)
        for program, here, counters, raised in placed:
            rank, tasks = program.rank, dict[int, Task]()
            for item, _ in here.sets:
                distance = at_rank(item.distance, rank)  # type: ignore[arg-type]
                tasks[item.same] = Raise(counters[item.same], self._delay_us(item, rank, distance), distance != 0)
            for item in here.waits:
                number = counters[item.same]
                awaited = at_rank(item.awaited, rank)  # type: ignore[arg-type]
                tasks[item.same] = Await(number, awaited, sets.get(number, 0), item.previous)
            for item in here.works:
                tasks[item.same] = (
                    self._tiled_work(item, rank, raised[item.same]) if item.tiled else self._work(item, rank)
                )
            program.tasks = [tasks[same] for same in here.order]
        lanes = [program for program, *_ in placed]
        return LoweredSchedule(self.schedule, ranks, lanes, list(self._load_ids), len(self._counters), self._places)

    # -- tasks

    def _set(self, item: NumberedStep, rank: int) -> int:
        """Return the number of the counter that `rank` increments with `item`, an evaluated `Set` step."""
        distance, place = item.distance, item.place
        if distance.__class__ is not int:
            distance = int(distance[rank])  # type: ignore[index]
        owner = (rank + distance) % self.world % self._period  # as in `_owner_and_setter`
        if place.__class__ is not int:
            place = int(place[(owner - distance) % self.world])  # type: ignore[index]
        return self._counters.setdefault((owner, item.signal, place), len(self._counters))

    def _raised(self, item: NumberedStep, rank: int) -> Raised:
        """Return the increments that the tiles of `item` make on `rank`, as pairs (number of the counter, `SetBy`)."""
        raised = []
        for i, one in enumerate(item.tiled[rank].sets):
            owner, setter = self._owner_and_setter(rank, one.distance)
            raised.append((self._counter(owner, one.signal, item.tiled[setter].sets[i].place), one))
        return tuple(raised)

    def _owner_and_setter(self, rank: int, distance: int) -> tuple[int, int]:
        """Return (owner, setter) for a signal from `rank` to the peer at `distance`. Only some ranks are simulated, and
        represent all others.

        owner: the simulated rank that represents the peer.
        setter: the rank that sends this signal to `owner`, over the same distance. It is `rank` itself if the peer is
            simulated.
        """
        owner = (rank + distance) % self.world % self._period
        return owner, (owner - distance) % self.world

    def _counter(self, rank: int, signal: str, place: int) -> int:
        return self._counters.setdefault((rank, signal, place), len(self._counters))

    def _tiled_work(self, item: NumberedStep, rank: int, raised: Raised) -> Work:
        step = cast(Tiles, item.origin.step)
        count = sum(times for _, _, times in item.tiled[rank].parts)
        raises = tuple(
            Raising(
                counter, one.times, self._delay_us(item, rank, one.distance), *self._stored(step, count, one),
                at_once=counter not in self._in_parts,
            )
            for counter, one in raised
        )  # fmt: skip
        return self._tiles(item, step, rank)._replace(raises=raises, pulses=pulses(raises))

    def _delay_us(self, item: NumberedStep, rank: int, distance: int) -> float:
        key = rank, distance, item.carried or bool(item.tiled), item.signal if self.captured else ""
        found = self._delays.get(key)
        if found is None:
            found = self._delays[key] = self._new_delay_us(item, rank, distance)
        return found

    def _new_delay_us(self, item: NumberedStep, rank: int, distance: int) -> float:
        if not distance:
            engine = self.captured and item.signal in self._for_engines
            return self.model.signal_local_us + (self.model.graph_signal_us if engine else 0.0)
        by_kernel = item.carried or item.tiled
        us = self.model.signal_kernel_us if by_kernel else self.model.signal_remote_us
        if self.captured and not by_kernel and item.signal in self._by_streams:
            us += self.model.graph_remote_us
        return us + self._distances.latency_us(rank, distance)

    def _stored(self, step: Tiles, count: int, tiles: SetBy) -> tuple[float, float]:
        """Return (begin of the first of `tiles`, end of the last of `tiles`), as fractions of the kernel's work.

        Tiles run in waves, one tile per compute unit, and begin and end with their wave. If the kernel's waves are not
        known, return the fractions `first` and `last` of `tiles`.

        count: the number of all tiles of the kernel.
        tiles: the tiles that increment one counter.
        """
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
        work = Work(all_tiles.what, latency_us, all_tiles.work_us, load, False, all_tiles.sent_bytes)
        if not step.kernel.divides_tiles or _k_of(step, tiled) >= _LONG_K:
            return work
        return work._replace(programs=max(1, self.model.compute_units - SPARED_UNITS) / self.model.compute_units)

    def _work(self, item: NumberedStep, rank: int) -> Work:
        kind, operands, distance = self._kinds_found.get(item.same) or self._kind_of(item, rank)
        first = self._distances.first_like(rank, distance) if distance else 0
        few = item.units if 0 < item.units < COPY_UNITS else 0
        key = kind, first, few, rank, item.carried
        work = self._works.get(key)
        if work is None:
            if first != distance:
                operands = tuple([operand._replace(at=first) if operand.at else operand for operand in operands])
            work = self._works[key] = self._new_work(item, operands, few, rank)
        step = item.origin.step
        if item.exchanges:
            return work._replace(latency_us=work.latency_us + _EXCHANGE_US)
        if self.captured and step.meets:
            begins = any(lane.steps[0] is step for lane in self.schedule.lanes)
            more_us = self.model.graph_collective_us if begins else self.model.graph_run_us
            return work._replace(latency_us=work.latency_us + more_us)
        return work

    def _kind_of(self, item: NumberedStep, rank: int) -> tuple[int, tuple[Operand, ...], int]:
        """Return (kind, operands, distance) of an item (evaluated step) on `rank`. Items with equal kind and distance
        have equal costs.

        kind: the number of a class of items: equal steps with operands of equal sizes.
        distance: the distance to the peer whose memory has operands; 0 for no peer or several peers.
        """
        step = item.origin.step
        operands = self._operands(step, tuple([at_rank(number, rank) for number in item.numbers]))
        distances = {operand.at for operand in operands if operand.at}
        distance = distances.pop() if len(distances) == 1 else 0
        anywhere = tuple([operand._replace(at=bool(operand.at)) for operand in operands]) if distance else operands
        kind = self._kinds.setdefault((type(step), step.settings, anywhere, distance == 0), len(self._kinds))
        found = kind, operands, distance
        if all(isinstance(number, int) for number in item.numbers):
            self._kinds_found[item.same] = found
        return found

    def _new_work(self, item: NumberedStep, operands: tuple[Operand, ...], few: int, rank: int) -> Work:
        step = item.origin.step
        # A step within a rank costs the same on all ranks.
        local = type(step) in (Copy, Compute) and not any(operand.at for operand in operands)
        seen_from = 0 if local else self._seen_from(rank)
        units = min(self.model.kernel_copy_units, few) if few else self.model.kernel_copy_units
        if units not in self._models:
            self._models[units] = replace(self.model, kernel_copy_units=units)
        found = kept_cost(self._models[units], self.world, step, operands, seen_from)
        latency_us, holds = found.latency_us, found.holds
        if item.carried:  # the kernel that performs this step is running, and has its compute units
            latency_us = holds = 0.0
        return Work(
            found.what, latency_us, found.work_us, self._load(found, rank), found.joins, found.sent_bytes, (), (), holds,
            found.fills, found.least_us,
        )  # fmt: skip

    def _seen_from(self, rank: int) -> int:
        """Return the lowest rank from which the topology looks the same as from `rank`. Equal steps of these two ranks
        cost the same.
        """
        return rank % self._topology.period

    def _operands(self, step: Step, numbers: tuple[int, ...]) -> tuple[Operand, ...]:
        operands = []
        regions = step.regions
        for i in range(len(numbers) // 3):
            rows, cols, at = numbers[3 * i : 3 * i + 3]
            buffer = self._buffers[
                regions[i if i < len(regions) else 0].buffer
            ]  # the parts of an exchange have the dtype of its source
            operands.append(Operand(rows, cols, buffer.dtype, at, cols == buffer.cols))
        return tuple(operands)

    def _load(self, found: Cost, rank: int) -> int:
        # If one resource represents the resources of several ranks, keep uses of different ranks' resources as separate
        # entries.
        by_how: dict[How, list[tuple[int, float]]] = {"share": [], "hold": [], "disturb": []}
        whole: dict[int, float] = {}
        places, world, period = self._places, self.world, self._period
        for how, (kind, at), amount, of_transfer in found.uses:
            place = kind, (rank + at) % world % period
            number = places.get(place)
            if number is None:
                number = places[place] = len(places)
            by_how[how].append((number, amount))
            if of_transfer:
                whole[number] = of_transfer
        share, hold, disturb = (tuple(sorted(amounts)) for amounts in by_how.values())
        load = Load(share, hold, disturb, tuple(sorted(whole.items())))
        return self._load_ids.setdefault(load, len(self._load_ids))
