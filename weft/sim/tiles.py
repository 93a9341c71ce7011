"""Evaluation of a kernel's tiles for many ranks at the same time: operand sizes, `Set` steps, and bytes read.

A kernel may have thousands of tiles on each of dozens of ranks, but most sizes and offsets repeat from tile to tile or
from rank to rank. Each distinct value is evaluated once, and the tiles that have it are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from weft.schedule import Expr, Index, Region, Set, Step, Tiles
from weft.schedule.expr import Values
from weft.schedule.steps.loops import occurring

AT_ONCE = 1 << 18
"""The maximum of tiles x ranks that are evaluated at the same time, to limit memory."""
_FEW_TILES = 512
"""The number of tiles up to which finding equal tiles takes longer than it saves."""
_FEW_NUMBERS = 1 << 12
"""The number of tiles x ranks up to which the values of subexpressions are cached for later steps."""

Parts: TypeAlias = dict[tuple[str, bytes], dict[int, Any]]
"""Cached values of subexpressions: {(index variable, tiles as bytes): {id of the subexpression: values}}."""


class SetBy(NamedTuple):
    """The increments of one counter by the tiles of one rank.

    signal, place: the counter is element `place` of the array `signal`.
    distance: the distance from the rank that runs the tiles to the rank that has the counter.
    times: the number of increments.
    first, last: where the first tile that increments the counter begins, and where the last ends, as fractions of all
        tiles.
    """

    signal: str
    distance: int
    place: int
    times: int
    first: float = 0.0
    last: float = 1.0


class Tiled(NamedTuple):
    """A summary of a kernel's tiles on one rank.

    parts: the number of tiles that execute a step with certain sizes, as (index of the step in `Tiles.work`, sizes,
        number of tiles). The sizes are the rows and columns of each operand, and the distance to the rank that has it.
    sets: the increments of counters by all tiles.
    read_bytes: the bytes that matmuls read from the rank's own memory. A region that several tiles read counts once.
    """

    parts: tuple[tuple[int, tuple[int, ...], int], ...] = ()
    sets: tuple[SetBy, ...] = ()
    read_bytes: int = 0


def is_uneven(step: Tiles) -> bool:
    """True if any expression in the tile's body depends on the tile's index and also on the rank that executes the
    step.

    The rank of a peer is evaluated as a distance from the executing rank. So an expression for a peer always counts as
    dependent on the rank.
    """

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
    """Tiles that represent all tiles of a kernel in the evaluation of some expressions. On every rank, these expressions have
    equal values for a tile and for the tile that represents it.

    at: the indices of the representative tiles.
    times: the number of tiles that each represents.
    last: where the last tile that each represents ends, as a fraction of all tiles.
    """

    at: np.ndarray
    times: np.ndarray
    last: np.ndarray


class DifferentTiles:
    """A search for representative tiles of a kernel. Callers ask for the values of some expressions, such as an operand's rows,
    for all tiles. It is enough to evaluate these expressions for the representative tiles.

    Most expressions are periodic in the tile's index, so the tiles of one period represent all tiles. Otherwise, two
    tiles are equivalent if all subexpressions that do not depend on the rank have equal values for both.
    """

    def __init__(self, tiles: Tiles, extent: int, values: Values) -> None:
        self.step, self.extent, self.values = tiles, extent, values
        self._found: dict[tuple[str | int, ...], _Tiles] = {}

    @property
    def most(self) -> int:
        """The number of tiles for which `Tables` evaluates an expression: the maximum over the kernel's expressions. The
        memory for the evaluation is proportional to this number and to the number of ranks.
        """
        if self.extent <= _FEW_TILES:
            return self.extent
        numbers = [_extents(step) for step in self.step.work]
        numbers += [_read(region, step) for step in self.step.work if step.multiplies for region in step.regions[:-1]]
        numbers += [(one.index, one.at) for one in self.step.inner_sets]
        return max((len(self.of(one).at) for one in numbers), default=1)

    def of(self, numbers: Sequence[Index]) -> _Tiles:
        """Return the representative tiles for the expressions `numbers`."""
        key = tuple(map(text_of, numbers))
        if key not in self._found:
            self._found[key] = self._different([n for n in numbers if isinstance(n, Expr)])
        return self._found[key]

    def _different(self, numbers: list[Expr]) -> _Tiles:
        index = self.step.index
        period = math.lcm(*(n.period(index) for n in numbers))
        at = np.arange(min(period, self.extent) or self.extent)
        times = self.extent // len(at) + (at < self.extent % len(at))
        # The representatives of a period recur until the end, so each representative also occurs near the end.
        last = (at + 1) / self.extent if len(at) == self.extent else np.ones(len(at))
        if len(at) > _FEW_TILES and any("rank" in n.text for n in numbers):
            parts: dict[int, Any] = {}
            for number in numbers:
                number.parts_over({**self.values, index: at}, "rank", parts)
            which = _numbered_alike([np.broadcast_to(part, len(at)) for part in parts.values()], len(at))
            _, first, which = np.unique(which, return_index=True, return_inverse=True)
            order = np.argsort(first)  # sort by tile index
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            of_tile, ends = place[which], np.zeros(len(first))
            np.maximum.at(ends, of_tile, last)
            at, times, last = first[order], np.bincount(of_tile, weights=times).astype(int), ends
        return _Tiles(at, times, last)


def _numbered_alike(columns: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Return a label for each of `count` rows. Rows that are equal in all `columns` get equal labels."""
    found = np.zeros(count, np.int64)
    for column in columns:
        if (column == column[0]).all():
            continue
        column = np.unique(column, return_inverse=True)[1]  # small labels, so that the products below do not overflow
        found = np.unique(found * (column.max() + 1) + column, return_inverse=True)[1]
    return found


