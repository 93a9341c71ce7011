"""Layers of a tensor-parallel transformer: weights are sharded over the ranks of a group, activations between layers along the
sequence. Every collective overlaps with the adjacent GEMM, forward and backward.

A column-parallel layer has rows of the weight [out, in], a row-parallel layer has columns. A block needs two collectives forward
and two backward, and each is part of a GEMM:

    x [B, S/W, H]  --all_gather_matmul-->  [B, S, N/W]  --columnwise operations-->  --matmul_reduce_scatter-->  [B, S/W, H]

With `sequence_dim=None` activations between layers are replicated. Use it to decode a few tokens at a time, or if the sequence is
not divisible by the number of ranks. Then a block needs one collective forward and one backward:

    x [..., H]  --GEMM-->  [..., N/W]  --columnwise operations-->  --matmul_all_reduce-->  [..., H]

Source: "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 3, and "Reducing Activation
Recomputation in Large Transformer Models", 4.2.2, for the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from weft.nn.experts import ExpertParallelMLP
from weft.nn.norm import RMSNorm
from weft.operator.layers import (
    activated,
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
from weft.symm.groups import group_of
from weft.words import kind


class _ParallelLinear(nn.Module):
    """A linear layer whose weight is divided over ranks."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    divided: ClassVar[int]
    """The divided dimension of the weight."""

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
        group = group_of(group)
        # Store the name, not the group, so that a module can be copied and pickled.
        self.group_name, self.rank, self.world_size = group.group_name, group.rank(), group.size()
        self.in_features, self.out_features, self.sequence_dim = in_features, out_features, sequence_dim
        shape = [out_features, in_features]
        shape[self.divided] = _part(("out_features", "in_features")[self.divided], shape[self.divided], self.world_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        length = out_features if self.divided else shape[0]
        self.register_parameter("bias", nn.Parameter(torch.empty(length, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: dist.ProcessGroup | str, *, sequence_dim: int | None = 1) -> Self:
        """Return this rank's part of `linear`, copied: its values, dtype, device, and requires_grad."""
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
        """Draw parameters like `nn.Linear`: ranks with equal seeds have parts of one model. Temporarily needs memory for
        the whole weight."""
        if not self.weight.is_meta:
            device, dtype = self.weight.device, self.weight.dtype
            whole = nn.Linear(self.in_features, self.out_features, self.bias is not None, device=device, dtype=dtype)
            for name, part in self.local_part(whole.state_dict()).items():
                fill(self.get_parameter(name), part)

    def local_part(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's part of an `nn.Linear`'s given parameters: views."""
        divided = {"weight"} if self.divided else {"weight", "bias"}
        parts = {name: whole[name].chunk(self.world_size, self.divided)[self.rank] for name in divided & whole.keys()}
        return {**whole, **parts}

    def require_input(self, x: torch.Tensor, of: nn.Module) -> None:
        """Raise an error if x does not match the layer's parameters. Call it at the beginning of a forward. of: the
        layer."""
        _require(of, self._wrong_input(x, isinstance(of, ParallelAttention)) or wrong_device(x, self.weight))

    def _wrong_input(self, x: torch.Tensor, three: bool) -> str:
        """Return the error of x. three: x must have three dimensions."""
        if not isinstance(x, torch.Tensor):
            return f"x is {kind(x)}: pass a torch.Tensor"
        features, dim, shape = self.weight.shape[1], self.sequence_dim, tuple(x.shape)
        if dim is None:
            if len(shape) < 2 or shape[-1] != features or (three and len(shape) != 3):
                return f"x has shape {shape}, and sequence_dim=None takes [{'B, S' if three else '..., S'}, {features}]: pass that"
            return ""
        fits = -len(shape) <= dim < len(shape) and dim % len(shape) < len(shape) - 1 and shape[-1] == features
        if not fits or (three and len(shape) != 3):
            part = "S" if self.divided else "S/W"
            flat = f"[{part}, {features}]"
            known = {0: f"[{part}, B, {features}]{'' if three else f' or {flat}'}", 1: f"[B, {part}, {features}]"}
            takes = known.get(dim, f"[..., {features}], the sequence not in the last dimension")
            other = (
                f", or make the layer with sequence_dim=0 for {flat}"
                if len(shape) == 2 and dim == 1 and not three
                else ""
            )
            return f"x has shape {shape}, and sequence_dim={dim} takes {takes}: pass that{other}"
        if self.divided and shape[dim] % self.world_size:
            return (
                f"x has shape {shape}, and the {shape[dim]} of sequence_dim={dim} must be divisible by "
                f"world_size={self.world_size}, as every rank gets equally many: pad the sequence"
            )
        return ""

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={self.rank} of {self.world_size}, sequence_dim={self.sequence_dim}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """x @ weight.T + bias, with the output features divided over ranks, for an x that is divided along the sequence.

        x [B, S/W, in_features]  ->  [B, S, out_features/W]

    The all-gather of x overlaps with the GEMM (`weft.all_gather_matmul`), and in backward with the GEMM of the weight's
    gradient. Every call is collective over `group`, and so is its backward. With `sequence_dim=None`, [..., in_features] ->
    [..., out_features/W], nothing is gathered: only backward is collective, and the all-reduce of x's gradient overlaps
    (`weft.matmul_all_reduce`).

    in_features, out_features: of the whole layer. out_features must be divisible by the number of ranks.
    bias: divided as the output features are.
    group: a process group, or its name.
    sequence_dim: the divided dimension of x: 1 for [B, S, H], 0 for [S, B, H] or [S, H]; None if x is whole on every rank.
    device, dtype: as for `nn.Linear`; fp32, fp16 or bf16. Autocast converts x and the weight as in `nn.Linear`.

    Parameters are `weight` [out_features/W, in_features] and `bias` [out_features/W], ordinary tensors: rows of a stock layer's.
    `from_linear` makes a layer from a stock layer, `weft.nn.local_state_dict` loads a stock checkpoint. `deepcopy` and pickle
    keep the group's name. Errors are those of `weft.all_gather_matmul`.
    """

    divided = 0

    @tells_peers
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.require_input(x, self)
        compare_options(
            "ColumnParallelLinear", self.group_name, x, is_collective=self.sequence_dim is not None,
            in_features=self.in_features, out_features=self.out_features, bias=given(self.bias),
        )  # fmt: skip
        return column_parallel(x, [self], self)[0]


class RowParallelLinear(_ParallelLinear):
    """x @ weight.T + bias, with the input features divided over ranks; the result is divided along the sequence.

        x [B, S, in_features/W]  ->  [B, S/W, out_features]

    The GEMM overlaps with the reduce-scatter of the ranks' products (`weft.matmul_reduce_scatter`), and in backward with the
    all-gather. Every call is collective over `group`, and so is its backward. With `sequence_dim=None`, [..., in_features/W] ->
    [..., out_features], every rank gets the whole sum (`weft.matmul_all_reduce`), and backward has no collective: ranks
    continue with the same result, and the incoming gradient must be whole and equal on all ranks.

    in_features must be divisible by the number of ranks, and so must the sequence. Other arguments are as for
    `ColumnParallelLinear`.

    Parameters are `weight` [out_features, in_features/W], columns of a stock layer's, and `bias` [out_features], the same on
    every rank. The bias is added once, to the sum. Its gradient is the sum over ranks; with `sequence_dim=None` each rank has the
    whole gradient already. Errors are those of `weft.matmul_reduce_scatter`.
    """

    divided = 1

    @tells_peers
    def forward(self, x: torch.Tensor, *, residual: torch.Tensor | None = None, norm: nn.Module | None = None) -> Any:
        """Return the result y; with `norm` the pair (norm(y), y): the next layer's input, and its residual.

        residual: a tensor of the result's shape, which is added to it.
        norm: a norm over the hidden dimension. With `sequence_dim=None`, residual and norm are part of the all-reduce, if
            residual and parameters have the same dtype, and the norm is an `nn.RMSNorm` with a weight, an eps and no hooks.
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
        """Apply bias, residual and norm after the collective. bias: the bias of this rank's positions."""
        y = y if bias is None else y + replicated(bias, self.group_name).to(y.dtype)
        y = y if residual is None else y + residual
        return y if norm is None else (norm(y), y)

    def require_following(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: nn.Module | None, of: nn.Module
    ) -> None:
        """Refuse a residual and a norm that do not fit, before the first collective of a call.

        x: the input of `of`, the called module, whose result this layer makes."""
        if residual is None and norm is None:
            return
        shape, dim = [*x.shape[:-1], self.out_features], self.sequence_dim
        if of is self and dim is not None:
            shape[dim] //= self.world_size
        wrong = "" if residual is None else _wrong_residual(residual, tuple(shape), x.device)
        _require(of, wrong or ("" if norm is None else self._wrong_norm(norm, x.device)))

    def _wrong_norm(self, norm: nn.Module, device: torch.device) -> str:
        if not callable(norm):
            return f"norm is {kind(norm)}: pass a module, such as nn.RMSNorm({self.out_features})"
        if self.sequence_dim is None and isinstance(norm, RMSNorm):
            return (
                "norm is a weft.nn.RMSNorm, whose gradient is summed over ranks, but x is replicated here: pass "
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
    if not isinstance(residual, torch.Tensor):
        return f"residual is {kind(residual)}: pass a torch.Tensor"
    if tuple(residual.shape) != shape:
        return f"residual has shape {tuple(residual.shape)}: pass the result's shape, {shape}"
    if residual.device != device or not residual.is_floating_point():
        return (
            f"residual is {residual.dtype} on {residual.device}: pass a floating-point tensor on {device}, where x is"
        )
    return ""


def _require(of: nn.Module, wrong: str) -> None:
    """Raise `ValueError` if `wrong` names an error in the arguments of `of`; its peers are notified."""
    if wrong:
        raise ValueError(f"{type(of).__name__}: {wrong}")


def _follows(norm: nn.RMSNorm, weight: torch.Tensor) -> bool:
    """True if the all-reduce after a layer with this weight [N, ...] can include `norm`."""
    hooks = norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks
    own, called = norm.weight, any(hooks) or "forward" in norm.__dict__
    fits = type(own) is nn.Parameter and own.dtype == weight.dtype and own.shape == weight.shape[:1]
    return fits and norm.eps is not None and not called


def column_parallel(x: torch.Tensor, layers: list[ColumnParallelLinear], of: nn.Module) -> list[torch.Tensor]:
    """Return the result of each of `layers`, of one group, for `x`, which is gathered once.

    of: the called module, which has checked x."""
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


class ParallelMLP(nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)), Llama's (SwiGLU), tensor-parallel.

        x [B, S/W, hidden]  ->  [B, S/W, hidden]        with sequence_dim=None  [..., hidden]  ->  [..., hidden]

    x is gathered once for gate_proj and up_proj.

    hidden, intermediate: of the whole layer; intermediate must be divisible by the number of ranks.
    bias: True for biases in all three layers.
    activation: a function of one tensor; it must act on each column separately, and keep the shape and the dtype.
    group, sequence_dim, device, dtype: as for `ColumnParallelLinear`.

    Children are `gate_proj`, `up_proj` and `down_proj`, as in Hugging Face's `LlamaMLP` (w1, w3 and w2 in Meta's code).
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        group: dist.ProcessGroup | str,
        bias: bool = False,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        sequence_dim: int | None = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _part("intermediate", intermediate, group_of(group).size())
        self.activation = activation

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden, intermediate, bias, group=group, sequence_dim=sequence_dim, device=device, dtype=dtype
            )

        self.gate_proj, self.up_proj = column(), column()
        self.down_proj = RowParallelLinear(
            intermediate, hidden, bias, group=group, sequence_dim=sequence_dim, device=device, dtype=dtype
        )

    @property
    def group_name(self) -> str:
        return self.down_proj.group_name

    @tells_peers
    def forward(self, x: torch.Tensor, *, residual: torch.Tensor | None = None, norm: nn.Module | None = None) -> Any:
        """Run the MLP. residual, norm: as for `RowParallelLinear`."""
        gate_proj, up_proj, down_proj = self.gate_proj, self.up_proj, self.down_proj
        gate_proj.require_input(x, self)
        down_proj.require_following(x, residual, norm, self)
        compare_options(
            "ParallelMLP", down_proj.group_name, x, hidden=down_proj.out_features, intermediate=down_proj.in_features,
            activation=self.activation, gate_bias=given(gate_proj.bias), up_bias=given(up_proj.bias),
        )  # fmt: skip
        gate, up = column_parallel(x, [gate_proj, up_proj], self)
        return down_proj(activated(self, gate) * up, residual=residual, norm=norm)


class ParallelAttention(nn.Module):
    """Self-attention, Llama's, with the heads divided over ranks: each rank attends with its own heads, over the whole sequence.

        x [B, S/W, hidden]  ->  [B, S/W, hidden]        with sequence_dim=None  [B, S, hidden]  ->  [B, S, hidden]

    x is gathered once for q_proj, k_proj and v_proj. Grouped-query if kv_heads < heads.

    hidden, heads, kv_heads: of the whole layer; heads and kv_heads must be divisible by the number of ranks. kv_heads: default
        `heads`.
    head_dim: default hidden / heads.
    bias: True for biases in all four projections.
    causal: True: without a mask, a position attends only to itself and earlier positions.
    group, sequence_dim, device, dtype: as for `ColumnParallelLinear`; x has three dimensions.

    Children are `q_proj`, `k_proj`, `v_proj` and `o_proj`, as in Hugging Face's `LlamaAttention`, whose weights they accept
    (rotary embeddings rotate halves of a head, not neighbours).
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        group: dist.ProcessGroup | str,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = True,
        sequence_dim: int | None = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads, world = heads if kv_heads is None else kv_heads, group_of(group).size()
        _part("heads", heads, world)
        _part("kv_heads", kv_heads, world)
        if heads % kv_heads:
            raise ValueError(
                f"heads={heads} must be divisible by kv_heads={kv_heads}, because all keys are "
                "shared by the same number of heads"
            )
        if head_dim is None and hidden % heads:
            raise ValueError(f"hidden={hidden} must be divisible by heads={heads}, or pass head_dim")
        if sequence_dim not in (0, 1, None):
            raise ValueError(
                f"sequence_dim={sequence_dim} is not supported: pass 1 for [B, S, H], 0 for [S, B, H], or None if "
                "every rank has the whole x"
            )
        self.head_dim = hidden // heads if head_dim is None else head_dim
        self.grouped, self.causal, self.sequence_dim = heads != kv_heads, causal, sequence_dim

        def column(of_heads: int) -> ColumnParallelLinear:
            width = of_heads * self.head_dim
            return ColumnParallelLinear(
                hidden, width, bias, group=group, sequence_dim=sequence_dim, device=device, dtype=dtype
            )

        self.q_proj, self.k_proj, self.v_proj = column(heads), column(kv_heads), column(kv_heads)
        self.o_proj = RowParallelLinear(
            heads * self.head_dim, hidden, bias, group=group, sequence_dim=sequence_dim, device=device, dtype=dtype
        )

    @property
    def group_name(self) -> str:
        return self.o_proj.group_name

    @tells_peers
    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        mask: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> Any:
        """Run the attention.

        rotary: cosines and sines for all positions of the sequence, [S, head_dim] or [B, S, head_dim], as
            `rotary_embedding` and Hugging Face's `LlamaRotaryEmbedding` make them. Pass the whole sequence, not this rank's
            part: S is not broadcast.
        mask: `scaled_dot_product_attention`'s, of the whole sequence and of this rank's heads, broadcastable to [B, heads/W, S, S].
        residual, norm: as for `RowParallelLinear`."""
        q_proj, k_proj, v_proj, o_proj = self.q_proj, self.k_proj, self.v_proj, self.o_proj
        q_proj.require_input(x, self)
        if rotary is not None or mask is not None:
            _require(self, self._wrong_attending(x, rotary, mask))
        o_proj.require_following(x, residual, norm, self)
        compare_options(
            "ParallelAttention", o_proj.group_name, x, hidden=o_proj.out_features,
            heads=q_proj.out_features // self.head_dim, kv_heads=k_proj.out_features // self.head_dim,
            head_dim=self.head_dim, causal=self.causal, rotary=given(rotary), mask=given(mask), q_bias=given(q_proj.bias),
            k_bias=given(k_proj.bias), v_bias=given(v_proj.bias),
        )  # fmt: skip
        q, k, v = column_parallel(x, [q_proj, k_proj, v_proj], self)
        return o_proj(self.attend(q, k, v, rotary, mask), residual=residual, norm=norm)

    def _wrong_attending(self, x: torch.Tensor, rotary: Any, mask: Any) -> str:
        world, dim = self.q_proj.world_size, self.sequence_dim
        batch, length = (x.shape[1], x.shape[0]) if dim == 0 else x.shape[:2]
        length *= 1 if dim is None else world
        wrong = "" if rotary is None else _wrong_rotary(rotary, batch, length, self.head_dim, x.device)
        if wrong or mask is None:
            return wrong
        shape = batch, self.q_proj.out_features // self.head_dim // world, length, length
        return _wrong_mask(mask, shape, x)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of this rank's heads, [B, S, heads/W x head_dim]; k and v have the columns of kv_heads."""
        sequence = 1 if self.sequence_dim is None else self.sequence_dim
        q, k, v = (y.movedim(sequence, 1).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))
        if rotary is not None:
            cos, sin = (t.unsqueeze(-3).to(q.dtype) for t in rotary)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal and mask is None, enable_gqa=self.grouped
        )
        if self.sequence_dim is None:
            return y.transpose(1, 2).flatten(2)
        # [B, heads, S, head_dim] -> [S, B, heads x head_dim], the reduce-scatter's layout: one copy at most.
        return y.permute(2, 0, 1, 3).flatten(2).movedim(0, sequence)


