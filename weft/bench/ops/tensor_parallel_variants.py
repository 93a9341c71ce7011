"""The variants of `weft.bench.ops.tensor_parallel`: the tensor-parallel MLP (SwiGLU) and causal grouped-query attention
of a Llama.

A variant communicates by torch's collectives, by weft's modules, by AsyncTP, or not at all. Between blocks the sequence
is sharded over ranks. The sequence is the first dimension, as in Megatron, so that gathers and scatters need no copy.
In `-whole` models, activations are replicated, and the sequence is the second dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import weft.nn
from weft.bench.core.harness import Ranks
from weft.bench.ops.asynctp import ASYNCTP, enable_symmetric_memory
from weft.bench.ops.gemms import BASELINE, WEFT
from weft.bench.ops.layers import COMPUTE, Exchange, Layer, Through
from weft.runtime.collectives import all_gather_by_torch, reduce_scatter_by_torch

COMPILED = "weft-compiled"


class ModelSizes(NamedTuple):
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    length: int
    """The length of the sequence, over all ranks."""
    whole: bool = False
    """True without sequence parallelism: each rank has the whole sequence between blocks."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Block:
    of: str
    kind: Literal["mlp", "attention"]
    model: ModelSizes

    @property
    def name(self) -> str:
        return f"{self.of} {self.kind}"


def variants_of(block: Block, wanted: Sequence[str], ranks: Ranks, dtype: torch.dtype) -> dict[str, Layer]:
    """Return `compute`, `serial` and the variants of `wanted`, all with the same weights. All ranks must make this
    call.
    """
    model = block.model
    torch.manual_seed(0)
    sequence_dim = None if model.whole else 0
    given: dict[str, Any] = {"group": ranks.group, "sequence_dim": sequence_dim, "device": ranks.device, "dtype": dtype}
    plain: Any
    fused: nn.Module
    if block.kind == "mlp":
        sizes: tuple[int, ...] = (model.hidden, model.intermediate)
        plain, fused = PlainMLP, weft.nn.ParallelMLP(*sizes, **given)
    else:
        sizes = (model.hidden, model.heads, model.kv_heads)
        plain, fused = PlainAttention, weft.nn.ParallelAttention(*sizes, **given)
    serial, alone = plain(*sizes, **given), plain(*sizes, **given)
    alone.anything = torch.randn(model.length, 1, model.hidden, device=ranks.device).to(dtype)
    for module in (serial, alone):
        module.whole = model.whole
        module.load_state_dict(fused.state_dict())
    variants = {BASELINE: Layer(serial, serial), COMPUTE: Layer(alone, alone), WEFT: Layer(fused, fused)}
    if COMPILED in wanted:
        variants[COMPILED] = Layer(fused, torch.compile(fused, dynamic=False))
    if ASYNCTP in wanted:
        from torch._inductor import config

        config._micro_pipeline_tp = True
        kind = {"mlp": StockMLP, "attention": StockAttention}[block.kind]
        stock = asynctp(kind(model, ranks.device, dtype), fused.state_dict())
        variants[ASYNCTP] = Layer(stock, torch.compile(stock, dynamic=False))
    return {name: variant for name, variant in variants.items() if name in (BASELINE, COMPUTE, *wanted)}


# -- blocks of plain linear layers, with this rank's part of the weights


def gathered(x: torch.Tensor) -> torch.Tensor:
    whole = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    all_gather_by_torch(whole, x.contiguous())
    return whole


def scattered(x: torch.Tensor) -> torch.Tensor:
    world = dist.get_world_size()
    if x.device.type == "cpu":  # gloo has no reduce-scatter
        dist.all_reduce(total := x.clone())
        return total.chunk(world)[dist.get_rank()].contiguous()
    part = x.new_empty(len(x) // world, *x.shape[1:])
    reduce_scatter_by_torch(part, x.contiguous())
    return part


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def added_up(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(total := x.clone())
    return total


class Plain:
    """The base of blocks that communicate by torch's collectives, before and after their GEMMs.

    anything: a tensor to use instead of gathered data, so that the block runs without communication; None to
    communicate.
    """

    anything: torch.Tensor | None = None
    whole = False

    def exchanges(self) -> tuple[Exchange, Exchange]:
        """Return two functions: the exchange between ranks before the GEMMs, and the exchange after them. In backward each is
        replaced by the other.
        """
        if self.whole:
            return _same, added_up if self.anything is None else _same
        if self.anything is None:
            return gathered, scattered
        whole, world = self.anything.detach(), dist.get_world_size()
        return lambda x: whole.view_as(whole), lambda x: x[: len(x) // world]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        gather, scatter = self.exchanges()
        return Through.apply(x, gather, scatter)  # type: ignore[no-any-return]

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        gather, scatter = self.exchanges()
        return Through.apply(x, scatter, gather)  # type: ignore[no-any-return]


class PlainMLP(Plain, weft.nn.ParallelMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        whole = self.gather(x)
        h = F.silu(F.linear(whole, self.gate_proj.weight)) * F.linear(whole, self.up_proj.weight)
        return self.scatter(F.linear(h, self.down_proj.weight))


class PlainAttention(Plain, weft.nn.ParallelAttention):
    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        whole = self.gather(x)
        q, k, v = (F.linear(whole, layer.weight) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.scatter(F.linear(self.attend(q, k, v, rotary), self.o_proj.weight))


# -- AsyncTP's


class StockMLP(nn.Module):
    def __init__(self, model: ModelSizes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False, device=device, dtype=dtype)
        self.gate_proj, self.up_proj = (linear(model.hidden, model.intermediate) for _ in range(2))
        self.down_proj = linear(model.intermediate, model.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class StockAttention(nn.Module):
    def __init__(self, model: ModelSizes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False, device=device, dtype=dtype)
        width, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q_proj, self.k_proj, self.v_proj = (linear(model.hidden, n) for n in (width, kv, kv))
        self.o_proj = linear(width, model.hidden)
        self.head_dim, self.sequence_dim, self.causal = model.head_dim, 0, True
        self.grouped = model.heads != model.kv_heads

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(weft.nn.ParallelAttention.attend(self, q, k, v, rotary))  # type: ignore[arg-type]


def asynctp(stock: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    enable_symmetric_memory(mesh.get_group().group_name)
    *columns, rows = (name for name, _ in stock.named_children())
    styles: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {
        rows: RowwiseParallel(output_layouts=Shard(0))
    }
    parallelize_module(stock, mesh, styles)
    attention = rows == "o_proj"
    inputs = (Shard(0), None) if attention else (Shard(0),)
    wanted = (Replicate(), None) if attention else (Replicate(),)
    parallelize_module(stock, mesh, PrepareModuleInput(input_layouts=inputs, desired_input_layouts=wanted))
    for name, parameter in stock.named_parameters():
        assert isinstance(parameter, DTensor)
        parameter.to_local().data.copy_(state[name])
    return stock


def fused_by_torch(call: Callable[[], Any]) -> int:
    """Run a compiled call, and return how many AsyncTP operators it contains; 0 if the compiler fused none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(e.count for e in profile.key_averages() if e.key.startswith("symm_mem::fused"))
