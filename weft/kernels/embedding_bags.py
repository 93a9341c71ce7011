"""Device functions that read bags of embedding ids. They return the next unit of work, the bounds of a bag, its ids,
and its table rows.

`weft.kernels.embedding_all_to_all` pools the bags. A slot is a feature of this rank; a unit of work is some slots of
one sample. The launcher makes the tables `slots` and `units`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.signals import words

# Columns of the slot table (int64): address, rows, stride, block of offsets, first output column, width, 1 for mean
# pooling, 1 for the slot's first piece. A slot wider than BLOCK_D is several pieces, each with its own columns.
SLOT_FIELDS = 8
# Columns of the unit table (int64): first slot and end of a sample's unit of work, its first output column and its width.
UNIT_FIELDS = 4
# Ids of a bag that are read at a time, one per lane.
IDS = 32
# The lowest bits of the signal "ready" are the number of an output buffer.
SLOT_BITS = 8

_SLOT_FIELDS = tl.constexpr(SLOT_FIELDS)
_UNIT_FIELDS = tl.constexpr(UNIT_FIELDS)
_IDS = tl.constexpr(IDS)
_SLOT_MASK = tl.constexpr((1 << SLOT_BITS) - 1)


@triton.jit
def row_of(id, rows, HASH: tl.constexpr):
    """Return the index of the table row that an id selects. It is the id itself, or with HASH a hash of the id (the finalizer
    of splitmix64) modulo the number of rows.
    """
    if HASH:
        z = id.to(tl.int64).to(tl.uint64, bitcast=True)
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z = z ^ (z >> 31)
        return (z % rows.to(tl.uint64)).to(tl.int64)
    return id.to(tl.int64)


@triton.jit
def unit_at(unit, n_units, units, units_per_sample, first_sample, batch, by_slot):
    """Return (sample, first slot, end slot) of unit of work number `unit`: the features (slots) of one sample that a program
    pools. Samples are ordered from `first_sample` to the last sample and then from sample 0.

    If `by_slot` is 0, units are numbered sample by sample. Otherwise the first units of all samples come first, then their
    second units, and so on. If `unit` is too large, return the first unit, which the caller must ignore.
    """
    u = tl.where(unit < n_units, unit, 0)
    inner = tl.where(by_slot != 0, tl.maximum(batch, 1), units_per_sample)
    outer = u // inner
    rest = u - outer * inner
    position = tl.where(by_slot != 0, rest, outer)
    entry = units + tl.where(by_slot != 0, outer, rest) * _UNIT_FIELDS
    sample = position + first_sample
    sample = tl.where(sample >= batch, sample - batch, sample)
    return sample, tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)


@triton.jit
def slot_after(
    unit, sample, slot, stop, grabbed, counter, programs, n_units, units, units_per_sample, first_sample, batch, by_slot
):
    """Return (unit, sample, slot, end slot, grabbed) of the slot that a program pools after `slot`. If `slot` is the last
    of its unit, return the first slot of unit `grabbed`, and take a new unit from `counter` as `grabbed`.
    """
    slot += 1
    if slot >= stop:
        unit = grabbed
        sample, slot, stop = unit_at(unit, n_units, units, units_per_sample, first_sample, batch, by_slot)
        grabbed = tl.atomic_add(counter, 1, sem="relaxed").to(tl.int32) + 2 * programs
    return unit, sample, slot, stop, grabbed


@triton.jit
def bag_at(offsets, slots, slot, sample, batch, n_values, valid, cut, POSITION: tl.constexpr):
    """Return (start, end, cut) for the bag of feature `slot` and `sample`: where the bag begins and ends in the tensor of ids,
    and the updated counter `cut`. Both positions are clamped to 0 .. `n_values`, the number of ids.

    cut: the number of bags so far whose positions had to be clamped. valid: False for elements of the vectors without a bag.
    """
    key = tl.load(slots + slot * _SLOT_FIELDS + 3).to(POSITION)
    at = offsets + key * batch + sample
    first = tl.load(at, mask=valid, other=0).to(tl.int64)
    last = tl.load(at + 1, mask=valid, other=0).to(tl.int64)
    start = tl.minimum(tl.maximum(first, 0), n_values)
    end = tl.minimum(tl.maximum(last, start), n_values)
    return start.to(POSITION), end.to(POSITION), cut + ((start != first) | (end != last)).to(tl.int32)


@triton.jit
def bag_after(
    unit, sample, slot, stop, grabbed, cut, counter, programs, n_units, units, units_per_sample, first_sample, by_slot,
    offsets, slots, batch, n_values, POSITION: tl.constexpr,
):  # fmt: skip
    """Return (unit, sample, slot, end slot, grabbed, start, end, cut) of the bag that a program pools after `slot`: the results of
    `slot_after` and of `bag_at`.
    """
    unit, sample, slot, stop, grabbed = slot_after(
        unit,
        sample,
        slot,
        stop,
        grabbed,
        counter,
        programs,
        n_units,
        units,
        units_per_sample,
        first_sample,
        batch,
        by_slot,
    )
    start, end, cut = bag_at(offsets, slots, slot, sample, batch, n_values, unit < n_units, cut, POSITION)
    return unit, sample, slot, stop, grabbed, start, end, cut


@triton.jit
def load_ids(values, start, end, lanes):
    at = start + lanes
    return tl.load(values + at, mask=at < end, other=0)


@triton.jit
def rows_of(
    ids, at, end, rows_in_table, counts, bad, bad_at, HASH: tl.constexpr, CHECK: tl.constexpr, ROW: tl.constexpr
):  # fmt: skip
    """Return (rows, bad, bad_at) for a block of ids of one bag. rows: the table row of each id; -1 for elements past the end of
    the bag, and for an id out of range.

    at, end: the position of each id in the tensor of ids, and the end of the bag.
    bad, bad_at: for each element, the number of ids out of range so far, and the position of the first of them. Both are
        updated.
    counts: 0 if ids out of range must not be counted for this feature.
    """
    inside = at < end
    row = row_of(ids, rows_in_table, HASH)
    if CHECK:
        # As unsigned numbers, negative ids are large: one comparison finds both kinds of bad ids.
        wrong = inside & (row.to(tl.uint64, bitcast=True) >= rows_in_table.to(tl.uint64))
        inside = inside & (wrong == 0)
        bad_at = tl.where(wrong & (bad == 0), at, bad_at)
        bad += (wrong & (counts != 0)).to(tl.int32)
    return tl.where(inside, row.to(ROW), tl.full([_IDS], -1, ROW)), bad, bad_at


@triton.jit
def table_of(
    slots, slot, DTYPE: tl.constexpr, ITEM_BYTES: tl.constexpr, ALIGN: tl.constexpr, UNIFORM: tl.constexpr, CHECK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the slot table's entry for feature `slot`: (table, rows, stride, width, counts), as for `rows_of` and `load_rows`."""
    entry = slots + slot * _SLOT_FIELDS
    weight = tl.multiple_of(tl.load(entry).to(tl.pointer_type(DTYPE)), ALIGN * ITEM_BYTES)
    rows_in_table = tl.load(entry + 1)
    stride = tl.full([], BLOCK_D, tl.int64)
    width = tl.full([], BLOCK_D, tl.int64)
    if not UNIFORM:
        stride = tl.multiple_of(tl.load(entry + 2), ALIGN)
        width = tl.multiple_of(tl.load(entry + 5), ALIGN)
    counts = tl.full([], 1, tl.int64)
    if CHECK and not UNIFORM:
        counts = tl.load(entry + 7)
    return weight, rows_in_table, stride, width, counts