def _wrong_rotary(rotary: Any, batch: int, length: int, head_dim: int, device: torch.device) -> str:
    fix = f"pass (cos, sin) of all positions, as weft.nn.rotary_embedding({length}, {head_dim}) makes them"
    parts = rotary if isinstance(rotary, tuple | list) else [rotary]
    if any(isinstance(t, torch.Tensor) and t.is_complex() for t in parts):
        return f"rotary is complex, as Meta's freqs_cis: {fix}, and weights as in Hugging Face, where halves of a head are rotated"
    if len(parts) != 2 or not all(isinstance(t, torch.Tensor) for t in parts):
        return f"rotary is {kind(rotary) if parts[0] is rotary else [kind(t) for t in parts]}: {fix}"
    for name, t in zip(("cos", "sin"), parts, strict=True):
        # A table of one position would broadcast over all of them.
        whole = 2 <= t.dim() <= 3 and t.shape[-2] == length and t.shape[-1] == head_dim
        if not whole or (t.dim() == 3 and t.shape[0] not in (1, batch)):
            takes = f"[S, head_dim] = {(length, head_dim)} or [B, S, head_dim] = {(batch, length, head_dim)}"
            return f"{name} of rotary has shape {tuple(t.shape)}, and the whole sequence takes {takes}: {fix}"
        if not t.is_floating_point() or t.device != device:
            return f"{name} of rotary is {t.dtype} on {t.device}: pass a floating-point tensor on {device}, where x is"
    return ""


