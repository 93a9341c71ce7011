"""The parts of tables and optimizer states as ShardedTensors, the form of TorchRec's state dicts.

A tensor is described by its parts: rank, offsets and sizes of each. Table-wise there is one part. The memory is shared, so that
`torch.distributed.checkpoint` loads in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata

from weft.embedding.partition import TablePart
from weft.embedding.tables import EmbeddingBagConfig


class Part(NamedTuple):
    """A part of a tensor on `rank` of a group: `sizes` elements in each dimension from `offsets` on."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def layout(table: EmbeddingBagConfig, parts: Sequence[TablePart], per_row: bool) -> tuple[tuple[int, ...], list[Part]]:
    """Return the size and the parts of a table, or of a state of it with one number per row.

    Such a state is [rows]. Each part of a column-wise table has its own numbers, because a mean is over its columns. They are
    concatenated, [parts x rows], as in TorchRec.
    """
    if not per_row:
        places = [Part(part.rank, (part.row, part.column), (part.rows, part.columns)) for part in parts]
        return (table.num_embeddings, table.embedding_dim), places
    begins = [part.row for part in parts]
    if any(part.columns < table.embedding_dim for part in parts):
        begins = [place * table.num_embeddings for place in range(len(parts))]
    places = [Part(part.rank, (begin,), (part.rows,)) for part, begin in zip(parts, begins, strict=True)]
    return (begins[-1] + parts[-1].rows,), places


def sharded_tensor(
    size: Sequence[int], parts: Sequence[Part], own: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device,
    group: dist.ProcessGroup,
) -> ShardedTensor:  # fmt: skip
    """Return a tensor whose parts are on the ranks of `group`. own: this rank's parts, in their order. Not collective.

    device: the device of this rank. Other ranks are assumed to use the device of the same type that has their rank as its number.
    """
    rank = group.rank()
    metadata = [
        ShardMetadata(list(part.offsets), list(part.sizes), _placement(group, part.rank, rank, device))
        for part in parts
    ]
    mine = [one for one, part in zip(metadata, parts, strict=True) if part.rank == rank]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(tensor.detach(), one) for tensor, one in zip(own, mine, strict=True)],
        ShardedTensorMetadata(metadata, torch.Size(size), TensorProperties(dtype=dtype)),
        process_group=group,
    )


def _placement(group: dist.ProcessGroup, rank: int, own: int, device: torch.device) -> str:
    where = str(device) if rank == own or device.type == "cpu" else f"{device.type}:{rank}"
    return f"rank:{dist.get_global_rank(group, rank)}/{where}"
