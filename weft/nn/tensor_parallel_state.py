"""State dicts for tensor-parallel layers: this rank's part of an unsharded checkpoint, and DTensors for
`torch.distributed.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from weft.arguments import check_type
from weft.nn.experts import ExpertParallelMLP
from weft.nn.parallel_linear import ParallelLinear
from weft.symm.groups import group_of


def local_state_dict(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's state dict for `model.load_state_dict`, from the state dict of an unsharded model.

    Layers of `weft.nn` get this rank's part. Other entries are unchanged. The tensors are views, except that experts
    with separate entries are copied into one tensor.
    """
    check_type("model", model, nn.Module, "pass a torch.nn.Module")
    check_type("whole", whole, Mapping, "pass a state dict, {name: tensor}")
    found = dict(whole)
    for prefix, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            keys = {name: f"{prefix}.{name}".lstrip(".") for name in ("weight", "bias")}
            given = {name: whole[key] for name, key in keys.items() if key in whole}
            found |= {keys[name]: part for name, part in module.local_part(given).items()}
        if isinstance(module, ExpertParallelMLP):
            begin = f"{prefix}." if prefix else ""
            experts = {
                key: w for key, w in whole.items() if key.startswith(begin) and module.is_of_experts(key[len(begin) :])
            }
            if experts:
                mine = module.local_part({key[len(begin) :]: w for key, w in experts.items()})
                found = {key: w for key, w in found.items() if key not in experts}
                found |= {begin + name: part for name, part in mine.items()}
    return found


def distributed_state_dict(
    model: nn.Module, state: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return the state dict of `model` for `torch.distributed.checkpoint`, with sharded parameters of `weft.nn` layers
    as DTensors.

    The checkpoint then contains all parts, under the names and shapes of an unsharded model. Any number of ranks can
    load it.

        dcp.save(weft.nn.distributed_state_dict(model), checkpoint_id=folder)
        dcp.load(weft.nn.distributed_state_dict(model), checkpoint_id=folder)  # writes into the model's parameters

    state: tensors with the parameters' names and shapes, such as an optimizer's moments (default:
        `model.state_dict()`).

    Raises `ValueError` for parameters that FSDP2 has sharded too.
    """
    check_type("model", model, nn.Module, "pass a torch.nn.Module")
    if state is not None:
        check_type("state", state, Mapping, "pass a state dict, {name: tensor}")
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard  # the import takes half a second

    found = dict(model.state_dict() if state is None else state)
    for prefix, module in model.named_modules():
        divided = {}
        if isinstance(module, ParallelLinear):
            divided = {"weight": module.divided} if module.divided else {"weight": 0, "bias": 0}
        elif isinstance(module, ExpertParallelMLP):
            divided = {module.first_name: 0, "down_proj": 0}
        for name, dim in divided.items():
            key = f"{prefix}.{name}".lstrip(".")
            if (part := found.get(key)) is None:
                continue
            if isinstance(part, DTensor):
                raise ValueError(
                    f"{key} is also sharded by FSDP2: save model.state_dict() to a separate folder for each rank "
                    "of the tensor-parallel group"
                )
            mesh = DeviceMesh.from_group(group_of(module.group_name), part.device.type)  # type: ignore[arg-type]
            found[key] = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
    return found