def _wrong_mask(mask: Any, shape: tuple[int, ...], x: torch.Tensor) -> str:
    if not isinstance(mask, torch.Tensor):
        return f"mask is {kind(mask)}: pass a torch.Tensor"
    if not 2 <= mask.dim() <= 4 or any(n not in (1, of) for n, of in zip(mask.shape[::-1], shape[::-1], strict=False)):
        return (
            f"mask has shape {tuple(mask.shape)}: pass one of the whole sequence and of this rank's heads, that broadcasts to "
            f"[B, heads/W, S, S] = {shape}"
        )
    converted = mask.is_floating_point() and torch.is_autocast_enabled(x.device.type)
    fits = converted or mask.dtype in (torch.bool, torch.float32, x.dtype)
    if not fits or mask.device != x.device:
        return f"mask is {mask.dtype} on {mask.device}: pass one of torch.bool or {x.dtype} on {x.device}, as x is"
    return ""


def rotary_embedding(
    length: int, head_dim: int, base: float = 10000.0, *, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines for positions 0 ... length - 1, [length, head_dim] in fp32, for `ParallelAttention`. Once for all
    layers.

    Source: "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    if head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} must be even, because rotary positions rotate the two halves of a "
            "head against each other"
        )
    rates = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), rates).repeat(1, 2)
    return angles.cos(), angles.sin()


