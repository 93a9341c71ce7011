"""Pooling of bags that have one id each, as of one-hot features.

A bag with one id has no sum. So a program pools all features of a unit of work at the same time, a row for each
feature, in place of one bag after the other. Bags of several ids get the same sums as in `embedding_all_to_all_kernel`,
but slowly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.embedding_bags import (
    IDS,
    SLOT_FIELDS,
    bag_at,
    load_ids,
    load_rows,
    rows_of,
    table_of,
    target_of,
    unit_at,
    weighted_rows,
)

_IDS = tl.constexpr(IDS)
_SLOT_FIELDS = tl.constexpr(SLOT_FIELDS)


@triton.jit
def sum_of_bag(
    values, start, end, weight, rows_in_table, stride, width, counts, per_sample_weights, bad, bad_at,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, UNIFORM: tl.constexpr, WEIGHTED: tl.constexpr, HASH: tl.constexpr,
    CHECK: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Return (the sum of the rows of a bag, float32 `[BLOCK_D]`, bad, bad_at), with the additions in the same order as in
    `embedding_all_to_all_kernel`. The arguments are as for `rows_of` and `load_rows`.
    """
    cols, lanes, id_lanes = tl.arange(0, BLOCK_D), tl.arange(0, ROWS), tl.arange(0, _IDS)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    begin = start
    while begin < end:
        ids = load_ids(values, begin, end, id_lanes)
        rows, bad, bad_at = rows_of(ids, begin + id_lanes, end, rows_in_table, counts, bad, bad_at, HASH, CHECK, ROW)
        here = tl.minimum(end - begin, _IDS).to(tl.int32)
        done = tl.full([], 0, tl.int32)
        while done < here:
            block = load_rows(weight, rows, done, stride, cols, width, lanes, UNIFORM, BLOCK_D)
            acc += weighted_rows(block, rows, done, begin, per_sample_weights, lanes, WEIGHTED)
            done += ROWS
        begin += _IDS
    return tl.sum(acc, 0), bad, bad_at


@triton.jit
def bags_of_unit(
    unit, cuts, id_lanes, n_units, units, units_per_sample, first_sample, by_slot, offsets, slots, batch, n_values,
    POSITION: tl.constexpr,
):  # fmt: skip
    """Return (sample, first slot, end slot, starts, ends, cuts) of a unit of work, with a bag for each slot: the results of
    `unit_at` and of `bag_at`.
    """
    sample, slot, stop = unit_at(unit, n_units, units, units_per_sample, first_sample, batch, by_slot)
    each = slot + id_lanes
    has = (each < stop) & (unit < n_units)
    starts, ends, cuts = bag_at(offsets, slots, tl.where(has, each, slot), sample, batch, n_values, has, cuts, POSITION)
    return sample, slot, stop, starts, ends, cuts


