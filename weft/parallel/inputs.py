"""`PrepareModuleInput`: one all-gather for several linear layers, overlapped with the first layer's GEMM.

In torchtitan's Llama, torch's `PrepareModuleInput` redistributes the attention's input to Replicate before wq, wk and
wv, and no GEMM runs during that all-gather. With weft's style the input stays a sharded DTensor with the same value and
shape. The first `ColwiseLinear` that receives the input gathers it during its own GEMM, and stores the result on the
DTensor for the other layers. Backward reduce-scatters the sum of all gradients once, as with torch's styles.
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
    """torch's `PrepareModuleInput`, with the all-gather moved into the first linear layer, where it overlaps with a
    GEMM.

    Arguments and layouts are torch's. If linear layers inside the module use `weft.parallel.ColwiseParallel`, an input
    that torch would redistribute from Shard(d) to Replicate stays a DTensor with Shard(d). The module's code sees the
    same shape, and operations on the DTensor give the same values.

    Use torch's style if the module's code

    - calls `to_local()` on the input, which would return only this rank's part,
    - changes the input before its linear layers, since each layer would then gather it again, or
    - calls some of its linear layers with gradients, autocast or activation checkpointing, and others without.

    Under torch.compile, do not change the input in place between linear layers.

    If no linear layer inside the module uses `ColwiseParallel`, or if `use_local_output=True`, torch's code runs.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        leaving = _Leaving.__new__(_Leaving)
        leaving.__dict__ = self.__dict__

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # Search in each call: layers may be parallelized after the module, and hooks cannot keep state under
            # torch.compile.
            gathering = any(isinstance(layer, ColwiseLinear) for layer in module.modules())
            style = leaving if gathering and not self.use_local_output else self
            if self.with_kwargs:
                return style._prepare_input_kwarg_fn(args, kwargs, device_mesh)
            return style._prepare_input_fn(args, device_mesh), kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class _Leaving(TorchPrepareModuleInput):
    """torch's `PrepareModuleInput`, except that sharded inputs stay sharded where torch gathers them. A `ColwiseLinear` can
    then gather the inputs during its GEMM.
    """

    def _prepare_input_arg(self, input: Any, mesh: Any, input_layout: Any, desired_layout: Any) -> Any:
        if not (type(input_layout) is Shard and desired_layout == Replicate()):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        if not isinstance(input, DTensor):
            return shared(DTensor.from_local(input, mesh, (input_layout,), run_check=False))
        if input.placements == (input_layout,):
            alias: Any = input.view_as(input)
            return shared(alias)  # a new DTensor, so that the gathered tensor is freed when the module's forward ends
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)


class PrepareModuleInputOutput(TorchPrepareModuleInputOutput):
    """torch's `PrepareModuleInputOutput`, with weft's `PrepareModuleInput` for the inputs."""

    def __init__(self, **layouts: Any) -> None:
        super().__init__(**layouts)
        made, self.prepare_module_input = self.prepare_module_input, PrepareModuleInput()
        self.prepare_module_input.__dict__ = made.__dict__
