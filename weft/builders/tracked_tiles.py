"""The tiles of a tracked GEMM in the order in which its kernel computes them."""

from __future__ import annotations

from collections.abc import Sequence

from weft.builders.operands import split
from weft.schedule.expr import Expr, Index, lookup
from weft.schedule.kernels import TrackedMatmul

_GROUP = 8  # row tiles that are computed together, column by column, so that their inputs stay in the cache
_TILE, _LEAST_TILE = (128, 256), 16  # (rows, columns); a small product gets tiles of at least 16 x 16


class TrackedTiles:
    """The tiles of a tracked GEMM, as expressions of the tile's index t.

    The GEMM computes one or more parts of shape [m, n], such as the rows of each rank. Each part is cut by rows into
    `chunks` chunks.

    order: the chunks of all parts in the order of computation. Each is given by its index within its part. Default: the chunks
        of one part, in order.
    pieces: the rows of each chunk within its part, as (first row, number of rows).
    counts: the number of tiles of each chunk of a part.
    extent: the number of tiles of all parts.
    rows, cols: the rows and the columns of tile t within its part, as (first, count).
    """

    def __init__(self, m: int, n: int, chunks: int, order: Sequence[int] | None = None) -> None:
        height, width = (
            min(most, max(_LEAST_TILE, 1 << (size - 1).bit_length())) for most, size in zip(_TILE, (m, n), strict=True)
        )
        self.kernel, down, across = TrackedMatmul(height, width), -(-m // height), -(-n // width)
        tiles = split(down, chunks, what="row tiles of a rank's result")
        self.pieces = [(height * first, min(m - height * first, height * count)) for first, count in tiles]
        self.counts = [count * across for _, count in tiles]
        # Entry t // across: (chunk, first row tile of the group, row tiles of the group, row tiles before the group).
        table: list[tuple[int, int, int, int]] = []
        for chunk, piece in enumerate(range(chunks) if order is None else order):
            first, rows = tiles[piece]
            for i in range(first, first + rows, _GROUP):
                count = min(_GROUP, first + rows - i)
                table += [(chunk, i, count, len(table))] * count
        self._chunks, firsts, counts, begins = zip(*table, strict=True)
        self._at: Index = Expr("t") // across
        self.extent = len(table) * across
        begin_of, first_of, count_of = (lookup(one, self._at) for one in (begins, firsts, counts))
        in_group = Expr("t") - begin_of * across
        row = first_of + in_group % count_of  # type: ignore[operator]  # numbers: all entries are equal
        col = in_group // count_of  # type: ignore[operator]
        self.rows = height * row, lookup([min(height, m - height * i) for i in range(down)], row)
        self.cols = width * col, lookup([min(width, n - width * j) for j in range(across)], col)

    def by_chunk(self, values: Sequence[int]) -> Index:
        """Return `values[c]` as an expression of t, where c is the number of tile t's chunk in the order of
        computation.
        """
        return lookup([values[chunk] for chunk in self._chunks], self._at)
