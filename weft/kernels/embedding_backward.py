"""The gradient of every embedding row that a batch has read, reduced in a fixed order, and an optimizer's update of the row.

    g[row] = factor * sum over occurrences of row:  weight / (length of the bag, for a mean) * grad[sample, columns]

An occurrence is one id of one bag. Before these kernels a stable sort has put the occurrences of each row together: a run. `order`
has the numbers of occurrences, sorted; `starts` the begin of each run in it, and the end.

Order. The tiles of a run begin at its first occurrence and are summed one after the other. So a sum depends on the run and the
constants alone: neither on programs and their order nor on other runs. A run of more than SEGMENT occurrences is cut into
segments of that length, whose sums `segment_sums_kernel` leaves in `partials`; the update adds them, in order. So a row that is
hit a million times keeps many programs busy, and nothing is added by atomics.

Every program takes runs in strides until the number of runs, which only the device knows. The rules are those of
`weft.embedding.optimizers`; numbers that change from call to call are in device memory, so that a captured launch can be replayed.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The table of tables (int64): addresses of weight, first state, second state and output; first linear row; columns; first run;
# number of the table.
TABLE_FIELDS = 8
# The numbers (float32).
NUMBERS = 11
RATE, FACTOR, EPS, DECAY, BETA1, BETA2, REST1, REST2, CORRECTION1, CORRECTION2, CLIP = range(NUMBERS)

_TABLE_FIELDS = tl.constexpr(TABLE_FIELDS)
_RATE = tl.constexpr(RATE)
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
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _sum(
    order, places, scales, grads, begin, end, columns, inside,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Return the sum of occurrences [begin, end), fp32 [BLOCK_D]."""
    total = tl.zeros([BLOCK_D], tl.float32)
    lanes = tl.arange(0, ROWS)
    for i in range(begin, end, ROWS):
        at = i + lanes
        there = at < end
        occurrence = tl.load(order + at, mask=there, other=0)
        place = tl.load(places + occurrence, mask=there, other=0)
        mask = there[:, None] & inside[None, :]
        g = tl.load(grads + place[:, None] + columns[None, :], mask=mask, other=0).to(tl.float32)
        if SCALED:
            g = g * tl.load(scales + occurrence, mask=there, other=0)[:, None]
        total += tl.sum(g, axis=0)
    return total


