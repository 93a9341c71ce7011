"""Vectorised evaluation of a schedule's steps for all ranks: their sizes, and the distances to the ranks that they
access.

An expression is evaluated once, with the array of all ranks as the variable `rank`. A result that is equal on all ranks
is stored as one number. So the time grows with the number of different expressions, not with steps x ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, singledispatch
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from weft.schedule import (
    ITEM_BYTES,
    RANK,
    Buffer,
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
from weft.sim.tiles import AT_ONCE, NO_TILES, DifferentTiles, Parts, Tables, Tiled, is_uneven, text_of

Iteration: TypeAlias = tuple[tuple[str, int], ...]
ByRank: TypeAlias = int | np.ndarray
"""A number that is equal on all ranks, or an array with a number for each rank, not all equal."""


class Origin(NamedTuple):
    """The step of a task, and the values of the loop indices around the step."""

    step: Step
    turn: Iteration


class NumberedStep(NamedTuple):
    """A step whose expressions are evaluated for all ranks. Other docstrings call it an item.

    present: 1 on ranks that have the step, otherwise 0.
    numbers: for each operand, the number of rows and columns, and the distance to the rank that has the operand.
    tiled: the summary of the tiles of each rank, if the step has tiles.
    signal, place: the name and index of the signal that the step sets or waits for.
    distance: for a `Set` step, the distance to the rank that has the signal; otherwise None.
    awaited: for a `Wait` step, the number of sets that it waits for; otherwise None.
    previous: True if a `Wait` step waits for the sets of the previous run.
    same: a number by which equal items are recognised: it is the same for items that differ only in their origin.
    carried: True if a kernel that starts at an earlier step also runs this step.
    units: the compute units that the step's launch holds while it polls (`weft.schedule.launches`).
    exchanges: True for the first copy of a launch that is a whole exchange of rows.
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
    exchanges: bool = False


class _Known:
    """A cache of steps whose expressions are evaluated for all ranks. Two schedules share a cache if they have the same number
    of ranks and expect the same contents in the buffers that determine sizes. For example, all candidate schedules of a problem
    share one.
    """

    def __init__(self, values: list[Values]) -> None:
        self.values = values
        # Ranks with the same expected contents are evaluated together.
        self.holds = [tuple(id(held) for held in of.values() if isinstance(held, PrefixSums)) for of in values]
        together: dict[tuple[int, ...], list[int]] = {}
        for rank, holds in enumerate(self.holds):
            together.setdefault(holds, []).append(rank)
        self.together = [np.array(ranks) for ranks in together.values()]
        self.vectors: dict[tuple[str, Iteration, int | bytes], ByRank] = {}
        self.distances: dict[tuple[str | int, Iteration, int | bytes], ByRank] = {}
        self.found: dict[tuple, tuple[Any, ...]] = {}  # key of a step -> its item without the origin
        self.tiled: dict[tuple, tuple[Tiled, ...]] = {}
        self.different = itertools.count(
            0, 2
        )  # values of `NumberedStep.same`: even, and the next odd number if carried


