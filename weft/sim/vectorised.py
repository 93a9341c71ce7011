"""Vectorised evaluation of a schedule's steps at all ranks: sizes, and distances to the ranks whose memory and counters they use.

An expression is evaluated once, with the array of all ranks as `rank`. A result that is equal at all ranks is kept as one
number. So the time for n steps and W ranks grows with the number of different expressions, not with n W.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, singledispatch
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from weft.schedule import (
    ITEM_BYTES,
    RANK,
    Expr,
    For,
    Index,
    Lane,
    Norm,
    Region,
    Schedule,
    Set,
    Step,
    Tiles,
    Wait,
)
from weft.schedule.expr import PrefixSums, Values
from weft.schedule.launches import launches, units_of_dynamic_copies
from weft.schedule.steps import flattened, substitute

Iteration: TypeAlias = tuple[tuple[str, int], ...]
ByRank: TypeAlias = int | np.ndarray
"""A number that all ranks share, or an array of one number per rank, not all equal."""

_AT_ONCE = 1 << 18
"""Maximal tiles times ranks whose numbers are in memory at once."""
_FEW_TILES = 512
"""Number of tiles up to which looking for equal ones takes longer than it saves."""


class Origin(NamedTuple):
    """The origin of a task: its step, and the iterations of the enclosing loops."""

    step: Step
    turn: Iteration


class SetBy(NamedTuple):
    """The sets of one counter by one rank: place `place` of `signal` at the rank at `distance`, `times` times.

    first, last: the shares of all tiles at which the setting tiles begin and end.
    """

    signal: str
    distance: int
    place: int
    times: int
    first: float = 0.0
    last: float = 1.0


class Tiled(NamedTuple):
    """The tiles of one rank.

    parts: (place in `Tiles.work`, numbers of its operands, count of tiles). sets: those of all tiles together.
    read_bytes: bytes of its own memory that matmuls read; a region that several tiles read counts once.
    """

    parts: tuple[tuple[int, tuple[int, ...], int], ...] = ()
    sets: tuple[SetBy, ...] = ()
    read_bytes: int = 0


class NumberedStep(NamedTuple):
    """A step with its numbers.

    numbers: rows, columns and distance of each operand. tiled: the tiles of each rank, if it has any. signal, place: the signal
    that it sets or waits for, and its index. distance: to the rank whose signal it sets; None unless it sets one. awaited: number
    of sets that it waits for, with `previous` in the run before; None unless it waits.

    same: equal for items that differ only in their origin. Most steps share their sizes with others, at other offsets.
    carried: True if a kernel that already runs does it. units: compute units that its launch holds while it polls
    (`weft.schedule.launches`).
    """

    origin: Origin
    present: ByRank
    numbers: tuple[ByRank, ...] = ()
    tiled: tuple[Tiled, ...] = ()
    signal: str = ""
    place: ByRank = 0
    distance: ByRank | None = None
    awaited: ByRank | None = None
    previous: bool = False
    same: int = 0
    carried: bool = False
    units: int = 0


class Numbers:
    """The numbers of the steps of one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.world, self._ranks = schedule.world_size, np.arange(schedule.world_size)
        self._values = values_of_ranks(schedule)
        # Ranks with the same expected contents are evaluated together.
        self._holds = [
            tuple(id(held) for held in values.values() if isinstance(held, PrefixSums)) for values in self._values
        ]
        together: dict[tuple[int, ...], list[int]] = {}
        for rank, holds in enumerate(self._holds):
            together.setdefault(holds, []).append(rank)
        self._together = [np.array(ranks) for ranks in together.values()]
        self._units: dict[str, int] = {}  # of copies of dynamic size, by resource
        self._schedule, self._buffers = schedule, {b.name: b for b in schedule.buffers}
        self._held = frozenset(contents.buffer for contents in schedule.contents)
        self._vectors: dict[tuple[str, Iteration, int | bytes], ByRank] = {}
        self._distances: dict[tuple[str | int, Iteration, int | bytes], ByRank] = {}
        self._found: dict[tuple, tuple[Any, ...]] = {}  # items without their origins
        sets = [step for step in schedule.walk() if isinstance(step, Set) and step.at is not RANK]
        sets += [one for step in schedule.walk() if isinstance(step, Tiles) for one in step.inner_sets]
        self._crossing = {one.signal for one in sets}  # signals that peers set, or tiles
        self._different = 0

    def items(self, lane: Lane) -> list[NumberedStep]:
        """Return the items of a lane, with its loops unrolled."""
        everywhere: tuple[Iteration, ByRank] = (), 1
        items = [self._item(step, *state) for step, state in flattened(lane.steps, everywhere, self._turns)]
        steps = [
            substitute(step, dict(turn), partially_evaluated=True) if turn and step.copies_by == "kernel" else step
            for step, turn in (item.origin for item in items)
        ]
        # As on GPUs, a signal of a stream to another stream of its rank ends a launch.
        crossing = [
            item.signal in self._crossing and not (isinstance(item.distance, int) and item.distance == 0)
            for item in items
        ]
        units = self._units.get(lane.resource)
        if units is None:
            units = self._units[lane.resource] = units_of_dynamic_copies(self._schedule, lane.resource)
        for launch in launches(steps, crossing, self._buffers, held=self._held, dynamic_units=units, tiles_go_on=True):
            for place, carried in enumerate(launch.carried(), launch.first):
                if carried or launch.units:
                    items[place] = items[place]._replace(
                        same=items[place].same + carried, carried=carried, units=launch.units
                    )
        return items

    def _turns(self, loop: For, around: tuple[Iteration, ByRank]) -> Iterator[tuple[Iteration, ByRank]]:
        turn, there = around
        extent = self.vector(loop.extent, turn, there)
        for i in range(int(np.max(extent))):
            yield (*turn, (loop.index, i)), _everywhere(there, i < extent)

    def vector(self, index: Index, turn: Iteration, there: ByRank = 1) -> ByRank:
        """Return `index` at every rank; 0 at ranks without the step."""
        if not isinstance(index, Expr):
            return index
        key = (index.text, turn, there if isinstance(there, int) else there.tobytes())
        found = self._vectors.get(key)
        if found is None:
            found = self._vectors[key] = self._evaluated(index, turn, there)
        return found

    def _evaluated(self, index: Expr, turn: Iteration, there: ByRank) -> ByRank:
        if isinstance(there, int) and there:
            try:
                return _at_all_ranks(index, turn, self.world)
            except (KeyError, IndexError, ArithmeticError):
                pass  # it names the contents of a buffer, or has no value at some rank, which `evaluate` reports
        found, here = np.zeros(self.world, np.int64), np.broadcast_to(np.asarray(there) != 0, self.world)
        for ranks in self._together:
            those = ranks[here[ranks]]
            if len(those):
                found[those] = self._evaluated_together(index, turn, those)
        return _collapse(found)

    def _evaluated_together(self, index: Expr, turn: Iteration, ranks: np.ndarray) -> int | np.ndarray | list[int]:
        """Return `index` at ranks with the same contents."""
        values = {**dict(turn), **self._values[int(ranks[0])]}
        if len(ranks) > 1:
            try:
                with np.errstate(divide="raise"):
                    return index.evaluated_over({**values, "rank": ranks})
            except (KeyError, IndexError, ArithmeticError):
                pass  # `evaluate` reports it
        return [index.evaluate({**values, "rank": int(rank)}) for rank in ranks]

    def distance(self, at: Index, turn: Iteration, there: ByRank) -> ByRank:
        if at is RANK:
            return 0
        key = (_text(at), turn, there if isinstance(there, int) else there.tobytes())
        found = self._distances.get(key)
        if found is None:
            found = _collapse((self.vector(at, turn, there) - self._ranks) % self.world)
            self._distances[key] = found
        return found

    def _item(self, step: Step, turn: Iteration, there: ByRank) -> NumberedStep:
        origin = Origin(step, turn)
        if not turn and step.tile_kernel is None and isinstance(there, int):
            key = key_of(step)
            found = self._found.get(key)
            if found is None:
                found = self._found[key] = self._new(origin, there)[1:]
            return NumberedStep(origin, *found)
        return self._new(origin, there)

    def _new(self, origin: Origin, there: ByRank) -> NumberedStep:
        self._different += 2  # carried steps have the number after their name
        return _numbered(origin.step, self, origin, there)._replace(same=self._different)

    def operands(self, step: Step, turn: Iteration, there: ByRank) -> list[ByRank]:
        """Return the rows, columns and distance of each operand."""
        numbers: list[ByRank] = []
        for region in step.regions:
            numbers.append(self.vector(region.rows, turn, there))
            numbers.append(self.vector(region.cols, turn, there))
            numbers.append(self.distance(region.at, turn, there))
        return numbers

    def sent(self, indices: Sequence[Index], turn: Iteration, there: ByRank) -> list[ByRank]:
        """Return what each rank sends to the rank at each distance, from 0. indices: what it sends to each rank."""
        to_ranks = np.array([np.broadcast_to(self.vector(n, turn, there), self.world) for n in indices])
        return [
            _collapse(to_ranks[(self._ranks + distance) % self.world, self._ranks]) for distance in range(self.world)
        ]

    # -- tiles

    def tiled(self, step: Tiles, turn: Iteration, there: ByRank) -> tuple[Tiled, ...]:
        extent = self.vector(step.extent, turn, there)
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            if at_rank(there, rank) and at_rank(extent, rank):
                alike.setdefault((at_rank(extent, rank), *self._holds[rank]), []).append(rank)
        found = [_NO_TILES] * self.world
        equal: dict[Tiled, Tiled] = {}  # equal ranks share one object, so that later comparisons are by identity
        uneven = _is_uneven(step)
        item_bytes = {name: ITEM_BYTES[buffer.dtype] for name, buffer in self._buffers.items()}
        for (count, *_), ranks in alike.items():
            tiles = _DifferentTiles(step, count, {**dict(turn), **self._values[ranks[0]]})
            some = max(1, _AT_ONCE // tiles.most) if uneven else len(ranks)
            for i in range(0, len(ranks), some):
                here = ranks[i : i + some]
                made = [equal.setdefault(one, one) for one in _Tables(tiles, here, self.world).tiled(item_bytes)]
                for rank, one in zip(here, made if len(made) > 1 else made * len(here), strict=True):
                    found[rank] = one
        return tuple(found)


@singledispatch
def _numbered(step: Step, numbers: Numbers, origin: Origin, there: ByRank) -> NumberedStep:
    """Return a step with its numbers. Empty steps are left out, but for collectives: all ranks call them."""
    operands = numbers.operands(step, origin.turn, there)
    for distance, rows in enumerate(numbers.sent(step.sizes, origin.turn, there) if step.sizes else ()):
        operands += [rows, operands[1], distance]
    decisive = () if step.meets else step.decisive
    sizes = [size for number in decisive for size in operands[3 * number : 3 * number + 2]]
    return NumberedStep(origin, _everywhere(there, *(size > 0 for size in sizes)), tuple(operands))


@_numbered.register
def _set(step: Set, numbers: Numbers, origin: Origin, there: ByRank) -> NumberedStep:
    distance, place = numbers.distance(step.at, origin.turn, there), numbers.vector(step.index, origin.turn, there)
    return NumberedStep(origin, there, signal=step.signal, place=place, distance=distance)


@_numbered.register
def _wait(step: Wait, numbers: Numbers, origin: Origin, there: ByRank) -> NumberedStep:
    place, awaited = (numbers.vector(index, origin.turn, there) for index in (step.index, step.count))
    return NumberedStep(origin, there, signal=step.signal, place=place, awaited=awaited, previous=step.previous)


@_numbered.register
def _tiles(step: Tiles, numbers: Numbers, origin: Origin, there: ByRank) -> NumberedStep:
    tiled = numbers.tiled(step, origin.turn, there)
    return NumberedStep(origin, _collapse([int(one != _NO_TILES) for one in tiled]), tiled=tiled)


def _is_uneven(step: Tiles) -> bool:
    """True if a number of a tile depends on both tile and rank. A distance to a rank that depends on the tile always does."""

    def depends(number: Index, name: str) -> bool:
        return isinstance(number, Expr) and number.period(name) != 1

    regions = [region for inner in step.body for region in inner.regions]
    read = [region for inner in step.work if inner.multiplies for region in inner.regions[:-1]]
    numbers = [n for region in regions for n in (region.rows, region.cols)]
    numbers += [n for region in read for n in (region.row, region.col)]
    numbers += [one.index for one in step.inner_sets]
    of_ranks = [one.at for one in regions] + [one.at for one in step.inner_sets]
    return any(depends(at, step.index) for at in of_ranks) or any(
        depends(number, step.index) and depends(number, "rank") for number in numbers
    )


class _Tiles(NamedTuple):
    """Tiles that represent all tiles of a kernel, whose numbers they have at every rank.

    at: their numbers. times: how often each occurs. last: the share of all tiles at which the last tile like it ends.
    """

    at: np.ndarray
    times: np.ndarray
    last: np.ndarray


class _DifferentTiles:
    """The tiles of a kernel that differ in some numbers, on whichever rank.

    Most numbers depend only on a tile's place within its sample, so that one sample represents all. In others a few parts
    depend on the tile, and the rank is added or looked up afterwards: tiles with equal parts are equal at every rank.
    """

    def __init__(self, tiles: Tiles, extent: int, values: Values) -> None:
        self.step, self.extent, self.values = tiles, extent, values
        self._found: dict[tuple[str | int, ...], _Tiles] = {}

    @property
    def most(self) -> int:
        """Return the largest number of tiles in `of` for what `_Tables` asks."""
        if self.extent <= _FEW_TILES:
            return self.extent
        numbers = [_extents(step) for step in self.step.work]
        numbers += [_read(region, step) for step in self.step.work if step.multiplies for region in step.regions[:-1]]
        numbers += [(one.index, one.at) for one in self.step.inner_sets]
        return max((len(self.of(one).at) for one in numbers), default=1)

    def of(self, numbers: Sequence[Index]) -> _Tiles:
        """Return tiles that represent all those that differ in these numbers."""
        key = tuple(map(_text, numbers))
        if key not in self._found:
            self._found[key] = self._different([n for n in numbers if isinstance(n, Expr)])
        return self._found[key]

    def _different(self, numbers: list[Expr]) -> _Tiles:
        index = self.step.index
        period = math.lcm(*(n.period(index) for n in numbers))
        at = np.arange(min(period, self.extent) or self.extent)
        times = self.extent // len(at) + (at < self.extent % len(at))
        # Representative tiles repeat periodically, so that the last one is near the end.
        last = (at + 1) / self.extent if len(at) == self.extent else np.ones(len(at))
        if len(at) > _FEW_TILES and any("rank" in n.text for n in numbers):
            parts: dict[int, Any] = {}
            for number in numbers:
                number.parts_over({**self.values, index: at}, "rank", parts)
            which = _numbered_alike([np.broadcast_to(part, len(at)) for part in parts.values()], len(at))
            _, first, which = np.unique(which, return_index=True, return_inverse=True)
            order = np.argsort(first)  # in the order of the tiles
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            of_tile, ends = place[which], np.zeros(len(first))
            np.maximum.at(ends, of_tile, last)
            at, times, last = first[order], np.bincount(of_tile, weights=times).astype(int), ends
        return _Tiles(at, times, last)


def _numbered_alike(columns: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Return a number for each of `count` rows, equal for rows that are equal in all columns."""
    found = np.zeros(count, np.int64)
    for column in columns:
        if (column == column[0]).all():
            continue
        column = np.unique(column, return_inverse=True)[1]  # small numbers, so that products do not overflow
        found = np.unique(found * (column.max() + 1) + column, return_inverse=True)[1]
    return found


def _extents(step: Step) -> tuple[Index, ...]:
    """Return the numbers on which the cost of a step depends."""
    return tuple(n for region in step.regions for n in (region.rows, region.cols, region.at))


def _read(region: Region, matmul: Step) -> tuple[Index, ...]:
    """Return the numbers on which the bytes of a region that a matmul reads depend."""
    return matmul.regions[-1].rows, region.at, region.row, region.col, region.rows, region.cols


class _Tables:
    """The numbers in a step's tiles at some ranks, which have the same count of tiles and the same contents.

    Most numbers are equal at all these ranks. They are then counted and sorted for one rank only.
    """

    def __init__(self, tiles: _DifferentTiles, ranks: list[int], world: int) -> None:
        self._different, self._tiles, self._extent, self._world = tiles, tiles.step, tiles.extent, world
        self._ranks = np.array(ranks)[:, None]
        self._values = {**tiles.values, "rank": self._ranks}
        self._columns: dict[tuple[str, int], np.ndarray] = {}  # by expression and identity of the tiles

    def tiled(self, item_bytes: dict[str, int]) -> list[Tiled]:
        """Return the `Tiled` of each rank, or one for all ranks."""
        parts: list[list[list[tuple[int, tuple[int, ...], int]]]] = []  # by step, then by rank (or one for all ranks)
        sets = [self._sets(inner) for inner in self._tiles.inner_sets]
        for place, inner in enumerate(self._tiles.work):
            parts.append([[(place, *one) for one in of_rank] for of_rank in self._counted(*_extents(inner))])
        read = self._read_bytes(item_bytes)
        differing = max([len(read), *map(len, parts), *map(len, sets)])
        return [
            Tiled(tuple(_joined(parts, i)), tuple(sorted(_joined(sets, i))), read[i if len(read) > 1 else 0])
            for i in range(differing)
        ]

    def _counted(self, *numbers: Index) -> list[list[tuple[tuple[int, ...], int]]]:
        """Return by rank, or once for all ranks, (values of `numbers`, count of tiles with them), by rising values.

        Every third number is a rank, and is replaced by its distance.
        """
        table, tiles = self._table(numbers, ranks=slice(2, None, 3))
        found: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}  # most ranks have the same numbers
        counted = []
        for of_rank in np.moveaxis(table, 1, 0):
            key = of_rank.tobytes()
            if key not in found:
                found[key] = _occurring(of_rank, tiles.times)
            counted.append(found[key])
        return counted

    def _sets(self, step: Set) -> list[list[SetBy]]:
        """Return the sets of `step` by rank, or once for all ranks.

        Tiles run in order: a counter that only the first tiles set is complete once they are done.
        """
        (places, distances), tiles = self._table((step.index, step.at), ranks=slice(1, 2))
        found = []
        for of_rank in places * self._world + distances:  # one number sorts faster than two
            values, first, which = np.unique(of_rank, return_index=True, return_inverse=True)
            last = np.zeros(len(values))
            np.maximum.at(last, which, tiles.last)
            count = np.bincount(which, weights=tiles.times).astype(int)
            where = (values % self._world, values // self._world, count, tiles.at[first] / self._extent, last)
            found.append([SetBy(step.signal, *one) for one in zip(*(w.tolist() for w in where), strict=True)])
        return found

    def _table(self, numbers: Sequence[Index], ranks: slice) -> tuple[np.ndarray, _Tiles]:
        """Return ([numbers, ranks, representative tiles], these tiles).

        There is one rank if all have the same numbers. ranks: which of the numbers are ranks; distances replace them.
        """
        tiles = self._different.of(numbers)
        columns = [self._column(number, tiles.at) for number in numbers]
        columns[ranks] = [(column - self._ranks) % self._world for column in columns[ranks]]
        columns = [column[:1] if column.ndim > 1 and (column == column[:1]).all() else column for column in columns]
        rows = max(len(column) if column.ndim > 1 else 1 for column in columns)
        table = np.empty((len(columns), rows, len(tiles.at)), np.int64)
        for column, found in zip(table, columns, strict=True):
            column[...] = found
        return table, tiles

    def _column(self, number: Index, at: np.ndarray) -> np.ndarray:
        if not isinstance(number, Expr):
            return np.asarray(number, np.int64)
        key = (number.text, id(at))
        if key not in self._columns:
            self._columns[key] = np.asarray(number.evaluated_over({**self._values, self._tiles.index: at}), np.int64)
        return self._columns[key]

    def _read_bytes(self, item_bytes: dict[str, int]) -> list[int]:
        """Return, by rank or once for all ranks, the bytes that matmuls read in the rank's own memory."""
        found: dict[str, list[np.ndarray]] = {}  # by buffer, the regions that tiles read
        for matmul in (step for step in self._tiles.work if step.multiplies):
            for region in matmul.regions[:-1]:
                found.setdefault(region.buffer, []).append(self._table(_read(region, matmul), ranks=slice(1, 2))[0])
        ranks = max((table.shape[1] for tables in found.values() for table in tables), default=1)
        total = np.zeros(ranks, np.int64)
        for buffer, tables in found.items():
            table = np.concatenate([np.broadcast_to(t, (len(t), ranks, t.shape[2])) for t in tables], axis=2)
            rank, tile = ((table[0] != 0) & (table[1] == 0)).nonzero()
            row, col, rows, cols = table[2:, rank, tile]
            count = rows * cols
            order = np.lexsort((count, col, row, rank))  # regions at one place together, the largest last
            place = np.stack([rank, row, col])[:, order]
            last = np.flatnonzero(np.diff(place, append=-1).any(0))
            np.add.at(total, place[0, last], count[order[last]] * item_bytes[buffer])
        found_bytes: list[int] = total.tolist()
        return found_bytes if len(set(found_bytes)) > 1 else found_bytes[:1]


def _joined(of_steps: list[list[list[Any]]], number: int) -> list[Any]:
    """Return the concatenated lists of the `number`th rank. A step with a single list has it for all ranks."""
    return [one for of_ranks in of_steps for one in of_ranks[number if len(of_ranks) > 1 else 0]]


_NO_TILES = Tiled()


def _occurring(table: np.ndarray, times: np.ndarray) -> list[tuple[tuple[int, ...], int]]:
    """Return (a column of `table`, count of tiles with it), by rising values."""
    order = np.lexsort(table[::-1])
    table = table[:, order]
    begins = np.flatnonzero(np.r_[True, (table[:, 1:] != table[:, :-1]).any(0)])
    counts = np.add.reduceat(times[order], begins).tolist()
    return [(tuple(values), n) for values, n in zip(table[:, begins].T.tolist(), counts, strict=True)]


def values_of_ranks(schedule: Schedule) -> list[Values]:
    """Return the values that expressions may name at each rank. Ranks with equal contents share their prefix sums."""
    distinct = {id(of_rank): of_rank for c in schedule.contents for of_rank in c.expected}
    equal = {of_rank: PrefixSums(of_rank) for of_rank in set(distinct.values())}
    held = {key: equal[of_rank] for key, of_rank in distinct.items()}
    return [
        {"rank": rank} | {c.buffer: held[id(c.expected[rank])] for c in schedule.contents}
        for rank in range(schedule.world_size)
    ]


@lru_cache(maxsize=1 << 13)  # candidates for dozens of ranks have the same few thousand
def _at_all_ranks(index: Expr, turn: Iteration, world: int) -> ByRank:
    with np.errstate(divide="raise"):
        return _collapse(index.evaluated_over({**dict(turn), "rank": np.arange(world)}))


def key_of(step: Step) -> tuple:
    """Return a key that is equal only for steps that have equal numbers, and equal costs, in every loop iteration."""
    return step.kind, *_key_of(step.values())


def _key_of(values: tuple[Any, ...]) -> list[Any]:
    key: list[Any] = []
    for value in values:
        kind = value.__class__
        if kind is Region:
            rows, cols, at = value.rows, value.cols, value.at
            key.append(
                (
                    value.buffer,
                    rows if rows.__class__ is int else _text(rows),
                    cols if cols.__class__ is int else _text(cols),
                    at.text if at.__class__ is Expr else at,
                )
            )
        elif kind is tuple:
            key.append(tuple(_key_of(value)))
        elif kind is Norm:
            key.append(tuple(_key_of((value.out, value.weight))))
        else:
            key.append(value.text if kind is Expr else value)
    return key


def _text(index: Index) -> int | str:
    """Return a substitute for `index` in a key: hashing an expression is slower than hashing its text."""
    return index.text if isinstance(index, Expr) else index


def at_rank(number: ByRank, rank: int) -> int:
    return number if isinstance(number, int) else int(number[rank])


def _everywhere(*conditions: ByRank | np.bool_ | bool) -> ByRank:
    """Return 1 at ranks where all conditions hold, and 0 elsewhere."""
    if all(isinstance(one, int) for one in conditions):
        return int(all(conditions))
    return _collapse(np.logical_and.reduce(np.broadcast_arrays(*conditions)).astype(np.int64))


def _collapse(numbers: Sequence[int] | np.ndarray | int) -> ByRank:
    found = np.asarray(numbers)
    if not found.ndim:
        return int(found)
    first = found[0]
    return int(first) if (found == first).all() else found
