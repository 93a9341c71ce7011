"""Checks on the CPU that an input matches the tables. Errors give the table, the feature, the value and the fix.

Every call checks shapes, dtypes, devices and names before anything is written, in a few microseconds. Contents of
tensors are checked separately: `check_offsets` reads every offset of CPU tensors. On GPUs the kernel checks offsets.
Kernels count ids out of range, and `first_bad_index` then finds the first of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from weft.arguments import check_tensor
from weft.embedding.hashing import hash_ids
from weft.embedding.jagged import INDEX_DTYPES, JaggedInput, wrong_range
from weft.embedding.options import EmbeddingOptions
from weft.embedding.tables import EmbeddingSharding, Slot
from weft.words import counted

DEVICE_TYPES = ("cpu", "cuda")
_OFFSETS_PER_LOOK = 1 << 16  # offsets per step, half a MiB, so that the second read of each offset hits the cache


class CheckedInput(NamedTuple):
    """A rank's input after the checks. A *local slot* is a feature of one of this rank's tables, and the block of
    output columns into which this rank pools the feature.

    key_of_slot: for each local slot s, the index of its feature in the input. The bag of sample b begins at
        `offsets[key_of_slot[s] * global_batch + b]`.
    batch_sizes: the number of samples of each rank, in rank order.
    tables: the layouts and addresses of this rank's tables (`weft.runtime.layouts`), or None. Later calls recognise
        unchanged tables by them.
    """

    key_of_slot: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    global_batch: int
    tables: Hashable = None


def check_jagged(
    jagged: JaggedInput,
    sharding: EmbeddingSharding,
    rank: int,
    batch_sizes: Sequence[int] | None,
    weights: Sequence[torch.Tensor] | torch.device,
    tables: Hashable = None,
) -> CheckedInput:
    """Check one rank's input and tables against the sharding, without reading their contents. Raise `ValueError` if
    they do not match.

    jagged: the input, with the samples of all ranks. Its offsets have a block of bags for each key. Without keys, the
        offsets have a block for each feature of this rank's tables, in the order of the output columns. Keys of other
        ranks' tables are skipped.
    batch_sizes: the number of samples of each rank. None: divide the global batch evenly; the first ranks get the
        remainder.
    weights: this rank's tables, in the order of `sharding.local_tables(rank)`; or their device, if they have been
        checked.
    tables: the layouts and addresses of the tables, or None. The result's field `tables` gets this value.
    """
    device = weights if isinstance(weights, torch.device) else check_weights(weights, sharding, rank)
    check_parts(jagged, device)
    if jagged.keys is None:
        blocks, named = len(sharding.local_slots(rank)), "local feature"
        key_of_slot = tuple(range(blocks))
    else:
        key_of_slot, blocks, named = _blocks_of_known(jagged.keys, sharding, rank), len(jagged.keys), "key"
    sizes = None if batch_sizes is None else _checked_sizes(batch_sizes, sharding.world_size)
    global_batch = _global_batch(jagged, blocks, named, sizes)
    if sizes is None:
        each, odd = divmod(global_batch, sharding.world_size)
        sizes = (each + 1,) * odd + (each,) * (sharding.world_size - odd)
    elif sum(sizes) != global_batch:
        raise ValueError(
            f"batch_sizes={sizes} sum to {sum(sizes)}, but the features have {counted(global_batch, 'sample')}: pass "
            "the bags of all ranks' samples for this rank's features, and batch sizes that sum to the number of "
            "samples"
        )
    return CheckedInput(key_of_slot, sizes, global_batch, tables)


def check_weights(weights: Sequence[torch.Tensor], sharding: EmbeddingSharding, rank: int) -> torch.device | None:
    """Check this rank's tables against the sharding. Return their device; None if the rank has no tables."""
    local = sharding.local_tables(rank)
    if len(weights) != len(local):
        names = ", ".join(sharding.tables[i].name for i in local) or "none"
        raise ValueError(
            f"{counted(len(weights), 'weight')} for rank {rank}, which owns {counted(len(local), 'table')} ({names}): "
            "pass one tensor per table, in that order"
        )
    for index, weight in zip(local, weights, strict=True):
        check_tensor(f"the weight of table {sharding.tables[index].name!r}", weight)
    if local and weights[0].device.type not in DEVICE_TYPES:
        raise ValueError(f"table {sharding.tables[local[0]].name!r}: {no_tables_on(weights[0].device)}")
    for index, weight in zip(local, weights, strict=True):
        table = sharding.tables[index]
        shape = (table.num_embeddings, table.embedding_dim)
        if tuple(weight.shape) != shape:
            raise ValueError(
                f"table {table.name!r}: the weight is {list(weight.shape)} but the table is {list(shape)}: pass a weight of the "
                "table's shape"
            )
        if weight.dtype != table.dtype:
            raise ValueError(
                f"table {table.name!r}: the weight is {weight.dtype}, but the table is {table.dtype}: convert one of them"
            )
        if not weight.is_contiguous():
            raise ValueError(
                f"table {table.name!r}: the weight has strides {weight.stride()}: pass weight.contiguous()"
            )
        if weight.is_neg():
            raise ValueError(
                f"table {table.name!r}: the weight is a view whose memory has the negated values: pass "
                "weight.resolve_neg()"
            )
        if weight.is_cuda and weight.data_ptr() % 16:
            raise ValueError(
                f"table {table.name!r}: the weight begins at address {weight.data_ptr():#x}, but GPUs read rows 16 bytes at "
                f"a time: pass weight.clone()"
            )
        if weight.device != weights[0].device:
            raise ValueError(
                f"table {table.name!r} is on {weight.device} but table {sharding.tables[local[0]].name!r} is on "
                f"{weights[0].device}: move all tables of a rank to one device"
            )
    return weights[0].device if local else None


