"""Kernels that compute a sort key for each id of a batch and, after a sort by key, the runs of equal table rows.

An occurrence is one id of one bag. A slot is a feature, with one table and one key of the jagged input. Several slots may read
one table. The sort key of an occurrence is `linear row * SPLIT + number of the slot among its table's slots`. Linear rows
number the rows of all tables of a rank consecutively. An occurrence's place is the offset of its bag's gradient, in elements,
and its scale is the factor of this gradient.

    occurrences_kernel   from ids and offsets: keys, places and scales. A program searches all offsets for the bags of its first
                         and last id, and only between these two bags for the bags of its other ids
    (a stable sort)      of keys, together with the places, or with the indices of the occurrences
    count_runs_kernel    the number of runs that begin in each block of sorted keys
    sum_runs_kernel      the prefix sums of these numbers
    runs_kernel          start and key of each run; places and scales in sorted order
    long_runs_kernel     the segments of runs of more than SEGMENT occurrences. Atomics number the segments, so their numbers
                         differ between calls, but the sums do not

All results stay on the device. Memory is allocated for the largest possible numbers of runs and segments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.embedding_bags import row_of

# Columns of the table of slots (int64): table, number of rows, first linear row of the table, number among the table's
# slots, first column of the gradient, 1 for mean pooling.
SLOT_FIELDS = 6
# Indices of the counters of long runs (int64).
SEGMENTS, LONG_RUNS, ANY_LONG = range(3)

_SLOT_FIELDS = tl.constexpr(SLOT_FIELDS)
_LONG_RUNS = tl.constexpr(LONG_RUNS)
_ANY_LONG = tl.constexpr(ANY_LONG)
_WIDE = tl.constexpr(32)
_PARTS = tl.constexpr(128)


@triton.jit
def _bag_before(offsets, at, bags, BAG: tl.constexpr):
    """Return the index of the bag that contains id number `at`: the largest i with `offsets[i]` <= `at`; -1 if there is none.

    offsets: `[bags + 1]`, ascending.
    """
    parts = tl.arange(0, _PARTS)
    low = tl.full([], -1, BAG)
    high = (low + 2 + bags).to(BAG)
    while high - low > 1:
        step = (high - low + _PARTS - 1) // _PARTS
        pivots = low + step * (1 + parts)
        inside = pivots < high
        before = inside & (tl.load(offsets + pivots, mask=inside, other=0).to(tl.int64) <= at)
        low = (low + step * tl.sum(before.to(tl.int32), axis=0)).to(BAG)
        high = tl.minimum(low + step, high).to(BAG)
    return low


@triton.jit(do_not_specialize=["count", "bags", "batch", "keys_of_layer", "stride", "no_row"])
def occurrences_kernel(
    values, offsets, weights, of_key, slots, keys, places, scales, over_length,
    count, bags, batch, keys_of_layer, stride, no_row,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, HASH: tl.constexpr, WEIGHTED: tl.constexpr, ANY_MEAN: tl.constexpr,
    BAG: tl.constexpr,
):  # fmt: skip
    """Write the sort key, the gradient's place and the gradient's factor (`scales`) of each occurrence (id of a bag). Grid:
    (blocks, layers).

    A slot is a feature of one table. The slots are divided into layers, so that no two slots of a layer read the same key of
    the input. So each id has at most one occurrence in a layer. Results have the occurrences of the first layer first.

    values `[count]`, offsets `[bags + 1]`: the jagged input. of_key `[layers, keys_of_layer]`: the slot that reads a
        key of the input in this layer, or -1.
    stride: the number of elements between the gradients of consecutive samples.
    no_row: the sort key of ids out of range.
    over_length (result, fp32): for each occurrence, 1 / length of its bag for mean pooling, else 1. scales (result, fp32): the
        per-sample weight times over_length.
    BAG: the integer type in which the kernel computes indices of bags.
    """
    block, layer = tl.program_id(0).to(tl.int64) * BLOCK, tl.program_id(1).to(tl.int64)
    at = block + tl.arange(0, BLOCK)
    inside = at < count
    first = _bag_before(offsets, block, bags, BAG)
    last = tl.maximum(_bag_before(offsets, tl.minimum(block + BLOCK, count) - 1, bags, BAG), first)
    low = tl.zeros([BLOCK], BAG) + first
    high = tl.zeros([BLOCK], BAG) + last + 1
    span = last + 1 - first
    while span > 1:
        middle = (low + high) // 2
        is_open = high - low > 1
        is_before = tl.load(offsets + middle, mask=is_open, other=0).to(tl.int64) <= at
        low = tl.where(is_open & is_before, middle, low)
        high = tl.where(is_open & (is_before == 0), middle, high)
        span = (span + 1) // 2
    read = inside & (low >= 0) & (low < bags)  # values before the first offset and after the last are in no bag
    bag = tl.where(read, low, 0)
    key = bag // batch
    slot = tl.load(of_key + layer * keys_of_layer + key, mask=read, other=-1)
    read = read & (slot >= 0)
    entry = slots + slot * _SLOT_FIELDS
    rows = tl.load(entry + 1, mask=read, other=1)
    row = row_of(tl.load(values + at, mask=inside, other=0), rows, HASH)
    read = read & (row >= 0) & (row < rows)
    base = tl.load(entry + 2, mask=read, other=0)
    turn = tl.load(entry + 3, mask=read, other=0)
    column = tl.load(entry + 4, mask=read, other=0)
    place = tl.where(read, (bag - key * batch).to(tl.int64) * stride + column, 0)
    out = layer * count + at
    key = tl.where(read, (base + row) * SPLIT + turn, no_row)
    tl.store(keys + out, key.to(keys.dtype.element_ty), mask=inside)
    tl.store(places + out, place.to(places.dtype.element_ty), mask=inside)
    scale = tl.full([BLOCK], 1.0, tl.float32)
    if ANY_MEAN:
        length = tl.load(offsets + bag + 1, mask=read, other=1) - tl.load(offsets + bag, mask=read, other=0)
        is_mean = tl.load(entry + 5, mask=read, other=0) != 0
        over = tl.div_rn(scale, tl.maximum(length, 1).to(tl.float32))
        scale = tl.where(is_mean, over, scale)
        tl.store(over_length + out, scale, mask=inside)
    if WEIGHTED:
        scale = tl.load(weights + at, mask=inside, other=0) * scale
    if WEIGHTED or ANY_MEAN:
        tl.store(scales + out, scale, mask=inside)


@triton.jit
def _begins(keys, at, count, no_row, SPLIT: tl.constexpr):
    """Find the runs (all occurrences of one table row) among sorted occurrences. Return (the sort keys at the indices `at`,
    begins, ends). begins is a mask of the occurrences that begin a run. ends marks the end of the last run: it is True only at
    the first occurrence of an id out of range, which sorts after all others.
    """
    inside = at < count
    key = tl.load(keys + at, mask=inside, other=no_row)
    before = tl.load(keys + at - 1, mask=inside & (at > 0), other=no_row)
    known = inside & (key != no_row)
    is_first = (at == 0) | (before // SPLIT != key // SPLIT) | (before == no_row)
    return key, known & is_first, inside & (known == 0) & ((at == 0) | (before != no_row))


@triton.jit(do_not_specialize=["count", "no_row"])
def count_runs_kernel(keys, counts, count, no_row, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """Write, for each block of sorted keys, the number of runs that begin in the block. A run is all occurrences of one table
    row. Grid: one program per block.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, begins, _ = _begins(keys, at, count, no_row, SPLIT)
    tl.store(counts + tl.program_id(0), tl.sum(begins.to(tl.int32), axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["blocks"])
def sum_runs_kernel(ends, counters, runs, blocks, BLOCK: tl.constexpr):
    """Replace the numbers in `ends` by their inclusive prefix sums. `ends` has the number of runs that begin in each block. A
    run is all occurrences of one table row. Grid: one program.

    Also write the number of all runs to `runs`, and 0 to the three `counters` of long runs.
    """
    lanes = tl.arange(0, BLOCK)
    before = tl.full([], 0, tl.int64)
    for begin in range(0, blocks, BLOCK):
        at = begin + lanes
        inside = at < blocks
        counts = tl.load(ends + at, mask=inside, other=0)
        tl.store(ends + at, before + tl.cumsum(counts, axis=0), mask=inside)
        before += tl.sum(counts, axis=0)
    three = tl.arange(0, 4)
    tl.store(counters + three, three.to(tl.int64) * 0, mask=three < 3)
    tl.store(runs, before)


@triton.jit(do_not_specialize=["count", "no_row"])
def runs_kernel(
    keys, order, places, scales, ends, starts, run_keys, sorted_places, sorted_scales, counters, count, no_row,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr, SEGMENT: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Write the first occurrence and the sort key of each run (all occurrences of one table row). Also write all places
    (offsets of gradients) and scales (factors of gradients) in sorted order. If a run has more than SEGMENT occurrences, set
    the counter ANY_LONG to 1.

    order: for each sorted occurrence, its index before the sort (ORDER 0) or its place (ORDER 1). With ORDER 2 the kernel does
        not read it, because `sorted_places` already has the places.
    ends: for each block, the number of runs that begin in it or before it.
    starts (result): the first occurrence of each run, and the end of the last run.
    Grid: one program per block.
    """
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    key, begins, is_end = _begins(keys, at, count, no_row, SPLIT)
    base = tl.load(ends + block - 1, mask=block > 0, other=0)
    number = base + tl.cumsum(begins.to(tl.int32), axis=0) - 1
    tl.store(starts + number, at.to(starts.dtype.element_ty), mask=begins)
    tl.store(run_keys + number, key, mask=begins)
    far = tl.load(keys + at + SEGMENT, mask=begins & (at + SEGMENT < count), other=no_row)
    is_long = begins & (far != no_row) & (far // SPLIT == key // SPLIT)
    if tl.max(is_long.to(tl.int32), axis=0) > 0:
        tl.store(counters + _ANY_LONG, tl.full([], 1, tl.int64))
    is_end = is_end | (((at + 1) == count) & (key != no_row))
    end = tl.where(key != no_row, count, at)
    runs = tl.load(ends + tl.num_programs(0) - 1)
    tl.store(starts + runs + at * 0, end.to(starts.dtype.element_ty), mask=is_end)
    if ORDER == 0:
        occurrence = tl.load(order + at, mask=inside, other=0)
        tl.store(sorted_places + at, tl.load(places + occurrence, mask=inside, other=0), mask=inside)
    if ORDER == 1:
        tl.store(sorted_places + at, tl.load(order + at, mask=inside, other=0), mask=inside)
    if SCALED:
        tl.store(sorted_scales + at, tl.load(scales + occurrence, mask=inside, other=0), mask=inside)


@triton.jit
def long_runs_kernel(
    starts, runs, counters, first_segment, run_of_segment, long_runs, BLOCK: tl.constexpr, SEGMENT: tl.constexpr
):
    """Cut long runs into numbered segments. A run is all occurrences of one table row, and is long if it has more than SEGMENT.
    Write the number of each long run's first segment to `first_segment`, the run of each segment to `run_of_segment`, and the
    list of the long runs to `long_runs`.

    counters: the number of segments, and the number of long runs (results, zero before the launch), and 1 if there are long
        runs, else 0.
    """
    total = tl.load(runs) * tl.load(counters + _ANY_LONG)
    for begin in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        run = begin + tl.arange(0, BLOCK)
        inside = run < total
        first = tl.load(starts + run, mask=inside, other=0)
        length = tl.load(starts + run + 1, mask=inside, other=0) - first
        is_long = inside & (length > SEGMENT)
        segments = tl.where(is_long, (length + SEGMENT - 1) // SEGMENT, 0).to(tl.int64)
        most = tl.max(segments, axis=0)
        if most > 0:
            at = tl.atomic_add(counters + run * 0, segments, mask=is_long, sem="relaxed")
            tl.store(first_segment + run, at, mask=is_long)
            number = tl.atomic_add(counters + _LONG_RUNS + run * 0, is_long.to(tl.int64), mask=is_long, sem="relaxed")
            tl.store(long_runs + number, run, mask=is_long)
            lanes = tl.arange(0, _WIDE)
            for segment in range(0, most, _WIDE):
                mask = is_long[:, None] & (segment + lanes[None, :] < segments[:, None])
                where = run_of_segment + at[:, None] + segment + lanes[None, :]
                tl.store(where, run[:, None] + lanes[None, :] * 0, mask=mask)
