"""Matrix multiplication that tracks its progress. The kernel computes tiles in a given order, stores each tile at an
address from a table, and sets signals as soon as their tiles are stored.

T3's tracker counts stores in the memory controller, including stores by peers and by DMA. Here a program increments a
counter in device memory after each tile that it stores. The program that makes a counter's last increment sets the
counter's signals. A stream that waits for a signal copies finished tiles while the kernel continues. The GEMM is one
launch, and copies by copy engine (DMA) use no compute units.

    table [tiles, columns]      for each tile: its first row in a, its number of rows, its first column, its number of columns,
                                the address and the row pitch of its part of the result, and the indices of its counters;
                                with ADDS also the addend's address and row pitch
    counters [n, 4]             for each counter: number of finished tiles (zero between launches), total number of tiles,
                                start and end of its range in `sets`
    sets                        addresses of flag words (`weft.kernels.signals`), on this rank and on peers

Split-K (SPLITS > 1): SPLITS programs each multiply one part of the K range of a tile, and store an fp32 partial sum in
`partials`. The last program to finish reduces the partial sums in the order of the parts, so results are bitwise
reproducible. It stores the tile and increments the counters.

A tile is stored at an address of this device or of a peer. A negative row pitch means that the address is an offset in bytes
from `y`, the caller's tensor. The addend (the C of a GEMM) is in memory of this device or of a peer. The program adds the
tile's part of the addend in fp32 when the product is done. So a peer's partial sum is transferred while other tiles compute,
without a separate copy.

Order. After the stores of a tile, a program runs a barrier, then increments a counter with acquire and release at system scope.
The program that makes the last increment has acquired all other increments, and stores the flags with release. Do not wait
inside the loop: a wait would break the compiler's software pipelining.

Speed. The loop over tiles and the loop over K are compiled as one loop, so that the next tile's operands arrive while a
tile is stored. A Triton barrier, branch or loop after a tile would prevent that. So on NVIDIA GPUs one thread counts
tiles and sets flags, in PTX, while the other threads continue (`_TRACK`).

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", section 4.2, in
software, and 7.7 (split-K GEMMs).
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.signals import write_flag

_TRACK = tl.constexpr(
    # $1: a counter; $2: `sets`. Wait for the stores of all threads; one thread counts the tile.
    "{.reg .pred p; .reg .u32 t; .reg .u64 come, total, word, end, at; "
    "bar.sync 0; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra DONE; "
    "atom.global.sys.acq_rel.add.u64 come, [$1], 1; ld.global.u64 total, [$1+8]; add.u64 come, come, 1; "
    "setp.ne.u64 p, come, total; @p bra DONE; "
    # The last tile: reset the counter, and store 1 at each address.
    "mov.u64 come, 0; st.global.u64 [$1], come; ld.global.u64 word, [$1+16]; ld.global.u64 end, [$1+24]; mov.u32 t, 1; "
    "NEXT: setp.ge.u64 p, word, end; @p bra DONE; shl.b64 at, word, 3; add.u64 at, $2, at; ld.global.u64 at, [at]; "
    "st.release.sys.global.b32 [at], t; add.u64 word, word, 1; bra NEXT; "
    "DONE: mov.u32 $0, 0;}"
)


@triton.jit
def _count(counter, sets, PTX: tl.constexpr):
    """Increment a counter after all threads of this program have stored their parts of a tile. The program that makes the
    counter's last increment also sets its flags.
    """
    if PTX:
        tl.inline_asm_elementwise(
            _TRACK, "=r,l,l", [counter.to(tl.int64), sets.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()  # all lanes have stored
        total = tl.load(counter + 1)
        come = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys")
        if come == total - 1:
            tl.store(counter, tl.full([], 0, tl.int64))
            for word in range(tl.load(counter + 2).to(tl.int32), tl.load(counter + 3).to(tl.int32)):
                write_flag(tl.load(sets + word), tl.full([], 1, tl.int32), True, PTX)


@triton.jit
def _store_and_count(
    acc, entry, counters, sets, y, DTYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SETS: tl.constexpr, ADDS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    in_tile, in_columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    rows, columns = tl.load(entry + 1).to(tl.int32), tl.load(entry + 3).to(tl.int32)
    place, pitch = tl.load(entry + 4), tl.load(entry + 5)
    to = tl.where(pitch < 0, y + place, place).to(tl.pointer_type(DTYPE))
    step = tl.where(pitch < 0, -pitch, pitch) // ALIGN * ALIGN
    to = tl.multiple_of(to, ALIGN * DTYPE.primitive_bitwidth // 8)
    columns = columns // ALIGN * ALIGN  # tells the compiler the alignment, so that it stores 16 bytes at a time
    at = to + in_tile.to(tl.int64)[:, None] * step + in_columns[None, :]
    mask = (in_tile < rows)[:, None] & (in_columns < columns)[None, :]
    if ADDS:
        added = tl.load(entry + 6 + SETS).to(tl.pointer_type(DTYPE))
        added = tl.multiple_of(added, ALIGN * DTYPE.primitive_bitwidth // 8)
        step = tl.load(entry + 7 + SETS) // ALIGN * ALIGN
        acc += tl.load(added + in_tile.to(tl.int64)[:, None] * step + in_columns[None, :], mask=mask).to(tl.float32)
    tl.store(at, acc.to(DTYPE), mask=mask)

    for number in tl.static_range(SETS):
        _count(counters + 4 * tl.load(entry + 6 + number), sets, PTX)


@triton.jit(
    do_not_specialize=["y", "tiles", "a_rows", "a_stride", "w_stride"],
    do_not_specialize_on_alignment=["table", "counters", "sets", "arrived"],
)
def tracked_matmul_kernel(
    a, w, table, counters, sets, partials, arrived,
    y: tl.int64, tiles: tl.int32, a_rows: tl.int32, a_stride: tl.int64, w_stride: tl.int64,
    K: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, TMA: tl.constexpr, W_TRANSPOSED: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SETS: tl.constexpr, ADDS: tl.constexpr,
    SPLITS: tl.constexpr, PART_K: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute a @ w, and set the signals of finished tiles, as the module docstring describes.

    a `[a_rows, K]`, w `[K, N]` (W_TRANSPOSED: `[N, K]`): the operands, of type DTYPE, with unit stride in the last dimension.
        With TMA both are tensor maps with boxes `[BLOCK_M, BLOCK_K]` and `[BLOCK_K, BLOCK_N]` (or `[BLOCK_N, BLOCK_K]`).
        Otherwise they are pointers, with strides in elements that are multiples of ALIGN.
    table, counters, sets: see the module docstring. y: the address of the caller's tensor.
    partials `[tiles, SPLITS, BLOCK_M, BLOCK_N]`: fp32 scratch for partial sums. arrived `[tiles]`: for each tile, the number of
        programs that have stored their partial sums; zero between launches.
    PART_K: if SPLITS programs share a tile, the number of elements of K that each program multiplies.
    """
    in_tile, in_columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    ONE_LOOP: tl.constexpr = TMA and PTX and SPLITS == 1
    for unit in tl.range(tl.program_id(0), tiles * SPLITS, tl.num_programs(0), flatten=ONE_LOOP):
        tile, begin = unit // SPLITS, unit % SPLITS * PART_K
        entry = table + tile * (6 + SETS + 2 * ADDS)
        row, rows = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
        column = tl.load(entry + 2).to(tl.int32)

        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if TMA:
            end = K if SPLITS == 1 else tl.minimum(begin + PART_K, K)
            for k in range(0 if SPLITS == 1 else begin, end, BLOCK_K):
                x = a.load([row, k])
                if W_TRANSPOSED:
                    b = w.load([column, k]).T
                else:
                    b = w.load([k, column])
                acc = tl.dot(x, b, acc)
        else:
            ks = tl.arange(0, BLOCK_K)
            is_row = (in_tile < rows) & (row + in_tile < a_rows)
            is_column = column + in_columns < N
            a_at = a + (row + in_tile).to(tl.int64)[:, None] * (a_stride // ALIGN * ALIGN) + (begin + ks)[None, :]
            w_step = w_stride // ALIGN * ALIGN
            if W_TRANSPOSED:
                w_at = w + (begin + ks)[:, None] + (column + in_columns).to(tl.int64)[None, :] * w_step
            else:
                w_at = w + (begin + ks).to(tl.int64)[:, None] * w_step + (column + in_columns)[None, :]
            for k in range(begin, tl.minimum(begin + PART_K, K), BLOCK_K):
                is_k = ks < K - k
                x = tl.load(a_at, mask=is_row[:, None] & is_k[None, :], other=0.0)
                b = tl.load(w_at, mask=is_k[:, None] & is_column[None, :], other=0.0)
                acc = tl.dot(x, b, acc, input_precision="ieee")
                a_at += BLOCK_K
                if W_TRANSPOSED:
                    w_at += BLOCK_K
                else:
                    w_at += BLOCK_K * w_step

        if SPLITS == 1:
            _store_and_count(acc, entry, counters, sets, y, DTYPE, ALIGN, BLOCK_M, BLOCK_N, SETS, ADDS, PTX)
        else:
            in_part = in_tile[:, None] * BLOCK_N + in_columns[None, :]
            parts = partials + tile * (SPLITS * BLOCK_M * BLOCK_N)  # there are at most as many tiles as programs
            tl.store(parts + unit % SPLITS * (BLOCK_M * BLOCK_N) + in_part, acc)
            tl.debug_barrier()  # all lanes have stored
            if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
                tl.store(arrived + tile, tl.full([], 0, tl.int32))
                acc = tl.load(parts + in_part)
                for split in range(1, SPLITS):
                    acc += tl.load(parts + split * (BLOCK_M * BLOCK_N) + in_part)
                _store_and_count(acc, entry, counters, sets, y, DTYPE, ALIGN, BLOCK_M, BLOCK_N, SETS, ADDS, PTX)