@triton.jit
def load_rows(weight, rows, first, stride, cols, width, lanes, UNIFORM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return ROWS table rows `[ROWS, BLOCK_D]`: the rows whose numbers are `rows[first : first + ROWS]`. Number -1 gives
    zeros.

    weight: the table. stride, width: the row pitch of the table, and its columns; with UNIFORM, both are BLOCK_D.
    """
    row = tl.gather(rows, first + lanes, 0)
    real = row >= 0
    if UNIFORM:
        block = tl.load(weight + row.to(tl.int64)[:, None] * BLOCK_D + cols[None, :], mask=real[:, None], other=0.0)
    else:
        inside = real[:, None] & (cols < width)[None, :]
        block = tl.load(weight + row.to(tl.int64)[:, None] * stride + cols[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def weighted_rows(block, rows, first, at, per_sample_weights, lanes, WEIGHTED: tl.constexpr):
    """Return the rows that `load_rows` has loaded, as float32, times their per-sample weights.

    at: the position, in the tensor of ids, of the id that belongs to `rows[0]`. Its per-sample weight has the same position.
    """
    block = block.to(tl.float32)
    if WEIGHTED:
        real = tl.gather(rows, first + lanes, 0) >= 0
        block *= tl.load(per_sample_weights + at + first + lanes, mask=real, other=0.0)[:, None]
    return block


@triton.jit
def ends_of(batch_starts, ranks, is_rank, batch, is_even, WORLD: tl.constexpr):
    """Return, for each rank in the vector `ranks`, the index in the global batch at which its samples end (exclusive), int32."""
    if is_even != 0:
        ends = (ranks + 1) * (batch // WORLD) + tl.minimum(ranks + 1, batch % WORLD)
    else:
        ends = tl.load(batch_starts + ranks + 1, mask=is_rank, other=0).to(tl.int32)
    return ends


@triton.jit
def target_of(
    sample, batch_starts, batch, is_even, mine, out_addresses, out_slot, out_slot_bytes,
    WORLD: tl.constexpr, WORLD_P2: tl.constexpr, OUT_STRIDE: tl.constexpr, OUT_BYTES: tl.constexpr,
):  # fmt: skip
    """Return (the address of a sample's row in the output of its rank, that rank, the rank's first sample, its number of
    samples).

    mine: the address of this rank's signals.
    """
    owner = tl.full([], 0, tl.int32)
    owner_start = tl.full([], 0, tl.int32)
    owner_batch = owner_start + batch
    if WORLD > 1:
        ranks = tl.arange(0, WORLD_P2)
        is_rank = ranks < WORLD
        ends = ends_of(batch_starts, ranks, is_rank, batch, is_even, WORLD)
        owner = tl.sum((is_rank & (ends <= sample)).to(tl.int32), 0)
        owner_start = tl.max(tl.where(is_rank & (ends <= sample), ends, 0), 0)
        owner_batch = tl.min(tl.where(is_rank & (ends > sample), ends, batch), 0) - owner_start
        ready_word = tl.load(words(mine + 16 * owner + 8))  # it contains the peer's slot
        address = tl.load(out_addresses + owner) + (ready_word & _SLOT_MASK) * out_slot_bytes
    else:
        address = tl.load(out_addresses) + out_slot * out_slot_bytes
    return address + (sample - owner_start).to(tl.int64) * (OUT_STRIDE * OUT_BYTES), owner, owner_start, owner_batch


@triton.jit
def samples_of(rank, batch_starts, batch, is_even, WORLD: tl.constexpr):
    """Return the number of samples of a rank, int64."""
    if is_even != 0:
        count = (batch // WORLD + (rank < batch % WORLD).to(tl.int32)).to(tl.int64)
    else:
        count = tl.load(batch_starts + rank + 1) - tl.load(batch_starts + rank)
    return count


@triton.jit
def fill_with_nan(out, items, DTYPE: tl.constexpr):
    block = tl.arange(0, 1024)
    nan = tl.full([1024], float("nan"), tl.float32).to(DTYPE)
    at = items * 0
    while at < items:
        tl.store(out + at + block, nan, mask=at + block < items)
        at += 1024
