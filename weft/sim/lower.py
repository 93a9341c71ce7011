"""A schedule in numbers for a model: tasks by lane, with their costs, and counters in place of named signals.

Most schedules are one program turned around the ring of ranks: at rank r everything happens as at rank 0, r ranks further
on. On a machine whose GPUs are alike, all ranks then do the same at the same time, and rank 0 is enough: what it sends to
rank d it also receives, from rank -d, and each resource stands for those of all ranks. That makes the simulation as many
times faster as there are ranks. Where sizes or signals do not turn around like that, every rank is lowered.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias, cast

from weft.schedule import (
    ITEM_BYTES,
    RANK,
    Collective,
    Compute,
    Copy,
    Expr,
    For,
    Index,
    Read,
    Region,
    Schedule,
    Set,
    Step,
    Tiles,
    Wait,
    value,
)
from weft.schedule.dispatch import LIBRARY_GEMMS
from weft.schedule.expr import Held, Values
from weft.schedule.steps import put_in
from weft.schedule.tiles import counted
from weft.sim.costs import Cost, How, Operand, Place, What, cost, cost_of_tiles
from weft.sim.fair import Load
from weft.sim.model import Model

Turn: TypeAlias = tuple[tuple[str, int], ...]
ByRank: TypeAlias = int | tuple[int, ...]
"""A number that is the same at all ranks, or one for each."""


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


class Await(NamedTuple):
    counter: int
    sets: int
    sets_per_run: int
    previous: bool


Task: TypeAlias = Work | Raise | Await


class Origin(NamedTuple):
    """Where a task comes from: the step, and the turns of the loops around it."""

    step: Step
    turn: Turn


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
        return _name(lane.origins[task], lane.rank if rank is None else rank)


class _SetBy(NamedTuple):
    """What one rank sets: its counter at the rank so far on, so many times."""

    signal: str
    distance: int
    place: int
    times: int


class _Tiled(NamedTuple):
    """Of one rank, (place in the body, its operands' numbers, in how many tiles), the sets of all tiles together, and the bytes
    of its own memory that their matmuls read: of regions that several do, once."""

    parts: tuple[tuple[int, tuple[int, ...], int], ...]
    sets: tuple[_SetBy, ...]
    read_bytes: int = 0


class _Item(NamedTuple):
    """A step with its numbers. numbers: rows, columns and distance of each operand; or distance and index; or index, count."""

    origin: Origin
    present: ByRank
    numbers: tuple[ByRank, ...]
    signal: str = ""
    carried: bool = (
        False  # done by the kernel before it: a set at its end, a copy of the same rows to elsewhere, more of its tiles
    )
    tiled: tuple[_Tiled, ...] = ()  # by rank
    kernels: int = 0  # a captured graph has that many for this signal alone


def lower(schedule: Schedule, model: Model, *, alike: bool = True, captured: bool = False) -> Program:
    """alike: ranks may be represented by rank 0, if the schedule allows it. captured: as runs of a graph."""
    return _Lowering(schedule, model, captured).program(alike)


class _Lowering:
    def __init__(self, schedule: Schedule, model: Model, captured: bool) -> None:
        self.schedule, self.model, self.world, self.captured = schedule, model, schedule.world_size, captured
        self._awaiting: dict[str, int] = {}  # kernels that wait for a signal, by its name
        self._vectors: dict[tuple[str, Turn, ByRank], ByRank] = {}
        self._buffers = {b.name: b for b in schedule.buffers}
        self._values = values_of_ranks(schedule)
        self._costs: dict[object, Cost] = {}
        self._load_ids: dict[Load, int] = {}
        self._places: dict[Place, int] = {}

    def program(self, alike: bool) -> Program:
        items = [self._items(lane.steps) for lane in self.schedule.lanes]
        if self.captured:
            caller = next((i for i, lane in enumerate(self.schedule.lanes) if lane.resource == "compute"), None)
            items = [_with_kernels(of_lane, number == caller) for number, of_lane in enumerate(items)]
            for item in (item for of_lane in items for item in of_lane if isinstance(item.origin.step, Wait)):
                self._awaiting[item.signal] = max(item.kernels, self._awaiting.get(item.signal, 0))
        symmetric = alike and self.world > 1 and self._turns_around([item for lane in items for item in lane])
        ranks = (0,) if symmetric else tuple(range(self.world))
        counters: dict[tuple[int, str, int], int] = {}
        sets = self._count_sets(items, symmetric, counters)
        lanes = []
        for rank in ranks:
            for number, (lane, its) in enumerate(zip(self.schedule.lanes, items, strict=True)):
                program = LaneProgram(rank, lane.name, number)
                for item in its:
                    if _at(item.present, rank):
                        program.tasks.append(self._task(item, rank, symmetric, counters, sets))
                        program.origins.append(item.origin)
                lanes.append(program)
        loads = {number: load for load, number in self._load_ids.items()}
        return Program(self.schedule, symmetric, ranks, lanes, loads, len(counters))

    # -- numbers

    def _vector(self, index: Index, turn: Turn, there: ByRank = 1) -> ByRank:
        """The number at every rank; 0 where the step is not there."""
        if not isinstance(index, Expr):
            return index
        key = (index.text, turn, there)
        if key not in self._vectors:
            values = ({**dict(turn), **of_rank} for of_rank in self._values)
            self._vectors[key] = _collapse([index.evaluate(v) if _at(there, r) else 0 for r, v in enumerate(values)])
        return self._vectors[key]

    def _distance(self, at: Index, turn: Turn, there: ByRank) -> ByRank:
        if at is RANK:
            return 0
        ranks = self._vector(at, turn, there)
        return _collapse([(_at(ranks, rank) - rank) % self.world for rank in range(self.world)])

    def _flat(self, steps: Sequence[Step], turn: Turn, there: ByRank) -> Iterator[tuple[Step, Turn, ByRank]]:
        for step in steps:
            if not isinstance(step, For):
                yield step, turn, there
                continue
            extent = self._vector(step.extent, turn, there)
            longest = extent if isinstance(extent, int) else max(extent)
            for i in range(longest):
                at_turn = _collapse([int(i < _at(extent, r) and bool(_at(there, r))) for r in range(self.world)])
                yield from self._flat(step.body, (*turn, (step.index, i)), at_turn)

    def _items(self, steps: Sequence[Step]) -> list[_Item]:
        items: list[_Item] = []
        kernel: Copy | Tiles | None = None
        persistent = ""
        for step, turn, there in self._flat(steps, (), 1):
            item = self._item(step, turn, there)
            if isinstance(step, Copy) and step.by == "kernel":
                item = item._replace(carried=isinstance(kernel, Copy) and step.src == kernel.src)
                kernel = step
            elif isinstance(step, Tiles):
                item = item._replace(carried=step.kernel == persistent)
                kernel = step
            elif isinstance(step, Set):
                item = item._replace(carried=kernel is not None)
            else:
                kernel = None
            if not isinstance(step, Set | Wait):  # a persistent kernel sets and waits itself
                persistent = step.kernel if isinstance(step, Tiles) else ""
            items.append(item)
        return items

    def _item(self, step: Step, turn: Turn, there: ByRank) -> _Item:
        origin = Origin(step, turn)
        if isinstance(step, Set):
            return _Item(
                origin,
                there,
                (self._distance(step.at, turn, there), self._vector(step.index, turn, there)),
                step.signal,
            )
        if isinstance(step, Wait):
            index, count = (self._vector(n, turn, there) for n in (step.index, step.count))
            return _Item(origin, there, (index, count), step.signal)
        if isinstance(step, Tiles):
            tiled = tuple(
                self._tiled(step, turn, rank) if _at(there, rank) else _NO_TILES for rank in range(self.world)
            )
            return _Item(origin, _collapse([int(one != _NO_TILES) for one in tiled]), (), tiled=tiled)
        numbers: list[ByRank] = []
        for region in _regions(step):
            numbers += [self._vector(extent, turn, there) for extent in (region.rows, region.cols)]
            numbers.append(self._distance(region.at, turn, there))
        if isinstance(step, Collective) and step.sent:
            to_ranks = [self._vector(rows, turn, there) for rows in step.sent]
            for distance in range(self.world):
                sent = [_at(to_ranks[(rank + distance) % self.world], rank) for rank in range(self.world)]
                numbers += [_collapse(sent), numbers[1], distance]
        if not isinstance(step, Collective):  # empty steps are left out
            rows, cols = numbers[-3:-1] if isinstance(step, Compute) else numbers[:2]
            full = [int(_at(there, r) and _at(rows, r) > 0 and _at(cols, r) > 0) for r in range(self.world)]
            there = _collapse(full)
        return _Item(origin, there, tuple(numbers))

    def _tiled(self, step: Tiles, turn: Turn, rank: int) -> _Tiled:
        values = {**dict(turn), **self._values[rank]}
        here = replace(step, extent=put_in(step.extent, values))
        parts: list[tuple[int, tuple[int, ...], int]] = []
        sets: list[_SetBy] = []
        for place, inner in enumerate(here.body):
            if isinstance(inner, Set):
                for (at, index), times in counted(here, *_known((inner.at, inner.index), values), values=values):
                    sets.append(_SetBy(inner.signal, (at - rank) % self.world, index, times))
                continue
            extents = [n for region in _regions(inner) for n in (region.rows, region.cols, region.at)]
            for numbers, times in counted(here, *_known(extents, values), values=values):
                placed = (n if i % 3 < 2 else (n - rank) % self.world for i, n in enumerate(numbers))
                parts.append((place, tuple(placed), times))
        return _Tiled(tuple(parts), tuple(sorted(sets)), self._read_bytes(here, rank, values))

    def _read_bytes(self, tiles: Tiles, rank: int, values: Values) -> int:
        read: dict[tuple[str, int, int], int] = {}
        for matmul in tiles.body:
            if not isinstance(matmul, Compute) or matmul.op != "matmul":
                continue
            for region in matmul.inputs:
                numbers = (matmul.out.rows, region.at, region.row, region.col, region.rows, region.cols)
                for (out, at, row, col, rows, cols), _ in counted(tiles, *_known(numbers, values), values=values):
                    if out and at == rank:
                        item_bytes = ITEM_BYTES[self._buffers[region.buffer].dtype]
                        read[region.buffer, row, col] = rows * cols * item_bytes
        return sum(read.values())

    def _sets(self, item: _Item, rank: int) -> tuple[_SetBy, ...]:
        if item.tiled:
            return item.tiled[rank].sets
        if not isinstance(item.origin.step, Set):
            return ()
        distance, index = (_at(n, rank) for n in item.numbers)
        return (_SetBy(item.signal, distance, index, 1),)

    # -- symmetry

    def _turns_around(self, items: list[_Item]) -> bool:
        """Whether rank r does what rank 0 does, turned by r, and waits for the same sets."""
        for item in items:
            step = item.origin.step
            part = slice(1) if isinstance(step, Set) else slice(isinstance(step, Wait), None)
            numbers = item.numbers[part]
            if not isinstance(item.present, int) or not all(isinstance(n, int) for n in numbers):
                return False
            if (
                len({(one.parts, one.read_bytes, tuple(s._replace(place=0) for s in one.sets)) for one in item.tiled})
                > 1
            ):
                return False
        sets = [
            (of_ranks[0].signal, of_ranks[0].distance, tuple(one.place for one in of_ranks))
            for item in items
            for of_ranks in zip(*(self._sets(item, rank) for rank in range(self.world)), strict=True)
        ]
        waits = [(i.signal, i.numbers[0]) for i in items if isinstance(i.origin.step, Wait)]
        for rank in range(1, self.world):
            same: dict[tuple[str, int], tuple[str, int]] = {}  # counters of rank 0: of this rank
            for signal, distance, places in sets:
                here = (signal, places[-distance % self.world])
                there = (signal, places[(rank - distance) % self.world])
                if same.setdefault(here, there) != there:
                    return False
            if len(set(same.values())) != len(same):
                return False
            for signal, index in waits:
                if same.get((signal, _at(index, 0))) != (signal, _at(index, rank)):
                    return False
        return True

    # -- tasks

    def _counters(self, item: _Item, rank: int, symmetric: bool) -> Iterator[tuple[tuple[int, str, int], _SetBy]]:
        """(counter, what it sets) of an item at a rank."""
        for i, one in enumerate(self._sets(item, rank)):
            if symmetric:  # what rank 0 does to a peer, another peer does to rank 0
                yield (0, one.signal, self._sets(item, -one.distance % self.world)[i].place), one
            else:
                yield ((rank + one.distance) % self.world, one.signal, one.place), one

    def _count_sets(
        self, items: list[list[_Item]], symmetric: bool, counters: dict[tuple[int, str, int], int]
    ) -> dict[int, int]:
        sets: dict[int, int] = {}
        for rank in (0,) if symmetric else range(self.world):
            for lane in items:
                for item in lane:
                    for counter, one in self._counters(item, rank, symmetric) if _at(item.present, rank) else ():
                        number = counters.setdefault(counter, len(counters))
                        sets[number] = sets.get(number, 0) + one.times
        return sets

    def _task(
        self, item: _Item, rank: int, symmetric: bool, counters: dict[tuple[int, str, int], int], sets: dict[int, int]
    ) -> Task:
        step = item.origin.step
        remote_us = self.model.signal_kernel_us if item.carried or item.tiled else self.model.signal_remote_us
        remote_us += self.model.graph_signal_us * (item.kernels + self._awaiting.get(item.signal, 0))
        raises = tuple(
            (counters[counter], one.times, remote_us if one.distance else self.model.signal_local_us)
            for counter, one in self._counters(item, rank, symmetric)
        )
        if isinstance(step, Set):
            counter, _, delay = raises[0]
            return Raise(counter, delay)
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
            number = counters.setdefault((rank, step.signal, _at(item.numbers[0], rank)), len(counters))
            return Await(number, _at(item.numbers[1], rank), sets.get(number, 0), step.previous)
        assert not isinstance(step, For)  # they are written out
        operands = self._operands(step, tuple(_at(n, rank) for n in item.numbers))
        key = (type(step), *(getattr(step, name, None) for name in ("op", "by", "accumulate")), operands)
        if key not in self._costs:
            self._costs[key] = cost(self.model, self.world, step, operands)
        found = self._costs[key]
        load = self._load(found, rank, symmetric)
        latency_us = 0.0 if item.carried else found.latency_us
        if self.captured and isinstance(step, Collective):
            latency_us += self.model.graph_collective_us
        return Work(found.what, latency_us, found.work_us, load, found.joins, found.sent_bytes)

    def _operands(self, step: Copy | Compute | Collective | Read, numbers: tuple[int, ...]) -> tuple[Operand, ...]:
        operands = []
        regions = _regions(step)
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


def _with_kernels(items: list[_Item], of_caller: bool) -> list[_Item]:
    """A copying kernel sets and waits for what stands around it, and tiles do; the caller's lane ends with a kernel that sets."""
    steps = [item.origin.step for item in items]
    works = [place for place, step in enumerate(steps) if not isinstance(step, Set | Wait)]
    found = []
    for place, item in enumerate(items):
        at = bisect.bisect(works, place)
        before = steps[works[at - 1]] if at else None
        after = steps[works[at]] if at < len(works) else None
        if isinstance(steps[place], Wait):
            item = item._replace(kernels=int(not (_signals(before) or _signals(after))))
        elif isinstance(steps[place], Set):
            item = item._replace(kernels=int(not (_signals(before) or (of_caller and after is None))))
        found.append(item)
    return found


def _signals(step: Step | None) -> bool:
    """Whether it is a kernel that sets and waits."""
    return isinstance(step, Tiles) or (isinstance(step, Copy) and step.by == "kernel")


_NO_TILES = _Tiled((), ())


def values_of_ranks(schedule: Schedule) -> list[Values]:
    """What expressions may name at each rank; ranks that hold the same share its sums."""
    held: dict[tuple[int, ...], Held] = {}
    return [
        {"rank": rank}
        | {c.buffer: held.setdefault(c.expected[rank], Held(c.expected[rank])) for c in schedule.contents}
        for rank in range(schedule.world_size)
    ]


def _known(numbers: Sequence[Index], values: Values) -> list[Index]:
    """Numbers in place of what has a value, whatever tile it is."""
    return [n.evaluate(values) if isinstance(n, Expr) and n.variables() <= values.keys() else n for n in numbers]


def _name(origin: Origin, rank: int) -> str:
    step, numbers = origin.step, {**dict(origin.turn), "rank": rank}  # no name depends on what a buffer holds

    def of(region: Region) -> str:
        at = value(region.at, **numbers)
        return region.buffer if at == rank else f"{region.buffer}@{at}"

    if isinstance(step, Compute):
        return f"{step.op} {of(step.out)}"
    if isinstance(step, Wait):
        return f"wait {step.signal}[{value(step.index, **numbers)}]" + (" of the previous run" if step.previous else "")
    if isinstance(step, Tiles):
        return step.kernel
    if isinstance(step, Read):
        return f"read {step.region.buffer}"
    assert isinstance(step, Copy | Collective)
    return f"{'copy' if isinstance(step, Copy) else step.op} {of(step.src)} -> {of(step.dst)}"


def _regions(step: Step) -> tuple[Region, ...]:
    """As `weft.sim.costs.cost` wants its operands."""
    if isinstance(step, Compute):
        return (*step.inputs, step.out)
    if isinstance(step, Read):
        return (step.region,)
    assert isinstance(step, Copy | Collective)
    return step.src, step.dst


def _at(number: ByRank, rank: int) -> int:
    return number if isinstance(number, int) else number[rank]


def _collapse(numbers: Sequence[int]) -> ByRank:
    first = numbers[0]
    return first if all(n == first for n in numbers) else tuple(numbers)