@triton.jit
def segment_sums_kernel(
    order, places, scales, grads, starts, run_of_segment, first_segment, segments, tables_of, tables, partials,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Sum each segment of long runs into its row of `partials`, [segments, BLOCK_D]."""
    columns = tl.arange(0, BLOCK_D)
    for segment in range(tl.program_id(0), tl.load(segments), tl.num_programs(0)):
        run = tl.load(run_of_segment + segment)
        first, run_end = tl.load(starts + run), tl.load(starts + run + 1)
        begin = first + (segment - tl.load(first_segment + run)) * SEGMENT
        end = tl.minimum(begin + SEGMENT, run_end)
        table = tl.load(tables_of + tl.load(order + first))
        inside = columns < tl.load(tables + table * _TABLE_FIELDS + 5)
        total = _sum(order, places, scales, grads, begin, end, columns, inside, ROWS, BLOCK_D, SCALED)
        tl.store(partials + tl.cast(segment, tl.int64) * BLOCK_D + columns, total)


@triton.jit
def _reduced(
    order, places, scales, grads, first, end, run, first_segment, partials, columns, inside,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Return the sum of a run: of its occurrences, or of its segments' sums."""
    if end - first <= SEGMENT:
        total = _sum(order, places, scales, grads, first, end, columns, inside, ROWS, BLOCK_D, SCALED)
    else:
        total = tl.zeros([BLOCK_D], tl.float32)
        lanes = tl.arange(0, ROWS)
        segment = tl.load(first_segment + run)
        segments_end = segment + (end - first + SEGMENT - 1) // SEGMENT
        for i in range(segment, segments_end, ROWS):
            at = i + lanes
            mask = (at < segments_end)[:, None] & inside[None, :]
            total += tl.sum(tl.load(partials + at[:, None] * BLOCK_D + columns[None, :], mask=mask, other=0), axis=0)
    return total


@triton.jit
def _mixed(word):
    """Return splitmix64's finalizer of an int64, as uint64."""
    z = word.to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _at_random(x, random, DTYPE: tl.constexpr):
    """Return fp32 `x` as a neighbour in DTYPE, fp16 or bf16, chosen by the 24 lowest bits of `random`.

    The upper neighbour has the probability that is the distance from the lower one, over that of the two. The same as
    `narrow_at_random` of csrc/embedding_backward.cpp.
    """
    bits = x.to(tl.uint32, bitcast=True)
    LOW: tl.constexpr = 0xFFFF if tl.bfloat16 == DTYPE else 0x1FFF
    finite = (bits & 0x7F800000) != 0x7F800000
    moved = ((bits + (random & LOW).to(tl.uint32)) & (0xFFFFFFFF - LOW)).to(tl.float32, bitcast=True)
    found = tl.where(finite, moved, x)
    if tl.float16 == DTYPE:  # subnormals are multiples of 2**-24
        scaled = tl.abs(x) * 16777216.0
        below = tl.floor(scaled)
        up = (random & 0xFFFFFF).to(tl.int32).to(tl.float32) < (scaled - below) * 16777216.0
        size = (below + tl.where(up, 1.0, 0.0)) * 5.9604644775390625e-08
        found = tl.where(tl.abs(x) < 6.103515625e-05, tl.where(x < 0, -size, size), found)
    return found.to(DTYPE)


@triton.jit
def update_rows_kernel(
    keys, order, places, scales, grads, starts, runs, first_segment, partials, tables_of, tables, numbers, extra, skipped,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr, SEGMENT: tl.constexpr, SPLIT: tl.constexpr,
    DTYPE: tl.constexpr, RULE: tl.constexpr, SPARSE: tl.constexpr, SKIP: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Reduce the gradient of every run, and apply the rule to its row.

    keys: sorted, (linear row) * SPLIT + a number below SPLIT. RULE: of `EmbeddingOptimizer`; 0 writes the gradient to the output,
    SPARSE to the row of the run in it; 6 writes the sum of the gradient's squares to the element of the run in `extra`, fp32.
    DTYPE: of the tables, and of the output of rule 0. skipped: int64, counts rows that SKIP left alone. extra: for STOCHASTIC
    the seed, int64 [1].
    """
    columns = tl.arange(0, BLOCK_D)
    factor, rate = tl.load(numbers + _FACTOR), tl.load(numbers + _RATE)
    for run in range(tl.program_id(0), tl.load(runs), tl.num_programs(0)):
        first, end = tl.load(starts + run), tl.load(starts + run + 1)
        entry = tables + tl.load(tables_of + tl.load(order + first)) * _TABLE_FIELDS
        dim = tl.load(entry + 5)
        row = tl.load(keys + first).to(tl.int64) // SPLIT - tl.load(entry + 4)
        inside = columns < dim
        g = factor * _reduced(
            order,
            places,
            scales,
            grads,
            first,
            end,
            run,
            first_segment,
            partials,
            columns,
            inside,
            ROWS,
            BLOCK_D,
            SCALED,
            SEGMENT,
        )
        stored = inside
        if SKIP:
            infinite = tl.sum((inside & ~(tl.abs(g) <= _LARGEST)).to(tl.int32), axis=0)
            stored = inside & (infinite == 0)
            if infinite > 0:
                tl.atomic_add(skipped, 1)
        clip = tl.load(numbers + _CLIP)
        g = tl.where(g > clip, clip, tl.where(g < -clip, -clip, g))  # NaN stays NaN
        if RULE == 6:
            squares = tl.sum(tl.where(stored, g * g, 0), axis=0)
            tl.store(extra + run, squares)
        elif RULE == 0:
            at = row
            if SPARSE:
                at = run - tl.load(entry + 6)
            out = tl.load(entry + 3).to(tl.pointer_type(DTYPE))
            tl.store(out + at * dim + columns, g.to(DTYPE), mask=stored)
        else:
            weight = tl.load(entry).to(tl.pointer_type(DTYPE)) + row * dim + columns
            w = tl.load(weight, mask=inside, other=0).to(tl.float32)
            g += tl.load(numbers + _DECAY) * w
            eps = tl.load(numbers + _EPS)
            states1 = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
            states2 = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
            is_stored = tl.sum(stored.to(tl.int32), axis=0) > 0
            mean = tl.sum(tl.where(inside, g * g, 0), axis=0) / dim.to(tl.float32)
            if RULE == 2:  # rowwise Adagrad
                s = tl.load(states1 + row) + mean
                tl.store(states1 + row, s, mask=is_stored)
                g = tl.div_rn(g, tl.sqrt_rn(s) + eps)
            if RULE == 3:  # Adagrad
                s = tl.load(states1 + row * dim + columns, mask=inside, other=1) + g * g
                tl.store(states1 + row * dim + columns, s, mask=stored)
                g = tl.div_rn(g, tl.sqrt_rn(s) + eps)
            if RULE >= 4:  # Adam, partial rowwise Adam
                m = tl.load(states1 + row * dim + columns, mask=inside, other=0)
                m = tl.load(numbers + _BETA1) * m + tl.load(numbers + _REST1) * g
                tl.store(states1 + row * dim + columns, m, mask=stored)
                m = m * tl.load(numbers + _CORRECTION1)
                if RULE == 4:
                    v = tl.load(states2 + row * dim + columns, mask=inside, other=1)
                    v = tl.load(numbers + _BETA2) * v + tl.load(numbers + _REST2) * (g * g)
                    tl.store(states2 + row * dim + columns, v, mask=stored)
                    g = tl.div_rn(m, tl.sqrt_rn(v * tl.load(numbers + _CORRECTION2)) + eps)
                else:
                    u = tl.load(numbers + _BETA2) * tl.load(states2 + row) + tl.load(numbers + _REST2) * mean
                    tl.store(states2 + row, u, mask=is_stored)
                    g = tl.div_rn(m, tl.sqrt_rn(u * tl.load(numbers + _CORRECTION2)) + eps)
            if rate != 0:  # otherwise the row keeps its bits, the sign of a zero too
                if STOCHASTIC:
                    base = _mixed(tl.load(extra) + tl.load(entry + 7) * _GOLDEN).to(tl.int64, bitcast=True)
                    random = _mixed(base + (row * dim + columns) * _GOLDEN)
                    tl.store(weight, _at_random(w - rate * g, random, DTYPE), mask=stored)
                else:
                    tl.store(weight, (w - rate * g).to(DTYPE), mask=stored)


@triton.jit
def gradients_of_weights_kernel(
    keys, places, grads, tables_of, tables, out, count,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr, NO_ROW: tl.constexpr,
):  # fmt: skip
    """Write <grad[sample, columns], row> for each occurrence; 0 where an id has no row. keys: not sorted."""
    columns, lanes = tl.arange(0, BLOCK_D), tl.arange(0, ROWS)
    for i in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        at = i + lanes
        key = tl.load(keys + at, mask=at < count, other=NO_ROW)
        there = (at < count) & (key != NO_ROW)
        entry = tables + tl.load(tables_of + at, mask=there, other=0) * _TABLE_FIELDS
        dim = tl.load(entry + 5)
        row = tl.where(there, key.to(tl.int64) // SPLIT - tl.load(entry + 4), 0)
        mask = there[:, None] & (columns[None, :] < dim[:, None])
        weight = tl.load(entry).to(tl.pointer_type(DTYPE))
        w = tl.load(weight[:, None] + (row * dim)[:, None] + columns[None, :], mask=mask, other=0).to(tl.float32)
        place = tl.load(places + at, mask=there, other=0)
        g = tl.load(grads + place[:, None] + columns[None, :], mask=mask, other=0).to(tl.float32)
        tl.store(out + at, tl.sum(w * g, axis=1), mask=at < count)
