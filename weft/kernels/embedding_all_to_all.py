"""Embedding pooling fused with the all-to-all: one persistent kernel for all tables of a rank.

Problem. A rank owns some tables and pools their rows for the whole global batch. Each pooled vector belongs to the rank
that owns its sample. A separate all-to-all after pooling overlaps with nothing, and needs a send buffer, a receive
buffer and an unpack pass. This kernel stores each vector in the output of the sample's rank as soon as it is pooled:

    out[rank of b][b, column of t] = sum or mean over i in bag(t, b) of weight[t][values[i]] (* per_sample_weights[i])

Transports. `direct`: the pooled vector is stored into the peer's memory. `put` (STAGED): the vectors of one slice (several
adjacent features of a sample) are pooled into a staging area of the program, which stays in the L2 cache. Then the slice is
sent as one contiguous copy, followed by a fence and the slice's flag. One program pools all of a slice, so it knows when the
slice is complete. A program delays a slice's fence and flag until it has pooled its next slice. By then the copy has arrived,
so that the fence need not wait.

Protocol of call number `epoch` (a word in device memory that the kernel advances, so that a launch can be replayed):
  1. The first program grants every peer credit for this rank's output buffer number `slot`. At each peer it stores a hash of
     its call, then, with release, ready = epoch * 256 + slot. No rank stores into a peer before it has acquired the peer's
     `ready`. Before the grant, the granting rank's stream has read the buffer's old contents.
  2. Programs take units of work from a counter: remote samples first (rotated by rank), local samples last. A unit is a slice
     (put), or several features of a sample (direct). With `by_slot`, the same features of all samples follow one another, so
     that rows of a table stay in the L2 cache.
  3. direct: the last program to finish sets done = epoch at every peer, with release. Programs count their arrivals with
     acquire-release at system scope, so the release covers the stores of all programs. Then this last program waits for done =
     epoch from every peer. put: each program waits for a part of the flags of slices from peers.
  4. The last program clears the local counters and stores the new epoch. Work after the kernel in the stream may read
     the output. Every wait ends at a deadline, or when the watchdog writes POISON, which is larger than any epoch. In
     both cases the program writes a record to pinned memory, and then stores nothing else.

Speed. When all programs access memory, its latency is a microsecond, so many rows in flight and short chains of dependent loads
matter. A bag is a chain of three dependent loads (offsets, ids, rows). So each program, of one warp, works on three bags at a
time: while rows of the first bag arrive, it loads the ids of the second bag and the offsets of the third. Ids are read one per
lane, and a gather passes them to the lanes that load the row. Values that can be read again are not kept in registers, which
are needed for ROWS rows in flight. Programs take units dynamically: bags differ in length, and with a static distribution the
slowest program ends 5-25% later. With AHEAD, the first rows of a bag are loaded while rows of the preceding bag are summed. This
needs registers, which only small tiles (16-bit or narrow rows) leave. If bags have one id each, a program pools all features of a
unit at the same time (`weft.kernels.embedding_single_ids`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.embedding_bags import (
    IDS,
    SLOT_BITS,
    SLOT_FIELDS,
    UNIT_FIELDS,
    bag_after,
    bag_at,
    fill_with_nan,
    load_ids,
    load_rows,
    rows_of,
    samples_of,
    table_of,
    target_of,
    unit_at,
    weighted_rows,
)
from weft.kernels.embedding_single_ids import pool_single_ids
from weft.kernels.signals import (
    POISON,
    multiprocessor,
    now_ns,
    report,
    store_release,
    wait_at_least,
    wait_for_flags,
    wait_or_record,
    words,
)

# Each constant stands twice: for the CPU, and with an underscore, for device code.
# Words of the local state (int64, device memory).
STATE_WORDS = 16
EPOCH, GRABBED, ARRIVED, FAILED, BAD_INDICES, BAD_POSITION, BAD_OFFSETS, COPIES, FLAGS = range(9)
_EPOCH, _GRABBED, _ARRIVED, _FAILED, _BAD_INDICES, _BAD_POSITION, _BAD_OFFSETS, _COPIES, _FLAGS = map(
    tl.constexpr, range(9)
)
# Words of the record in pinned memory (int64), after those of `weft.kernels.signals`.
RECORD_WORDS = 16
R_BAD_INDICES, R_BAD_POSITION, R_BAD_OFFSETS = range(5, 8)
_R_BAD_INDICES, _R_BAD_POSITION, _R_BAD_OFFSETS = map(tl.constexpr, range(5, 8))
# Values of R_STATUS.
WAIT_READY, WAIT_DONE, WAIT_FLAG, DISAGREE = range(1, 5)
_WAIT_READY, _WAIT_DONE, _WAIT_FLAG, _DISAGREE = map(tl.constexpr, range(1, 5))
# Words of the signal area of a rank: for each peer (fingerprint, ready), then done.
NO_POSITION = (1 << 62) - 1
_SLOT_BITS = tl.constexpr(SLOT_BITS)
_POISON = tl.constexpr(POISON)
_NO_POSITION = tl.constexpr(NO_POSITION)
_IDS = tl.constexpr(IDS)
_SLOT_FIELDS = tl.constexpr(SLOT_FIELDS)
_UNIT_FIELDS = tl.constexpr(UNIT_FIELDS)
# The number of the kernel's pointer arguments, which come first.
POINTERS = 13
# The fields of a line of the timeline. A line describes a unit. After the lines of all units, each program has a line for its wait,
# with the number of its multiprocessor in PUT.
TIMELINE_FIELDS = 5
START, END, SENT, PROGRAM, PUT = range(TIMELINE_FIELDS)
_, _END, _SENT, _PROGRAM, _PUT = map(tl.constexpr, range(TIMELINE_FIELDS))
_TIMELINE_FIELDS = tl.constexpr(TIMELINE_FIELDS)


@triton.jit(
    # One compiled kernel must serve every call of an operator. Triton would specialise integers that are 1 or divisible
    # by 16, and a compilation while a stream waits for a peer would never return.
    do_not_specialize=[
        "batch",
        "n_units",
        "n_values",
        "out_slot",
        "out_slot_bytes",
        "fingerprint",
        "deadline_ns",
        "units_per_sample",
        "flags_before",
        "flags_total_per_sample",
        "first_sample",
        "is_even",
        "by_slot",
    ],
    # Do not specialise on the alignment of the user's tensors either. ALIGN states the alignment of rows and outputs.
    do_not_specialize_on_alignment=[
        "slots",
        "units",
        "values",
        "offsets",
        "per_sample_weights",
        "batch_starts",
        "out_addresses",
        "signal_addresses",
        "flag_addresses",
        "state",
        "record",
        "timeline",
    ],
)
def embedding_all_to_all_kernel(
    slots, values, offsets, per_sample_weights, timeline, units, batch_starts,
    out_addresses, signal_addresses, flag_addresses, staging, state, record,
    batch: tl.int32, n_units: tl.int32, n_values: tl.int64, out_slot: tl.int32,
    out_slot_bytes: tl.int64, fingerprint: tl.int64, deadline_ns: tl.int64,
    units_per_sample: tl.int32, flags_before: tl.int32, flags_total_per_sample: tl.int32, first_sample: tl.int32,
    is_even: tl.int32, by_slot: tl.int32,
    RANK: tl.constexpr, WORLD: tl.constexpr, WORLD_P2: tl.constexpr, OUT_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, UNIFORM: tl.constexpr, ALIGN: tl.constexpr, DTYPE: tl.constexpr,
    ITEM_BYTES: tl.constexpr, OUT_DTYPE: tl.constexpr, OUT_BYTES: tl.constexpr, ROW: tl.constexpr, POSITION: tl.constexpr,
    STAGED: tl.constexpr, STAGE_WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, ANY_MEAN: tl.constexpr,
    HASH: tl.constexpr, CHECK: tl.constexpr,
    ENTER: tl.constexpr, EXIT: tl.constexpr, WAIT: tl.constexpr, COUNT: tl.constexpr, TIMELINE: tl.constexpr, PTX: tl.constexpr,
    AHEAD: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Run the pooling and the exchange that the module docstring describes.

    slots `[n, SLOT_FIELDS]`: the descriptions of this rank's features (slots). units `[units_per_sample, UNIT_FIELDS]`: the
        units of work of a sample. values `[n_values]`, offsets `[keys * batch + 1]`: the jagged input, int32 or int64. timeline
        `[n_units + programs, TIMELINE_FIELDS]`: times of each unit, then of each program's wait for its peers.
    batch: the number of samples of all ranks. is_even: 1 if the batch is divided evenly: `batch // WORLD` samples for each
        rank, and one more for each of the first `batch % WORLD` ranks. batch_starts `[WORLD + 1]`: the first sample of each
        rank, and `batch`; used only if is_even is 0.
    first_sample: the sample that is pooled first. The others follow in cyclic order.
    by_slot: 1 to pool the first units of all samples, then their second units, and so on; 0 to pool sample by sample, as
        STAGED requires.
    flags_total_per_sample: the number of flags for a sample: one for each slice that any rank sends of it. flags_before: the
        number of these flags that belong to slices of lower ranks.
    out_addresses, signal_addresses, flag_addresses `[WORLD]`: addresses of every rank's memory, as mapped on this
        device.
    out_slot: the index of the output buffer that this rank uses for this call. fingerprint: the hash that ranks compare.
    out_slot_bytes: the size of an output buffer. staging `[programs, STAGE_WIDTH]`: device memory in which programs pool slices
    before they send them. state `[STATE_WORDS]`: device memory for the epoch and counters. record `[RECORD_WORDS]`: pinned
    memory in which the kernel reports errors.

    DTYPE, ITEM_BYTES: the type of the elements of tables, and its size. OUT_DTYPE, OUT_BYTES: the same for outputs.
    ENTER, EXIT: if several launches form one call, ENTER is True only in the first, and EXIT only in the last.
    WAIT: False if one process runs all ranks one after the other.
    AHEAD: True to load the first rows of a bag before the sum of the preceding bag is computed. SINGLE: True if bags
        probably have one id each (`weft.kernels.embedding_single_ids`).
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(state + _EPOCH) + 1
    ranks = tl.arange(0, WORLD_P2)
    is_rank = ranks < WORLD
    peer = is_rank & (ranks != RANK)
    safe_rank = tl.where(is_rank, ranks, RANK)
    mine = tl.load(signal_addresses + RANK)

    # 1. Grant peers credit for this rank's output buffer; read for which buffers the peers granted credit.
    if WORLD > 1:
        theirs = tl.load(signal_addresses + safe_rank)
        wanted = epoch << _SLOT_BITS
        if ENTER:
            if program == 0:
                word = theirs + 16 * RANK
                tl.store(words(word), tl.full([WORLD_P2], 0, tl.int64) + fingerprint, mask=peer)
                at = tl.where(peer, word + 8, mine + 16 * RANK + 8)
                store_release(words(at), tl.full([WORLD_P2], 0, tl.int64) + (wanted + out_slot), PTX)
        ready_at = words(tl.where(peer, mine + 16 * ranks + 8, mine + 16 * RANK + 8))
        if WAIT:
            # Lanes without a peer read this rank's own word. The first program sets this word together with the peers'
            # words, so waiting for it never takes longer.
            found = wait_at_least(ready_at, wanted, deadline_ns, PTX)
            lowest = tl.min(found, 0)
            if (lowest < wanted) | (tl.max(found, 0) >= _POISON):
                late = tl.argmin(found, 0).to(tl.int64)
                report(record, _WAIT_READY, epoch, late, wanted >> _SLOT_BITS, lowest >> _SLOT_BITS)
                tl.atomic_add(state + _FAILED, 1, sem="relaxed")
                n_units = n_units * 0
            else:
                prints = tl.load(words(mine + 16 * safe_rank), mask=peer, other=fingerprint, volatile=True)
                differ = (prints != fingerprint).to(tl.int32)
                if tl.max(differ, 0) != 0:
                    other = tl.max(tl.where(differ != 0, prints, 0), 0)
                    report(record, _DISAGREE, epoch, tl.argmax(differ, 0).to(tl.int64), fingerprint, other)
                    tl.atomic_add(state + _FAILED, 1, sem="relaxed")
                    n_units = n_units * 0

    # 2. Pool. Three bags are in progress: rows of the current bag, ids of the next bag, offsets of the bag after that.
    cols = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, ROWS)
    id_lanes = tl.arange(0, _IDS)
    bad = tl.zeros([_IDS], tl.int32)
    bad_at = tl.zeros([_IDS], POSITION)
    cut = tl.full([], 0, tl.int32)
    copies = tl.full([], 0, tl.int64)
    flags_raised = tl.full([], 0, tl.int64)
    started = tl.full([], 0, tl.int64)
    owed_flag = tl.full([], 0, tl.int64)
    staged = tl.full([], 0, tl.int32)
    if TIMELINE:
        started = now_ns(PTX)

    if SINGLE:
        bad, bad_at, cut = pool_single_ids(
            slots, units, values, offsets, per_sample_weights, batch_starts, out_addresses, mine, state + _GRABBED, bad, bad_at,
            batch, n_units, n_values, out_slot, out_slot_bytes, units_per_sample, first_sample, is_even, by_slot,
            WORLD, WORLD_P2, OUT_STRIDE, ROWS, BLOCK_D, UNIFORM, ALIGN, DTYPE, ITEM_BYTES, OUT_DTYPE, OUT_BYTES, ROW, POSITION,
            WEIGHTED, ANY_MEAN, HASH, CHECK,
        )  # fmt: skip
    else:
        unit0 = program
        sample0, slot0, stop0 = unit_at(unit0, n_units, units, units_per_sample, first_sample, batch, by_slot)
        start0, end0, cut = bag_at(offsets, slots, slot0, sample0, batch, n_values, unit0 < n_units, cut, POSITION)
        # The number of a program determines its units of the first two rounds. Later units come from a counter, because
        # incrementing one word in memory takes a nanosecond per program.
        unit1, sample1, slot1, stop1, grabbed, start1, end1, cut = bag_after(
            unit0, sample0, slot0, stop0, program + programs, cut, state + _GRABBED, programs, n_units, units, units_per_sample,
            first_sample, by_slot, offsets, slots, batch, n_values, POSITION,
        )  # fmt: skip
        ids = load_ids(values, start0, end0, id_lanes)
        if AHEAD:
            ids_next = load_ids(values, start1, end1, id_lanes)
            unit2, sample2, slot2, stop2, grabbed, start2, end2, cut = bag_after(
                unit1, sample1, slot1, stop1, grabbed, cut, state + _GRABBED, programs, n_units, units, units_per_sample,
                first_sample, by_slot, offsets, slots, batch, n_values, POSITION,
            )  # fmt: skip
            weight, rows_in_table, stride, width, counts = table_of(
                slots, slot0, DTYPE, ITEM_BYTES, ALIGN, UNIFORM, CHECK, BLOCK_D
            )
            rows, bad, bad_at = rows_of(
                ids, start0 + id_lanes, end0, rows_in_table, counts, bad, bad_at, HASH, CHECK, ROW
            )
            block = load_rows(weight, rows, 0, stride, cols, width, lanes, UNIFORM, BLOCK_D)
        sample_before = tl.full([], -1, tl.int32)
        owner = tl.full([], 0, tl.int32)
        owner_start = tl.full([], 0, tl.int32)
        owner_batch = owner_start + batch
        out_row_at = tl.full([], 0, tl.int64)

        while unit0 < n_units:
            slot_entry = slots + slot0 * _SLOT_FIELDS
            column = tl.multiple_of(tl.load(slot_entry + 4), ALIGN)
            acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
            if AHEAD:
                # Load the first rows of the next bag, then reduce those of the current bag.
                weight, rows_in_table, stride, width, counts = table_of(
                    slots, slot1, DTYPE, ITEM_BYTES, ALIGN, UNIFORM, CHECK, BLOCK_D
                )
                rows_next, bad, bad_at = rows_of(
                    ids_next, start1 + id_lanes, end1, rows_in_table, counts, bad, bad_at, HASH, CHECK, ROW
                )
                block_next = load_rows(weight, rows_next, 0, stride, cols, width, lanes, UNIFORM, BLOCK_D)
                ids = load_ids(values, start0 + _IDS, end0, id_lanes)
                ids_next = load_ids(values, start2, end2, id_lanes)
                unit3, sample3, slot3, stop3, grabbed, start3, end3, cut = bag_after(
                    unit2, sample2, slot2, stop2, grabbed, cut, state + _GRABBED, programs, n_units, units,
                    units_per_sample, first_sample, by_slot, offsets, slots, batch, n_values, POSITION,
                )  # fmt: skip
                weight, rows_in_table, stride, width, counts = table_of(
                    slots, slot0, DTYPE, ITEM_BYTES, ALIGN, UNIFORM, CHECK, BLOCK_D
                )
                acc += weighted_rows(block, rows, 0, start0, per_sample_weights, lanes, WEIGHTED)
            else:
                weight, rows_in_table, stride, width, counts = table_of(
                    slots, slot0, DTYPE, ITEM_BYTES, ALIGN, UNIFORM, CHECK, BLOCK_D
                )
                rows, bad, bad_at = rows_of(
                    ids, start0 + id_lanes, end0, rows_in_table, counts, bad, bad_at, HASH, CHECK, ROW
                )
                ids = load_ids(values, start0 + _IDS, end0, id_lanes)
                ids_next = load_ids(values, start1, end1, id_lanes)
                unit2, sample2, slot2, stop2, grabbed, start2, end2, cut = bag_after(
                    unit1, sample1, slot1, stop1, grabbed, cut, state + _GRABBED, programs, n_units, units,
                    units_per_sample, first_sample, by_slot, offsets, slots, batch, n_values, POSITION,
                )  # fmt: skip

            # The target is the row of the sample in its owner's output. All slots of a unit have the same sample.
            if sample0 != sample_before:
                sample_before = sample0
                out_row_at, owner, owner_start, owner_batch = target_of(
                    sample0, batch_starts, batch, is_even, mine, out_addresses, out_slot, out_slot_bytes,
                    WORLD, WORLD_P2, OUT_STRIDE, OUT_BYTES,
                )  # fmt: skip
            is_local = owner == RANK
            out_row = tl.multiple_of(out_row_at.to(tl.pointer_type(OUT_DTYPE)), ALIGN * OUT_BYTES)

            begin = start0
            while begin < end0:
                if begin > start0:  # a bag of more than _IDS ids
                    rows, bad, bad_at = rows_of(
                        ids, begin + id_lanes, end0, rows_in_table, counts, bad, bad_at, HASH, CHECK, ROW
                    )
                    ids = load_ids(values, begin + _IDS, end0, id_lanes)
                here = tl.minimum(end0 - begin, _IDS).to(tl.int32)
                done = tl.full([], 0, tl.int32)
                if AHEAD:
                    done = tl.where(begin > start0, 0, ROWS)
                while done < here:
                    more = load_rows(weight, rows, done, stride, cols, width, lanes, UNIFORM, BLOCK_D)
                    acc += weighted_rows(more, rows, done, begin, per_sample_weights, lanes, WEIGHTED)
                    done += ROWS
                begin += _IDS
            pooled = tl.sum(acc, 0)
            if ANY_MEAN:
                is_mean = tl.load(slot_entry + 6) != 0
                count = tl.where(is_mean & (end0 > start0), end0 - start0, 1).to(tl.float32)
                pooled = pooled / count

            target = out_row + column
            if STAGED:
                # The columns of a slice are adjacent, so its vectors are staged contiguously. Local slices need no copy: they are
                # pooled in place.
                stage = staging + program * STAGE_WIDTH
                place = tl.where(is_local, target.to(tl.int64), (stage + staged).to(tl.int64))
                target = tl.multiple_of(place.to(tl.pointer_type(OUT_DTYPE)), ALIGN * OUT_BYTES)
                staged += width.to(tl.int32)
            if UNIFORM:
                tl.store(target + cols, pooled.to(OUT_DTYPE))
            else:
                tl.store(target + cols, pooled.to(OUT_DTYPE), mask=cols < width)

            if STAGED:
                if slot0 + 1 >= stop0:
                    if is_local == 0:
                        # Memory latency is a microsecond when all programs access memory, so all operands of the copy are
                        # loaded before the first barrier. The flag set here belongs to the previous slice, whose copy has
                        # had the time of a whole slice to arrive. So the release does not wait.
                        flag = (
                            (sample0 - owner_start).to(tl.int64) * units_per_sample
                            + unit0 % units_per_sample
                            + owner_batch.to(tl.int64) * flags_before
                        )
                        next_flag = tl.load(flag_addresses + owner) + flag * 8
                        if owed_flag != 0:
                            store_release(words(owed_flag), epoch, PTX)
                            flags_raised += 1
                        owed_flag = next_flag
                        if TIMELINE:
                            tl.store(timeline + unit0.to(tl.int64) * _TIMELINE_FIELDS + _PUT, now_ns(PTX))
                        tl.debug_barrier()
                        slice_row = tl.multiple_of(out_row + (column + width - staged), ALIGN * OUT_BYTES)
                        block = tl.arange(0, 512)
                        c = staged * 0
                        while c < staged:
                            inside = c + block < staged
                            tl.store(slice_row + c + block, tl.load(stage + c + block, mask=inside), mask=inside)
                            c += 512
                        # The next slice may not overwrite the staging area before every lane has read it.
                        tl.debug_barrier()
                        copies += 1
                    staged = staged * 0
            if TIMELINE:
                if slot0 + 1 >= stop0:
                    now = now_ns(PTX)
                    number = tl.where(by_slot != 0, unit0 // tl.maximum(batch, 1), unit0 % units_per_sample)
                    unit_bytes = tl.load(units + number * _UNIT_FIELDS + 3) * OUT_BYTES
                    line = timeline + unit0.to(tl.int64) * _TIMELINE_FIELDS
                    tl.store(line, started)
                    tl.store(line + _END, now)
                    tl.store(line + _SENT, tl.where(is_local, 0, unit_bytes))
                    tl.store(line + _PROGRAM, program)
                    started = now

            unit0 = unit1
            sample0 = sample1
            slot0 = slot1
            stop0 = stop1
            start0 = start1
            end0 = end1
            unit1 = unit2
            sample1 = sample2
            slot1 = slot2
            stop1 = stop2
            start1 = start2
            end1 = end2
            if AHEAD:
                unit2 = unit3
                sample2 = sample3
                slot2 = slot3
                stop2 = stop3
                start2 = start3
                end2 = end3
                rows = rows_next
                block = block_next
            else:
                ids = ids_next
        if unit0 < 0:
            # Never true. Triton 3.6 miscounts a loop's results when the last one, here `ids`, is not used after the loop, and
            # fails to compile ("PassManager::run failed").
            tl.store(state + _COPIES, tl.sum((ids_next if AHEAD else ids).to(tl.int64), 0))
    if STAGED:
        if owed_flag != 0:
            store_release(words(owed_flag), epoch, PTX)
            flags_raised += 1
    if TIMELINE:
        wait_line = timeline + (n_units.to(tl.int64) + program) * _TIMELINE_FIELDS
        tl.store(wait_line, now_ns(PTX))

    # 3. Count bad input, wait for the peers' vectors, and finish. Values of part 1 are read again: keeping them in
    # registers would reduce the rows in flight in part 2.
    epoch = tl.load(state + _EPOCH, volatile=True) + 1
    mine = tl.load(signal_addresses + RANK, volatile=True)
    if CHECK:
        bad_here = tl.sum(bad, 0)
        if bad_here > 0:
            tl.atomic_add(state + _BAD_INDICES, bad_here.to(tl.int64), sem="relaxed")
            first_bad = tl.min(tl.where(bad > 0, bad_at.to(tl.int64), _NO_POSITION), 0)
            tl.atomic_min(state + _BAD_POSITION, first_bad, sem="relaxed")
    if cut > 0:
        tl.atomic_add(state + _BAD_OFFSETS, cut.to(tl.int64), sem="relaxed")
    if COUNT:
        tl.atomic_add(state + _COPIES, copies, sem="relaxed")
        tl.atomic_add(state + _FLAGS, flags_raised, sem="relaxed")
    if STAGED and WAIT and EXIT and WORLD > 1:
        # Flags are ordered by source. Flags of this rank's own block are never set, since no rank waits for them.
        my_batch = samples_of(RANK, batch_starts, batch, is_even, WORLD)
        own = my_batch * flags_before
        own_end = own + my_batch * units_per_sample
        total = my_batch * flags_total_per_sample
        wait_for_flags(
            words(tl.load(flag_addresses + RANK)), total, own, own_end, epoch, state + _EPOCH, state + _FAILED, record, deadline_ns,
            _WAIT_FLAG, PTX,
        )  # fmt: skip

    if TIMELINE:
        tl.store(wait_line + _END, now_ns(PTX))
        tl.store(wait_line + _SENT, tl.full([], 0, tl.int64))
        tl.store(wait_line + _PROGRAM, program)
        tl.store(wait_line + _PUT, multiprocessor(PTX))
    tl.debug_barrier()
    arrived = tl.atomic_add(state + _ARRIVED, 1, sem="acq_rel", scope="sys")
    if arrived == programs - 1:
        failed = tl.load(state + _FAILED, volatile=True)
        if EXIT and WORLD > 1 and not STAGED:
            if failed == 0:
                theirs = tl.load(signal_addresses + safe_rank, volatile=True)
                done_at = tl.where(peer, theirs + 16 * WORLD + 8 * RANK, mine + 16 * WORLD + 8 * RANK)
                store_release(words(done_at), tl.full([WORLD_P2], 0, tl.int64) + epoch, PTX)
                if WAIT:
                    done_words = mine + 16 * WORLD + 8 * safe_rank
                    failed += wait_or_record(record, done_words, epoch, epoch, deadline_ns, _WAIT_DONE, PTX)
                    if TIMELINE:
                        tl.store(wait_line + _END, now_ns(PTX))
        if WORLD > 1:
            if failed != 0:
                # Fill the output, so that no rank mistakes the old contents for a result.
                own = tl.load(out_addresses + RANK) + out_slot * out_slot_bytes
                items = samples_of(RANK, batch_starts, batch, is_even, WORLD) * OUT_STRIDE
                fill_with_nan(own.to(tl.pointer_type(OUT_DTYPE)), items, OUT_DTYPE)
        tl.store(state + _GRABBED, tl.full([], 0, tl.int64))
        tl.store(state + _ARRIVED, tl.full([], 0, tl.int64))
        tl.store(state + _FAILED, tl.full([], 0, tl.int64))
        n_bad = tl.load(state + _BAD_INDICES, volatile=True)
        n_bad_offsets = tl.load(state + _BAD_OFFSETS, volatile=True)
        if (n_bad > 0) | (n_bad_offsets > 0):
            # The CPU clears these words after it has raised the error. Until then they keep the position of the first
            # bad call.
            earlier = tl.load(record + _R_BAD_INDICES, volatile=True)
            if earlier == 0:
                tl.store(record + _R_BAD_POSITION, tl.load(state + _BAD_POSITION, volatile=True))
            tl.store(record + _R_BAD_INDICES, earlier + n_bad)
            tl.store(record + _R_BAD_OFFSETS, tl.load(record + _R_BAD_OFFSETS, volatile=True) + n_bad_offsets)
            tl.store(state + _BAD_INDICES, tl.full([], 0, tl.int64))
            tl.store(state + _BAD_OFFSETS, tl.full([], 0, tl.int64))
            tl.store(state + _BAD_POSITION, tl.full([], _NO_POSITION, tl.int64))
        if EXIT:
            tl.store(state + _EPOCH, epoch)
