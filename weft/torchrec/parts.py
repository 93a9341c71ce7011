"""Tables and their optimizers' states as ShardedTensors in TorchRec's form, from this rank's parts.

A state with a number for each row is [rows], but for a column-wise table: each part has its own numbers, since a mean is over the
part's columns. They stand one after another, [parts x rows].
"""

from __future__ import annotations

from typing import Any

import torch

from weft.embedding.optimizers import StateShape
from weft.embedding.partition import Partition
from weft.nn.sharded_tensors import Part, sharded_tensor


def is_cut(module: Any) -> bool:
    """True if `module`, one of weft's, may have sharded tables."""
    return isinstance(getattr(module, "partition", None), Partition)


def joined(
    module: Any, partition: Partition, number: int, own: list[torch.Tensor], shape: StateShape, dtype: torch.dtype
) -> Any:
    """Return table `number`, or a state of its, as one tensor. own: this rank's parts. module: has a group and a device."""
    table, parts = partition.tables[number], [partition.parts[place] for place in partition.parts_of(number)]
    size: tuple[int, ...] = (table.num_embeddings, table.embedding_dim)
    places = [Part(part.rank, (part.row, part.column), (part.rows, part.columns)) for part in parts]
    if shape == "row":
        begins = [part.row for part in parts]
        if any(part.columns < table.embedding_dim for part in parts):
            begins = [place * table.num_embeddings for place in range(len(parts))]
        places = [Part(part.rank, (begin,), (part.rows,)) for part, begin in zip(parts, begins, strict=True)]
        size = (begins[-1] + parts[-1].rows,)
    return sharded_tensor(size, places, own, dtype, module.device, module.group)
