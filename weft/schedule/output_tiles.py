"""The tiles of one tracked GEMM, chunk by chunk in the order of production: which rows and columns tile t has, and of which chunk.

Of a chunk `_GROUP` row tiles at a time are taken column by column, so that what they read stays in the cache. Chunks end where row
tiles end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.schedule.expr import Expr, Index, lookup
from weft.schedule.kernels import TrackedMatmul
from weft.schedule.operands import cut

_GROUP = 8
_TILE, _LEAST_TILE = (128, 256), 16  # rows and columns: fast where there are so many


class Tiling:
    """Of a product of `m` rows for each rank, in `per_rank` chunks. pieces: (first, count) of their rows. tiles: of each."""

    def __init__(self, m: int, n: int, per_rank: int) -> None:
        height, width = (
            min(most, max(_LEAST_TILE, 1 << (size - 1).bit_length())) for most, size in zip(_TILE, (m, n), strict=True)
        )
        self.kernel, self._down, self.across = TrackedMatmul(height, width), -(-m // height), -(-n // width)
        self._heights = [min(height, m - height * i) for i in range(self._down)]
        self._widths = [min(width, n - width * j) for j in range(self.across)]
        self._of_piece = cut(self._down, per_rank, what="row tiles of a rank's part")
        self.pieces = [(height * i, sum(self._heights[i : i + count])) for i, count in self._of_piece]
        self.tiles = [count * self.across for _, count in self._of_piece]

    def groups(self, piece: int) -> list[tuple[int, int]]:
        first, count = self._of_piece[piece]
        return [(i, min(_GROUP, first + count - i)) for i in range(first, first + count, _GROUP)]

    def rows(self, i: Index) -> tuple[Index, Index]:
        return self.kernel.rows * i, lookup(self._heights, i)

    def cols(self, j: Index) -> tuple[Index, Index]:
        return self.kernel.cols * j, lookup(self._widths, j)


class Tiled:
    """As expressions of t. pieces: of each chunk in the order of production, which of its owner's it is. rows, cols: (first,
    count), rows of the owner's. extent: of t."""

    def __init__(self, tiling: Tiling, pieces: Sequence[int]) -> None:
        groups = [(chunk, *group) for chunk, piece in enumerate(pieces) for group in tiling.groups(piece)]
        # By the row tile at which one would be if each took as many tiles as there are columns.
        table = [(chunk, first, count, begin) for begin, (chunk, first, count) in _begun(groups) for _ in range(count)]
        self._chunks, firsts, counts, begins = zip(*table, strict=True)
        self._at: Index = Expr("t") // tiling.across
        self.extent = len(table) * tiling.across
        first, count, begin = (lookup(one, self._at) for one in (firsts, counts, begins))
        in_group = Expr("t") - begin * tiling.across
        i, j = first + in_group % count, in_group // count  # type: ignore[operator]  # of one tile all are numbers
        self.rows, self.cols = tiling.rows(i), tiling.cols(j)

    def by_chunk(self, values: Sequence[int]) -> Index:
        """Of a tile's chunk."""
        return lookup([values[chunk] for chunk in self._chunks], self._at)


def _begun(groups: list[tuple[int, int, int]]) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """With the number of row tiles before each."""
    begin = 0
    for group in groups:
        yield begin, group
        begin += group[2]