def local_state_dict(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict for `model.load_state_dict` on this rank, from a stock model's state dict.

    Layers of `weft.nn` in `model` get this rank's part; other entries are unchanged. The tensors are views, except for
    experts that are given one by one, which are copied."""
    found = dict(whole)
    for prefix, module in model.named_modules():
        if isinstance(module, _ParallelLinear):
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
    """Return the state dict of `model` for `torch.distributed.checkpoint`, with the divided parameters of `weft.nn` layers
    as DTensors.

    A checkpoint then has all parts, under stock names and shapes, and any number of ranks can load it.

        dcp.save(weft.nn.distributed_state_dict(model), checkpoint_id=folder)
        dcp.load(weft.nn.distributed_state_dict(model), checkpoint_id=folder)  # into the parameters: memory is shared

    state: tensors with the parameters' names and shapes, such as an optimizer's moments; default `model.state_dict()`.

    Raises `ValueError` for parameters that FSDP2 has sharded too.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard  # the import takes half a second

    found = dict(model.state_dict() if state is None else state)
    for prefix, module in model.named_modules():
        divided = {}
        if isinstance(module, _ParallelLinear):
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


def _part(name: str, value: int, world: int) -> int:
    if value < 1 or value % world:
        raise ValueError(
            f"{name}={value} must be positive and divisible by world_size={world}: pass "
            f"{max(1, -(-value // world)) * world}, or use another number of ranks"
        )
    return value // world


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
