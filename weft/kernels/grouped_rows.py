"""The search for the rows of a tile of `weft.kernels.grouped_matmul`, in the table of counts, which only the device knows.

A tile's number determines its expert, and its row tile and column among the tiles of the expert. The row tile determines the
source, and the places of the rows in the operands and in the result.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def table_of_counts(
    counts, counts_stride, most, W: tl.constexpr, E: tl.constexpr, W_P2: tl.constexpr, E_P2: tl.constexpr
):
    """Load `counts`, the numbers of rows from each source rank for each expert, as int32 `[W_P2, E_P2]`. Each count is clamped
    to `0 .. most`. Entries beyond W and E are 0.
    """
    source = tl.arange(0, W_P2)[:, None]
    expert = tl.arange(0, E_P2)[None, :]
    rows = tl.load(counts + source * counts_stride + expert, mask=(source < W) & (expert < E), other=0)
    return tl.minimum(tl.maximum(rows, 0), most).to(tl.int32)


@triton.jit
def tiled_rows(table, sources, rank, most, MERGED: tl.constexpr):
    """Return the number of rows of each segment, `[W_P2, E_P2]`, from which the number of tiles follows. A segment is the rows
    of one source rank for one expert. With MERGED, all rows of an expert are one segment: their number is in the line of source
    `rank`, and the other lines are 0.
    """
    if MERGED:
        rows = tl.minimum(tl.sum(table, 0), most)
        return tl.where(sources[:, None] == rank, rows[None, :], 0)
    return table


@triton.jit
def rows_of_sources(table, expert, experts, block_first):
    """Return two vectors, (ends, places), with which to find the rows of an expert. Both have an entry for each source rank s:

    - ends[s]: the number of the expert's rows from ranks 0 to s. If all rows of the expert are listed in the order of their
      sources, the rows of s end at this index.
    - places[s]: add it to the index of a row of s in this list. The result is the row's number in the matrix that stores it
      (`own` or `slots`).
    """
    rows = tl.sum(tl.where(experts[None, :] == expert, table, 0), 1)
    earlier = tl.sum(tl.where(experts[None, :] < expert, table, 0), 1)
    ends = tl.cumsum(rows, 0)
    return ends, block_first + earlier - (ends - rows)


@triton.jit
def least_count(counts, counts_stride, W: tl.constexpr, E: tl.constexpr, W_P2: tl.constexpr, E_P2: tl.constexpr):
    source = tl.arange(0, W_P2)[:, None]
    expert = tl.arange(0, E_P2)[None, :]
    rows = tl.load(counts + source * counts_stride + expert, mask=(source < W) & (expert < E), other=0)
    return tl.min(tl.min(rows, 1), 0)


@triton.jit
def pick(here, of_segment):
    """Return the element of the vector `of_segment` at the one index where the mask `here` is True."""
    return tl.sum(tl.where(here, of_segment, 0), 0)


@triton.jit
def expert_of_tile(
    row_tile, table, ends, is_source, block_first, experts, sources, rank, most,
    MERGED: tl.constexpr, BACK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return the expert of a row tile of the launch, and values that all tiles of the expert share:

    - first, end: the number of row tiles of the launch before this expert, and up to and including it.

    The other results are vectors, with an entry for each source:

    - segment_first, segment_end: the source's first row tile of this expert, and the end of its row tiles.
    - by_source: the tile's first row in the source's block is by_source + row_tile * BLOCK_M.
    - in_whole: the tile's first row in the matrix `whole` of `grouped_matmul_kernel` is in_whole + row_tile * BLOCK_M.
    - left_of: from the tile's first row on, the source has left_of - row_tile * BLOCK_M rows of this expert.
    - row_ends, places: see `rows_of_sources`; zeros unless MERGED and BACK.
    """
    before = ends <= row_tile
    expert = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, ends, 0), 0)
    row_ends, places = tl.zeros_like(sources), tl.zeros_like(sources)
    if MERGED and BACK:
        row_ends, places = rows_of_sources(table, expert, experts, block_first)
    table = tiled_rows(table, sources, rank, most, MERGED)
    earlier = tl.sum(tl.where(experts[None, :] < expert, table, 0), 1)
    rows = tl.sum(tl.where(experts[None, :] == expert, table, 0), 1)
    row_tiles_of = tl.where(is_source, tl.cdiv(rows, BLOCK_M), 0)
    end = first + tl.sum(row_tiles_of, 0)
    segment_end = tl.cumsum(row_tiles_of, 0)
    segment_first = segment_end - row_tiles_of
    by_source = block_first + earlier - segment_first * BLOCK_M
    in_whole = tl.sum(earlier, 0) + tl.cumsum(rows, 0) - rows - segment_first * BLOCK_M
    left_of = rows + segment_first * BLOCK_M
    return expert, first, end, segment_first, segment_end, by_source, in_whole, left_of, row_ends, places


@triton.jit
def place_in_expert(number, row_tiles, N_TILES: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (row tile, first column) of an expert's tile number `number`. Tiles are ordered by group, a group being GROUP
    consecutive row tiles, and within a group by column.
    """
    group = number // (GROUP * N_TILES)
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    number -= group * (GROUP * N_TILES)
    return group * GROUP + number % group_rows, (number // group_rows) * BLOCK_N


@triton.jit
def rows_of_tile(
    row_tile, segment_first, segment_end, by_source, in_whole, left_of, sources, turn, rank,
    own_rows, slots_rows, whole_rows, slot_rows, BACK: tl.constexpr, MERGED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return (is_own, first row to read, first row to store, number of rows to store) for a row tile (BLOCK_M rows of one
    expert).

    is_own: True if this rank itself is the source of the rows.
    row_tile: the number of the tile among the expert's row tiles. segment_first .. left_of: results of `expert_of_tile`.
    turn: the position of each source after this rank, `(source - rank) % W`.
    """
    here = (row_tile >= segment_first) & (row_tile < segment_end)
    is_own = pick(here, sources) == rank
    if BACK:
        x_row = pick(here, in_whole) + row_tile * BLOCK_M
        y_row = pick(here, by_source) + row_tile * BLOCK_M
        end_of_slot = tl.minimum(pick(here, turn) * slot_rows, slots_rows)
        y_end = tl.where(is_own, own_rows, end_of_slot)
    else:
        x_row = pick(here, by_source) + row_tile * BLOCK_M
        y_row = pick(here, in_whole) + row_tile * BLOCK_M
        y_end = whole_rows
    if MERGED and BACK:  # `store_to_sources` finds each row's place
        return is_own, x_row, y_row, tl.maximum(pick(here, left_of) - row_tile * BLOCK_M, 0)
    # The caller reports rows beyond y. Sums of invalid counts may have overflowed.
    left = tl.minimum(pick(here, left_of) - row_tile * BLOCK_M, y_end - y_row)
    return is_own, x_row, y_row, tl.where(y_row < 0, 0, tl.maximum(left, 0))