class Numbers:
    """The steps of one schedule, evaluated for all ranks: the sizes of each step, and the distances to the ranks whose
    memory it accesses.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.world, self._ranks = schedule.world_size, np.arange(schedule.world_size)
        self._known = _known(schedule)
        self._values, self._holds, self._together = self._known.values, self._known.holds, self._known.together
        self._vectors, self._distances, self._found = self._known.vectors, self._known.distances, self._known.found
        self._parts: dict[
            tuple[Iteration, tuple[int, ...]], Parts
        ] = {}  # (iteration, ranks) -> subexpressions of tiles
        self._units: dict[str, int] = {}  # resource -> compute units of copies of dynamic size
        self._schedule, self._buffers = schedule, {b.name: b for b in schedule.buffers}
        self._held = frozenset(contents.buffer for contents in schedule.contents)
        sets = [step for step in schedule.walk() if isinstance(step, Set) and step.at is not RANK]
        sets += [one for step in schedule.walk() if isinstance(step, Tiles) for one in step.inner_sets]
        self._crossing = {one.signal for one in sets}  # signals that peers or tiles set

    def items(self, lane: Lane) -> list[NumberedStep]:
        """Return the items (`NumberedStep`) of a lane, with its loops unrolled."""
        everywhere: tuple[Iteration, ByRank] = (), 1
        items = [self._item(step, *state) for step, state in flattened(lane.steps, everywhere, self._turns)]
        steps = [
            substitute(step, dict(turn), partially_evaluated=True) if turn and step.copies_by == "kernel" else step
            for step, turn in (item.origin for item in items)
        ]
        # As on GPUs, a signal between two streams of a rank ends a launch.
        crossing = [
            item.signal in self._crossing and not (isinstance(item.distance, int) and item.distance == 0)
            for item in items
        ]
        units = self._units.get(lane.resource)
        if units is None:
            units = self._units[lane.resource] = units_of_dynamic_copies(self._schedule, lane.resource)
        for launch in launches(
            steps, crossing, self._buffers, held=self._held, dynamic_units=units, tiles_go_on=True,
            round_trips=len(self._schedule.lanes) == 1,
        ):  # fmt: skip
            for place, carried in enumerate(launch.carried(), launch.first):
                if carried or launch.units:
                    items[place] = items[place]._replace(
                        same=items[place].same + carried, carried=carried, units=launch.units
                    )
            if launch.trip:  # a number of its own, because equal copies of other launches take less time
                first = items[launch.begin]
                items[launch.begin] = first._replace(same=-2 - first.same, exchanges=True)
        return items

    def _turns(self, loop: For, around: tuple[Iteration, ByRank]) -> Iterator[tuple[Iteration, ByRank]]:
        turn, there = around
        extent = self.vector(loop.extent, turn, there)
        for i in range(int(np.max(extent))):
            yield (*turn, (loop.index, i)), _everywhere(there, i < extent)

    def vector(self, index: Index, turn: Iteration, there: ByRank = 1) -> ByRank:
        """Return the value of `index`, an expression in a step, on every rank; 0 for ranks that do not have the step.

        turn: the values of the loop indices.
        there: 1 for ranks that have the step, otherwise 0.
        """
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
                pass  # it depends on contents of a buffer, or is invalid on some rank, which `evaluate` reports
        found, here = np.zeros(self.world, np.int64), np.broadcast_to(np.asarray(there) != 0, self.world)
        for ranks in self._together:
            those = ranks[here[ranks]]
            if len(those):
                found[those] = self._evaluated_together(index, turn, those)
        return _collapse(found)

    def _evaluated_together(self, index: Expr, turn: Iteration, ranks: np.ndarray) -> int | np.ndarray | list[int]:
        """Return the value of the expression `index` on each of `ranks`, which have the same contents of buffers."""
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
        key = (text_of(at), turn, there if isinstance(there, int) else there.tobytes())
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
        return _numbered(origin.step, self, origin, there)._replace(same=next(self._known.different))

    def operands(self, step: Step, turn: Iteration, there: ByRank) -> list[ByRank]:
        """Return one list: the number of rows, the number of columns and the distance of the first operand, then these
        three numbers of the next operand, and so on.

        turn: the values of the loop indices.
        there: 1 for ranks that have the step, otherwise 0.
        """
        numbers: list[ByRank] = []
        for region in step.regions:
            numbers.append(self.vector(region.rows, turn, there))
            numbers.append(self.vector(region.cols, turn, there))
            numbers.append(self.distance(region.at, turn, there))
        return numbers

    def sent(self, indices: Sequence[Index], turn: Iteration, there: ByRank) -> list[ByRank]:
        """Return, for distances 0, 1, and so on, the number of rows that each rank sends to the rank at this distance.

        indices: for each destination rank, the expression for the number of rows that are sent to it.
        turn: the values of the loop indices. there: 1 for ranks that have the step, otherwise 0.
        """
        to_ranks = np.array([np.broadcast_to(self.vector(n, turn, there), self.world) for n in indices])
        return [
            _collapse(to_ranks[(self._ranks + distance) % self.world, self._ranks]) for distance in range(self.world)
        ]

    # -- tiles

    def tiled(self, step: Tiles, turn: Iteration, there: ByRank) -> tuple[Tiled, ...]:
        key = (_key_of_tiles(step, self._buffers), turn, there if isinstance(there, int) else there.tobytes())
        found = self._known.tiled.get(key)
        if found is None:
            found = self._known.tiled[key] = self._tiled(step, turn, there)
        return found

    def _tiled(self, step: Tiles, turn: Iteration, there: ByRank) -> tuple[Tiled, ...]:
        extent = self.vector(step.extent, turn, there)
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            if at_rank(there, rank) and at_rank(extent, rank):
                alike.setdefault((at_rank(extent, rank), *self._holds[rank]), []).append(rank)
        found = [NO_TILES] * self.world
        equal: dict[Tiled, Tiled] = {}  # equal ranks share one object, so that later comparisons are by identity
        uneven = is_uneven(step)
        item_bytes = {name: ITEM_BYTES[buffer.dtype] for name, buffer in self._buffers.items()}
        for (count, *_), ranks in alike.items():
            tiles = DifferentTiles(step, count, {**dict(turn), **self._values[ranks[0]]})
            some = max(1, AT_ONCE // tiles.most) if uneven else len(ranks)
            for i in range(0, len(ranks), some):
                here = ranks[i : i + some]
                table = Tables(tiles, here, self.world, self._parts.setdefault((turn, tuple(here)), {}))
                made = [equal.setdefault(one, one) for one in table.tiled(item_bytes)]
                for rank, one in zip(here, made if len(made) > 1 else made * len(here), strict=True):
                    found[rank] = one
        return tuple(found)


@singledispatch
def _numbered(step: Step, numbers: Numbers, origin: Origin, there: ByRank) -> NumberedStep:
    """Return the step with its expressions evaluated. To support another kind of step, register a function here.

    Except for collectives, the result is marked as absent on ranks where the step has nothing to do.
    """
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
    return NumberedStep(origin, _collapse([int(one != NO_TILES) for one in tiled]), tiled=tiled)


_MOST_KNOWN = 1 << 17
_shared: list[tuple[tuple, _Known]] = []
"""The caches of the latest problems' schedules, with at most `_MOST_KNOWN` steps and expressions."""


