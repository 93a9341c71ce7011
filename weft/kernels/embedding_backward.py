"""Reduction of the gradients of every embedding row that a batch has read, in a fixed order, and an optimizer's update
of the row.

    g[row] = factor * sum over occurrences of row:  weight / (length of the bag, for a mean) * grad[sample, columns]

`factor` multiplies all gradients, for example 1 / world size for a mean over ranks. An occurrence is one id of one bag.
`weft.kernels.embedding_runs` has grouped the occurrences of each row into a run. `starts` contains the index of each run's
first occurrence, and `places` the offset of each occurrence's gradient in `grads`.

Order. The occurrences of a run are added one after the other. A run of more than SEGMENT occurrences is cut into
segments of this length. `segment_sums_kernel` sums each segment, and `run_sums_kernel` adds these sums. So a sum
depends only on the run and on constants, not on the grid, timing, or other runs. No atomics are needed, and a row that
occurs a million times keeps many programs busy.

Speed. Most rows occur once or twice, so a chain of dependent loads (start of the run, places, gradients, row) takes
most of the time. A program works on GROUP runs at the same time, and meanwhile loads the starts and places of the next
group. `ALIGN` allows vector loads.

Only the device knows the number of runs. So program p of n handles the runs or groups p, p + n, p + 2 n and so on. The
update rules are as in `weft.embedding.optimizers`. Numbers that change between calls are in device memory, so that a
captured launch can be replayed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.embedding_arithmetic import at_random, mixed, over_root
from weft.kernels.embedding_runs import LONG_RUNS, SEGMENTS

# Columns of the list of tables (int64): addresses of weight, first state, second state and output; first linear row; number
# of columns; first run; number of the table. A line without a table follows the last line. Its first linear row is 2^63 - 1.
TABLE_FIELDS = 8
# Indices of a rule's numbers (float32).
NUMBERS = 10
FACTOR, EPS, DECAY, BETA1, BETA2, REST1, REST2, CORRECTION1, CORRECTION2, CLIP = range(NUMBERS)

# A line of the table of columns by owner (int64): see `by_owner_kernel`.
OWNER_FIELDS = 4

_OWNER_FIELDS = tl.constexpr(OWNER_FIELDS)
_TABLE_FIELDS = tl.constexpr(TABLE_FIELDS)
_FACTOR = tl.constexpr(FACTOR)
_EPS = tl.constexpr(EPS)
_DECAY = tl.constexpr(DECAY)
_BETA1 = tl.constexpr(BETA1)
_BETA2 = tl.constexpr(BETA2)
_REST1 = tl.constexpr(REST1)
_REST2 = tl.constexpr(REST2)
_CORRECTION1 = tl.constexpr(CORRECTION1)
_CORRECTION2 = tl.constexpr(CORRECTION2)
_CLIP = tl.constexpr(CLIP)
_SEGMENTS = tl.constexpr(SEGMENTS)
_LONG_RUNS = tl.constexpr(LONG_RUNS)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MOST = tl.constexpr(2**63 - 1)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _table_of(tables, count, row, STEPS: tl.constexpr):
    """Return a pointer to the line of `tables` that describes the embedding table with row number `row`. Rows are numbered
    consecutively over all tables.

    count: the number of tables. STEPS: the number of steps of the binary search for the table.
    """
    low = row * 0
    high = low + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        is_before = tl.load(tables + middle * _TABLE_FIELDS + 4) <= row
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return tables + low * _TABLE_FIELDS


@triton.jit(do_not_specialize=["count_of_tables"])
def segment_sums_kernel(
    run_keys, places, scales, grads, starts, run_of_segment, first_segment, counters, tables, partials, count_of_tables,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, UNIFORM: tl.constexpr, ALIGN: tl.constexpr, SCALED: tl.constexpr,
    SEGMENT: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of each segment of a long run, and write the sum to the segment's row of `partials`, fp32 `[segments,
    BLOCK_D]`. A run is all occurrences of one table row in the batch. Long runs are cut into segments.
    """
    columns, lanes = tl.arange(0, BLOCK_D), tl.arange(0, ROWS)
    for segment in range(tl.program_id(0), tl.load(counters + _SEGMENTS), tl.num_programs(0)):
        run = tl.load(run_of_segment + segment)
        first, run_end = tl.load(starts + run), tl.load(starts + run + 1)
        begin = first + ((segment - tl.load(first_segment + run)) * SEGMENT).to(first.dtype)
        end = tl.minimum(begin + SEGMENT, run_end)
        inside = columns < BLOCK_D
        if not UNIFORM:
            entry = _table_of(tables, count_of_tables, tl.load(run_keys + run).to(tl.int64) // SPLIT, STEPS)
            inside = columns < tl.multiple_of(tl.load(entry + 5), ALIGN)
        total = tl.zeros([BLOCK_D], tl.float32)
        for i in range(begin, end, ROWS):
            at = i + lanes
            there = at < end
            place = tl.multiple_of(tl.load(places + at, mask=there, other=0), ALIGN)
            mask = there[:, None] & inside[None, :]
            g = tl.load(grads + place[:, None] + columns[None, :], mask=mask, other=0).to(tl.float32)
            if SCALED:
                g = g * tl.load(scales + at, mask=there, other=0)[:, None]
            total += tl.sum(g, axis=0)
        tl.store(partials + tl.cast(segment, tl.int64) * BLOCK_D + columns, total)


@triton.jit
def run_sums_kernel(
    starts, long_runs, first_segment, counters, partials,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Add the sums of all segments of each long run, in order. A run is all occurrences of one table row in the batch.
    `partials` has a row for the sum of each segment; the total replaces the row of the run's first segment.
    """
    columns, lanes = tl.arange(0, BLOCK_D), tl.arange(0, ROWS)
    for number in range(tl.program_id(0), tl.load(counters + _LONG_RUNS), tl.num_programs(0)):
        run = tl.load(long_runs + number)
        first = tl.load(first_segment + run)
        end = first + (tl.load(starts + run + 1) - tl.load(starts + run) + SEGMENT - 1) // SEGMENT
        total = tl.zeros([BLOCK_D], tl.float32)
        for i in range(first, end, ROWS):
            at = i + lanes
            part = tl.load(partials + at[:, None] * BLOCK_D + columns[None, :], mask=(at < end)[:, None], other=0)
            total += tl.sum(part, axis=0)
        tl.store(partials + first * BLOCK_D + columns, total)  # a column's sum needs all of its loads


@triton.jit
def _gradient(
    places, scales, grads, at, there, columns, inside, SCALED: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Return one gradient for each of GROUP runs, fp32 `[GROUP, BLOCK_D]`: the gradient of one occurrence of the run. A run is
    all occurrences of one table row in the batch.

    at: for each run, the index of the occurrence among all sorted occurrences.
    there: False for runs without an occurrence at this index; their gradient is 0.
    """
    place = tl.load(places + at, mask=there, other=0)
    return _gradient_at(place, scales, grads, at, there, columns, inside, SCALED, ALIGN)


@triton.jit
def _gradient_at(
    place, scales, grads, at, there, columns, inside, SCALED: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Load the gradients as `_gradient` does, from the offsets `place` in `grads`, one for each run."""
    place = tl.multiple_of(place, ALIGN)
    g = tl.load(grads + place[:, None] + columns[None, :], mask=there[:, None] & inside, other=0).to(tl.float32)
    if SCALED:
        g = g * tl.load(scales + at, mask=there, other=0)[:, None]
    return g


@triton.jit
def _table_after(entry, tables, count, row, valid, STEPS: tl.constexpr):
    """Return the same as `_table_of`, faster. entry: the result of `_table_of` for row numbers that are at most `row`.
    Usually the table is the same, so only the first row of the next table is loaded.
    """
    end = tl.load(entry + _TABLE_FIELDS + 4, mask=valid, other=_MOST)
    if tl.max((valid & (end <= row)).to(tl.int32), axis=0) > 0:
        entry = _table_of(tables, count, row, STEPS)
    return entry


@triton.jit
def _row(
    entry, is_first: tl.constexpr, tables, count_of_tables, key, valid, columns,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, UNIFORM: tl.constexpr, ALIGN: tl.constexpr, SPLIT: tl.constexpr,
    STEPS: tl.constexpr, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Find the rows of GROUP runs, and load what an update reads. Return (the lines of their tables, their row numbers in the
    tables, their elements fp32 `[GROUP, BLOCK_D]`, their rowwise states fp32 `[GROUP]`).

    entry: the lines of the tables of the program's preceding runs; ignored if is_first.
    """
    linear = key.to(tl.int64) // SPLIT
    if is_first:
        entry = _table_of(tables, count_of_tables, linear, STEPS)
    else:
        entry = _table_after(entry, tables, count_of_tables, linear, valid, STEPS)
    row = linear - tl.load(entry + 4)
    dim = tl.full([GROUP], BLOCK_D, tl.int64)
    if not UNIFORM:
        dim = tl.multiple_of(tl.load(entry + 5), ALIGN)
    inside = valid[:, None] & (columns[None, :] < dim[:, None])
    element = tl.multiple_of(row * dim, ALIGN)
    w = tl.zeros([GROUP, BLOCK_D], tl.float32)
    if (RULE != 0) & (RULE != 6):
        weight = tl.multiple_of(tl.load(entry).to(tl.pointer_type(DTYPE)), ALIGN * ITEM_BYTES)
        w = tl.load(weight[:, None] + element[:, None] + columns[None, :], mask=inside, other=0).to(tl.float32)
    rowwise = tl.zeros([GROUP], tl.float32)
    if (RULE == 2) | (RULE == 5):
        states = tl.load(entry + (1 if RULE == 2 else 2)).to(tl.pointer_type(tl.float32))
        rowwise = tl.load(states + row, mask=valid, other=1)
    return entry, row, w, rowwise


@triton.jit(do_not_specialize=["count_of_tables"])
def update_rows_kernel(
    run_keys, places, scales, grads, starts, runs, ok, first_segment, partials, tables, numbers, learning_rate, extra, skipped,
    count_of_tables,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, UNIFORM: tl.constexpr, ALIGN: tl.constexpr, SCALED: tl.constexpr,
    SEGMENT: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr, DTYPE: tl.constexpr,
    ITEM_BYTES: tl.constexpr, RULE: tl.constexpr, SPARSE: tl.constexpr, SKIP: tl.constexpr, STOCHASTIC: tl.constexpr,
    CLIPS: tl.constexpr, DECAYS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of every run (all occurrences of one table row in the batch), and apply the update rule to the row. A
    program works on GROUP runs at a time.

    run_keys: the sort key of each run, ascending (see `weft.kernels.embedding_runs`).
    RULE: the number of an `EmbeddingOptimizer`'s rule, or 0 or 6, which update no table. Rule 0 writes each gradient to an
        output of its table. In this output, a gradient has the row number that it has in the table, or with SPARSE the run's
        index among the table's runs. Rule 6 writes the sum of the gradient's squares to the run's element of `extra`, fp32.
    numbers: the rule's constants, fp32. learning_rate: the learning rate, fp32 `[]`.
    extra: with STOCHASTIC the seed of stochastic rounding, int64 `[1]`.
    SKIP: True to leave a row unchanged if its gradient is infinite or NaN. skipped: int64, the count of such rows.
    CLIPS, DECAYS: True if the rule clamps the elements of gradients, and if it adds a multiple of the row to the gradient.
    ok: int64 `[1]`; 0 if gradients have not arrived from all ranks. Then nothing is written.
    UNIFORM: True if all tables have BLOCK_D columns.
    ALIGN: a common divisor of all tables' widths and of all offsets in `places`, in elements.
    DTYPE: the dtype of the tables, and of the output of rule 0.
    count_of_tables: the number of tables.
    STEPS: the number of steps of a binary search among them.
    """
    columns, lanes = tl.arange(0, BLOCK_D), tl.arange(0, GROUP)
    factor, rate, clip = tl.load(numbers + _FACTOR), tl.load(learning_rate), tl.load(numbers + _CLIP)
    total_runs = tl.load(runs) * tl.load(ok)
    stride = tl.num_programs(0) * GROUP
    begin = tl.program_id(0) * GROUP
    # A pipeline: runs are loaded two groups ahead. Their rows, states and first three places are loaded one group ahead.
    run = begin + lanes
    valid = run < total_runs
    first = tl.load(starts + run, mask=valid, other=0)
    end = tl.load(starts + run + 1, mask=valid, other=0)
    key = tl.load(run_keys + run, mask=valid, other=0)
    next_run = run + stride
    next_valid = next_run < total_runs
    next_first = tl.load(starts + next_run, mask=next_valid, other=0)
    next_end = tl.load(starts + next_run + 1, mask=next_valid, other=0)
    next_key = tl.load(run_keys + next_run, mask=next_valid, other=0)
    entry, row, w, rowwise = _row(
        tables, True, tables, count_of_tables, key, valid, columns,
        GROUP, BLOCK_D, UNIFORM, ALIGN, SPLIT, STEPS, DTYPE, ITEM_BYTES, RULE,
    )  # fmt: skip
    place0 = tl.load(places + first, mask=valid, other=0)
    place1 = tl.load(places + first + 1, mask=valid & (first + 1 < end), other=0)
    place2 = tl.load(places + first + 2, mask=valid & (first + 2 < end), other=0)
    while begin < total_runs:
        later_run = next_run + stride
        later_valid = later_run < total_runs
        later_first = tl.load(starts + later_run, mask=later_valid, other=0)
        later_end = tl.load(starts + later_run + 1, mask=later_valid, other=0)
        later_key = tl.load(run_keys + later_run, mask=later_valid, other=0)
        next_entry, next_row, next_w, next_rowwise = _row(
            entry, False, tables, count_of_tables, next_key, next_valid, columns,
            GROUP, BLOCK_D, UNIFORM, ALIGN, SPLIT, STEPS, DTYPE, ITEM_BYTES, RULE,
        )  # fmt: skip
        next_place0 = tl.load(places + next_first, mask=next_valid, other=0)
        next_place1 = tl.load(places + next_first + 1, mask=next_valid & (next_first + 1 < next_end), other=0)
        next_place2 = tl.load(places + next_first + 2, mask=next_valid & (next_first + 2 < next_end), other=0)

        dim = tl.full([GROUP], BLOCK_D, tl.int64)
        if not UNIFORM:
            dim = tl.multiple_of(tl.load(entry + 5), ALIGN)
        inside = valid[:, None] & (columns[None, :] < dim[:, None])
        element = tl.multiple_of(row * dim, ALIGN)

        length = end - first
        is_long = length > SEGMENT
        length = tl.where(is_long, 0, length)
        most = tl.max(length, axis=0)
        g = tl.zeros([GROUP, BLOCK_D], tl.float32)
        one = _gradient_at(place0, scales, grads, first, length > 0, columns, inside, SCALED, ALIGN)
        if most > 1:  # load the first three gradients together
            two = _gradient_at(place1, scales, grads, first + 1, length > 1, columns, inside, SCALED, ALIGN)
            three = _gradient_at(place2, scales, grads, first + 2, length > 2, columns, inside, SCALED, ALIGN)
            g = ((g + one) + two) + three
        else:
            g = g + one
        for i in range(3, most, 2):
            one = _gradient(places, scales, grads, first + i, i < length, columns, inside, SCALED, ALIGN)
            two = _gradient(places, scales, grads, first + i + 1, i + 1 < length, columns, inside, SCALED, ALIGN)
            g = (g + one) + two
        if tl.max(is_long.to(tl.int32), axis=0) > 0:
            segment = tl.load(first_segment + run, mask=is_long, other=0)
            part = partials + segment[:, None] * BLOCK_D + columns[None, :]
            g += tl.load(part, mask=is_long[:, None] & inside, other=0)
        g = factor * g

        stored = inside
        keeps = valid
        if SKIP:
            infinite = tl.sum((inside & ~(tl.abs(g) <= _LARGEST)).to(tl.int32), axis=1)
            keeps = valid & (infinite == 0)
            stored = inside & keeps[:, None]
            count = tl.sum((valid & (infinite > 0)).to(tl.int64), axis=0)
            if count > 0:
                tl.atomic_add(skipped, count)
        if CLIPS:
            g = tl.where(g > clip, clip, tl.where(g < -clip, -clip, g))  # NaN stays NaN
        if RULE == 6:
            squares = tl.sum(tl.where(stored, g * g, 0), axis=1)
            tl.store(extra + run, squares, mask=valid)
        elif RULE == 0:
            at = row
            if SPARSE:
                at = run - tl.load(entry + 6)
            out = tl.multiple_of(tl.load(entry + 3).to(tl.pointer_type(DTYPE)), ALIGN * ITEM_BYTES)
            tl.store(
                out[:, None] + tl.multiple_of(at * dim, ALIGN)[:, None] + columns[None, :], g.to(DTYPE), mask=stored
            )
        else:
            if DECAYS:
                g += tl.load(numbers + _DECAY) * w
            eps = tl.load(numbers + _EPS)
            states1 = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.float32)), ALIGN * ITEM_BYTES)
            states2 = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(tl.float32)), ALIGN * ITEM_BYTES)
            places1 = states1[:, None] + element[:, None] + columns[None, :]
            mean = tl.sum(tl.where(inside, g * g, 0), axis=1) / dim.to(tl.float32)
            if RULE == 2:  # rowwise Adagrad
                s = rowwise + mean
                tl.store(states1 + row, s, mask=keeps)
                g = over_root(g, s, eps, inside, GROUP, BLOCK_D, PTX)
            if RULE == 3:  # Adagrad
                s = tl.load(places1, mask=inside, other=1) + g * g
                tl.store(places1, s, mask=stored)
                g = tl.div_rn(g, tl.sqrt_rn(s) + eps)
            if RULE >= 4:  # Adam, partial rowwise Adam
                m = tl.load(places1, mask=inside, other=0)
                m = tl.load(numbers + _BETA1) * m + tl.load(numbers + _REST1) * g
                tl.store(places1, m, mask=stored)
                m = m * tl.load(numbers + _CORRECTION1)
                if RULE == 4:
                    places2 = states2[:, None] + element[:, None] + columns[None, :]
                    v = tl.load(places2, mask=inside, other=1)
                    v = tl.load(numbers + _BETA2) * v + tl.load(numbers + _REST2) * (g * g)
                    tl.store(places2, v, mask=stored)
                    g = tl.div_rn(m, tl.sqrt_rn(v * tl.load(numbers + _CORRECTION2)) + eps)
                else:
                    u = tl.load(numbers + _BETA2) * rowwise + tl.load(numbers + _REST2) * mean
                    tl.store(states2 + row, u, mask=keeps)
                    g = tl.div_rn(m, (tl.sqrt_rn(u * tl.load(numbers + _CORRECTION2)) + eps)[:, None])
            weight = tl.multiple_of(tl.load(entry).to(tl.pointer_type(DTYPE)), ALIGN * ITEM_BYTES)
            weight = weight[:, None] + element[:, None] + columns[None, :]
            if rate != 0:  # otherwise leave the row's bits unchanged, including the sign of a zero
                if STOCHASTIC:
                    base = mixed(tl.load(extra) + tl.load(entry + 7) * _GOLDEN).to(tl.int64, bitcast=True)
                    random = mixed(base[:, None] + (element[:, None] + columns[None, :]) * _GOLDEN)
                    tl.store(weight, at_random(w - rate * g, random, DTYPE), mask=stored)
                else:
                    tl.store(weight, (w - rate * g).to(DTYPE), mask=stored)
        begin += stride
        run = next_run
        valid = next_valid
        first = next_first
        end = next_end
        entry = next_entry
        row = next_row
        w = next_w
        rowwise = next_rowwise
        place0 = next_place0
        place1 = next_place1
        place2 = next_place2
        next_run = later_run
        next_valid = later_valid
        next_first = later_first
        next_end = later_end
        next_key = later_key


@triton.jit(do_not_specialize=["count", "no_row", "count_of_tables"])
def add_each_kernel(
    keys, places, scales, grads, tables, numbers, learning_rate, ok, count, no_row, count_of_tables,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, UNIFORM: tl.constexpr, ALIGN: tl.constexpr, SCALED: tl.constexpr,
    SPLIT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Apply SGD without sorting the ids: add -rate * factor * gradient of each occurrence to its fp32 row, with
    atomics.

    The order of additions differs between launches, and so do the last bits of a row.

    keys: the sort keys of the occurrences, in any order.
    ok: int64 `[1]`; 0 if gradients have not arrived from all ranks. Then nothing is added.
    """
    columns, lanes = tl.arange(0, BLOCK_D), tl.arange(0, ROWS)
    rate = tl.load(learning_rate)
    step = rate * tl.load(numbers + _FACTOR)
    last = count
    if (rate == 0) | (tl.load(ok) == 0):
        last = count * 0
    for i in range(tl.program_id(0) * ROWS, last, tl.num_programs(0) * ROWS):
        at = i + lanes
        key = tl.load(keys + at, mask=at < count, other=no_row)
        there = (at < count) & (key != no_row)
        linear = tl.where(there, key.to(tl.int64) // SPLIT, 0)
        entry = _table_of(tables, count_of_tables, linear, STEPS)
        row = linear - tl.load(entry + 4)
        dim = tl.full([ROWS], BLOCK_D, tl.int64)
        if not UNIFORM:
            dim = tl.multiple_of(tl.load(entry + 5), ALIGN)
        inside = columns[None, :] < dim[:, None]
        g = _gradient(places, scales, grads, at, there, columns, inside, SCALED, ALIGN)
        weight = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.float32)), ALIGN * 4)
        where = weight[:, None] + tl.multiple_of(row * dim, ALIGN)[:, None] + columns[None, :]
        tl.atomic_add(where, -step * g, mask=there[:, None] & inside, sem="relaxed")


@triton.jit(do_not_specialize=["count", "no_row", "count_of_tables"])
def gradients_of_weights_kernel(
    keys, places, grads, tables, out, count, no_row, count_of_tables,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the per-sample weight of each id in the batch. It is the dot product of the bag's gradient and the
    table row, or 0 for an id out of range.

    keys: the sort keys of the occurrences, in any order.
    """
    columns, lanes = tl.arange(0, BLOCK_D), tl.arange(0, ROWS)
    for i in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        at = i + lanes
        key = tl.load(keys + at, mask=at < count, other=no_row)
        there = (at < count) & (key != no_row)
        linear = tl.where(there, key.to(tl.int64) // SPLIT, 0)
        entry = _table_of(tables, count_of_tables, linear, STEPS)
        dim = tl.load(entry + 5)
        row = linear - tl.load(entry + 4)
        mask = there[:, None] & (columns[None, :] < dim[:, None])
        weight = tl.load(entry).to(tl.pointer_type(DTYPE))
        w = tl.load(weight[:, None] + (row * dim)[:, None] + columns[None, :], mask=mask, other=0).to(tl.float32)
        place = tl.load(places + at, mask=there, other=0)
        g = tl.load(grads + place[:, None] + columns[None, :], mask=mask, other=0).to(tl.float32)
        tl.store(out + at, tl.sum(w * g, axis=1), mask=at < count)


@triton.jit(do_not_specialize=["rows", "stride", "chunks"])
def by_owner_kernel(
    grad, send, table, rows, stride, chunks, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr
):
    """Reorder the columns of `grad` by the rank that owns their table. For each rank, one after the other, write a
    block [rows, columns of the rank's tables] to `send`.

    grad: rows are stride * WIDTH elements apart.
    table: int64 [chunks, OWNER_FIELDS], a line for each chunk of WIDTH consecutive columns of grad. A line has these four
        numbers, in columns, all multiples of WIDTH:

    - the chunk's first column in grad
    - the total width of all blocks before the chunk's block
    - the width of the chunk's block
    - the chunk's first column in its block

    Grid: (tiles of ROWS rows, groups of CHUNKS chunks).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    line = table + chunk * _OWNER_FIELDS
    is_chunk = chunk < chunks
    source = tl.load(line, mask=is_chunk, other=0)
    before = tl.load(line + 1, mask=is_chunk, other=0)
    columns = tl.load(line + 2, mask=is_chunk, other=0)
    column = tl.load(line + 3, mask=is_chunk, other=0)
    there = ((row < rows)[:, None] & is_chunk[None, :])[:, :, None]
    at = tl.multiple_of((row * stride * WIDTH)[:, None] + source[None, :], [WIDTH, WIDTH])
    to = before[None, :] * rows + row[:, None] * columns[None, :] + column[None, :]
    to = tl.multiple_of(to, [WIDTH, WIDTH])
    element = tl.arange(0, WIDTH)[None, None, :]
    g = tl.load(grad + at[:, :, None] + element, mask=there)
    tl.store(send + to[:, :, None] + element, g.to(send.dtype.element_ty), mask=there)