def no_tables_on(device: torch.device) -> str:
    """Return the error text for tables on a `device` that cannot pool them."""
    if device.type == "meta":
        return (
            f"the weight is on meta and holds no values: pass a weight on {' or '.join(DEVICE_TYPES)}. For a module made on meta, "
            "call module.to_empty(device=...), and then load_full_weights or load_state_dict"
        )
    return f"the weight is on {device}: move it to {' or '.join(DEVICE_TYPES)}"


def blocks_of_slots(keys: Sequence[str], sharding: EmbeddingSharding, rank: int) -> tuple[int, ...]:
    """Return, for each local slot of `rank` (see `CheckedInput`), the index of its feature in `keys`.

    Raise `ValueError` if a feature is missing.
    """
    block_of_key = {key: block for block, key in enumerate(keys)}
    slots: tuple[Slot, ...] = sharding.local_slots(rank)
    for slot in slots:
        if slot.feature not in block_of_key:
            raise ValueError(missing_feature(slot, keys, sharding))
    return tuple(block_of_key[slot.feature] for slot in slots)


def missing_feature(slot: Slot, keys: Sequence[str], sharding: EmbeddingSharding) -> str:
    """Return the error text for an input that lacks the feature of `slot`."""
    table = sharding.tables[slot.table].name
    return f"table {table!r} needs feature {slot.feature!r}, which the input lacks: its keys are {_some(keys)}"


