"""One gather for several layers, under a change of imports.

torchtitan's Llama gathers around layers: `PrepareModuleInput` makes a Replicate of the attention's input, and wq, wk and wv find it
gathered. There is no GEMM beside that gather. Here the input stays divided, as a DTensor, whose value and shape are the same; the
first `ColwiseLinear` that is given it gathers it with its GEMM, and leaves the whole on it for the others. So as many bytes move as
with torch's, and backward scatters the sum of all gradients once.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput as TorchPrepareModuleInput
from torch.distributed.tensor.parallel import PrepareModuleInputOutput as TorchPrepareModuleInputOutput

from weft.parallel.linear import ColwiseLinear, shared


class PrepareModuleInput(TorchPrepareModuleInput):
    """torch's `PrepareModuleInput`, which leaves it to the layers below to gather, overlapped with a GEMM.

    Arguments and layouts are torch's. Where an input is to go from Shard(d) to Replicate, and linears below the module are divided
    by `weft.parallel.ColwiseParallel`, it stays a DTensor Shard(d). The module's code sees the same shape and, by any operation on
    DTensors, the same values. Code that calls `to_local()` on it would see this rank's part, and code that changes it before its
    linears would have each of them gather: use torch's there. So would linears that are called one with and one without gradients,
    autocast or activation checkpointing. Under torch.compile do not change it in place between linears.

    Otherwise, and with `use_local_output=True`, it does what torch's does.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        leaving = _Leaving.__new__(_Leaving)
        leaving.__dict__ = self.__dict__

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # Looked for in each call, as the layers may be divided later, and torch.compile lets no hook remember anything.
            gathering = any(isinstance(layer, ColwiseLinear) for layer in module.modules())
            style = leaving if gathering and not self.use_local_output else self
            if self.with_kwargs:
                return style._prepare_input_kwarg_fn(args, kwargs, device_mesh)
            return style._prepare_input_fn(args, device_mesh), kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class _Leaving(TorchPrepareModuleInput):
    """Inputs as they are divided."""

    def _prepare_input_arg(self, input: Any, mesh: Any, input_layout: Any, desired_layout: Any) -> Any:
        if not (type(input_layout) is Shard and desired_layout == Replicate()):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        if not isinstance(input, DTensor):
            return shared(DTensor.from_local(input, mesh, (input_layout,), run_check=False))
        if input.placements == (input_layout,):
            alias: Any = input.view_as(input)
            return shared(alias)  # a new one: what is gathered goes when the module's forward ends
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)


class PrepareModuleInputOutput(TorchPrepareModuleInputOutput):
    """torch's `PrepareModuleInputOutput`, with weft's `PrepareModuleInput`."""

    def __init__(self, **layouts: Any) -> None:
        super().__init__(**layouts)
        made, self.prepare_module_input = self.prepare_module_input, PrepareModuleInput()
        self.prepare_module_input.__dict__ = made.__dict__
