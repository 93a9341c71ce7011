"""One gather for several layers, after a change of imports.

torchtitan's Llama gathers before its layers: `PrepareModuleInput` redistributes the attention's input to Replicate, and wq, wk
and wv receive it gathered. No GEMM runs during that gather. Here the input stays sharded, as a DTensor with the same value and
shape. The first `ColwiseLinear` that receives it gathers it during its GEMM, and stores the result on the DTensor for the others.
So as many bytes are sent as with torch's styles, and backward scatters the sum of all gradients once.
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
    """torch's `PrepareModuleInput`, except that the layers below gather, overlapped with a GEMM.

    Arguments and layouts are torch's. An input that goes from Shard(d) to Replicate stays a DTensor Shard(d), if linears below
    the module are parallelized by `weft.parallel.ColwiseParallel`. The module's code sees the same shape and, by any operation on
    DTensors, the same values.

    Use torch's style in these cases. The code calls `to_local()` on the input, which would return only this rank's part. Or it
    changes the input before its linears, each of which would then gather. Or it calls some of the linears with and others without
    gradients, autocast or activation checkpointing. Under torch.compile do not change the input in place between linears.

    In all other cases, and with `use_local_output=True`, torch's code runs.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        leaving = _Leaving.__new__(_Leaving)
        leaving.__dict__ = self.__dict__

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # Searched in each call: the layers may be parallelized later, and under torch.compile hooks cannot keep state.
            gathering = any(isinstance(layer, ColwiseLinear) for layer in module.modules())
            style = leaving if gathering and not self.use_local_output else self
            if self.with_kwargs:
                return style._prepare_input_kwarg_fn(args, kwargs, device_mesh)
            return style._prepare_input_fn(args, device_mesh), kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class _Leaving(TorchPrepareModuleInput):
    """The style that leaves inputs sharded."""

    def _prepare_input_arg(self, input: Any, mesh: Any, input_layout: Any, desired_layout: Any) -> Any:
        if not (type(input_layout) is Shard and desired_layout == Replicate()):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        if not isinstance(input, DTensor):
            return shared(DTensor.from_local(input, mesh, (input_layout,), run_check=False))
        if input.placements == (input_layout,):
            alias: Any = input.view_as(input)
            return shared(alias)  # a new DTensor: the gathered tensor is freed when the module's forward ends
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)


class PrepareModuleInputOutput(TorchPrepareModuleInputOutput):
    """torch's `PrepareModuleInputOutput`, with weft's `PrepareModuleInput`."""

    def __init__(self, **layouts: Any) -> None:
        super().__init__(**layouts)
        made, self.prepare_module_input = self.prepare_module_input, PrepareModuleInput()
        self.prepare_module_input.__dict__ = made.__dict__
