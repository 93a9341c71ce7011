"""Blocks of tensor-parallel Llamas, forward and backward: how much of their communication is hidden.

    python benchmarks/tensor_parallel.py [--ranks 2] [--models 8b 70b 405b] [--length 8192] [--json FILE]

An MLP (SwiGLU) and a causal attention (grouped-query) in bf16, of one sequence that is divided over ranks between blocks. It is the
first dimension, as in Megatron: nobody has to copy what is gathered or scattered. Arms:

    compute           the same GEMMs, attention and elementwise operations on one rank's part, without any communication
    serial            torch's all_gather_into_tensor before GEMMs and reduce_scatter_tensor behind them
    weft              weft.nn.ParallelMLP, weft.nn.ParallelAttention
    weft, compiled    the same under torch.compile
    asynctp           torch's styles (parallelize_module) under torch.compile with its AsyncTP; GPUs only

Results and all gradients of each arm are compared with those of `serial`. Arms take turns. A time is the slowest rank's for forward
and backward, the median of the turns. hidden: (serial - weft) / (serial - compute). FILE gets one JSON object per block and arm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import weft.nn
from weft.bench.core.records import append, environment
from weft.launch import run_ranks


class Model(NamedTuple):
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


MODELS = {
    "8b": Model(4096, 14336, 32, 8),
    "70b": Model(8192, 28672, 64, 8),
    "405b": Model(16384, 53248, 128, 8),
    "tiny": Model(64, 192, 8, 4),
}
TURNS, TURN_S = 7, 0.08
APART = 3e-2
"""How far from the serial arm's largest element results may be: roundings of bf16."""


# -- the arms that are made here: blocks of plain linear layers, each with a rank's part of the weights


class Alone(torch.autograd.Function):
    """In place of an all-gather: memory of that size, which holds anything."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.length = len(x)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad[: ctx.length], None


class AloneBehind(torch.autograd.Function):
    """In place of a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.whole = whole
        return x[: len(x) // dist.get_world_size()]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.whole, None


def gathered(x: torch.Tensor) -> torch.Tensor:
    whole = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous())
    return whole


