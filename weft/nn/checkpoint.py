"""The optimizers of all tables of a model, as one entry of a `torch.distributed.checkpoint` checkpoint.

    name in the checkpoint                                            value
    <path>.embedding_bags.<table>.weight                              the table, from `model.state_dict()`
    state.<path>.embedding_bags.<table>.weight.<table>.momentum1      a state of the table's optimizer
    param_groups.<path>.lr, .step                                     learning rate, number of updates
    param_groups.<path>.optimizer.Adam(beta1=0.9, ...)                always 0: only the name has meaning

<path> is the module's path in the model. The last name contains the optimizer's class and hyperparameters, because only
names, shapes and dtypes can be compared before a checkpoint is loaded. Tables and states have TorchRec's names, so weft
and TorchRec can load each other's files. Every rank writes its own part, and the checkpoint contains the whole of each
table and state. So a job with another number of ranks or another placement can load it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from weft.arguments import check_tensor, check_type
from weft.embedding.update import FusedUpdate
from weft.nn.fused_optimizer import FusedOptimizer

OPTIONAL = re.compile(r"(^|\.)param_groups\.(.*\.)?(lr|step)$")
"""A pattern for entries that TorchRec's checkpoints lack. When a TorchRec checkpoint is loaded, the model keeps its
values of these entries.
"""

OPTIMIZER = re.compile(r"(?P<entry>(?:.*\.)?param_groups\.(?:.*\.)?optimizer)\.(?P<described>\w+\(.*\))")
"""A pattern for entries whose name describes an optimizer. TorchRec's checkpoints lack them."""


