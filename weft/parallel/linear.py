"""Linear layers that torch's styles shard, with collectives fused with their GEMMs.

torch's styles redistribute DTensors before or after `F.linear`. Here torch's code shards the parameters and annotates
inputs and outputs, so FSDP2, checkpoints and optimizers work unchanged. In between, the layer calls weft with local
tensors:

    ColwiseParallel, input Shard(sequence)     all-gather + GEMM          `weft.all_gather_matmul`
    RowwiseParallel, output Shard(sequence)    GEMM + reduce-scatter      `weft.matmul_reduce_scatter`
    RowwiseParallel, output Replicate          GEMM + all-reduce          `weft.matmul_all_reduce`
    ColwiseParallel, input Replicate           backward: GEMM + all-reduce                      `weft.matmul_all_reduce`
    ColwiseParallel, Replicate in and out      also in forward: GEMM + all-gather               `weft.matmul_all_gather`
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwiseParallel

from weft.operator.layers import (
    as_autocast,
    compare_options,
    ends_group,
    given,
    replicated,
    require_alike,
    tells_peers,
    wrong_device,
)
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.ops.tensor_parallel import columns, gathered_columns, row

_WHOLE = "_weft_whole"
_OWN = "_weft_own"  # marks an input of a single layer, whose gradient is all-reduced alone
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class ColwiseParallel(TorchColwiseParallel):
    """torch's `ColwiseParallel`, whose collectives overlap with GEMMs.

    Arguments, layouts and the sharded parameters are torch's. The input of an `nn.Linear` may be sharded along any dimension
    except the last, by `input_layouts=Shard(1)` or as a DTensor. The all-gather of the input then overlaps with the GEMM. If
    several layers receive the same input, use `weft.parallel.PrepareModuleInput` for the module around them. Then the first
    layer gathers the input for all of them.

    A replicated input (the default) needs a collective only in backward: the all-reduce of its gradient. The all-reduce
    overlaps if the input is an ordinary tensor. If the input is a DTensor, torch adds the gradients of all layers that
    use it, and all-reduces the sum without overlap. With `output_layouts=Replicate()`, the all-gather of the output
    overlaps if the layer has no bias and its input is a replicated ordinary tensor.

    torch's code runs

    - for an `nn.Embedding`, or a subclass of `nn.Linear` with its own forward,
    - for a mesh of several dimensions, and for other layouts,
    - for sizes that are not divisible by the number of ranks, and
    - for dtypes other than fp32, fp16 and bf16.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, device_mesh, input_layouts, run_check=False)
            setattr(x, _OWN, True)
        if isinstance(mod, ColwiseLinear):
            if mod.gathers(x):
                return x
            if not x.placements[0].is_replicate():
                mod.require_dtype(x)
        rest = (x, *inputs[1:])
        return TorchColwiseParallel._prepare_input_fn(input_layouts, desired_input_layouts, mod, rest, device_mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if _is_stock(module) and device_mesh.ndim == 1:
            module.__class__ = ColwiseLinear
            module.joins = self.output_layouts == (Replicate(),)  # type: ignore[assignment]
        return module


class RowwiseParallel(TorchRowwiseParallel):
    """torch's `RowwiseParallel`, whose reduce-scatter or all-reduce overlaps with the GEMM.

    Arguments, layouts and the sharded parameters are torch's. weft runs if the output of an `nn.Linear` is replicated
    (the default), or sharded along any dimension except the last (`output_layouts=Shard(1)`). torch's code runs in the
    cases that `ColwiseParallel` lists.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        (layout,) = self.output_layouts
        if _is_stock(module) and device_mesh.ndim == 1 and type(layout) in (Shard, Replicate):
            module.__class__ = RowwiseLinear
            module.output_layout = layout  # type: ignore[assignment]
        return module


class _DividedLinear(nn.Linear):
    """The base class of linear layers that a style of `weft.parallel` has sharded. Their parameters are DTensors."""

    is_collective: ClassVar[bool]
    """True if every forward needs all ranks."""

    @property
    def group_name(self) -> str:
        assert isinstance(self.weight, DTensor)
        return self.weight.device_mesh.get_group().group_name

    def local_operands(self, x: DTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return this rank's parts of x, weight and bias, and record the layer's sizes, which ranks compare at the
        group's next call. Raise `ValueError` for a weight on meta.
        """
        local, weight = _local(x), _local(self.weight)
        if wrong := wrong_device(local, weight):
            raise ValueError(f"{type(self).__name__}: {wrong}")
        group = x.device_mesh.get_group().group_name
        compare_options(
            type(self).__name__, group, x, is_collective=self.is_collective, in_features=self.in_features,
            out_features=self.out_features, bias=given(self.bias),
        )  # fmt: skip
        return local, weight, None if self.bias is None else _local(self.bias)

    def by_torch(self, x: torch.Tensor) -> torch.Tensor:
        """Run torch's code on x, which weft does not support."""
        self.require_dtype(x)
        return nn.Linear.forward(self, x)

    def require_dtype(self, x: torch.Tensor) -> None:
        """Raise `ValueError` if x and the weight differ in dtype, and notify peers. torch's code would raise on this rank
        alone, or wait for peers in a collective that they do not run.
        """
        weight = self.weight
        if isinstance(x, DTensor) and weight.is_floating_point() and not torch.compiler.is_compiling():
            is_cast = all(t.is_floating_point() and t.dtype != torch.float64 for t in (x, weight))
            if not (is_cast and torch.is_autocast_enabled(x.device.type)):
                self._require_dtype(x)

    @tells_peers
    def _require_dtype(self, x: torch.Tensor) -> None:
        if x.dtype != self.weight.dtype:
            require_alike(self, x, self.weight)


class ColwiseLinear(_DividedLinear):
    """An `nn.Linear` that `ColwiseParallel` has sharded. joins: True if the output must be replicated, so that its columns are
    all-gathered.
    """

    joins: bool
    is_collective = False  # not in every forward: x may be replicated, or gathered by another layer

    def gathers(self, x: DTensor) -> bool:
        return _overlaps(self, x, x.placements[0], self.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return self.by_torch(x)
        if hasattr(x, _OWN) and x.placements[0].is_replicate() and _takes(self, x, self.out_features):
            return self._of_whole(x)
        return self._of_parts(x) if self.gathers(x) else self.by_torch(x)

    @tells_peers
    def _of_parts(self, x: DTensor) -> torch.Tensor:
        mesh, group, ndim = x.device_mesh, x.device_mesh.get_group().group_name, x.dim()
        dim, (local, weight, bias) = _dimension(x.placements[0], ndim), self.local_operands(x)
        shares, like = hasattr(x, _WHOLE), _circumstances(x)
        made_like, whole = getattr(x, _WHOLE, None) or (None, None)
        if whole is not None and made_like == like:
            y = nn.functional.linear(whole, weight, bias)
        else:
            local, weight = as_autocast(local, weight)
            require_alike(self, local, weight)
            whole, (y,) = all_gather_matmul(local, [weight.t()], dim, group, return_A=shares)
            if shares:
                setattr(x, _WHOLE, (like, whole))
            y = y if bias is None else y + bias.to(y.dtype)
        return DTensor.from_local(y, mesh, (Shard(ndim - 1),), run_check=False)

    @tells_peers
    def _of_whole(self, x: DTensor) -> torch.Tensor:
        mesh, group = x.device_mesh, x.device_mesh.get_group().group_name
        local, weight, bias = self.local_operands(x)
        local, weight = as_autocast(local, weight)
        require_alike(self, local, weight)
        if self.joins and self.bias is None:
            return DTensor.from_local(gathered_columns(local, weight, group), mesh, (Replicate(),), run_check=False)
        (y,) = columns(local, [weight], [None if bias is None else bias.to(weight.dtype)], group)
        return DTensor.from_local(y, mesh, (Shard(x.dim() - 1),), run_check=False)


class RowwiseLinear(_DividedLinear):
    """An `nn.Linear` that `RowwiseParallel` has sharded. output_layout: the layout of the output, `Replicate` or `Shard`."""

    output_layout: Placement
    is_collective = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor) or _dimension(x.placements[0], x.dim()) != x.dim() - 1:
            return self.by_torch(x)
        whole, taken = self.output_layout.is_replicate(), _takes(self, x, self.in_features)
        fits = taken if whole else _overlaps(self, x, self.output_layout, self.in_features)
        return self._reduced(x, whole) if fits else self.by_torch(x)

    @tells_peers
    def _reduced(self, x: DTensor, whole: bool) -> torch.Tensor:
        mesh, group, dim = x.device_mesh, x.device_mesh.get_group().group_name, _dimension(self.output_layout, x.dim())
        local, weight, bias = self.local_operands(x)
        local, weight = as_autocast(local, weight)
        require_alike(self, local, weight)
        if whole:
            y = row(local, weight, None if bias is None else bias.to(weight.dtype), group)
        else:
            y = matmul_reduce_scatter(local, weight.t(), "sum", dim, group)
            y = y if bias is None else self._biased(y, bias, group)
        return DTensor.from_local(y, mesh, (self.output_layout,), run_check=False)

    @ends_group
    def _biased(self, y: torch.Tensor, bias: torch.Tensor, group: str) -> torch.Tensor:
        """Return y, this rank's part of the output, plus the bias. The gradient of the bias is the sum over ranks."""
        return y + replicated(bias, group).to(y.dtype)


def shared(x: DTensor) -> DTensor:
    """Mark `x` as the input of several layers, and return it. The first layer that gathers `x` then stores the gathered tensor
    on `x`, where the other layers find it.
    """
    setattr(x, _WHOLE, None)
    return x


def _circumstances(x: DTensor) -> tuple[Any, ...]:
    """Return a key for the circumstances in which a layer is called with `x`. Layers with equal keys may share one gathered
    `x`.

    The key changes if gradients are switched on or off, if the autocast dtype changes, and if an operation changes x in place.
    It also differs between the forward pass and its recomputation by activation checkpointing.
    """
    kind, traced = x.device.type, torch.compiler.is_compiling()
    hooks = None if traced else torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (
        torch.is_grad_enabled(),
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        None if traced or x.is_inference() else x._version,
        None if hooks is None else weakref.ref(hooks[0]),  # weak: a strong reference would form a cycle with x
    )


def _is_stock(module: nn.Module) -> bool:
    """True for exactly `nn.Linear`, because a subclass may compute something else."""
    return type(module) is nn.Linear


def _dimension(placement: Placement, ndim: int) -> int:
    """Return the dimension that the placement shards; -1 if it shards none."""
    # While torch 2.11 traces, placements have no type. The type rules out a strided Shard, which only weights have.
    divided = placement.is_shard() if torch.compiler.is_compiling() else type(placement) is Shard
    return placement.dim % ndim if divided else -1  # type: ignore[attr-defined]


def _overlaps(layer: nn.Linear, x: DTensor, sequence: Placement, features: int) -> bool:
    """True if weft can run the layer with this input. Otherwise torch's code runs.

    sequence: the layout of the input (column-parallel) or of the output (row-parallel).
    features: the size of the weight's sharded dimension, which must be divisible by the number of ranks.
    """
    dim = _dimension(sequence, x.dim())
    return 0 <= dim < x.dim() - 1 and x.shape[dim] % x.device_mesh.size() == 0 and _takes(layer, x, features)


def _takes(layer: nn.Linear, x: DTensor, features: int) -> bool:
    """True if weft can multiply x by this rank's part of the layer's weight. Otherwise torch's code runs.

    features: the size of the weight's sharded dimension.
    """
    return (
        x.dim() >= 2
        and x.device_mesh.ndim == 1
        and x.device.type in ("cpu", "cuda")
        and features % x.device_mesh.size() == 0
        and isinstance(layer.weight, DTensor)
        and layer.weight.device_mesh == x.device_mesh
        and x.dtype in _DTYPES
        and layer.weight.dtype in _DTYPES
    )


def _local(x: torch.Tensor) -> torch.Tensor:
    assert isinstance(x, DTensor)
    local = x.to_local()
    return local.clone() if isinstance(local, AsyncCollectiveTensor) else local  # clone waits for the collective