def check_offsets(jagged: JaggedInput, sharding: EmbeddingSharding, rank: int, checked: CheckedInput) -> None:
    """Raise `ValueError` unless all offsets of a CPU input ascend, from 0 to the number of values."""
    offsets, batch = jagged.offsets, checked.global_batch
    if offsets.numel() == 0:  # a rank without features
        return

    def fail(position: int, what: str) -> None:
        block, sample = divmod(position, batch) if batch else (0, 0)
        where = _block_text(block, jagged, sharding, rank, checked)
        raise ValueError(f"{where}: offsets[{position}] (sample {sample}) {what}")

    first, last, count = int(offsets[0]), int(offsets[-1]), jagged.values.numel()
    if first < 0:
        fail(0, f"is {first}: offsets are positions in values, 0 or more")
    for begin in range(0, offsets.numel() - 1, _OFFSETS_PER_LOOK):
        look = offsets[begin : begin + _OFFSETS_PER_LOOK + 1]
        descends = look[1:] < look[:-1]
        if descends.any():
            at = begin + int(descends.nonzero()[0])
            here, after = int(offsets[at]), int(offsets[at + 1])
            fail(
                at, f"is {here} and the next is {after}: offsets must ascend, because a bag ends where the next begins"
            )
    if last > count and not jagged.from_lengths:
        at = int((offsets > count).nonzero()[0])
        cut = f": offsets begin at {first}, so if you cut off the values before it, pass offsets - {first}"
        fail(
            max(at - 1, 0),
            f"begins a bag that ends at {int(offsets[at])}, beyond the {counted(count, 'value')}{cut if first else ''}",
        )
    if (first, last) != (0, count):
        raise ValueError(wrong_range(first, last, count, jagged.from_lengths))


def check_contents(
    jagged: JaggedInput, sharding: EmbeddingSharding, rank: int, checked: CheckedInput, options: EmbeddingOptions
) -> None:
    """Raise `ValueError` for invalid offsets of a CPU input.

    If the options refuse bad ids, also raise it for ids out of range; this check waits for a GPU.
    """
    if jagged.values.device.type == "cpu":
        check_offsets(jagged, sharding, rank, checked)
    if options.refuses_bad_ids and (bad := first_bad_index(jagged, sharding, rank, checked)) is not None:
        raise ValueError(bad)


def bad_index_message(sharding: EmbeddingSharding, rank: int, slot: int, sample: int, position: int, value: int) -> str:
    """Return the error text for an id out of range.

    slot: the index among the local slots of `rank` (see `CheckedInput`).
    position: the index of the id in the bag of `sample`.
    value: the id.
    """
    where = sharding.local_slots(rank)[slot]
    table = sharding.tables[where.table]
    return (
        f"table {table.name!r}, feature {where.feature!r}, sample {sample} of the global batch, position {position}: "
        f"index {value} is not in [0, {table.num_embeddings}): correct the ids, enlarge the table, or pass hash=True "
        f"to map any id to a row"
    )


def first_bad_index(
    jagged: JaggedInput, sharding: EmbeddingSharding, rank: int, checked: CheckedInput, *, hash: bool = False
) -> str | None:
    """Return the error text for the first id out of range, by feature and then by sample; None if all ids are in range.

    The function reads all ids of this rank's features, which is slow on a GPU.

    hash: True if ids are hashed to rows, so that the hashes are checked.
    """
    batch = checked.global_batch
    for number, (slot, block) in enumerate(zip(sharding.local_slots(rank), checked.key_of_slot, strict=True)):
        rows = sharding.tables[slot.table].num_embeddings
        if batch == 0:
            continue
        bags = jagged.offsets[block * batch : (block + 1) * batch + 1]
        begin, end = int(bags[0]), int(bags[-1])
        ids = jagged.values[begin:end]
        looked_up = hash_ids(ids, rows) if hash else ids
        bad = ((looked_up < 0) | (looked_up >= rows)).nonzero()
        if bad.numel():
            at = int(bad[0])
            sample = int(torch.searchsorted(bags.contiguous(), begin + at, right=True)) - 1
            position = begin + at - int(bags[sample])
            return bad_index_message(sharding, rank, number, sample, position, int(ids[at]))
    return None