def _extents(step: Step) -> tuple[Index, ...]:
    """Return the expressions that determine the cost of a step: sizes and ranks of its regions."""
    return tuple(n for region in step.regions for n in (region.rows, region.cols, region.at))


def _read(region: Region, matmul: Step) -> tuple[Index, ...]:
    """Return the expressions that determine which bytes of `region` a matmul reads."""
    return matmul.regions[-1].rows, region.at, region.row, region.col, region.rows, region.cols


class Tables:
    """The sizes, `Set` steps and bytes read of a kernel's tiles, evaluated for several ranks at the same time.

    These ranks must have the same number of tiles. Buffers that determine dynamic sizes, such as tables of counts, must
    have the same expected contents on all of them. Then most expressions have the same values on all these ranks, and
    each value is counted once.
    """

    def __init__(self, tiles: DifferentTiles, ranks: list[int], world: int, parts: Parts) -> None:
        self._different, self._tiles, self._extent, self._world = tiles, tiles.step, tiles.extent, world
        self._ranks = np.array(ranks)[:, None]
        self._values = {**tiles.values, "rank": self._ranks}
        self._columns: dict[tuple[str, int], np.ndarray] = {}  # (text of an expression, id of the tiles) -> values
        self._parts = parts

    def tiled(self, item_bytes: dict[str, int]) -> list[Tiled]:
        """Return a summary of the tiles of each rank, or a list with only one summary if all ranks are equal.

        item_bytes: the bytes of an element of each buffer, by the buffer's name.
        """
        parts: list[list[list[tuple[int, tuple[int, ...], int]]]] = []  # [step][rank, or a single entry for all ranks]
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
        """Return, for each rank, a sorted list of (values of the expressions `numbers`, number of tiles with these
        values). If all ranks are equal, return one such list.

        `numbers` has three expressions for each region: its rows, its columns, and the rank that has the region. In the
        result, this rank is replaced by its distance from the executing rank.
        """
        table, tiles = self._table(numbers, ranks=slice(2, None, 3))
        found: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}  # most ranks have the same numbers
        counted = []
        for of_rank in np.moveaxis(table, 1, 0):
            key = of_rank.tobytes()
            if key not in found:
                found[key] = occurring(of_rank, tiles.times)
            counted.append(found[key])
        return counted

    def _sets(self, step: Set) -> list[list[SetBy]]:
        """Return the increments of counters by `step` in all tiles: a list for each rank, or one list if all ranks are
        equal.
        """
        (places, distances), tiles = self._table((step.index, step.at), ranks=slice(1, 2))
        found = []
        every = (
            int(tiles.times.sum()),
            int(tiles.at[0]) / self._extent,
            float(tiles.last.max()),
        )  # the case that all tiles set one counter
        for of_rank in places * self._world + distances:  # both in one number, which sorts faster
            if (of_rank == of_rank[0]).all():
                place, distance = divmod(int(of_rank[0]), self._world)
                found.append([SetBy(step.signal, distance, place, *every)])
                continue
            values, first, which = np.unique(of_rank, return_index=True, return_inverse=True)
            last = np.zeros(len(values))
            np.maximum.at(last, which, tiles.last)
            count = np.bincount(which, weights=tiles.times).astype(int)
            where = (values % self._world, values // self._world, count, tiles.at[first] / self._extent, last)
            found.append([SetBy(step.signal, *one) for one in zip(*(w.tolist() for w in where), strict=True)])
        return found

    def _table(self, numbers: Sequence[Index], ranks: slice) -> tuple[np.ndarray, _Tiles]:
        """Return (table, representatives). The table [expressions, ranks, representatives] has the values of the
        expressions `numbers` for representative tiles. The second dimension is 1 if all ranks have the same values.

        ranks: the slice of `numbers` whose values are ranks. The table has the distances from the executing rank to these ranks.
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
            values = {**self._values, self._tiles.index: at}
            few = len(at) * len(self._ranks) <= _FEW_NUMBERS
            known = self._parts.setdefault((self._tiles.index, at.tobytes()), {}) if few else None
            self._columns[key] = np.asarray(number.evaluated_over(values, known), np.int64)
        return self._columns[key]

    def _read_bytes(self, item_bytes: dict[str, int]) -> list[int]:
        """Return, for each rank, the bytes that matmuls read from the rank's own memory. If all ranks are equal, return
        one number.

        item_bytes: the bytes of an element of each buffer, by the buffer's name.
        """
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
            order = np.lexsort((count, col, row, rank))  # regions with the same origin are adjacent, the largest last
            place = np.stack([rank, row, col])[:, order]
            last = np.flatnonzero(np.diff(place, append=-1).any(0))
            np.add.at(total, place[0, last], count[order[last]] * item_bytes[buffer])
        found_bytes: list[int] = total.tolist()
        return found_bytes if len(set(found_bytes)) > 1 else found_bytes[:1]


def _joined(of_steps: list[list[list[Any]]], number: int) -> list[Any]:
    """Return the lists of all steps for rank `number`, concatenated.

    of_steps: for each step, a list for each rank, or one list that applies to all ranks.
    """
    return [one for of_ranks in of_steps for one in of_ranks[number if len(of_ranks) > 1 else 0]]


NO_TILES = Tiled()


def text_of(index: Index) -> int | str:
    """Return `index` as a dict key: a number, or the text of an expression, which is hashed faster than the expression."""
    return index.text if isinstance(index, Expr) else index
