"""Linear layers whose weight [out, in] is sharded over ranks: by rows (column-parallel) or by columns (row-parallel).

Every collective overlaps with the layer's GEMM, in forward and in backward.

Source: "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
from torch import nn

from weft.arguments import check_flag, not_dense
from weft.nn.layer_arguments import DTYPES, check_device, check_dtype, checked_sequence_dim, checked_size
from weft.nn.norm import RMSNorm
from weft.operator.layers import (
    as_autocast,
    compare_options,
    ends_group,
    fill,
    given,
    replicated,
    require_alike,
    tells_peers,
    wrong_device,
)
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.ops.tensor_parallel import columns, row
from weft.symm.groups import member_group
from weft.words import kind


class ParallelLinear(nn.Module):
    """The base class of linear layers whose weight is sharded over ranks."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    divided: ClassVar[int]
    """The sharded dimension of the weight [out, in]: 0 for column-parallel, 1 for row-parallel layers."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | str,
        sequence_dim: int | None = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        group = member_group(group)
        # Store the name, not the group, because groups cannot be copied or pickled.
        self.group_name, self.rank, self.world_size = group.group_name, group.rank(), group.size()
        self.sequence_dim = checked_sequence_dim(sequence_dim)
        check_flag("bias", bias)
        check_device(device)
        check_dtype(dtype)
        sizes, world = {"out_features": out_features, "in_features": in_features}, self.world_size
        shape = [
            checked_size(name, size, world if dim == self.divided else None)
            for dim, (name, size) in enumerate(sizes.items())
        ]
        self.out_features, self.in_features = shape
        shape[self.divided] //= world
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: dist.ProcessGroup | str, *, sequence_dim: int | None = 1) -> Self:
        """Return a layer with this rank's part of `linear`: a copy with the same dtype, device and requires_grad.

        sequence_dim: the dimension of the activations that is sharded over ranks; None if they are replicated.
        """
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"linear is a {type(linear).__name__}: pass a torch.nn.Linear")
        made = cls(
            linear.in_features, linear.out_features, linear.bias is not None, group=group, sequence_dim=sequence_dim,
            device="meta", dtype=linear.weight.dtype,
        ).to_empty(device=linear.weight.device)  # fmt: skip
        made.load_state_dict(made.local_part(linear.state_dict()))
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(linear.get_parameter(name).requires_grad)
        return made

    def reset_parameters(self) -> None:
        """Initialise the parameters as `nn.Linear` does. Ranks with equal seeds get shards of the same full weight.

        Temporarily needs memory for the full weight.
        """
        if not self.weight.is_meta:
            device, dtype = self.weight.device, self.weight.dtype
            whole = nn.Linear(self.in_features, self.out_features, self.bias is not None, device=device, dtype=dtype)
            for name, part in self.local_part(whole.state_dict()).items():
                fill(self.get_parameter(name), part)

    def local_part(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's parts of parameters of an `nn.Linear`, as views. whole: the parameters, by name.

        Raise `ValueError` for a parameter of another shape.
        """
        for name, shape in (("weight", (self.out_features, self.in_features)), ("bias", (self.out_features,))):
            if name in whole and tuple(whole[name].shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(whole[name].shape)}, but the whole layer has {shape}: pass the state dict of an "
                    "unsharded layer of the same sizes"
                )
        divided = {"weight"} if self.divided else {"weight", "bias"}
        parts = {name: whole[name].chunk(self.world_size, self.divided)[self.rank] for name in divided & whole.keys()}
        return {**whole, **parts}

    def require_input(self, x: torch.Tensor, of: nn.Module, *, three: bool = False) -> None:
        """Raise `ValueError` if x does not match the layer's parameters. Call this method at the beginning of a
        forward.

        of: the module that was called, for error texts. three: True if x must have three dimensions.
        """
        require(of, self._wrong_input(x, three) or wrong_device(x, self.weight))

    def _wrong_input(self, x: torch.Tensor, three: bool) -> str:
        """Return the error text for a bad x; "" for a valid x."""
        if wrong := not_dense("x", x):
            return wrong
        features, dim, shape = self.weight.shape[1], self.sequence_dim, tuple(x.shape)
        if dim is None:
            if len(shape) < 2 or shape[-1] != features or (three and len(shape) != 3):
                return f"x has shape {shape}, but sequence_dim=None needs [{'B, S' if three else '..., S'}, {features}]"
            return ""
        fits = -len(shape) <= dim < len(shape) and dim % len(shape) < len(shape) - 1 and shape[-1] == features
        if not fits or (three and len(shape) != 3):
            part = "S" if self.divided else "S/W"
            flat = f"[{part}, {features}]"
            known = {0: f"[{part}, B, {features}]{'' if three else f' or {flat}'}", 1: f"[B, {part}, {features}]"}
            takes = known.get(dim, f"[..., {features}], with the sequence in any dimension except the last")
            other = (
                f", or make the layer with sequence_dim=0 for {flat}"
                if len(shape) == 2 and dim == 1 and not three
                else ""
            )
            return f"x has shape {shape}, but sequence_dim={dim} needs {takes}: pass such a tensor{other}"
        if self.divided and shape[dim] % self.world_size:
            return (
                f"x has shape {shape}, whose size {shape[dim]} in dimension sequence_dim={dim} must be divisible by "
                f"world_size={self.world_size}, since every rank gets an equal part: pad the sequence"
            )
        return ""

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={self.rank} of {self.world_size}, sequence_dim={self.sequence_dim}"
        )


