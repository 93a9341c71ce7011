"""A copy on compute units that also waits for signals and sets signals, before and after the copy, in one launch.

A launch does this, in order:

1. It sets the flags of `sets_before`, and waits for the flags of `waits`.
2. It copies one source to one or more targets, or it copies several parts of a buffer, each to its own target.
3. When all programs are done, it clears the flags of `waits` and sets the flags of `sets`.
4. It waits for the flags of `waits_after`, and clears them.

So one launch can be a whole small all-gather. The launch grants credit to the peers, waits for their credit, copies the shard
to all ranks, notifies the peers, and waits for their shards. With several parts it can be an all-to-all. A launch also writes
numbers to memory: at its start (`begins`), after `waits` (`passes`), and at its end (`ends`). From these numbers a thread on
the CPU sees if the launch has missed its deadline.

Use kernel copies where copy engines are slow: for small copies (an engine takes about ten microseconds to start) and
for copies within a device.

Order: see `weft.kernels.signals` and `weft.runtime.cuda.flags`. The last program to finish sets and clears flags. Programs
count their arrivals with acquire-release at system scope. So a rank that sees a flag of `sets` also sees the stores of all
programs, and a flag of `waits` is cleared only after all programs have seen it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.signals import await_flags, now_ns, words, write_flag

# The kernel's arguments that are pointers to int64, for ahead-of-time compilation.
TABLES = ("targets", "parts", "sets_before", "waits", "sets", "waits_after", "begins", "passes", "ends", "arrivals")


@triton.jit
def note(table, count, PTX: tl.constexpr):
    """Store numbers at addresses, for a thread on the CPU that watches deadlines. table: `count` pairs (address, number)."""
    for i in range(count):
        write_flag(tl.load(table + 2 * i), tl.load(table + 2 * i + 1).to(tl.int32), False, PTX)


@triton.jit
def write_flags(table, count, value: tl.constexpr, PTX: tl.constexpr):
    for i in range(count):
        write_flag(tl.load(table + i), tl.full([], value, tl.int32), value == 1, PTX)


@triton.jit
def _put(place, items, inside, ADD: tl.constexpr):
    if ADD:
        tl.atomic_add(place, items, mask=inside, sem="relaxed", scope="sys")
    else:
        tl.store(place, items, mask=inside)


@triton.jit
def _extent(
    source, target, sizes, rows, width, source_pitch, target_pitch, source_rows,
    ITEM: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Return (source, target, rows, width) of a copy: its two addresses, its number of rows, and the number of items of
    a row.

    sizes: for a copy of dynamic size, the address of (first row of the source, first row of the target, number of rows); else
        0.
    """
    if sizes != 0:
        first, to = tl.load(words(sizes)), tl.load(words(sizes) + 1)
        fits = (first >= 0) & (first <= source_rows) & (to >= 0) & (to <= rows)
        rows = tl.where(fits, tl.minimum(tl.minimum(tl.load(words(sizes) + 2), rows - to), source_rows - first), 0)
        source += first * source_pitch * (ITEM.primitive_bitwidth // 8)
        target += to * target_pitch * (ITEM.primitive_bitwidth // 8)
        if (source_pitch == width) & (target_pitch == width):  # contiguous rows are one long row
            width = width * rows
            rows = tl.minimum(rows, 1)
    # The division tells the compiler the alignment, so that it moves 16 bytes at a time.
    return source, target, rows, width // ALIGN * ALIGN


@triton.jit(
    do_not_specialize=[
        "source", "target", "n_targets", "n_parts", "rows", "width", "source_pitch", "target_pitch", "n_sets_before", "n_waits",
        "n_sets", "n_waits_after", "n_begins", "n_passes", "n_ends", "sizes", "source_rows", "early",
    ],
    do_not_specialize_on_alignment=TABLES,
)  # fmt: skip
def move_kernel(
    source: tl.int64, target: tl.int64, rows: tl.int64, width: tl.int64, source_pitch: tl.int64, target_pitch: tl.int64,
    targets, n_targets: tl.int32, parts, n_parts: tl.int32,
    sets_before, n_sets_before: tl.int32, waits, n_waits: tl.int32, sets, n_sets: tl.int32,
    waits_after, n_waits_after: tl.int32, begins, n_begins: tl.int32, passes, n_passes: tl.int32, ends, n_ends: tl.int32,
    arrivals, sizes: tl.int64, source_rows: tl.int64, early: tl.int32,
    ITEM: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, ADD: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Run the copy and the signals that the module docstring describes.

    source, target: addresses of the first rows.
    rows: the number of rows. width and pitches count items of type ITEM. Width, pitches, addresses and offsets are
        multiples of ALIGN items.
    targets `[n_targets]`: addresses of further targets for the same rows.
    parts `[n_parts, 4]`: further copies, as (offset of the source in bytes from `source`, target, is_offset, sizes).
        The target is an address, or if is_offset is 1 an offset in bytes from the argument `target`.
    sets_before, waits, sets, waits_after: addresses of flags. begins, passes, ends `[n, 2]`: (address, number) to
        store.
    arrivals `[1]`: the number of programs that have finished, zero between launches.

    sizes: 0, or the address of three int64: the first row of the source, the first row of the target, and the number of
        rows to copy. The number of rows is clamped to the source's `source_rows` and the target's `rows`.
    early: True if no peer writes the source, so that reading may begin before the waits.
    ADD: True to add floating-point items to the target, with atomics of system scope.
    """
    if tl.program_id(0) == 0:
        write_flags(sets_before, n_sets_before, 1, PTX)
        note(begins, n_begins, PTX)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    begin, to, some, wide = _extent(
        source, target, sizes, rows, width, source_pitch, target_pitch, source_rows, ITEM, ALIGN
    )  # fmt: skip
    per_row = tl.maximum((wide + BLOCK - 1) // BLOCK, 1)
    column = (program % per_row) * BLOCK + tl.arange(0, BLOCK)
    begun = (column < wide) & (program < per_row * some) & (early != 0)
    place = begin.to(tl.pointer_type(ITEM)) + program // per_row * source_pitch
    place = tl.multiple_of(place, ALIGN * ITEM.primitive_bitwidth // 8)
    loaded = tl.load(place + column, mask=begun, other=0)
    # Every lane reads the flags, so no lane's other loads or stores move ahead of its waits.
    alive = await_flags(waits, n_waits, PTX)
    done = tl.full([], 0, tl.int64)  # blocks of earlier parts
    for part in range(n_parts + 1):
        is_begun = (part == 0) & (early != 0)
        if part > 0:
            entry = parts + 4 * (part - 1)
            to = tl.load(entry + 1) + tl.where(tl.load(entry + 2) != 0, target, 0)
            begin, to, some, wide = _extent(
                source + tl.load(entry), to, tl.load(entry + 3), rows, width, source_pitch, target_pitch, source_rows,
                ITEM, ALIGN,
            )  # fmt: skip
        per_row = tl.maximum((wide + BLOCK - 1) // BLOCK, 1)
        blocks = per_row * some
        block = (program + programs - done % programs) % programs
        while block < blocks:
            row = block // per_row
            column = (block - row * per_row) * BLOCK + tl.arange(0, BLOCK)
            inside = column < wide
            place = begin.to(tl.pointer_type(ITEM)) + row * source_pitch
            place = tl.multiple_of(place, ALIGN * ITEM.primitive_bitwidth // 8)
            items = tl.load(place + column, mask=inside & ((block != program) | (is_begun == 0)), other=loaded)
            if ADD:
                items = tl.where(alive, items, float("nan"))
            else:
                items = tl.where(alive, items, -1)  # the group has failed: NaN in any floating-point type
            place = to.to(tl.pointer_type(ITEM)) + row * target_pitch
            place = tl.multiple_of(place, ALIGN * ITEM.primitive_bitwidth // 8)
            _put(place + column, items, inside, ADD)
            for i in range(n_targets):
                place = tl.load(targets + i).to(tl.pointer_type(ITEM)) + row * target_pitch
                place = tl.multiple_of(place, ALIGN * ITEM.primitive_bitwidth // 8)
                _put(place + column, items, inside, ADD)
            block += programs
        done += blocks
    if n_waits + n_sets + n_waits_after + n_ends > 0:
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="sys")
        if arrived == programs - 1:
            tl.store(arrivals, tl.full([], 0, tl.int64))
            write_flags(waits, n_waits, 0, PTX)
            if alive:
                write_flags(sets, n_sets, 1, PTX)
            note(passes, n_passes, PTX)
            if alive:
                await_flags(waits_after, n_waits_after, PTX)
            tl.debug_barrier()  # wait until all lanes have seen the flags (`alive` may differ between lanes)
            write_flags(waits_after, n_waits_after, 0, PTX)
            note(ends, n_ends, PTX)


@triton.jit(do_not_specialize=["index"])
def stamp_kernel(stamps, index, PTX: tl.constexpr):
    """Store the device's clock in nanoseconds in stamps[index]. The devices of one host share this clock."""
    tl.store(stamps + index, now_ns(PTX))
