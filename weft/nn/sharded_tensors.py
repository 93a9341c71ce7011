"""Parts of tables and optimizer states as ShardedTensors, as in TorchRec's state dicts.

A ShardedTensor lists the rank, offsets and sizes of each part. A table-wise table has one part. The ShardedTensor
shares the memory of the part, so that `torch.distributed.checkpoint` loads in place.
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
    """A part of a tensor on one rank. offsets, sizes: the first element and the number of elements in each dimension."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def layout(table: EmbeddingBagConfig, parts: Sequence[TablePart], per_row: bool) -> tuple[tuple[int, ...], list[Part]]:
    """Return the size and the parts of a table, or with `per_row`, of an optimizer state that has one number per row.

    Such a state has the size [rows], or for a column-wise table [parts * rows], as in TorchRec. In the second case each
    part has its own number for each row: a mean over the part's columns.
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
    """Return a ShardedTensor whose parts are on the ranks of `group`. Ranks do not communicate.

    own: this rank's parts, in the order of `parts`.
    device: this rank's device. Other ranks are assumed to use devices of the same type: rank r uses device r.
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