@triton.jit
def pool_single_ids(
    slots, units, values, offsets, per_sample_weights, batch_starts, out_addresses, mine, counter, bad, bad_at,
    batch, n_units, n_values, out_slot, out_slot_bytes, units_per_sample, first_sample, is_even, by_slot,
    WORLD: tl.constexpr, WORLD_P2: tl.constexpr, OUT_STRIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    UNIFORM: tl.constexpr, ALIGN: tl.constexpr, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, OUT_DTYPE: tl.constexpr,
    OUT_BYTES: tl.constexpr, ROW: tl.constexpr, POSITION: tl.constexpr, WEIGHTED: tl.constexpr, ANY_MEAN: tl.constexpr,
    HASH: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Pool all units of work of this program, and store the vectors in the outputs of their samples' ranks. Return (bad,
    bad_at, the number of bags whose positions had to be clamped).

    mine: the address of this rank's signals. counter: the word from which programs take units. bad, bad_at: see `rows_of`.
    The other arguments are as for `embedding_all_to_all_kernel`.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols, lanes, id_lanes = tl.arange(0, BLOCK_D), tl.arange(0, ROWS), tl.arange(0, _IDS)
    cut = tl.full([], 0, tl.int32)
    # Ids are loaded one unit ahead, offsets two units ahead.
    cuts = tl.zeros([_IDS], tl.int32)
    unit0 = program
    sample0, slot0, stop0, starts0, ends0, cuts = bags_of_unit(
        unit0, cuts, id_lanes, n_units, units, units_per_sample, first_sample, by_slot, offsets, slots, batch, n_values,
        POSITION,
    )  # fmt: skip
    unit1 = program + programs
    sample1, slot1, stop1, starts1, ends1, cuts = bags_of_unit(
        unit1, cuts, id_lanes, n_units, units, units_per_sample, first_sample, by_slot, offsets, slots, batch, n_values,
        POSITION,
    )  # fmt: skip
    unit2 = tl.atomic_add(counter, 1, sem="relaxed").to(tl.int32) + 2 * programs
    ids0 = tl.load(values + starts0, mask=starts0 < ends0, other=0)
    while unit0 < n_units:
        ids1 = tl.load(values + starts1, mask=starts1 < ends1, other=0)
        sample2, slot2, stop2, starts2, ends2, cuts = bags_of_unit(
            unit2, cuts, id_lanes, n_units, units, units_per_sample, first_sample, by_slot, offsets, slots, batch, n_values,
            POSITION,
        )  # fmt: skip
        unit3 = tl.atomic_add(counter, 1, sem="relaxed").to(tl.int32) + 2 * programs

        entries = slots + tl.minimum(slot0 + id_lanes, stop0 - 1) * _SLOT_FIELDS
        tables, table_rows, columns = tl.load(entries), tl.load(entries + 1), tl.load(entries + 4)
        counts_of = tl.full([_IDS], 1, tl.int64)
        if CHECK and not UNIFORM:
            counts_of = tl.load(entries + 7)
        is_long = ends0 - starts0 > 1
        rows, bad, bad_at = rows_of(
            ids0, starts0, tl.where(is_long, starts0, ends0), table_rows, counts_of, bad, bad_at, HASH, CHECK, ROW
        )
        out_row_at, _, _, _ = target_of(
            sample0, batch_starts, batch, is_even, mine, out_addresses, out_slot, out_slot_bytes,
            WORLD, WORLD_P2, OUT_STRIDE, OUT_BYTES,
        )  # fmt: skip
        out_row = tl.multiple_of(out_row_at.to(tl.pointer_type(OUT_DTYPE)), ALIGN * OUT_BYTES)
        first = tl.full([], 0, tl.int32)
        while first < stop0 - slot0:
            here = first + lanes
            row = tl.gather(rows, here, 0)
            table = tl.gather(tables, here, 0).to(tl.pointer_type(DTYPE))
            table = tl.multiple_of(table, ALIGN * ITEM_BYTES)
            column = tl.multiple_of(tl.gather(columns, here, 0), ALIGN)
            inside = (slot0 + here < stop0) & (tl.gather(is_long.to(tl.int32), here, 0) == 0)
            inside = inside[:, None] & (cols < BLOCK_D)[None, :]
            pitch = tl.full([ROWS], BLOCK_D, tl.int64)
            if not UNIFORM:
                entry = slots + tl.minimum(slot0 + here, stop0 - 1) * _SLOT_FIELDS
                pitch = tl.multiple_of(tl.load(entry + 2), ALIGN)
                inside = inside & (cols[None, :] < tl.load(entry + 5)[:, None])
            at = table[:, None] + tl.multiple_of(row.to(tl.int64) * pitch, ALIGN)[:, None] + cols[None, :]
            block = tl.load(at, mask=inside & (row >= 0)[:, None], other=0.0).to(tl.float32)
            if WEIGHTED:
                start = tl.gather(starts0, here, 0)
                block *= tl.load(per_sample_weights + start, mask=row >= 0, other=0.0)[:, None]
            block = 0.0 + block  # as in the sum of a bag, where a negative zero becomes positive
            tl.store(out_row + column[:, None] + cols[None, :], block.to(OUT_DTYPE), mask=inside)
            first += ROWS
        if tl.max(is_long.to(tl.int32), 0) > 0:
            slot = slot0
            while slot < stop0:
                start, end, _ = bag_at(offsets, slots, slot, sample0, batch, n_values, slot < stop0, cut, POSITION)
                if end - start > 1:
                    weight, rows_in_table, stride, width, counts = table_of(
                        slots, slot, DTYPE, ITEM_BYTES, ALIGN, UNIFORM, CHECK, BLOCK_D
                    )
                    pooled, bad, bad_at = sum_of_bag(
                        values, start, end, weight, rows_in_table, stride, width, counts, per_sample_weights, bad, bad_at,
                        ROWS, BLOCK_D, UNIFORM, WEIGHTED, HASH, CHECK, ROW,
                    )  # fmt: skip
                    if ANY_MEAN:
                        is_mean = tl.load(slots + slot * _SLOT_FIELDS + 6) != 0
                        pooled = pooled / tl.where(is_mean, end - start, 1).to(tl.float32)
                    column_of = tl.multiple_of(tl.load(slots + slot * _SLOT_FIELDS + 4), ALIGN)
                    tl.store(out_row + column_of + cols, pooled.to(OUT_DTYPE), mask=cols < width)
                slot += 1
        unit0 = unit1
        sample0 = sample1
        slot0 = slot1
        stop0 = stop1
        starts0 = starts1
        ends0 = ends1
        ids0 = ids1
        unit1 = unit2
        sample1 = sample2
        slot1 = slot2
        stop1 = stop2
        starts1 = starts2
        ends1 = ends2
        unit2 = unit3
    if unit0 < 0:
        tl.store(counter, tl.sum(ids0, 0).to(tl.int64))  # never, as in `embedding_all_to_all_kernel`
    cut += tl.sum(cuts, 0)
    return bad, bad_at, cut