def _known(schedule: Schedule) -> _Known:
    distinct, of_ranks = _distinct_contents(schedule)
    key = (schedule.world_size, tuple(distinct), of_ranks)
    if not _shared or _shared[0][0] != key or len(_shared[0][1].vectors) + len(_shared[0][1].found) > _MOST_KNOWN:
        held = [PrefixSums(contents) for contents in distinct]
        _shared[:] = [(key, _Known([
            {"rank": rank} | {buffer: held[numbers[rank]] for buffer, numbers in of_ranks}
            for rank in range(schedule.world_size)
        ]))]  # fmt: skip
    return _shared[0][1]


def _distinct_contents(
    schedule: Schedule,
) -> tuple[dict[tuple[int, ...], int], tuple[tuple[str, tuple[int, ...]], ...]]:
    """Number the distinct contents that the schedule expects in buffers. Return (numbers, buffers).

    numbers: a number for each of the distinct contents that buffers have on ranks, as {contents: number}.
    buffers: the buffers with expected contents, as pairs (name, number of its contents on each rank).
    """
    distinct = {id(of_rank): of_rank for c in schedule.contents for of_rank in c.expected}
    numbers: dict[tuple[int, ...], int] = {}
    number_of = {key: numbers.setdefault(of_rank, len(numbers)) for key, of_rank in distinct.items()}
    return numbers, tuple(
        (c.buffer, tuple(number_of[id(of_rank)] for of_rank in c.expected)) for c in schedule.contents
    )


def values_of_ranks(schedule: Schedule) -> list[Values]:
    """Return, for each rank, the variables that expressions may use: {name: value}.

    The variables are the rank, and the buffers that determine sizes at run time. The value of such a buffer is the contents
    that the schedule expects, with their prefix sums. Ranks with equal contents share one object.
    """
    return _known(schedule).values


@lru_cache(maxsize=1 << 13)  # the candidates of a problem repeat the same steps
def _at_all_ranks(index: Expr, turn: Iteration, world: int) -> ByRank:
    with np.errstate(divide="raise"):
        return _collapse(index.evaluated_over({**dict(turn), "rank": np.arange(world)}))


def key_of(step: Step) -> tuple:
    """Return a dict key of the step. Steps with equal keys have equal sizes and costs in every loop iteration."""
    return step.kind, *_key_of(step.values())


def _key_of_tiles(tiles: Tiles, buffers: Mapping[str, Buffer]) -> tuple:
    """Return a dict key of a `Tiles` step. It includes offsets of regions, which determine the bytes that tiles read."""
    key: list[Any] = [tiles.kernel.__class__, tiles.index, text_of(tiles.extent)]
    for step in tiles.body:
        key += (step.kind, step.multiplies)
        if isinstance(step, Set):
            key += (step.signal, text_of(step.index), text_of(step.at))
        for region in step.regions:
            key += (
                region.buffer, ITEM_BYTES[buffers[region.buffer].dtype], text_of(region.row), text_of(region.col),
                text_of(region.rows), text_of(region.cols), text_of(region.at),
            )  # fmt: skip
    return tuple(key)


def _key_of(values: tuple[Any, ...]) -> list[Any]:
    key: list[Any] = []
    for value in values:
        kind = value.__class__
        if kind is Region:
            rows, cols, at = value.rows, value.cols, value.at
            key.append(
                (
                    value.buffer,
                    rows if rows.__class__ is int else text_of(rows),
                    cols if cols.__class__ is int else text_of(cols),
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


def at_rank(number: ByRank, rank: int) -> int:
    return number if isinstance(number, int) else int(number[rank])


def _everywhere(*conditions: ByRank | np.bool_ | bool) -> ByRank:
    """Return 1 for ranks on which all conditions hold, and 0 for other ranks."""
    if all(isinstance(one, int) for one in conditions):
        return int(all(conditions))
    return _collapse(np.logical_and.reduce(np.broadcast_arrays(*conditions)).astype(np.int64))


def _collapse(numbers: Sequence[int] | np.ndarray | int) -> ByRank:
    found = np.asarray(numbers)
    if not found.ndim:
        return int(found)
    first = found[0]
    return int(first) if (found == first).all() else found