class FusedOptimizers:
    """The optimizers of all sharded tables in `model`, for `torch.distributed.checkpoint`.

    These optimizers update tables during backward (`optimizer=` of the modules). Save and load them together with the
    model, on every rank. A job with another number of ranks or another placement of tables can load the checkpoint:

        state = {"model": model, "tables": weft.nn.FusedOptimizers(model)}
        torch.distributed.checkpoint.save(state, checkpoint_id=folder)
        torch.distributed.checkpoint.load(state, checkpoint_id=folder, planner=weft.nn.LoadPlanner())

    Raises `ValueError` if no module in `model` has an `optimizer`.
    """

    def __init__(self, model: nn.Module) -> None:
        check_type("model", model, nn.Module, "pass a torch.nn.Module")
        if isinstance(model, DistributedDataParallel):
            model = cast(nn.Module, model.module)
        self._modules = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module.__dict__.get("_update"), FusedUpdate)
        }
        if not self._modules:
            raise ValueError(
                "no module of this model updates tables in backward, so there is nothing to save: construct "
                "ShardedEmbeddingBagCollection with optimizer=, or save the state of your torch optimizer"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's tables (not copies), learning rates and numbers of updates. The CPU waits
        for the device.
        """
        # Tables of an optimizer without states have an empty entry, so that `LoadPlanner` knows their names.
        state: dict[str, dict[str, Any]] = {}
        parts = {path for path, module in self._modules.items() if hasattr(module, "partition")}
        numbers: dict[str, dict[str, Any]] = {}
        for path, module in self._modules.items():
            optimizer, update = _of(module)
            if path in parts:
                state |= _states_of_parts(path, module, optimizer)
            for name, parameter in () if path in parts else module.named_parameters():
                state[f"{path}.{name}" if path else name] = dict(optimizer.state.get(parameter, {}))
            lr = torch.tensor(float(optimizer.param_groups[0]["lr"]), dtype=torch.float64)
            described = {update.optimizer.described: torch.zeros((), dtype=torch.uint8)}
            numbers[path] = {"lr": lr, "step": update.step.cpu().clone(), "optimizer": described}
        return {"state": state, "param_groups": numbers}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy states, learning rates and numbers of updates from `state_dict`.

        Raise `ValueError` for a missing entry, or for an entry that does not fit the model. Nothing is copied then.
        """
        if missing := [name for name in ("state", "param_groups") if name not in state_dict]:
            raise ValueError(
                f"the state dict has no {' and no '.join(missing)}: pass what FusedOptimizers.state_dict() returned"
            )
        from weft.nn.parts_state import local_tensors  # imports torch's ShardedTensor, which most users do not need

        own, copies = self.state_dict(), list[tuple[torch.Tensor, torch.Tensor]]()
        for parameter, states in own["state"].items():
            if extra := [name for name in state_dict["state"].get(parameter, {}) if name not in states]:
                raise ValueError(
                    f"the state dict has state {extra[0]!r} of {parameter!r}, which this optimizer does not have: load a state "
                    "dict that was saved from this model with this optimizer"
                )
            for name, state in states.items():
                given = state_dict["state"].get(parameter, {}).get(name)
                if given is None:
                    raise ValueError(
                        f"the state dict has no state {name!r} of {parameter!r}: load a state dict that was saved from this model "
                        "with this optimizer"
                    )
                for tensor in local_tensors(given):
                    check_tensor(f"{parameter}.{name}", tensor)
                if given.size() != state.size() or given.dtype != state.dtype:
                    raise ValueError(
                        f"state {name!r} of {parameter!r} is {given.dtype} {list(given.size())} and must be {state.dtype} "
                        f"{list(state.size())}: load a state dict saved from this model and optimizer"
                    )
                copies += zip(local_tensors(state), local_tensors(given), strict=True)
        for path, numbers in own["param_groups"].items():
            given = state_dict["param_groups"].get(path, {})
            if missing := [name for name in ("lr", "step") if name not in given]:
                raise ValueError(
                    f"the state dict has no param_groups.{path}.{missing[0]}: load a state dict that was saved from this model "
                    "with this optimizer"
                )
            if given.get("optimizer", numbers["optimizer"]).keys() != numbers["optimizer"].keys():
                raise ValueError(
                    f"param_groups.{path}.optimizer is {', '.join(given['optimizer'])} in the state dict and "
                    f"{', '.join(numbers['optimizer'])} here: construct the module with the optimizer of the state dict"
                )
        with torch.no_grad():
            for state, given in copies:
                if state.data_ptr() != given.data_ptr():  # equal if torch.distributed.checkpoint has loaded in place
                    state.copy_(given)
        for path, module in self._modules.items():
            optimizer, update = _of(module)
            optimizer.param_groups[0]["lr"] = float(state_dict["param_groups"][path]["lr"])
            update.step.fill_(int(state_dict["param_groups"][path]["step"]))


def _states_of_parts(path: str, module: Any, optimizer: FusedOptimizer) -> dict[str, dict[str, Any]]:
    """Return the optimizer states of a module with sharded tables, under the names of the whole tables."""
    from weft.nn.parts_state import names_of_parts, whole

    found: dict[str, dict[str, Any]] = {}
    named = list(names_of_parts(module))
    own = [list(optimizer.state.get(weight, {}).values()) for _, weight in module.parts()]
    updated = {id(weight) for weight in optimizer.param_groups[0]["params"]}
    for (_, _, table), (_, weight) in zip(named, module.parts(), strict=True):
        if id(weight) in updated:
            found[f"{path}.{table}" if path else table] = {}
    for place, state in enumerate(module._update.optimizer.states):
        # A data-parallel table that the optimizer does not update has no states.
        given = [(part, of_part[place]) for (part, *_), of_part in zip(named, own, strict=True) if of_part]
        values = whole(module, given)
        for number, value in values.items():
            table = next(of_table for part, _, of_table in named if part.table == number)
            name = module.partition.tables[number].name
            found[f"{path}.{table}" if path else table][f"{name}.{state}"] = value
    return found


def _of(module: Any) -> tuple[FusedOptimizer, FusedUpdate]:
    return module.fused_optimizer, module._update
