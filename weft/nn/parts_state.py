"""Checkpoints of sharded tables under the names of the whole tables, so that another sharding can load them.

    <path>.embedding_bags.users[0:15].weight   in `module.state_dict()`: this rank's part
    <path>.embedding_bags.users.weight         in a checkpoint: a ShardedTensor of all parts, which shares their memory

Whole tables and data-parallel tables are plain tensors, as in a module without parts. For a column-wise table, an
optimizer state with one number per row and part has shape [parts * rows], as in TorchRec. Only a table with the same
number of parts can load such a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from weft.arguments import check_type
from weft.embedding.partition import DataParallel, Partition, TablePart
from weft.nn.sharded_tensors import layout, sharded_tensor


def partitioned(model: nn.Module) -> dict[str, Any]:
    """Return the modules of `model` that have sharded or data-parallel tables, by path."""
    return {path: one for path, one in model.named_modules() if isinstance(getattr(one, "partition", None), Partition)}


def names_of_parts(module: Any) -> Iterator[tuple[TablePart, str, str]]:
    """Yield (part, name of its parameter, name of the whole table's weight in a state dict) for each part on this rank."""
    names = [name for name, _ in module.named_parameters()]
    for (part, _), name in zip(module.parts(), names, strict=True):
        attribute = name.partition(".")[0]
        yield part, name, f"{attribute}.{module.partition.tables[part.table].name}.weight"


def whole(module: Any, own: list[tuple[TablePart, torch.Tensor]]) -> dict[int, Any]:
    """Assemble parts into whole tables. Return {table number: a plain tensor, or a ShardedTensor of all ranks' parts}
    for the tables of which this rank has parts.

    own: this rank's parts, as pairs (part, tensor). The tensors are the parts' weights, or one of their optimizer states.
    """
    partition: Partition = module.partition
    found: dict[int, Any] = {}
    for number in dict.fromkeys(part.table for part, _ in own):
        table, mine = partition.tables[number], [tensor for part, tensor in own if part.table == number]
        parts = [partition.parts[place] for place in partition.parts_of(number)]
        if isinstance(partition.shardings[number], DataParallel) or len(parts) == 1:
            found[number] = mine[0]
            continue
        size, places = layout(table, parts, mine[0].dim() == 1)
        found[number] = sharded_tensor(size, places, mine, mine[0].dtype, mine[0].device, module.group)
    return found


def local_tensors(value: Any) -> list[torch.Tensor]:
    """Return this rank's tensors in `value`, an entry of a checkpoint."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value] if isinstance(value, torch.Tensor) else []


class ModelState:
    """The state dict of `model` for `torch.distributed.checkpoint`, with sharded tables under the names of the whole
    tables.

    Pass a `ModelState` instead of the model if a module has sharded tables. Then a model with other parts, or with
    whole tables, can load the checkpoint.

        state = {"model": weft.nn.ModelState(model), "tables": weft.nn.FusedOptimizers(model)}
        torch.distributed.checkpoint.save(state, checkpoint_id=folder)
        torch.distributed.checkpoint.load(state, checkpoint_id=folder, planner=weft.nn.LoadPlanner())
    """

    def __init__(self, model: nn.Module) -> None:
        check_type("model", model, nn.Module, "pass a torch.nn.Module")
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's values, without copies."""
        found = self._model.state_dict()
        for path, module in partitioned(self._model).items():
            prefix, names, own = f"{path}." if path else "", dict[int, str](), list[tuple[TablePart, torch.Tensor]]()
            for part, name, of_table in names_of_parts(module):
                own.append((part, found.pop(prefix + name)))
                names[part.table] = prefix + of_table
            found |= {names[number]: value for number, value in whole(module, own).items()}
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's values into the model. Raises the errors of `nn.Module.load_state_dict`."""
        given = dict(state_dict)
        for path, module in partitioned(self._model).items():
            prefix, tensors = f"{path}." if path else "", dict[str, list[torch.Tensor]]()
            for _, name, of_table in names_of_parts(module):
                if prefix + of_table not in tensors:
                    tensors[prefix + of_table] = local_tensors(given.pop(prefix + of_table, None))
                if tensors[prefix + of_table]:
                    given[prefix + name] = tensors[prefix + of_table].pop(0)
        self._model.load_state_dict(given)
