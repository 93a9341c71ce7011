"""Linear layers that torch's styles divide, whose collectives are parts of their GEMMs.

torch's styles redistribute before or after `F.linear` on DTensors. Here parameters are divided, and inputs and outputs annotated,
by torch's own code, so that FSDP2, checkpoints and optimizers find what they know. In between, where a sequence is gathered or
scattered, the layer calls weft with local tensors:

    ColwiseParallel, input Shard(sequence)     all-gather + GEMM          `weft.all_gather_matmul`
    RowwiseParallel, output Shard(sequence)    GEMM + reduce-scatter      `weft.matmul_reduce_scatter`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwiseParallel

from weft.operator.layers import as_autocast, replicated
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter

_WHOLE = "_weft_whole"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class ColwiseParallel(TorchColwiseParallel):
    """torch's `ColwiseParallel`, whose all-gather overlaps with the GEMM.

    Arguments, layouts and the parameters that it makes are torch's. It gathers by weft where an `nn.Linear` gets an input that is
    divided along a dimension before the last: declared so (`input_layouts=Shard(1)`), or a DTensor that is. Where several layers
    get the same input, put `weft.parallel.PrepareModuleInput` on the module around them: then the first one gathers for all.

    Torch's own code runs for an `nn.Embedding`, a subclass of `nn.Linear` with a forward of its own, other layouts, sizes that do
    not divide by the number of ranks, a mesh of several dimensions, and dtypes other than fp32, fp16 and bf16.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, device_mesh, input_layouts, run_check=False)
        if isinstance(mod, ColwiseLinear) and mod.gathers(x):
            return x
        rest = (x, *inputs[1:])
        return TorchColwiseParallel._prepare_input_fn(input_layouts, desired_input_layouts, mod, rest, device_mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if _is_stock(module) and device_mesh.ndim == 1:
            module.__class__ = ColwiseLinear
        return module


class RowwiseParallel(TorchRowwiseParallel):
    """torch's `RowwiseParallel`, whose reduce-scatter overlaps with the GEMM.

    Arguments, layouts and the parameters that it makes are torch's. It scatters by weft where the output of an `nn.Linear` is
    divided along a dimension before the last (`output_layouts=Shard(1)`). Torch's own code runs in the cases that
    `ColwiseParallel` names, and for an output that is replicated.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        (layout,) = self.output_layouts
        if _is_stock(module) and device_mesh.ndim == 1 and type(layout) is Shard:
            module.__class__ = RowwiseLinear
            module.scatters = layout  # type: ignore[assignment]
        return module


class ColwiseLinear(nn.Linear):
    """An `nn.Linear` that `ColwiseParallel` has divided."""

    def gathers(self, x: DTensor) -> bool:
        return _overlaps(self, x, x.placements[0], self.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor) or not self.gathers(x):
            return super().forward(x)
        mesh, group, ndim = x.device_mesh, x.device_mesh.get_group().group_name, x.dim()
        dim = _dimension(x.placements[0], ndim)
        weight, bias = _local(self.weight), None if self.bias is None else _local(self.bias)
        whole = getattr(x, _WHOLE, None)
        if whole is not None:
            y = nn.functional.linear(whole, weight, bias)
        else:
            local, weight = as_autocast(_local(x), weight)
            whole, (y,) = all_gather_matmul(local, [weight.t()], dim, group, return_A=hasattr(x, _WHOLE))
            if whole is not None:
                setattr(x, _WHOLE, whole)
            y = y if bias is None else y + bias.to(y.dtype)
        return DTensor.from_local(y, mesh, (Shard(ndim - 1),), run_check=False)


class RowwiseLinear(nn.Linear):
    """An `nn.Linear` that `RowwiseParallel` has divided. scatters: the output's layout."""

    scatters: Shard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (
            not isinstance(x, DTensor)
            or _dimension(x.placements[0], x.dim()) != x.dim() - 1
            or not _overlaps(self, x, self.scatters, self.in_features)
        ):
            return super().forward(x)
        mesh, group, dim = x.device_mesh, x.device_mesh.get_group().group_name, _dimension(self.scatters, x.dim())
        local, weight = as_autocast(_local(x), _local(self.weight))
        y = matmul_reduce_scatter(local, weight.t(), "sum", dim, group)
        if (
            self.bias is not None
        ):  # of which each rank uses the positions that it has: its gradient is the sum over ranks
            y = y + replicated(_local(self.bias), group).to(y.dtype)
        return DTensor.from_local(y, mesh, (self.scatters,), run_check=False)


def shared(x: DTensor) -> DTensor:
    """`x`, on which the first layer that gathers it leaves the whole for others that are given this very DTensor."""
    setattr(x, _WHOLE, None)
    return x


def _is_stock(module: nn.Module) -> bool:
    """Others may compute something else, or hold something else than a matrix."""
    return type(module) is nn.Linear


def _dimension(placement: Placement, ndim: int) -> int:
    """That is divided; -1 if none is."""
    # What torch 2.11 traces has no type. A strided one, which is no plain Shard, is a weight's.
    divided = placement.is_shard() if torch.compiler.is_compiling() else type(placement) is Shard
    return placement.dim % ndim if divided else -1  # type: ignore[attr-defined]


def _overlaps(layer: nn.Linear, x: DTensor, sequence: Placement, features: int) -> bool:
    """Whether weft can do it. sequence: how the input or the output is divided; features: those of the weight that are."""
    world, dim = x.device_mesh.size(), _dimension(sequence, x.dim())
    return (
        0 <= dim < x.dim() - 1
        and x.device_mesh.ndim == 1
        and x.device.type in ("cpu", "cuda")
        and x.shape[dim] % world == 0
        and features % world == 0
        and isinstance(layer.weight, DTensor)
        and layer.weight.device_mesh == x.device_mesh
        and x.dtype in _DTYPES
        and layer.weight.dtype in _DTYPES
    )


def _local(x: torch.Tensor) -> torch.Tensor:
    assert isinstance(x, DTensor)
    local = x.to_local()
    return local.clone() if isinstance(local, AsyncCollectiveTensor) else local  # which waits for it
