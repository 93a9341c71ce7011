"""Tables and their optimizer states as ShardedTensors, in TorchRec's form."""

from __future__ import annotations

from typing import Any

import torch

from weft.embedding.optimizers import StateShape
from weft.embedding.partition import Partition
from weft.nn.sharded_tensors import layout, sharded_tensor


def is_cut(module: Any) -> bool:
    """True if `module`, a module of weft, can have tables that are sharded by rows or columns."""
    return isinstance(getattr(module, "partition", None), Partition)


def joined(
    module: Any, partition: Partition, number: int, own: list[torch.Tensor], shape: StateShape, dtype: torch.dtype
) -> Any:
    """Return table `number`, or one of its optimizer states, as a ShardedTensor.

    module: the weft module, which provides the group and the device. own: this rank's parts of the table or state.
        shape: "row" for a state with one number per row, "element" for the table and for states of its shape.
    """
    table, parts = partition.tables[number], [partition.parts[place] for place in partition.parts_of(number)]
    size, places = layout(table, parts, shape == "row")
    return sharded_tensor(size, places, own, dtype, module.device, module.group)
