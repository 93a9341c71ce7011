"""The tiles of one tracked GEMM, chunk by chunk in the order of production: the rows, columns and chunk of tile t.

This is `partial_products.Tiles` for any order of production.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.builders.partial_products import GROUP, TrackedTiles
from weft.schedule.expr import Expr, Index, lookup


class TilesOfRank:
    """The tiles of a product of `m` rows for each rank, in `per_rank` chunks. pieces: (first, count) of each chunk's rows. tiles:
    number in each."""

    def __init__(self, m: int, n: int, per_rank: int) -> None:
        tiles = TrackedTiles(m, n, per_rank)
        self.kernel, self.across = tiles.kernel, -(-n // tiles.kernel.cols)
        self.pieces, self.tiles = [rows for rows, _ in tiles.chunks], [count for _, count in tiles.chunks]
        self._m, self._n = m, n

    def groups(self, piece: int) -> list[tuple[int, int]]:
        """Return (first, count) of the row tiles that are computed column by column."""
        first = self.pieces[piece][0] // self.kernel.rows
        end = first + self.tiles[piece] // self.across
        return [(i, min(GROUP, end - i)) for i in range(first, end, GROUP)]

    def rows(self, i: Index) -> tuple[Index, Index]:
        return _cut(i, self.kernel.rows, self._m)

    def cols(self, j: Index) -> tuple[Index, Index]:
        return _cut(j, self.kernel.cols, self._n)


def _cut(i: Index, size: int, whole: int) -> tuple[Index, Index]:
    """Return (first, count) of the i-th piece of `whole`, each of `size`, the last one smaller."""
    return size * i, lookup([min(size, whole - begin) for begin in range(0, whole, size)], i)


class TilesInOrder:
    """The tiles as expressions of t.

    pieces: for each chunk in the order of production, its number among its owner's chunks. rows, cols: (first, count), relative
    to the owner's rows. extent: of t."""

    def __init__(self, tiling: TilesOfRank, pieces: Sequence[int]) -> None:
        groups = [(chunk, *group) for chunk, piece in enumerate(pieces) for group in tiling.groups(piece)]
        # Indexed by t // across: each row tile counts as `across` tiles.
        table = [(chunk, first, count, begin) for begin, (chunk, first, count) in _begun(groups) for _ in range(count)]
        self._chunks, firsts, counts, begins = zip(*table, strict=True)
        self._at: Index = Expr("t") // tiling.across
        self.extent = len(table) * tiling.across
        first, count, begin = (lookup(one, self._at) for one in (firsts, counts, begins))
        in_group = Expr("t") - begin * tiling.across
        i, j = first + in_group % count, in_group // count  # type: ignore[operator]  # numbers: all entries are equal
        self.rows, self.cols = tiling.rows(i), tiling.cols(j)

    def by_chunk(self, values: Sequence[int]) -> Index:
        """Return the value for a tile's chunk."""
        return lookup([values[chunk] for chunk in self._chunks], self._at)


def _begun(groups: list[tuple[int, int, int]]) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield each group with the number of row tiles before it."""
    begin = 0
    for group in groups:
        yield begin, group
        begin += group[2]
