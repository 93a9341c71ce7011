"""A copy by the compute units, with the waits before it, the signals after it and the waits after these, in one launch.

    wait until every word of `waits` is at least epoch + its delta; copy to one or more places; when all programs are done
    set every word of `sets` to epoch; wait for `answers` as for `waits`

That is a small all-gather whole: peers have room, my shard goes to them and to my own place, it is there, theirs are here.
The last launch of a run may also advance the epoch on the device.

Copies by kernel are for what copy engines do badly: small ones (an engine takes about ten microseconds to start) and those
within a device. With nothing to copy it is a wait or a signal alone: that is what a captured graph uses, because the waits
and writes of a stream are frozen with the value that they were captured with, while this kernel reads the epoch from memory.

Order: see `weft.kernels.signals`. The last program to finish sets the signals; its arrival is acquire-release at system
scope, so they cover the stores of all programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.signals import POISON, load_acquire, now_ns, store_release, words

_POISON = tl.constexpr(POISON)
# The kernel's arguments that are pointers (to int64), for who compiles it ahead.
TABLES = ("targets", "waits", "sets", "answers", "arrivals", "epoch_word")


@triton.jit
def _wait_for(table, count, epoch, PTX: tl.constexpr):
    """Whether all words of a table (address, delta) have come, and not because the group has failed."""
    alive = epoch >= 0
    for i in range(count):
        word = words(tl.load(table + 2 * i))
        wanted = epoch + tl.load(table + 2 * i + 1)
        found = load_acquire(word, PTX)
        while found < wanted:
            found = load_acquire(word, PTX)
        alive = alive & (found < _POISON)
    return alive


@triton.jit(
    do_not_specialize=[
        "source", "target", "n_targets", "rows", "width", "source_pitch", "target_pitch", "n_waits", "n_sets", "n_answers",
        "started", "advance", "epoch_given", "sizes", "source_rows",
    ],
    do_not_specialize_on_alignment=["targets", "waits", "sets", "answers", "arrivals", "epoch_word"],
)  # fmt: skip
def move_kernel(
    source: tl.int64, target: tl.int64, rows: tl.int64, width: tl.int64, source_pitch: tl.int64, target_pitch: tl.int64,
    targets, n_targets: tl.int32, waits, n_waits: tl.int32, sets, n_sets: tl.int32, answers, n_answers: tl.int32, arrivals,
    epoch_word, started: tl.int64, advance: tl.int32, epoch_given: tl.int64, sizes: tl.int64, source_rows: tl.int64,
    ITEM: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """See the top of this file.

    source, target: addresses of the first rows; targets [n_targets]: further places for the same rows. rows, width and
    pitches count items of type ITEM (width, pitches and addresses are multiples of ALIGN items). waits [n_waits, 2] and
    answers [n_answers, 2]: address, delta. sets [n_sets]: addresses. arrivals [1]: zero between launches. The epoch is
    epoch_word[0] + epoch_given; `advance`: it becomes the word at the end. started: an address that learns of it at once, or 0.
    sizes: 0, or where three int64 say at which row of the source to begin, at which of the target, and how many rows to copy:
    at most `rows`, and none beyond the `source_rows` that there are.
    """
    epoch = tl.load(epoch_word) + epoch_given
    if started != 0:
        if tl.program_id(0) == 0:
            store_release(words(started), epoch, PTX)
    # The words are read by every lane, so no lane's loads or stores go ahead of what it waited for.
    alive = _wait_for(waits, n_waits, epoch, PTX)
    program, programs = tl.program_id(0), tl.num_programs(0)
    if sizes != 0:
        first = tl.load(words(sizes))
        fits = (first >= 0) & (first <= source_rows)
        rows = tl.where(fits, tl.minimum(tl.minimum(tl.load(words(sizes) + 2), rows), source_rows - first), 0)
        source += first * source_pitch * (ITEM.primitive_bitwidth // 8)
        target += tl.load(words(sizes) + 1) * target_pitch * (ITEM.primitive_bitwidth // 8)
        if (source_pitch == width) & (target_pitch == width):  # whole rows are one long one
            width = width * rows
            rows = tl.minimum(rows, 1)
    width = width // ALIGN * ALIGN  # no change, but now the compiler knows it, and moves 16 bytes at a time
    per_row = (width + BLOCK - 1) // BLOCK
    blocks = per_row * rows
    if alive:
        block = program.to(tl.int64)
        while block < blocks:
            row = block // per_row
            column = (block - row * per_row) * BLOCK + tl.arange(0, BLOCK)
            inside = column < width
            first = source.to(tl.pointer_type(ITEM)) + row * source_pitch
            first = tl.multiple_of(first, ALIGN * ITEM.primitive_bitwidth // 8)
            items = tl.load(first + column, mask=inside)
            place = target.to(tl.pointer_type(ITEM)) + row * target_pitch
            place = tl.multiple_of(place, ALIGN * ITEM.primitive_bitwidth // 8)
            tl.store(place + column, items, mask=inside)
            for i in range(n_targets):
                place = tl.load(targets + i).to(tl.pointer_type(ITEM)) + row * target_pitch
                place = tl.multiple_of(place, ALIGN * ITEM.primitive_bitwidth // 8)
                tl.store(place + column, items, mask=inside)
            block += programs
    if n_sets + n_answers + advance > 0:
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="sys")
        if arrived == programs - 1:
            tl.store(arrivals, tl.full([], 0, tl.int64))
            if alive:
                for i in range(n_sets):
                    store_release(words(tl.load(sets + i)), epoch, PTX)
                _wait_for(answers, n_answers, epoch, PTX)
            if advance != 0:
                tl.store(epoch_word, epoch)


@triton.jit(do_not_specialize=["index"])
def stamp_kernel(stamps, index, PTX: tl.constexpr):
    """stamps[index] = the device's clock in nanoseconds, which the devices of one host share."""
    tl.store(stamps + index, now_ns(PTX))
