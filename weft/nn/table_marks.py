"""Marks of sharded tables, so that DistributedDataParallel and FSDP leave them alone.

DDP copies the first rank's parameters to all ranks and averages gradients. Sharded tables differ between ranks, in
number and in shape, so gloo would abort the process, or every rank would get the first rank's tables. DDP takes the
names of parameters to ignore from the module that it wraps. Tables inside this module cannot add names to its list. So
weft adds the names when DDP stores the module.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from weft.arguments import check_type


def mark_table(weight: Any) -> None:
    """Mark the parameter of a table, so that DDP and `ignore_tables` find it."""
    weight._weft_table = weight._ddp_ignored = True
    _watch_ddp()


def ignore_tables(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of all sharded embedding tables in `model`, for FSDP: `fully_shard(model,
    ignored_params=...)`.

    FSDP would shard the tables again. `DistributedDataParallel` needs no call of this function: it ignores these
    tables, because each rank has different tables. The function also marks the names of the tables in `model` for DDP.
    """
    check_type("model", model, nn.Module, "pass a torch.nn.Module")
    found = _tables(model)
    before = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    mark: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    mark(model, sorted(before | found.keys()))
    return set(found.values())


def _tables(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if getattr(parameter, "_weft_table", False)}


@functools.cache
def _watch_ddp() -> None:
    """Let `_ignore_in_ddp` run whenever a module is stored in another module. This affects all modules of the process, so weft
    calls this function only in processes with tables.
    """
    register_module_module_registration_hook(_ignore_in_ddp)  # type: ignore[no-untyped-call]


def _ignore_in_ddp(wrapper: nn.Module, name: str, model: nn.Module | None) -> None:
    """Add the tables in `model` to the parameters that `wrapper` ignores. Do nothing unless `wrapper` is a
    DistributedDataParallel module under construction.

    Raise `ValueError` if no other parameters are left, or if DDP has no such list.
    """
    if name != "module" or model is None or not isinstance(wrapper, DistributedDataParallel):
        return
    if not (tables := _tables(model)):
        return
    ddp: Any = wrapper
    try:
        ignored, parameters = ddp.parameters_to_ignore, ddp._module_parameters
    except AttributeError:
        raise ValueError(
            "this version of torch does not let weft exclude the sharded tables from DistributedDataParallel: call "
            "weft.nn.ignore_tables(model) before DistributedDataParallel(model)"
        ) from None
    ignored.update(tables)
    left = [one for one in parameters if not getattr(one, "_weft_table", False)]
    if not any(one.requires_grad for one in left):
        raise ValueError(
            "DistributedDataParallel has nothing to do in a model whose only trained parameters are sharded tables: weft "
            "exchanges their gradients, so call the model itself"
        )
    ddp._module_parameters = left