def check_parts(jagged: JaggedInput, device: torch.device | None) -> None:
    """Raise `ValueError` unless the values, offsets and weights of the input are one-dimensional tensors with valid dtypes on
    `device`.

    If there are weights, each value must have one.
    """
    device_of_all = device or getattr(jagged.values, "device", None)
    for name, tensor, dtypes in (
        ("values", jagged.values, INDEX_DTYPES),
        ("offsets", jagged.offsets, INDEX_DTYPES),
        ("per_sample_weights", jagged.weights, (torch.float32,)),
    ):
        if tensor is None and name == "per_sample_weights":
            continue
        check_tensor(name, tensor)
        assert tensor is not None
        if tensor.dim() != 1:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: pass a one-dimensional tensor")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} is {tensor.dtype}: pass {' or '.join(map(str, dtypes))}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: pass {name}.contiguous()")
        if tensor.device != device_of_all:
            beside = f"the tables are on {device}" if device else f"values is on {jagged.values.device}"
            raise ValueError(f"{name} is on {tensor.device} but {beside}: move the features there")
    if jagged.weights is not None and jagged.weights.numel() != jagged.values.numel():
        raise ValueError(
            f"{jagged.weights.numel()} per_sample_weights for {counted(jagged.values.numel(), 'value')}: pass one weight per value"
        )


def _checked_sizes(batch_sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
    sizes = tuple(batch_sizes)
    if len(sizes) != world_size:
        raise ValueError(
            f"batch_sizes={sizes} has {counted(len(sizes), 'entry', 'entries')}: pass one for each of the "
            f"{world_size} ranks"
        )
    for rank, size in enumerate(sizes):
        if size < 0:
            raise ValueError(f"batch_sizes={sizes}: rank {rank} has {size} samples, but must have 0 or more")
    return sizes


def _global_batch(jagged: JaggedInput, blocks: int, named: str, sizes: tuple[int, ...] | None) -> int:
    """Return the global batch size: the number of bags of each feature. Raise `ValueError` if the numbers do not match.

    blocks: the number of features in the input.
    named: the word for a feature in error texts, "feature" or "key".
    sizes: the batch sizes, if they were passed.
    """
    bags = jagged.offsets.numel() - 1
    known = jagged.stride if sizes is None else sum(sizes)
    if blocks == 0:
        if bags not in (-1, 0):
            raise ValueError(f"{counted(bags + 1, 'offset')} for a rank without features: pass the single offset 0")
        if known is None:
            raise ValueError(
                "this rank has no features in its input, so weft cannot infer the global batch size: pass "
                "batch_sizes, or a KeyedJaggedTensor with stride="
            )
        return known
    if bags < 0 or bags % blocks:
        wanted = "samples * features + 1" if known is None else f"{known} * {blocks} + 1 = {known * blocks + 1}"
        raise ValueError(
            f"{counted(bags + 1, 'offset')} for {counted(blocks, named)}: pass {wanted} offsets (feature-major, "
            "the last one is the number of values)"
        )
    return bags // blocks


@lru_cache(maxsize=256)
def _blocks_of_known(keys: tuple[str, ...], sharding: EmbeddingSharding, rank: int) -> tuple[int, ...]:
    """Return the result of `blocks_of_slots` (the index of each local slot's feature in `keys`), from a cache. Raise
    `ValueError` for a key that no table of any rank uses.
    """
    blocks, used = blocks_of_slots(keys, sharding, rank), {slot.feature for slot in sharding.slots}
    if unknown := [key for key in keys if key not in used]:
        raise ValueError(
            f"feature {unknown[0]!r} has no table: name it in some table's feature_names, or remove it from the input "
            f"(tables have the features {_some(slot.feature for slot in sharding.slots)})"
        )
    return blocks


def _block_text(block: int, jagged: JaggedInput, sharding: EmbeddingSharding, rank: int, checked: CheckedInput) -> str:
    """Return a text that names the table and the feature of a block of the input. block: the number of the block. A block has
    the bags of one feature.
    """
    for slot, own in zip(sharding.local_slots(rank), checked.key_of_slot, strict=True):
        if own == block:
            return f"table {sharding.tables[slot.table].name!r}, feature {slot.feature!r}"
    return f"feature {jagged.keys[block]!r} (of another rank's table)" if jagged.keys else "the input"


def _some(names: Iterable[str]) -> str:
    """Return a text that lists `names`, but only the first 20."""
    listed = list(dict.fromkeys(names))
    rest = f", ... ({len(listed) - 20} more)" if len(listed) > 20 else ""
    return (", ".join(map(repr, listed[:20])) or "none") + rest
