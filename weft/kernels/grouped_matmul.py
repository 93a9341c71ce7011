"""Grouped GEMM of all experts in one launch, which reads rows where an all-to-all stored them.

Problem. Tokens are sorted by expert before they are exchanged. Afterwards a rank has one block of rows per source rank,
each sorted by local expert. Only the device knows the numbers of rows, `counts[source, expert]`. torch's grouped matmul
needs the rows of an expert to be contiguous, which costs a copy of all blocks. In this kernel each (source, expert) is
a segment, read in place:

    y[y0(s, e) : y0(s, e) + counts[s, e]] = x_s[x0(s, e) : x0(s, e) + counts[s, e]] @ w[e]
    y0(s, e) = sum of counts[:, e'] over e' < e  +  sum of counts[s', e] over s' < s      (by expert, then by source)
    x0(s, e) = first row of block s  +  sum of counts[s, e'] over e' < e

For a peer s, x_s is the inbox `slots`, which has `slot_rows` rows for each peer. The block of the n-th source after this rank
begins at row (n - 1) * slot_rows. For this rank itself, x_s is `own`, its tokens for the experts of all ranks. `splits` has the
number of these tokens for each expert. Each rank has `experts` experts, so this rank's block begins at
row sum(splits[: rank * experts]).

With BACK, the roles of x and y are exchanged. Rows are read at y0(s, e) of `whole`, and stored at x0(s, e) of `slots`, which is
then an outbox for the peers. Rows whose source is this rank itself are stored in `own`, the result for this rank's tokens. Rows
that do not fit into a peer's `slot_rows` rows are dropped.

With ADDS, GEMMs are split along K, and y is the sum over launches. Each launch multiplies some columns of x_s and rows
of w. The first launch stores its tile of y. Each later launch loads this tile, accumulates in fp32, and rounds again.
BACK never accumulates.

Tiles for all sources (MERGED). If segments have few rows, tiles for single segments would be almost empty, and each tile
would load the weights again. With MERGED a tile has rows of all sources of an expert. Then the rows of x must be sorted
by expert. With BACK they already are. Without BACK, `weft.kernels.permute` has first copied them into `own`. With BACK the
rows of a tile go to several places, so they are stored through pointers, not through a tensor map.

A launch computes a range of sources and experts. So rows of one exchange step are multiplied while the rows of the next
step are in flight. The kernel has no waits: its stream waits for the operands before the launch. A wait inside the loop
would break the compiler's pipelining.

Speed. A persistent grid iterates over tiles of BLOCK_M x BLOCK_N, expert by expert. A row tile is BLOCK_M rows, with all its
column tiles. Within an expert, every GROUP consecutive row tiles form a group. Within a group, tiles are ordered by column, so
that a column of the weights is read from memory once per group. A program finds the expert of a tile without loads. All experts
have the same number of column tiles, so (tile number // number of column tiles) numbers the row tiles of all experts. The
program compares this number with the experts' running sums of row tiles, which are in registers. Other values of a tile are
computed only when the expert changes.

Last round (SPLITS). If the last round of tiles leaves at least half of the programs idle, several programs share each
of its tiles. Each program multiplies a range of K and stores its partial sum in fp32. The last program to finish adds
the partial sums in the order of K, so the result does not depend on timing. On an H100, 376 tokens x 6528 x 12288 with 2
experts: 172 us instead of 244 us. ROUNDS = 2 is for a last round that occupies up to 2/3 of
the programs. Each of its tiles is cut into three parts, which take two rounds of a third of the time. On an H100, 292
tokens for each of 2 experts x 3200 x 39064: 329 us instead of 369 us.

Few rows (SWAP). A tensor-core instruction (wgmma) computes at least 64 rows and 8 columns. If an expert has few rows,
SWAP computes the transposed product, in which the weights' columns are the rows. So a tile can have 16 rows of x, which
leaves shared memory for more weights in flight.

With TMA, operands are read through tensor maps, which are made on the CPU. The maps return zeros beyond K and N. The
last tile of a segment reads rows of x beyond the segment, but their results are not stored. The map of y is ragged: the
hardware masks rows outside the segment. Without TMA, masked loads and stores have the same effect.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.grouped_rows import (
    expert_of_tile,
    least_count,
    place_in_expert,
    rows_of_tile,
    table_of_counts,
    tiled_rows,
)
from weft.kernels.grouped_stores import store_result, store_to_sources


@triton.jit
def _fill_with_nan(y, rows, stride, N: tl.constexpr, DTYPE: tl.constexpr):
    columns = tl.arange(0, 128)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        for first in range(0, N, 128):
            nan = tl.full([128], float("nan"), tl.float32).to(DTYPE)
            tl.store(y + row * stride + first + columns, nan, mask=first + columns < N)


@triton.jit
def _there(
    y, stride, y_row, left, column,
    N: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the tile of y that earlier launches have stored, as fp32 `[BLOCK_M, BLOCK_N]`, so that this launch can add to it.

    y_row, column: the tile's first row and first column in y.
    left: the number of rows of the tile that are in y; further rows are zero.
    """
    in_tile, columns = tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    rows = y + (y_row + in_tile).to(tl.int64)[:, None] * (stride // ALIGN * ALIGN)
    if ALIGN > 1:
        rows = tl.multiple_of(rows, [16, 16])  # bytes
    there = tl.load(rows + columns[None, :], mask=(in_tile < left)[:, None] & (columns < N)[None, :], other=0.0)
    return there.to(tl.float32)


@triton.jit
def _multiply(
    own, slots, w, whole, expert, column, is_own, x_row, acc, first_step, end_step,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BACK: tl.constexpr, W_TRANSPOSED: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Return acc plus the product of a tile of rows and columns of w, for the steps `first_step` to `end_step` - 1 of the loop
    over K. With SWAP, both the product and acc are transposed.

    own, slots, w, whole: tensor maps, as in `grouped_matmul_kernel`; the rows are read from one of own, slots and whole. A step
        has BLOCK_K elements of K.
    """
    if BACK:
        x = whole
    elif is_own:
        x = own
    else:
        x = slots
    for step in range(first_step, end_step):
        a = x.load([x_row, step * BLOCK_K])
        if W_TRANSPOSED:
            b = w.load([expert, column, step * BLOCK_K]).reshape(BLOCK_N, BLOCK_K).T
        else:
            b = w.load([expert, step * BLOCK_K, column]).reshape(BLOCK_K, BLOCK_N)
        if SWAP:
            acc = tl.dot(b.T, a.T, acc)
        else:
            acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _rows_first(tile, SWAP: tl.constexpr):
    """Return the tile `[BLOCK_M, BLOCK_N]`. With SWAP, it is given transposed."""
    if SWAP:
        made = tl.trans(tile)
    else:
        made = tile
    return made


@triton.jit
def _sum_of_parts(part, parts, stride):
    """Return the sum of `parts` partial tiles, which several programs have computed for one tile. They are added in order.
    part: a pointer to the first partial tile. stride: the number of elements from a partial tile to the next.
    """
    acc = tl.load(part)
    for _ in range(1, parts):
        part += stride
        acc += tl.load(part)
    return acc


@triton.jit(
    # Arguments that differ between calls must not select another compiled kernel, because loading a kernel while a
    # stream waits for a peer would never return.
    do_not_specialize=[
        "own_rows", "slots_rows", "whole_rows", "slot_rows", "rank", "first_source", "n_sources", "first_expert", "n_experts",
        "counts_stride", "own_stride", "slots_stride", "whole_stride", "w_stride", "w_row_stride", "y_address", "slots_address",
    ],
    do_not_specialize_on_alignment=["counts", "splits", "partials", "arrived"],
)  # fmt: skip
def grouped_matmul_kernel(
    own, slots, w, whole, counts, splits, partials, arrived,
    own_rows: tl.int32, slots_rows: tl.int32, whole_rows: tl.int32, slot_rows: tl.int32,
    rank: tl.int32, first_source: tl.int32, n_sources: tl.int32, first_expert: tl.int32, n_experts: tl.int32,
    counts_stride: tl.int64, own_stride: tl.int64, slots_stride: tl.int64, whole_stride: tl.int64, w_stride: tl.int64,
    w_row_stride: tl.int64, y_address: tl.int64, slots_address: tl.int64,
    W: tl.constexpr, E: tl.constexpr, W_P2: tl.constexpr, E_P2: tl.constexpr, SPLITS_P2: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, TMA: tl.constexpr, W_TRANSPOSED: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    BACK: tl.constexpr, ADDS: tl.constexpr, SPLITS: tl.constexpr, MERGED: tl.constexpr, ROUNDS: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """Run the multiplication that the module docstring describes.

    own, slots, w, whole: matrices of type DTYPE, with unit stride in the last dimension. With TMA they are tensor maps, else
        pointers, with strides in elements that are multiples of ALIGN.

        |       | without BACK                       | with BACK                          |
        |-------|------------------------------------|------------------------------------|
        | own   | this rank's tokens `[own_rows, K]` | the result y `[own_rows, N]`       |
        | slots | the inbox `[slots_rows, K]`        | the outbox `[slots_rows, N]`       |
        | whole | the result y `[whole_rows, N]`     | the rows h `[whole_rows, K]`       |
        | w     | `[E, K, N]`, or with W_TRANSPOSED `[E, N, K]` | the same                |

    Boxes of the tensor maps: `[BLOCK_M, BLOCK_K]` for rows to read, `[1, BLOCK_K, BLOCK_N]` (or `[1, BLOCK_N, BLOCK_K]`) for
        w, and ragged `[BLOCK_M, BLOCK_N // PARTS]` for results.
    counts `[W, E]`, int64, with row stride counts_stride: the number of rows from each rank for each local expert. Negative
        counts mean that the group has failed; then y becomes NaN. splits `[W * E]`, int64: the number of this rank's tokens for
        each expert of all ranks.
    first_source, n_sources: the launch covers n_sources sources: `(rank + first_source) % W` and the following ranks.
        first_expert, n_experts: the launch covers n_experts experts from first_expert on.
    y_address: the address of the result y. slots_address: the address of slots.
    partials `[ROUNDS * programs, BLOCK_M, BLOCK_N]`: fp32 scratch for the partial sums of shared tiles. arrived `[programs]`: for
        each shared tile, the number of programs that have stored their partial sums; zero between launches.
    ADDS: add products to y; never with BACK.
    MERGED: tiles have rows of all sources, and the launch covers all sources; never with ADDS.
    SPLITS: the largest number of programs that share a tile; above 1 only with TMA and without ADDS.
    ROUNDS: the largest number of rounds of the parts of shared tiles: 1, or 2 if SPLITS is at least 3.
    SWAP: compute the transposed product; only with TMA and without ADDS.
    """
    tl.static_assert(not SWAP or (TMA and not ADDS), "transposed products need TMA, and cannot accumulate")
    tl.static_assert(not (BACK and ADDS), "BACK cannot accumulate")
    tl.static_assert(not (MERGED and ADDS), "tiles with rows of all sources cannot accumulate")
    tl.static_assert(SPLITS == 1 or (TMA and not ADDS), "programs can share a tile only with TMA and without ADDS")
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program, programs = tl.program_id(0), tl.num_programs(0)
    sources, experts = tl.arange(0, W_P2), tl.arange(0, E_P2)
    turn = (sources - rank + W) % W
    is_source = (sources < W) & (turn >= first_source) & (turn < first_source + n_sources)
    is_expert = (experts >= first_expert) & (experts < first_expert + n_experts)

    if least_count(counts, counts_stride, W, E, W_P2, E_P2) < 0:
        if BACK:
            _fill_with_nan(y_address.to(tl.pointer_type(DTYPE)), own_rows, own_stride, N, DTYPE)
        else:
            _fill_with_nan(y_address.to(tl.pointer_type(DTYPE)), whole_rows, whole_stride, N, DTYPE)
    # The number of row tiles up to and including each expert. Experts before the first of the launch have no tiles.
    table = table_of_counts(counts, counts_stride, whole_rows, W, E, W_P2, E_P2)
    table = tiled_rows(table, sources, rank, whole_rows, MERGED)
    row_tiles = tl.where(is_source[:, None] & is_expert[None, :], tl.cdiv(table, BLOCK_M), 0)
    ends = tl.cumsum(tl.sum(row_tiles, 0), 0)
    before_me = tl.arange(0, SPLITS_P2)
    own_first = tl.sum(tl.load(splits + before_me, mask=before_me < rank * E, other=0), 0).to(tl.int32)
    if MERGED and not BACK:
        own_first = tl.full([], 0, tl.int32)
    block_first = tl.where(sources == rank, own_first, (turn - 1) * slot_rows)

    tiles = tl.max(ends, 0) * N_TILES
    K_STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # tiles of the last round that several programs share, and the number of programs per tile
    shared_tiles, sharers = 0, 1
    if SPLITS > 1:
        last_round = tiles % programs
        sharers = tl.minimum(programs // tl.maximum(last_round, 1), SPLITS)
        if ROUNDS == 2:
            sharers = tl.where((sharers == 1) & (3 * last_round <= 2 * programs), 3, sharers)
        shared_tiles = tl.where(sharers > 1, last_round, 0)

    expert = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)  # number of row tiles before this expert, and including it
    end = tl.full([], 0, tl.int32)
    # Per source, for this expert: see `expert_of_tile`.
    segment_first = tl.zeros([W_P2], tl.int32)
    segment_end = tl.zeros([W_P2], tl.int32)
    by_source = tl.zeros([W_P2], tl.int32)
    in_whole = tl.zeros([W_P2], tl.int32)
    left_of = tl.zeros([W_P2], tl.int32)
    row_ends = tl.zeros([W_P2], tl.int32)  # MERGED and BACK: see `rows_of_sources`
    places = tl.zeros([W_P2], tl.int32)
    # One loop over tiles and K: the next tile's operands arrive while this tile is stored. Reading a stored tile first
    # would end the pipeline, and a large table of counts needs registers.
    ONE_LOOP: tl.constexpr = TMA and not ADDS and W_P2 * E_P2 <= 512
    for tile in tl.range(program, tiles - shared_tiles, programs, flatten=ONE_LOOP):
        if tile >= end * N_TILES:
            table = table_of_counts(counts, counts_stride, whole_rows, W, E, W_P2, E_P2)
            expert, first, end, segment_first, segment_end, by_source, in_whole, left_of, row_ends, places = (
                expert_of_tile(
                    tile // N_TILES,
                    table,
                    ends,
                    is_source,
                    block_first,
                    experts,
                    sources,
                    rank,
                    whole_rows,
                    MERGED,
                    BACK,
                    BLOCK_M,
                )
            )
        row_tile, column = place_in_expert(tile - first * N_TILES, end - first, N_TILES, GROUP, BLOCK_N)
        is_own, x_row, y_row, left = rows_of_tile(
            row_tile, segment_first, segment_end, by_source, in_whole, left_of, sources, turn, rank,
            own_rows, slots_rows, whole_rows, slot_rows, BACK, MERGED, BLOCK_M,
        )  # fmt: skip
        if SWAP:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        elif ADDS:
            begin = y_address.to(tl.pointer_type(DTYPE))
            acc = _there(begin, whole_stride, y_row, left, column, N, ALIGN, BLOCK_M, BLOCK_N)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if TMA:
            acc = _multiply(
                own, slots, w, whole, expert, column, is_own, x_row, acc, 0, K_STEPS, BLOCK_N, BLOCK_K, BACK, W_TRANSPOSED, SWAP
            )  # fmt: skip
            made = _rows_first(acc, SWAP)
            if MERGED and BACK:
                store_to_sources(
                    y_address, slots_address, own_stride, slots_stride, own_rows, slots_rows, slot_rows, rank, turn, sources,
                    row_ends, places, row_tile * BLOCK_M, left, column, made, N, DTYPE, ALIGN, BLOCK_M, BLOCK_N, PARTS,
                )  # fmt: skip
            else:
                store_result(
                    own, slots, whole, is_own, y_row, left, column, made, BLOCK_M, BLOCK_N, PARTS, DTYPE, BACK
                )  # fmt: skip
        else:
            in_tile = tl.arange(0, BLOCK_M)
            if is_own:
                source_at, source_step, source_rows = own, own_stride, own_rows
            else:
                source_at, source_step, source_rows = slots, slots_stride, slots_rows
            if BACK:
                x_at, x_step, x_rows = whole, whole_stride, whole_rows
                y_at, y_step = source_at, source_step
            else:
                x_at, x_step, x_rows = source_at, source_step, source_rows
                y_at, y_step = whole, whole_stride
            from_row = x_row + in_tile
            is_row = (in_tile < left) & (from_row >= 0) & (from_row < x_rows)
            ks = tl.arange(0, BLOCK_K)
            columns = column + tl.arange(0, BLOCK_N)
            is_column = columns < N
            # This does not change the strides. It tells the compiler their alignment, so that it moves 16 bytes at a
            # time.
            x_at += from_row.to(tl.int64)[:, None] * (x_step // ALIGN * ALIGN) + ks[None, :]
            w_at = w + expert.to(tl.int64) * (w_stride // ALIGN * ALIGN)
            w_step = w_row_stride // ALIGN * ALIGN
            if W_TRANSPOSED:
                w_at += ks[:, None] + columns.to(tl.int64)[None, :] * w_step
            else:
                w_at += ks.to(tl.int64)[:, None] * w_step + columns[None, :]
            for k in range(0, K, BLOCK_K):
                is_k = ks < K - k
                a = tl.load(x_at, mask=is_row[:, None] & is_k[None, :], other=0.0)
                b = tl.load(w_at, mask=is_k[:, None] & is_column[None, :], other=0.0)
                acc = tl.dot(a, b, acc, input_precision="ieee")
                x_at += BLOCK_K
                if W_TRANSPOSED:
                    w_at += BLOCK_K
                else:
                    w_at += BLOCK_K * w_step
            if MERGED and BACK:
                store_to_sources(
                    y_address, slots_address, own_stride, slots_stride, own_rows, slots_rows, slot_rows, rank, turn, sources,
                    row_ends, places, row_tile * BLOCK_M, left, column, acc, N, DTYPE, ALIGN, BLOCK_M, BLOCK_N, 1,
                )  # fmt: skip
            else:
                y_at += (y_row + in_tile).to(tl.int64)[:, None] * (y_step // ALIGN * ALIGN) + columns[None, :]
                tl.store(y_at, acc.to(DTYPE), mask=(in_tile < left)[:, None] & is_column[None, :])

    for turn_of_parts in tl.static_range(ROUNDS):
        piece = program + turn_of_parts * programs
        if SPLITS > 1 and piece < shared_tiles * sharers:
            shared, part = piece % shared_tiles, piece // shared_tiles
            tile = tiles - shared_tiles + shared
            table = table_of_counts(counts, counts_stride, whole_rows, W, E, W_P2, E_P2)
            expert, first, end, segment_first, segment_end, by_source, in_whole, left_of, row_ends, places = (
                expert_of_tile(
                    tile // N_TILES,
                    table,
                    ends,
                    is_source,
                    block_first,
                    experts,
                    sources,
                    rank,
                    whole_rows,
                    MERGED,
                    BACK,
                    BLOCK_M,
                )
            )
            row_tile, column = place_in_expert(tile - first * N_TILES, end - first, N_TILES, GROUP, BLOCK_N)
            is_own, x_row, y_row, left = rows_of_tile(
                row_tile, segment_first, segment_end, by_source, in_whole, left_of, sources, turn, rank,
                own_rows, slots_rows, whole_rows, slot_rows, BACK, MERGED, BLOCK_M,
            )  # fmt: skip
            ROWS: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
            COLUMNS: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
            acc = _multiply(
                own, slots, w, whole, expert, column, is_own, x_row, tl.zeros([ROWS, COLUMNS], tl.float32),
                part * K_STEPS // sharers, (part + 1) * K_STEPS // sharers, BLOCK_N, BLOCK_K, BACK, W_TRANSPOSED, SWAP,
            )  # fmt: skip
            in_tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            first_part = partials + shared * (BLOCK_M * BLOCK_N) + in_tile
            stride = shared_tiles * (BLOCK_M * BLOCK_N)
            tl.store(first_part + part * stride, acc)
            tl.debug_barrier()  # all lanes have stored
            if tl.atomic_add(arrived + shared, 1, sem="acq_rel", scope="gpu") == sharers - 1:
                tl.store(arrived + shared, tl.full([], 0, tl.int32))
                made = _rows_first(_sum_of_parts(first_part, sharers, stride), SWAP)
                if MERGED and BACK:
                    store_to_sources(
                        y_address, slots_address, own_stride, slots_stride, own_rows, slots_rows, slot_rows, rank, turn, sources,
                        row_ends, places, row_tile * BLOCK_M, left, column, made, N, DTYPE, ALIGN, BLOCK_M, BLOCK_N, PARTS,
                    )  # fmt: skip
                else:
                    store_result(
                        own, slots, whole, is_own, y_row, left, column, made, BLOCK_M, BLOCK_N, PARTS, DTYPE, BACK
                    )
