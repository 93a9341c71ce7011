"""Stores of the tiles that `weft.kernels.grouped_matmul` computes. They use a ragged tensor map, with which the hardware masks
rows outside of a segment. If the rows of a tile go to several sources, they use pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.ragged_tma import to_ragged_indices


@triton.jit
def _store_rows(y, first, count, column, tile):
    """Store the first `count` rows of a tile to `y`, from row `first` of `y` on. `y` is a ragged tensor map: the hardware masks
    the other rows of the tile.
    """
    a, b, c = to_ragged_indices(first, count, 0)
    y.store([a, b, c, column], tile.reshape(1, 1, tile.shape[0], tile.shape[1]))


@triton.jit
def store_result(
    own, slots, whole, is_own, y_row, left, column, acc,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Store the first `left` rows of the tile `acc` to the result, from the result's row `y_row` on. The result is `whole`.
    With BACK it is `own` if the rows belong to this rank (`is_own`), else `slots`. All three are ragged tensor maps.
    """
    if BACK:
        if is_own:
            y = own
        else:
            y = slots
    else:
        y = whole
    if PARTS == 2:
        halves = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1)
        left_half, right_half = tl.split(halves)
        _store_rows(y, y_row, left, column, left_half.to(DTYPE))
        _store_rows(y, y_row, left, column + BLOCK_N // 2, right_half.to(DTYPE))
    else:
        _store_rows(y, y_row, left, column, acc.to(DTYPE))


@triton.jit
def store_to_sources(
    own_address, slots_address, own_stride, slots_stride, own_rows, slots_rows, slot_rows, rank, turn, sources,
    row_ends, places, row, left, column, acc,
    N: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Store a tile whose rows belong to several source ranks: each row into the block of its source, in this rank's result
    `own` or in the outbox `slots`.

    turn: the position of each source after this rank, `(source - rank) % W`. sources: the numbers of the source ranks.
    row: the index of the tile's first row among the rows of its expert. left: the number of rows to store.
    row_ends, places: see `rows_of_sources`.
    """
    in_tile = tl.arange(0, BLOCK_M)
    at = row + in_tile
    source = tl.sum((row_ends[None, :] <= at[:, None]).to(tl.int32), 1)
    is_source = sources[None, :] == source[:, None]
    to = tl.sum(tl.where(is_source, places[None, :], 0), 1) + at
    is_own = source == rank
    end_of_slot = tl.sum(tl.where(is_source, tl.minimum(turn * slot_rows, slots_rows)[None, :], 0), 1)
    is_row = (in_tile < left) & (to >= 0) & (to < tl.where(is_own, own_rows, end_of_slot))
    ITEM_BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    pitch = tl.where(is_own, own_stride, slots_stride) * ITEM_BYTES
    rows = (tl.where(is_own, own_address, slots_address) + to.to(tl.int64) * pitch)[:, None].to(tl.pointer_type(DTYPE))
    if ALIGN > 1:
        rows = tl.multiple_of(rows, [16, 16])  # bytes
    columns = column + tl.arange(0, BLOCK_N // PARTS)
    if PARTS == 2:
        left_half, right_half = tl.split(acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1))
        tl.store(rows + columns[None, :], left_half.to(DTYPE), mask=is_row[:, None] & (columns < N)[None, :])
        columns += BLOCK_N // 2
        tl.store(rows + columns[None, :], right_half.to(DTYPE), mask=is_row[:, None] & (columns < N)[None, :])
    else:
        tl.store(rows + columns[None, :], acc.to(DTYPE), mask=is_row[:, None] & (columns < N)[None, :])
