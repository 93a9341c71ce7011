"""An all-to-all in one launch: send rows to peers, notify them, wait for the rows of peers, and place these rows.

NCCL's all-to-all is one kernel too. With a launch for each copy, every launch costs its start and its end, and every signal a
fence, which takes longer than small copies. A launch does this, in order:

1. It waits for the flags of `waits`: peers have read what an earlier run sent.
2. It sends a table of counts to every rank, and copies the first `n_sends` ranges of rows, to peers.
3. When all programs are done, it clears the flags of `waits` and sets the flags of `sets`.
4. It copies the next `n_own` ranges, which need no peer.
5. It waits for the flags of `waits_after`, which peers set in step 3, and copies the other ranges.
6. It compares the tables of counts of all ranks with the counts that this rank expects (`weft.kernels.agree`). If the
   counts of a rank differ, the rows from this rank become NaN.
7. When all programs are done, it clears the flags of `waits_after` and sets the flags of `sets_after`.

The last program only stores `begins`. All other programs must run at the same time. In step 5 each of them waits for
flags, which a peer sets only after all its programs have ended step 2. So the launcher starts at most one program for
each multiprocessor.

Order: see `weft.kernels.signals` and `weft.runtime.cuda.flags`. Programs count their arrivals with acquire-release at system
scope. The last program to arrive sets and clears flags. So a rank that sees a flag of `sets` also sees the rows and the tables
of all programs. A flag of `waits` or `waits_after` is cleared only after all programs have seen it. A flag of `sets_after` is
set only after all programs have read the rows that peers sent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.agree import differing, erase
from weft.kernels.move import note
from weft.kernels.signals import FLAG, load_acquire, words, write_flag

_FLAG = tl.constexpr(FLAG)

# The kernel's arguments that are pointers to int64, for ahead-of-time compilation.
TABLES = (
    "ranges", "sizes", "targets", "table", "expected", "sent", "waits", "sets", "waits_after", "sets_after", "begins", "passes",
    "ends", "arrivals", "lost",
)  # fmt: skip


@triton.jit
def _addresses(table, count, FLAGS_P2: tl.constexpr):
    """Return the first `count` addresses of `table`. They are loaded before they are needed, because a load takes half a
    microsecond. Elements beyond `count` repeat the first address.
    """
    number = tl.arange(0, FLAGS_P2)
    return tl.load(table + tl.where(number < count, number, 0))


@triton.jit
def _await(addresses, count, PTX: tl.constexpr):
    """Poll until every flag is set or poisoned. Return True if none is poisoned."""
    alive = count >= 0
    if count > 0:
        found = load_acquire(words(addresses), PTX)
        while tl.min(found, 0) == 0:
            found = load_acquire(words(addresses), PTX)
        alive = tl.sum((found != _FLAG).to(tl.int32), 0) == 0
    return alive


@triton.jit
def _write(addresses, count, value: tl.constexpr, FLAGS_P2: tl.constexpr, PTX: tl.constexpr):
    for i in range(count):
        address = tl.sum(tl.where(tl.arange(0, FLAGS_P2) == i, addresses, 0), 0)
        write_flag(address, value, value == 1, PTX)


@triton.jit
def _share(
    first, last, number, source, target, items, program, programs, alive,
    ITEM: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Copy the ranges first .. last - 1. Programs share the blocks of all these ranges evenly.

    number, source, target, items: for each range, its number, its addresses, and its number of items.
    """
    blocks = tl.where((number >= first) & (number < last), (items + BLOCK - 1) // BLOCK, 0)
    ends, all_blocks = tl.cumsum(blocks, 0), tl.sum(blocks, 0)
    block = program
    while block < all_blocks:
        is_behind = ends <= block
        here = number == tl.sum(is_behind.to(tl.int32), 0)
        begin = tl.max(tl.where(is_behind, ends, 0), 0)
        read, write, count = (
            tl.sum(tl.where(here, source, 0), 0), tl.sum(tl.where(here, target, 0), 0), tl.sum(tl.where(here, items, 0), 0),
        )  # fmt: skip
        place = tl.multiple_of(read.to(tl.pointer_type(ITEM)), ALIGN * ITEM.primitive_bitwidth // 8)
        to = tl.multiple_of(write.to(tl.pointer_type(ITEM)), ALIGN * ITEM.primitive_bitwidth // 8)
        at = (block - begin) * BLOCK + tl.arange(0, BLOCK)
        # The division tells the compiler the alignment, so that it moves 16 bytes at a time.
        inside = at < count // ALIGN * ALIGN
        loaded = tl.load(place + at, mask=inside, other=0)
        tl.store(
            to + at, tl.where(alive, loaded, -1), mask=inside
        )  # the group has failed: NaN in any floating-point type
        block += programs


@triton.jit(
    do_not_specialize=[
        "n_ranges", "n_sends", "n_own", "width", "n_table", "n_waits", "n_sets", "n_waits_after", "n_sets_after", "n_begins",
        "n_passes", "n_ends", "n_lost", "out", "out_rows", "counts", "row", "ranks",
    ],
    do_not_specialize_on_alignment=[*TABLES, "differs"],
)  # fmt: skip
def round_trip_kernel(
    ranges, n_ranges: tl.int32, n_sends: tl.int32, n_own: tl.int32, sizes, width: tl.int64,
    targets, table, n_table: tl.int32,
    waits, n_waits: tl.int32, sets, n_sets: tl.int32, waits_after, n_waits_after: tl.int32, sets_after, n_sets_after: tl.int32,
    begins, n_begins: tl.int32, passes, n_passes: tl.int32, ends, n_ends: tl.int32, arrivals,
    lost, n_lost: tl.int32, expected, sent, differs, out: tl.int64, out_rows: tl.int64, counts: tl.int32, row: tl.int32,
    ranks: tl.int32,
    RANGES_P2: tl.constexpr, FLAGS_P2: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    WORDS: tl.constexpr, WIDE: tl.constexpr, COUNTED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Run the all-to-all that the module docstring describes. There are at least `ranks` + 1 programs.

    ranges int64 `[n_ranges, 5]`: a line for each range of rows: the address and number of rows of the source, the address and
        number of rows of the target, and a flag. If the flag is 1, the target is `out`. If it is 2, the source is `out`.
    sizes int64 `[n_ranges, 3]`: the first row of the source, the first row of the target, and the number of rows to copy. The
        number of rows is clamped to source and target.
    width: the number of items of type ITEM in a row. Rows are contiguous. `width` and all addresses are multiples of ALIGN items.
    targets int64 `[ranks]`: the address, in the memory of each rank, to which the `n_table` words of `table` are copied.
    waits, sets, waits_after, sets_after: addresses of flags. begins, passes, ends `[n, 2]`: (address, number) to store when
        the kernel begins, after `waits`, and when the kernel ends.
    arrivals `[2]`: the numbers of programs that have ended steps 2 and 6, zero between launches. A program may end step 6 before
        another ends step 2. From bit 32 on, the second number also counts ranks whose counts differ, and from bit 40 on
        programs that have seen a failed group.
    lost: `n_lost` counts of rows, which become -1 if the group has failed.
    expected, sent, differs, out, out_rows, counts, row: see `weft.kernels.agree`. With `counts` 0, nothing is compared.
    COUNTED: a type of the size of an element. WIDE: the number of elements in an item.
    """
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0) - 1
    step = tl.full([], 1, tl.int64)
    if program == programs:  # a program of its own, because a fence behind a store to CPU memory takes a microsecond
        note(begins, n_begins, PTX)
    else:
        number = tl.arange(0, RANGES_P2)
        entry, size, is_range = ranges + 5 * number, sizes + 3 * number, number < n_ranges
        source, source_rows = tl.load(entry, mask=is_range, other=0), tl.load(entry + 1, mask=is_range, other=0)
        target, target_rows = tl.load(entry + 2, mask=is_range, other=0), tl.load(entry + 3, mask=is_range, other=0)
        of_caller = tl.load(entry + 4, mask=is_range, other=0)
        first, to = tl.load(size, mask=is_range, other=0), tl.load(size + 1, mask=is_range, other=0)
        rows = tl.load(size + 2, mask=is_range, other=0)
        waits_at, waits_after_at = (
            _addresses(waits, n_waits, FLAGS_P2),
            _addresses(waits_after, n_waits_after, FLAGS_P2),
        )
        sets_at = _addresses(sets, n_sets, FLAGS_P2)
        source, source_rows = tl.where(of_caller == 2, out, source), tl.where(of_caller == 2, out_rows, source_rows)
        target, target_rows = tl.where(of_caller == 1, out, target), tl.where(of_caller == 1, out_rows, target_rows)
        fits = (first >= 0) & (first <= source_rows) & (to >= 0) & (to <= target_rows)
        rows = tl.where(fits, tl.minimum(tl.minimum(rows, target_rows - to), source_rows - first), 0)
        items = tl.maximum(rows, 0) * width
        source += first * width * (ITEM.primitive_bitwidth // 8)
        target += to * width * (ITEM.primitive_bitwidth // 8)
        rank = programs - 1 - program  # the last programs have the fewest rows

        # Every lane reads the flags, so no lane's other loads or stores move ahead of its waits.
        alive = _await(waits_at, n_waits, PTX)
        if rank < ranks:
            place, at = words(tl.load(targets + rank)), 0
            while at < n_table:
                inside = at + tl.arange(0, WORDS) < n_table
                counted = tl.load(table + at + tl.arange(0, WORDS), mask=inside)
                tl.store(place + at + tl.arange(0, WORDS), counted, mask=inside)
                at += WORDS
        _share(0, n_sends, number, source, target, items, program, programs, alive, ITEM, BLOCK, ALIGN)
        tl.debug_barrier()
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="sys") == programs - 1:
            tl.store(arrivals, tl.full([], 0, tl.int64))
            _write(
                waits_at, n_waits, 0, FLAGS_P2, PTX
            )  # before the sets, because peers may then raise these flags again
            if alive:
                _write(sets_at, n_sets, 1, FLAGS_P2, PTX)
            note(passes, n_passes, PTX)

        _share(n_sends, n_sends + n_own, number, source, target, items, program, programs, alive, ITEM, BLOCK, ALIGN)
        if alive:
            alive = _await(waits_after_at, n_waits_after, PTX)
        _share(n_sends + n_own, n_ranges, number, source, target, items, program, programs, alive, ITEM, BLOCK, ALIGN)
        if rank < ranks:
            if differing(rank, ranks, expected, sent, counts, row, WORDS) > 0:
                step += 1 << 32
        if not alive:
            step += 1 << 40
    sets_after_at = _addresses(sets_after, n_sets_after, FLAGS_P2)
    clears_at = _addresses(waits_after, n_waits_after, FLAGS_P2)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + 1, step, sem="acq_rel", scope="sys") + step
    if (arrived & ((1 << 32) - 1)) == programs + 1:
        tl.store(arrivals + 1, tl.full([], 0, tl.int64))
        if (arrived >> 32) & 255 > 0:
            for i in range(ranks):
                each = tl.full([], 0, tl.int64) + i
                if differing(each, ranks, expected, sent, counts, row, WORDS) > 0:
                    erase(each, expected, differs, out, out_rows, width * WIDE, counts, COUNTED, WORDS)
        tl.debug_barrier()
        _write(clears_at, n_waits_after, 0, FLAGS_P2, PTX)
        note(ends, n_ends, PTX)
        if arrived < (1 << 40):
            _write(sets_after_at, n_sets_after, 1, FLAGS_P2, PTX)
        else:
            at = 0
            while at < n_lost:
                inside = at + tl.arange(0, WORDS) < n_lost
                tl.store(lost + at + tl.arange(0, WORDS), tl.full([WORDS], -1, tl.int64), mask=inside)
                at += WORDS