class ColumnParallelLinear(ParallelLinear):
    """x @ weight.T + bias, with the output features sharded over ranks. x is sharded along the sequence.

        x [B, S/W, in_features]  ->  [B, S, out_features/W]        B: batch, S: sequence length, W: number of ranks

    The all-gather of x overlaps with the GEMM (`weft.all_gather_matmul`), and in backward with the GEMM of the weight's
    gradient. All ranks of `group` must run every forward and every backward.

    With `sequence_dim=None`, x is replicated, and forward is [..., in_features] -> [..., out_features/W] without a
    collective. Backward all-reduces the gradient of x, overlapped with a GEMM (`weft.matmul_all_reduce`).

    in_features, out_features: the sizes of the whole layer. out_features must be divisible by the number of ranks.
    bias: True for a bias, which is sharded like the output features.
    group: a process group, or its name.
    sequence_dim: the sharded dimension of x: 1 for [B, S, H], 0 for [S, B, H] or [S, H], None if x is replicated.
    device, dtype: as for `nn.Linear`. dtype is fp32, fp16 or bf16, or fp64 on CPU. Autocast converts x and the weight as for
        `nn.Linear`.

    The parameters are `weight` [out_features/W, in_features] and `bias` [out_features/W]: ordinary tensors with this
    rank's rows of an `nn.Linear`. `from_linear` makes a layer from an `nn.Linear`, and `weft.nn.local_state_dict` loads
    an unsharded checkpoint. Copies by `deepcopy` and pickle use the group with the same name.

    Memory and errors of calls: as for `weft.all_gather_matmul`. Source: "Megatron-LM: Training Multi-Billion Parameter
    Language Models Using Model Parallelism", section 3.
    """

    divided = 0

    @tells_peers
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y [B, S, out_features/W] for x [B, S/W, in_features]: the shapes for sequence_dim=1."""
        self.require_input(x, self)
        compare_options(
            "ColumnParallelLinear", self.group_name, x, is_collective=self.sequence_dim is not None,
            in_features=self.in_features, out_features=self.out_features, bias=given(self.bias),
        )  # fmt: skip
        return column_parallel(x, [self], self)[0]


class RowParallelLinear(ParallelLinear):
    """x @ weight.T + bias, with the input features sharded over ranks. The result is sharded along the sequence.

        x [B, S, in_features/W]  ->  [B, S/W, out_features]

    The reduce-scatter of the ranks' products overlaps with the GEMM (`weft.matmul_reduce_scatter`), and in backward the
    all-gather overlaps with a GEMM. All ranks of `group` must run every forward and every backward.

    With `sequence_dim=None`, forward is [..., in_features/W] -> [..., out_features], and every rank gets the whole sum
    (`weft.matmul_all_reduce`). Backward then has no collective: ranks continue with the same result, so the incoming
    gradient must be complete and equal on all ranks.

    in_features and the sequence length must be divisible by the number of ranks. Other arguments are as for
    `ColumnParallelLinear`.

    The parameters are `weight` [out_features, in_features/W], this rank's columns of an `nn.Linear`, and `bias`
    [out_features], equal on every rank. The bias is added to the sum over ranks. Its gradient is summed over ranks,
    too. (With `sequence_dim=None` each rank already has the complete gradient.)

    Memory and errors of calls: as for `weft.matmul_reduce_scatter`, or with `sequence_dim=None` as for
    `weft.matmul_all_reduce`. Source: as for `ColumnParallelLinear`.
    """

    divided = 1

    @tells_peers
    def forward(self, x: torch.Tensor, *, residual: torch.Tensor | None = None, norm: nn.Module | None = None) -> Any:
        """Return the result y. With `norm` return (norm(y), y): the input and the residual of the next layer.

        residual: a tensor of the result's shape, which is added to the result. With `sequence_dim=None`, a residual of
            the parameters' dtype is fused with the all-reduce.
        norm: a norm over the hidden dimension. With `sequence_dim=None`, an `nn.RMSNorm` with a weight, an eps and no
            hooks is fused with the all-reduce, unless there is a residual of another dtype.
        """
        self.require_input(x, self)
        self.require_following(x, residual, norm, self)
        compare_options(
            "RowParallelLinear", self.group_name, x, in_features=self.in_features, out_features=self.out_features,
            bias=given(self.bias), residual=given(residual), norm=norm,
        )  # fmt: skip
        x, weight = as_autocast(x, self.weight)
        require_alike(self, x, weight)
        bias: torch.Tensor | None = self.bias
        if self.sequence_dim is not None:
            y = matmul_reduce_scatter(x, weight.t(), "sum", self.sequence_dim, self.group_name)
        else:
            bias = None if bias is None else bias.to(weight.dtype)
            within = residual if residual is not None and residual.dtype == weight.dtype else None
            if within is residual and type(norm) is nn.RMSNorm and _follows(norm, weight):
                return row(x, weight, bias, self.group_name, residual, norm.weight, cast(float, norm.eps))
            y = row(x, weight, bias, self.group_name, within)
            residual, bias = None if within is residual else residual, None
        return y if residual is norm is bias is None else self._followed(y, bias, residual, norm)

    @ends_group
    def _followed(
        self, y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, norm: nn.Module | None
    ) -> Any:
        """Add bias and residual to `y`, then apply norm. In backward, the gradient of bias is summed over ranks."""
        y = y if bias is None else y + replicated(bias, self.group_name).to(y.dtype)
        y = y if residual is None else y + residual
        return y if norm is None else (norm(y), y)

    def require_following(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: nn.Module | None, of: nn.Module
    ) -> None:
        """Raise `ValueError` for a residual or a norm that does not fit the layer. Call this method before the first
        collective of a call.

        of: the called module, whose last layer is this layer. x: the input of `of`.
        """
        if residual is None and norm is None:
            return
        shape, dim = [*x.shape[:-1], self.out_features], self.sequence_dim
        if of is self and dim is not None:
            shape[dim] //= self.world_size
        wrong = "" if residual is None else _wrong_residual(residual, tuple(shape), x.device)
        require(of, wrong or ("" if norm is None else self._wrong_norm(norm, x.device)))

    def _wrong_norm(self, norm: nn.Module, device: torch.device) -> str:
        if isinstance(norm, type) or not callable(norm):
            return f"norm is {kind(norm)}: pass a module, such as nn.RMSNorm({self.out_features})"
        if self.sequence_dim is None and isinstance(norm, RMSNorm):
            return (
                "norm is a weft.nn.RMSNorm, whose gradient is summed over ranks, but with sequence_dim=None x is replicated: pass "
                "torch's nn.RMSNorm"
            )
        weight = getattr(norm, "weight", None)
        shape = getattr(norm, "normalized_shape", None) if weight is None else weight.shape
        if shape is not None and tuple(shape) != (self.out_features,):
            return f"norm has shape {tuple(shape)}: pass a norm of the hidden dimension, ({self.out_features},)"
        if weight is not None and weight.device != device:
            return f"the weight of norm is on {weight.device} and x on {device}: use one device"
        return ""


def _wrong_residual(residual: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> str:
    if wrong := not_dense("residual", residual):
        return wrong
    if tuple(residual.shape) != shape:
        return f"residual has shape {tuple(residual.shape)}: pass the result's shape, {shape}"
    if residual.device != device or residual.dtype not in DTYPES:
        return (
            f"residual is {residual.dtype} on {residual.device}: pass a floating-point tensor on {device}, where x is"
        )
    return ""


def require(of: nn.Module, wrong: str) -> None:
    """Raise `ValueError` with the text `wrong`, unless the text is empty. Callers have the decorator `tells_peers`,
    which notifies peers of the error.
    """
    if wrong:
        raise ValueError(f"{type(of).__name__}: {wrong}")


def _follows(norm: nn.RMSNorm, weight: torch.Tensor) -> bool:
    """True if weft can fuse `norm` with the all-reduce of a layer that has this weight [N, ...]."""
    hooks = norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks
    own, called = norm.weight, any(hooks) or "forward" in norm.__dict__
    fits = type(own) is nn.Parameter and own.dtype == weight.dtype and own.shape == weight.shape[:1]
    return fits and norm.eps is not None and not called


def column_parallel(x: torch.Tensor, layers: list[ColumnParallelLinear], of: nn.Module) -> list[torch.Tensor]:
    """Return the result of each of `layers` for `x`, which is gathered once. The layers have the same group.

    of: the called module, which has checked x.
    """
    first = layers[0]
    x, *weights = as_autocast(x, *(layer.weight for layer in layers))
    require_alike(of, x, *weights)
    if first.sequence_dim is None:
        return columns(
            x, weights, [b if b is None else b.to(x.dtype) for b in (layer.bias for layer in layers)], first.group_name
        )
    _, ys = all_gather_matmul(x, [w.t() for w in weights], first.sequence_dim, first.group_name, return_A=False)
    biases = (layer.bias for layer in layers)
    return [y if bias is None else y + bias.to(y.dtype) for y, bias in zip(ys, biases, strict=True)]
