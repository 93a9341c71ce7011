"""Layers of a tensor-parallel transformer. Weights are sharded over ranks; activations between layers are sharded along
the sequence.

Every collective overlaps with the adjacent GEMM, in forward and in backward. Weights are [out, in]. B is the batch
size, S the sequence length, H the hidden size, N the number of columns between the two layers, and W the number of
ranks. Each rank has some rows of a column-parallel layer's weight, and some columns of a row-parallel layer's weight. A
block needs two collectives in forward and two in backward, each fused with a GEMM:

    x [B, S/W, H]  --all_gather_matmul-->  [B, S, N/W]  --columnwise operations-->  --matmul_reduce_scatter-->  [B, S/W, H]

With `sequence_dim=None`, activations between layers are replicated. Use it to decode a few tokens at a time, or if the
sequence is not divisible by the number of ranks. A block then needs one collective in forward and one in backward:

    x [..., H]  --GEMM-->  [..., N/W]  --columnwise operations-->  --matmul_all_reduce-->  [..., H]

Sources: "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", section 3. "Reducing
    Activation Recomputation in Large Transformer Models", 4.2.2, for sequence parallelism.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from weft.arguments import check_flag, checked_whole
from weft.integers import is_real
from weft.nn.layer_arguments import check_activation, check_device, checked_sequence_dim, checked_size
from weft.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear, column_parallel, require
from weft.operator.layers import activated, compare_options, given, tells_peers
from weft.symm.groups import member_group
from weft.words import kind


class ParallelMLP(nn.Module):
    """Llama's MLP (SwiGLU), tensor-parallel: down_proj(activation(gate_proj(x)) * up_proj(x)).

        x [B, S/W, hidden]  ->  [B, S/W, hidden]        with sequence_dim=None  [..., hidden]  ->  [..., hidden]

    x is gathered once for gate_proj and up_proj.

    hidden, intermediate: the sizes of the whole layer. intermediate must be divisible by the number of ranks.
    bias: True for biases in all three projections.
    activation: a function of one tensor. It must act on each column separately, and keep the shape and the dtype.
    group, sequence_dim, device, dtype: as for `ColumnParallelLinear`.

    The submodules are `gate_proj`, `up_proj` and `down_proj`, as in Hugging Face's `LlamaMLP` (w1, w3 and w2 in Meta's
    code). Memory, errors and source: as for `ColumnParallelLinear` and `RowParallelLinear`.
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
        hidden = checked_size("hidden", hidden)
        intermediate = checked_size("intermediate", intermediate, member_group(group).size())
        check_activation(activation)
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
        """The name of the process group."""
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
    """Llama's self-attention, with the heads distributed over ranks. Each rank computes its own heads over the whole
    sequence.

        x [B, S/W, hidden]  ->  [B, S/W, hidden]        with sequence_dim=None  [B, S, hidden]  ->  [B, S, hidden]

    x is gathered once for q_proj, k_proj and v_proj. Attention is grouped-query if kv_heads < heads.

    hidden, heads, kv_heads: the sizes of the whole layer (kv_heads default: heads). heads and kv_heads must be
        divisible by the number of ranks.
    head_dim: the size of a head (default: hidden / heads).
    bias: True for biases in all four projections.
    causal: True if, without a mask, a position attends only to itself and earlier positions.
    group, sequence_dim, device, dtype: as for `ColumnParallelLinear`. x must have three dimensions.

    The submodules are `q_proj`, `k_proj`, `v_proj` and `o_proj`, as in Hugging Face's `LlamaAttention`, and accept its
    weights. (Rotary embeddings rotate the two halves of a head, not adjacent pairs.) Memory, errors and source: as for
    `ColumnParallelLinear` and `RowParallelLinear`.
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
        kv_heads, world = heads if kv_heads is None else kv_heads, member_group(group).size()
        hidden, heads = checked_size("hidden", hidden), checked_size("heads", heads, world)
        kv_heads = checked_size("kv_heads", kv_heads, world)
        sequence_dim = checked_sequence_dim(sequence_dim)
        check_flag("causal", causal)
        if heads % kv_heads:
            raise ValueError(
                f"heads={heads} must be divisible by kv_heads={kv_heads}, because each key head is "
                "shared by the same number of query heads"
            )
        if head_dim is None and hidden % heads:
            raise ValueError(
                f"hidden={hidden} must be divisible by heads={heads}: change one of them, or pass head_dim"
            )
        if sequence_dim not in (0, 1, None):
            raise ValueError(
                f"sequence_dim={sequence_dim} is not supported: pass 1 for [B, S, H], 0 for [S, B, H], or None if "
                "every rank has the whole x"
            )
        self.head_dim = hidden // heads if head_dim is None else checked_size("head_dim", head_dim)
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
        """The name of the process group."""
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
        """Return the result of the attention; with `norm`, see `RowParallelLinear`.

        rotary: (cosines, sines) for all positions of the sequence, each [S, head_dim] or [B, S, head_dim], as from
            `rotary_embedding` or Hugging Face's `LlamaRotaryEmbedding`. Pass the whole sequence, not this rank's part.
        mask: as for `scaled_dot_product_attention`, for the whole sequence and this rank's heads, broadcastable to [B,
            heads/W, S, S].
        residual, norm: as for `RowParallelLinear`.
        """
        q_proj, k_proj, v_proj, o_proj = self.q_proj, self.k_proj, self.v_proj, self.o_proj
        q_proj.require_input(x, self, three=True)
        if rotary is not None or mask is not None:
            require(self, self._wrong_attending(x, rotary, mask))
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
        """Return the attention of this rank's heads, [B, S, heads/W x head_dim]. k and v have kv_heads/W x head_dim
        columns.
        """
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
        # [B, heads, S, head_dim] -> [S, B, heads x head_dim], the layout of the reduce-scatter, with at most one copy.
        return y.permute(2, 0, 1, 3).flatten(2).movedim(0, sequence)


def _wrong_rotary(rotary: Any, batch: int, length: int, head_dim: int, device: torch.device) -> str:
    fix = f"pass (cos, sin) of all positions, as weft.nn.rotary_embedding({length}, {head_dim}) makes them"
    parts = rotary if isinstance(rotary, tuple | list) else [rotary]
    if any(isinstance(t, torch.Tensor) and t.is_complex() for t in parts):
        return f"rotary is complex, as Meta's freqs_cis: {fix}. The weights must have Hugging Face's layout"
    if len(parts) != 2 or not all(isinstance(t, torch.Tensor) for t in parts):
        return f"rotary is {[kind(t) for t in parts] if isinstance(rotary, tuple | list) else kind(rotary)}: {fix}"
    for name, t in zip(("cos", "sin"), parts, strict=True):
        # A table for one position would silently broadcast over all positions.
        whole = 2 <= t.dim() <= 3 and t.shape[-2] == length and t.shape[-1] == head_dim
        if not whole or (t.dim() == 3 and t.shape[0] not in (1, batch)):
            takes = f"[S, head_dim] = {(length, head_dim)} or [B, S, head_dim] = {(batch, length, head_dim)}"
            return f"{name} of rotary has shape {tuple(t.shape)}, but the whole sequence needs {takes}: {fix}"
        if not t.is_floating_point() or t.device != device:
            return f"{name} of rotary is {t.dtype} on {t.device}: pass a floating-point tensor on {device}, where x is"
    return ""


def _wrong_mask(mask: Any, shape: tuple[int, ...], x: torch.Tensor) -> str:
    if not isinstance(mask, torch.Tensor):
        return f"mask is {kind(mask)}: pass a torch.Tensor"
    if not 2 <= mask.dim() <= 4 or any(n not in (1, of) for n, of in zip(mask.shape[::-1], shape[::-1], strict=False)):
        return (
            f"mask has shape {tuple(mask.shape)}: pass a mask for the whole sequence and this rank's heads, which broadcasts to "
            f"[B, heads/W, S, S] = {shape}"
        )
    converted = mask.is_floating_point() and torch.is_autocast_enabled(x.device.type)
    fits = converted or mask.dtype in (torch.bool, torch.float32, x.dtype)
    if not fits or mask.device != x.device:
        return f"mask is {mask.dtype} on {mask.device}: pass torch.bool or {x.dtype}, on the device of x, {x.device}"
    return ""


def rotary_embedding(
    length: int, head_dim: int, base: float = 10000.0, *, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cosines, sines) of the positions 0 to length - 1, each [length, head_dim] in fp32, for
    `ParallelAttention`.

    All layers can share one result.

    Source: "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    length = checked_whole("length", length, "pass the number of positions, an integer")
    head_dim = checked_whole("head_dim", head_dim, "pass the size of a head, an integer")
    if length < 0 or head_dim < 1:
        raise ValueError(
            f"length={length} must be at least 0 and head_dim={head_dim} at least 2: pass the sizes of the sequence"
        )
    if not is_real(base) or not 0 < base <= sys.float_info.max:
        raise ValueError(f"base={base!r} must be a finite number above 0: pass the model's rope_theta, such as 10000.0")
    check_device(device)
    if head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} must be even, because rotary positions rotate the two halves of a "
            "head against each other"
        )
    rates = float(base) ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), rates).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
