"""The tables of a sharded collection, pooled or not, under TorchRec's names: parameters, state dict, optimizer.

The parameter `<container>.<table>.weight` is this rank's part of the table, or empty if the rank has no part. In the
state dict it is a ShardedTensor. A data-parallel table is whole on every rank, and a plain tensor in the state dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from weft.embedding.partition import Partition, TablePart
from weft.torchrec.fused_optimizer import FusedOptimizer
from weft.torchrec.parts import joined
from weft.torchrec.plan import ModulePlan
from weft.words import kind


class ShardedTables(FusedOptimizerModule):
    """The base class of both sharded collections. It holds the tables, and wraps a module of weft, `weft_module`."""

    weft_module: Any
    _optim: KeyedOptimizer
    _container: str

    def _adopt(self: Any, made: Any, read: ModulePlan, container: str) -> None:
        """Register the tables of `made`, the wrapped module of weft, under TorchRec's names in a submodule of `self`.

        read: the plan from which `made` was constructed. container: the name of the submodule, as in TorchRec.
        """
        self.__dict__["weft_module"] = (
            made  # not a submodule, since its parameters are registered under TorchRec's names
        )
        self._partition, self._is_fused, self._container = read.partition, read.is_fused, container
        self._optim = CombinedOptimizer([])
        number_of = {table.name: number for number, table in enumerate(read.partition.tables)}
        self._numbered = [
            (number_of[config.name], config.name) for config in self._configs
        ]  # in the unsharded module's order
        setattr(self, container, nn.ModuleDict({name: nn.Module() for _, name in self._numbered}))
        self._register()
        self.register_state_dict_post_hook(_as_sharded_tensors)
        self.register_load_state_dict_pre_hook(_as_local_tensors)

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer that backward runs (`weft.torchrec.FusedOptimizer`). With the kernel "dense" it has no parameters."""
        return self._optim

    def reset_parameters(self) -> None:
        """Fill this rank's tables with new initial values, without communication."""
        self.weft_module.reset_parameters()

    def is_copied(self: Any, number: int) -> bool:
        """True if table `number` is data-parallel."""
        return number in self._partition.replicated_tables

    def own_part(self: Any, number: int) -> tuple[TablePart, nn.Parameter] | None:
        """Return this rank's part of a table and its parameter; None if the rank has no part."""
        partition: Partition = self._partition
        modules = getattr(self.weft_module, self._container)._modules
        if self.is_copied(number):
            table = partition.tables[number]
            whole = TablePart(number, self.weft_module.rank, 0, table.num_embeddings, 0, table.embedding_dim)
            return whole, modules[table.name].weight
        for part in (partition.parts[place] for place in partition.parts_of(number)):
            if part.rank == self.weft_module.rank:
                return part, modules[part.name_in(partition.tables[number])].weight
        return None

    def _register(self: Any) -> None:
        """Register this rank's parts of tables as parameters under TorchRec's names, and an empty parameter for each table
        without a part on this rank. Also make the optimizer.
        """
        made, params, states = self.weft_module, dict[str, nn.Parameter](), dict[str, dict[str, ShardedTensor]]()
        places: Any = getattr(self, self._container)
        for number, _ in self._numbered:
            table, own, parameter = self._partition.tables[number], self.own_part(number), None
            if own is None:
                parameter = nn.Parameter(torch.empty(0, device=made.device), requires_grad=not self._is_fused)
            else:
                part, parameter = own
                name = f"{self._container}.{table.name}.weight"
                if self._is_fused and not self.is_copied(number):
                    params[name] = parameter
                    prefix, of_part = part.name_in(table), made.fused_optimizer.state.get(parameter, {})
                    states[name] = {
                        f"{table.name}.{state}": joined(
                            made, self._partition, number, [of_part[f"{prefix}.{state}"]], shape, torch.float32
                        )
                        for state, shape in made._update.optimizer.states.items()
                    }
            places[table.name].register_parameter("weight", parameter)
        if not self._is_fused:
            return
        self._optim = FusedOptimizer(made.fused_optimizer, params, states)
        for number, name in self._numbered:
            if self.is_copied(number):  # a torch optimizer trains it
                continue
            optimizer = EmptyFusedOptimizer() if self.own_part(number) is None else self._optim
            places[name].weight._in_backward_optimizers = [optimizer]

    def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Convert or move the tables. `nn.Module` calls this method in `to(...)`, `half()` and similar methods."""
        before = self._kind_of_tables()
        self.weft_module._apply(fn, recurse)
        if before != self._kind_of_tables():
            self._register()
        return self

    def _kind_of_tables(self: Any) -> tuple[torch.device, list[int]]:
        own = [self.own_part(number) for number, _ in self._numbered]
        return self.weft_module.device, [id(one[1]) for one in own if one is not None]

    def extra_repr(self) -> str:
        return self.weft_module.extra_repr()  # type: ignore[no-any-return]


def _as_sharded_tensors(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    made = module.weft_module
    for number, name in module._numbered:
        if module.is_copied(number):
            continue
        own = module.own_part(number)
        parts = [] if own is None else [own[1].detach()]
        dtype = made.sharding.dtype if hasattr(made, "sharding") else made.partition.tables[0].dtype
        state_dict[f"{prefix}{module._container}.{name}.weight"] = joined(
            made, module._partition, number, parts, "element", dtype
        )


def _as_local_tensors(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace each table of a state dict by this rank's part of it. The table may be whole, or a ShardedTensor.

    Raise `ValueError`, before any table is copied, if a table has a wrong shape, or if the parts of a ShardedTensor
    differ from the parts of this module.
    """
    local: dict[str, torch.Tensor] = {}
    for number, name in module._numbered:
        table, key = module._partition.tables[number], f"{prefix}{module._container}.{name}.weight"
        value, own = state_dict.get(key), module.own_part(number)
        if value is None:
            continue
        if not isinstance(value, ShardedTensor) and type(value) not in (torch.Tensor, nn.Parameter):
            raise ValueError(f"{key} is {kind(value)}: pass a ShardedTensor, or the whole table")
        wanted = [table.num_embeddings, table.embedding_dim]
        if list(value.size()) != wanted:
            raise ValueError(
                f"{key} has shape {list(value.size())} but must have {wanted}, the shape of the whole table"
            )
        if own is None:
            local[key] = torch.empty(0)
        elif isinstance(value, ShardedTensor):
            part = own[0]
            place = [part.row, part.column], [part.rows, part.columns]
            found = [s for s in value.local_shards() if (s.metadata.shard_offsets, s.metadata.shard_sizes) == place]
            if not found:
                raise ValueError(
                    f"{key} is sharded in another way than this module's plan: load it with "
                    "torch.distributed.checkpoint into this module's state_dict()"
                )
            local[key] = found[0].tensor
        else:
            part = own[0]
            local[key] = value[part.row : part.row + part.rows, part.column : part.column + part.columns]
    state_dict.update(local)