def scattered(x: torch.Tensor) -> torch.Tensor:
    world = dist.get_world_size()
    if x.device.type == "cpu":  # gloo has no reduce-scatter
        dist.all_reduce(total := x.clone())
        return total.chunk(world)[dist.get_rank()].contiguous()
    part = x.new_empty(len(x) // world, *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous())
    return part


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: Any) -> torch.Tensor:  # type: ignore[override]
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return scattered(grad), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: Any) -> torch.Tensor:  # type: ignore[override]
        return scattered(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gathered(grad), None


class PlainMLP(weft.nn.ParallelMLP):
    before: Any = Gather
    behind: Any = Scatter
    anything: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.before.apply(x, self.anything)
        h = F.silu(F.linear(whole, self.gate_proj.weight)) * F.linear(whole, self.up_proj.weight)
        return self.behind.apply(F.linear(h, self.down_proj.weight), self.anything)


class PlainAttention(weft.nn.ParallelAttention):
    before: Any = Gather
    behind: Any = Scatter
    anything: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        whole = self.before.apply(x, self.anything)
        q, k, v = (F.linear(whole, layer.weight) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.behind.apply(F.linear(self.attend(q, k, v, rotary), self.o_proj.weight), self.anything)


# -- AsyncTP's


class StockMLP(nn.Module):
    def __init__(self, model: Model, device: torch.device) -> None:
        super().__init__()

        def linear(k: int, n: int) -> nn.Linear:
            return nn.Linear(k, n, False, device=device, dtype=torch.bfloat16)

        self.gate_proj, self.up_proj = (linear(model.hidden, model.intermediate) for _ in range(2))
        self.down_proj = linear(model.intermediate, model.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class StockAttention(nn.Module):
    def __init__(self, model: Model, device: torch.device) -> None:
        super().__init__()

        def linear(k: int, n: int) -> nn.Linear:
            return nn.Linear(k, n, False, device=device, dtype=torch.bfloat16)

        width, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q_proj, self.k_proj, self.v_proj = (linear(model.hidden, n) for n in (width, kv, kv))
        self.o_proj = linear(width, model.hidden)
        self.head_dim, self.sequence_dim, self.grouped, self.causal = (
            model.head_dim,
            0,
            model.heads != model.kv_heads,
            True,
        )

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(weft.nn.ParallelAttention.attend(self, q, k, v, rotary))  # type: ignore[arg-type]


def asynctp(stock: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    enable_symm_mem_for_group(mesh.get_group().group_name)
    columns = [name for name, _ in stock.named_children() if name not in ("down_proj", "o_proj")]
    rows = next(name for name in ("down_proj", "o_proj") if hasattr(stock, name))
    parallelize_module(
        stock, mesh,
        {name: ColwiseParallel() for name in columns} | {rows: RowwiseParallel(output_layouts=Shard(0))},
    )  # fmt: skip
    attention = rows == "o_proj"
    inputs = (Shard(0), None) if attention else (Shard(0),)
    wanted = (Replicate(), None) if attention else (Replicate(),)
    parallelize_module(stock, mesh, PrepareModuleInput(input_layouts=inputs, desired_input_layouts=wanted))
    for name, parameter in stock.named_parameters():
        assert isinstance(parameter, DTensor)
        parameter.to_local().data.copy_(state[name])
    return stock


# -- measuring


class Arm(NamedTuple):
    module: nn.Module
    call: Callable[..., torch.Tensor]


def arms_of(block: str, model: Model, length: int, device: torch.device, compiled: bool) -> dict[str, Arm]:
    group, world = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    torch.manual_seed(0)
    given: dict[str, Any] = {"group": group, "sequence_dim": 0, "device": device, "dtype": torch.bfloat16}
    plain: Any
    fused: nn.Module
    if block == "mlp":
        sizes: tuple[int, ...] = (model.hidden, model.intermediate)
        plain, fused = PlainMLP, weft.nn.ParallelMLP(*sizes, **given)
    else:
        sizes = (model.hidden, model.heads, model.kv_heads)
        plain, fused = PlainAttention, weft.nn.ParallelAttention(*sizes, **given)
    made: dict[str, nn.Module] = {"weft": fused, "serial": plain(*sizes, **given), "compute": plain(*sizes, **given)}
    alone = made["compute"]
    alone.before, alone.behind = Alone, AloneBehind  # type: ignore[assignment]
    alone.anything = torch.randn(length, 1, model.hidden, device=device).bfloat16()  # type: ignore[assignment]
    for module in made.values():
        module.load_state_dict(fused.state_dict())
    arms = {name: Arm(module, module) for name, module in made.items()}
    if compiled:
        arms["weft, compiled"] = Arm(fused, torch.compile(fused, dynamic=False))
        if device.type == "cuda":
            from torch._inductor import config

            config._micro_pipeline_tp = True
            stock = asynctp({"mlp": StockMLP, "attention": StockAttention}[block](model, device), fused.state_dict())
            arms["asynctp"] = Arm(stock, torch.compile(stock, dynamic=False))
    assert world == group.size()
    return arms


def fused_by_torch(call: Callable[[], Any]) -> int:
    """How many of AsyncTP's operators a call takes: that the compiler found something to fuse."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(e.count for e in profile.key_averages() if e.key.startswith("symm_mem::fused"))


def local(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return x.to_local() if hasattr(x, "to_local") else x


def measure(rank: int, world: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device()) if given.device == "cuda" else torch.device("cpu")
    records = []
    for name in given.models:
        for block in ("mlp", "attention"):
            torch.compiler.reset()
            found = measured(rank, world, given, name, block, device)
            if rank == 0:
                records += found
                print("  ".join(f"{r['variant']} {r['p50_ms']:.3f}" for r in found), flush=True)
    return records


def measured(
    rank: int, world: int, given: argparse.Namespace, name: str, block: str, device: torch.device
) -> list[dict[str, Any]]:
    model, length = MODELS[name], given.length
    arms = arms_of(block, model, length, device, given.compiled)
    torch.manual_seed(1 + rank)
    x = torch.randn(length // world, 1, model.hidden, device=device).bfloat16().requires_grad_()
    grad = torch.randn(length // world, 1, model.hidden, device=device).bfloat16()
    rotary = weft.nn.rotary_embedding(length, model.head_dim, device=device)
    rest = (rotary,) if block == "attention" else ()

    def step(arm: Arm) -> torch.Tensor:
        x.grad = None
        for parameter in arm.module.parameters():
            parameter.grad = None
        y = arm.call(x, *rest)
        y.backward(grad)
        return y

    def results(arm: Arm) -> dict[str, torch.Tensor]:
        y = step(arm)
        found = {"y": local(y.detach()), "x": local(x.grad)}
        return {k: v.float() for k, v in (found | {n: local(p.grad) for n, p in arm.module.named_parameters()}).items()}

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wanted, calls, fused = results(arms["serial"]), {}, {}
    for arm_name, arm in arms.items():
        for _ in range(2):  # the second call is as all others
            got = results(arm)
        for key in wanted if arm_name != "compute" else ():
            error = ((got[key] - wanted[key]).abs().max() / wanted[key].abs().max()).item()
            if not error <= APART:
                raise RuntimeError(f"{name} {block}: {key} of {arm_name} is {error:.1e} from serial's, relatively")
        fused[arm_name] = fused_by_torch(lambda arm=arm: step(arm))
        synchronize()
        start = time.perf_counter()
        step(arm)
        synchronize()
        seconds = [0.0] * world
        dist.all_gather_object(seconds, time.perf_counter() - start)
        calls[arm_name] = max(2, min(200, int(TURN_S / max(seconds))))
    times: dict[str, list[float]] = {arm_name: [] for arm_name in arms}
    for turn in range(TURNS):
        order = list(arms)
        for arm_name in order[turn % len(order) :] + order[: turn % len(order)]:
            step(arms[arm_name])
            synchronize()
            start = time.perf_counter()
            for _ in range(calls[arm_name]):
                step(arms[arm_name])
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[arm_name].append(1e3 * (time.perf_counter() - start) / calls[arm_name])
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, times)
    slowest = {a: [max(of[a][i] for of in everyone) for i in range(TURNS)] for a in arms}
    medians = {a: statistics.median(slowest[a]) for a in arms}
    exposed = medians["serial"] - medians["compute"]
    return [
        {
            "op": "tensor_parallel", "config": f"llama-3-{name} {block}", "variant": a, "ranks": world, "length": length,
            "p50_ms": medians[a], "low_ms": min(slowest[a]), "high_ms": max(slowest[a]), "calls": calls[a],
            "hidden": None if a == "compute" else (medians["serial"] - medians[a]) / exposed,
            "fused_by_torch": fused[a], "dtype": "bf16", **environment(given.device),
        }
        for a in arms
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes to start")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["8b", "70b", "405b"])
    parser.add_argument("--length", type=int, default=8192, help="of the sequence, all ranks' together")
    parser.add_argument(
        "--no-compiled", dest="compiled", action="store_false", help="leave out the arms under torch.compile"
    )
    parser.add_argument("--json", type=Path, help="append records to this file")
    given = parser.parse_args()
    backend = "nccl" if given.device == "cuda" else "gloo"
    found = run_ranks(given.ranks, measure, given, backend=backend, timeout_s=900.0)[0]
    for r in found:
        hidden = "" if r["hidden"] is None else f"{r['hidden']:7.0%} hidden"
        print(f"{r['config']:24} {r['variant']:16} {r['p50_ms']:9.3f} ms{hidden}")
    if given.json is not None:
        append(given.json, found)
    else:
        print(json.dumps(found[0], indent=1))


if __name__ == "__main__":
    main()
