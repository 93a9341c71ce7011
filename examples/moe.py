"""A mixture-of-experts layer that overlaps both exchanges of tokens with the experts' GEMMs, in a model that trains.

It uses weft.all_to_all_matmul and weft.matmul_all_to_all.

    python examples/moe.py                                        # Mixtral's layer, an eighth as wide, on 2 CPU processes
    python examples/moe.py --preset deepseek --ranks 4
    python examples/moe.py --schedule "dispatch[by=kernel,rest=each]" --back "combine[chunks=1,by=store]"
    torchrun --nproc-per-node 2 examples/moe.py --device cuda     # the full layer, bf16

Each rank has its own tokens and some of the experts. A router selects the experts of each token, and their weights:

    weights, experts = top_k(softmax(x @ router))            each token once for each of its experts, sorted by expert
    h = all-to-all, then h_e = x_e @ gate_up_e               weft.all_to_all_matmul: GEMMs start on arrived tokens
    h = silu(gate) * up
    y = h_e @ down_e, then all-to-all back                   weft.matmul_all_to_all: rows leave as they are computed
    weighted sum of a token's experts

Forward and backward run twice: with schedule="serial" (NCCL or gloo and torch's GEMMs), and with the schedules that weft chooses.
The example then does three things:

1. It compares outputs and gradients with a dense layer in float64. weft's error may be at most twice the error of serial.
2. It trains the layer twice from the same weights for some steps. The losses must fall, and agree in every step.
3. It times both.

A real layer would also drop or balance tokens; this example does not.

`weft.nn.ExpertParallelMLP` is a module for the experts of such a layer.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.builders import AllToAllMatmul, MatmulAllToAll, named
from weft.launch import run_ranks


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer. hidden: the columns of a token. width: the columns of gate, and of up. tokens: the number
    of tokens on each rank.
    """

    hidden: int
    width: int
    experts: int
    top_k: int
    tokens: int = 4096


PRESETS = {
    "mixtral": Layer(hidden=4096, width=14336, experts=8, top_k=2),  # Mixtral-8x7B
    "deepseek": Layer(hidden=7168, width=2048, experts=256, top_k=8),  # DeepSeek-V3, without its shared expert
}
SAME_LOSS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # largest relative difference
SHRUNK = 8  # divisor of hidden and width on CPU by default


def expert_weights(layer: Layer, expert: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (gate and up concatenated [hidden, 2 * width], down [width, hidden]), equal on all ranks."""
    generator = torch.Generator(like.device).manual_seed(1000 + expert)
    gate_up = torch.randn(layer.hidden, 2 * layer.width, generator=generator, device=like.device) / layer.hidden**0.5
    down = torch.randn(layer.width, layer.hidden, generator=generator, device=like.device) / layer.width**0.5
    return gate_up.to(like.dtype), down.to(like.dtype)


class Ways(NamedTuple):
    """The schedules of the two operators; None: weft's choice."""

    there: str | None
    back: str | None


SERIAL = Ways("serial", "serial")


class MoE(nn.Module):
    """The router and this rank's E experts, whose numbers are rank * E to rank * E + E - 1. The experts' parameters are
    gate_up [E, ...] and down [E, ...].

    All ranks have the same router."""

    def __init__(self, layer: Layer, group: dist.ProcessGroup, like: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.group = layer, group
        local = layer.experts // group.size()
        first = group.rank() * local
        gate_up, down = zip(*(expert_weights(layer, first + e, like) for e in range(local)), strict=True)
        self.gate_up, self.down = nn.Parameter(torch.stack(gate_up)), nn.Parameter(torch.stack(down))
        generator = torch.Generator(like.device).manual_seed(1)
        router = torch.randn(layer.hidden, layer.experts, generator=generator, device=like.device) / layer.hidden**0.5
        self.router = nn.Parameter(router)  # fp32, because small differences decide which experts are chosen

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (weights of each token's experts, the experts), both [tokens, top_k]."""
        weights, experts = (x.to(self.router.dtype) @ self.router).softmax(dim=1).topk(self.layer.top_k, dim=1)
        return weights / weights.sum(dim=1, keepdim=True), experts

    def forward(self, x: torch.Tensor, ways: Ways, timeline: weft.Timeline | None = None) -> torch.Tensor:
        """Map this rank's [tokens, hidden] to [tokens, hidden]."""
        weights, experts = self.route(x)
        order = experts.flatten().argsort(stable=True)  # each token once for each of its experts, sorted by expert
        token = order // self.layer.top_k
        splits = torch.bincount(experts.flatten(), minlength=self.layer.experts)
        h, received = weft.all_to_all_matmul(
            x[token], self.gate_up, splits, group=self.group, return_received=True, schedule=ways.there, timeline=timeline
        )  # fmt: skip
        gate, up = h.chunk(2, dim=1)
        y = weft.matmul_all_to_all(
            nn.functional.silu(gate) * up, self.down, received, splits, group=self.group, schedule=ways.back, timeline=timeline
        )  # fmt: skip
        return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order].unsqueeze(1).to(y.dtype))


# -- the reference

RESULTS = ("y", "x grad", "router grad", "gate_up grad", "down grad")


def inputs(layer: Layer, rank: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (a rank's tokens, the gradient of its outputs): [tokens, hidden] both."""
    generator = torch.Generator(like.device).manual_seed(rank)
    size = (2, layer.tokens, layer.hidden)
    x, grad = torch.randn(size, generator=generator, device=like.device).to(like.dtype)
    return x, grad


class Errors:
    """The error of results relative to exact results, in the Euclidean norm, accumulated piece by piece."""

    def __init__(self) -> None:
        self.off, self.size = (dict.fromkeys(RESULTS, 0.0) for _ in range(2))

    def add(self, name: str, found: torch.Tensor, exact: torch.Tensor) -> None:
        self.off[name] += float((found.double() - exact).square().sum())
        self.size[name] += float(exact.square().sum())

    def worst(self, name: str) -> float:
        """Return the largest error of all ranks."""
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (self.off[name] / self.size[name]) ** 0.5)
        return max(everybody)


def compare(moe: MoE, results: dict[str, dict[str, torch.Tensor]]) -> dict[str, Errors]:
    """Return the error of each of `results` against a dense layer in float64, which needs no communication.

    The dense layer computes the experts one by one, because 256 experts may not fit into memory in float64."""
    layer, rank, ranks = moe.layer, moe.group.rank(), moe.group.size()
    like, errors = moe.gate_up.detach(), {way: Errors() for way in results}
    x, grad = (torch.cat(parts) for parts in zip(*(inputs(layer, r, like) for r in range(ranks)), strict=True))
    with (
        torch.no_grad()
    ):  # use the chosen experts: near a tie another precision may choose other experts, which is not an error
        experts = torch.cat([moe.route(part)[1] for part in x.split(layer.tokens)])
    x64, router = x.double().requires_grad_(), moe.router.detach().double().requires_grad_()
    chosen = (x64 @ router).softmax(dim=1).gather(1, experts)
    weights = chosen / chosen.sum(dim=1, keepdim=True)
    weights_leaf = weights.detach().requires_grad_()
    y, local = torch.zeros_like(x64), layer.experts // ranks
    for expert in range(layer.experts):
        gate_up, down = (w.double().requires_grad_() for w in expert_weights(layer, expert, like))
        token, slot = (experts == expert).nonzero(as_tuple=True)
        gate, up = (x64[token] @ gate_up).chunk(2, dim=1)
        part = (nn.functional.silu(gate) * up) @ down * weights_leaf[token, slot].unsqueeze(1)
        part.backward(grad[token].double())
        y.index_add_(0, token, part.detach())
        if expert // local == rank:
            for way, found in results.items():
                for name, w in (("gate_up grad", gate_up), ("down grad", down)):
                    assert w.grad is not None
                    errors[way].add(name, found[name][expert % local], w.grad)
    weights.backward(weights_leaf.grad)
    mine = slice(rank * layer.tokens, (rank + 1) * layer.tokens)
    assert x64.grad is not None
    assert router.grad is not None
    for way, found in results.items():
        for name, exact in (("y", y[mine]), ("x grad", x64.grad[mine]), ("router grad", router.grad)):
            errors[way].add(name, found[name], exact)
    return errors


# -- running it


def step(
    moe: MoE, x: torch.Tensor, grad: torch.Tensor, ways: Ways, timeline: weft.Timeline | None = None
) -> dict[str, torch.Tensor]:
    """Run forward and backward. Return {name in `RESULTS`: the output or a gradient}. The router's gradient is summed over
    ranks, as in data parallelism.
    """
    x = x.detach().requires_grad_()
    moe.zero_grad(set_to_none=True)
    y = moe(x, ways, timeline)
    y.backward(grad)
    assert moe.router.grad is not None
    dist.all_reduce(moe.router.grad, group=moe.group)
    found = (y.detach(), x.grad, moe.router.grad, moe.gate_up.grad, moe.down.grad)
    return {name: t for name, t in zip(RESULTS, found, strict=True) if t is not None}


def train(layer: Layer, group: dist.ProcessGroup, like: torch.Tensor, ways: Ways, steps: int) -> list[float]:
    """Train by Adam towards fixed outputs, from the same weights in every call. Return the loss of each step.

    The loss is the mean square over the tokens of all ranks."""
    moe = MoE(layer, group, like)
    optimizer = torch.optim.Adam(moe.parameters(), lr=2e-3)
    x, target = inputs(layer, group.rank(), like)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = (moe(x, ways) - target).float().square().mean() / group.size()
        loss.backward()
        assert moe.router.grad is not None
        dist.all_reduce(moe.router.grad, group=group)
        optimizer.step()
        dist.all_reduce(of_all := loss.detach(), group=group)
        losses.append(of_all.item())
    return losses


def milliseconds(moe: MoE, schedules: dict[str, Ways], repetitions: int) -> dict[str, float]:
    """Return the median time of a step on the slowest rank. weft and serial take turns."""
    x, grad = inputs(moe.layer, moe.group.rank(), moe.gate_up.detach())
    times: dict[str, list[float]] = {way: [] for way in schedules}
    for _ in range(repetitions):
        for way, ways in schedules.items():
            dist.barrier()
            start = time.perf_counter()
            step(moe, x, grad, ways)
            if moe.gate_up.is_cuda:
                torch.cuda.synchronize()
            times[way].append(time.perf_counter() - start)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, times)
    slowest = {way: [max(of) for of in zip(*(theirs[way] for theirs in everybody), strict=True)] for way in schedules}
    return {way: 1e3 * sorted(found)[len(found) // 2] for way, found in slowest.items()}


def what_ran(timeline: weft.Timeline, rank: int) -> str:
    """Return the forward steps of both operators on one rank as text: a line for each lane, without waits and signals."""
    lines = []
    for lane in timeline.lanes(rank):
        work = [
            s for s in timeline if (s.rank, s.lane) == (rank, lane) and s.name.split()[0] not in ("wait", "set", "read")
        ]
        lines.append(f"    {lane}: " + ", ".join(f"{s.name} ({s.duration_us:.0f} us)" for s in work))
    return "\n".join(lines)


def ran_in_turn(timeline: weft.Timeline, rank: int) -> bool:
    """True if weft selected the serial schedule for both operators: `timeline` then has the exchanges of this schedule."""
    names = {s.name for s in timeline if s.rank == rank}
    return {"exchange tokens -> unordered", "exchange ordered -> y"} <= names


def compare_losses(losses: dict[str, list[float]], same: float, rank: int) -> None:
    off = [abs(ours - usual) / usual for ours, usual in zip(losses["weft"], losses["serial"], strict=True)]
    if off and rank == 0:
        first, *_, last = [losses["weft"][0], *losses["weft"]]
        print(
            f"{len(off)} steps of training: loss {first:.6f} -> {last:.6f}; unfused calls: the same to {max(off):.1e}"
        )
    if off and not max(off) <= same:
        raise RuntimeError(f"losses of weft and serial differ by {max(off):.1e}, but the limit is {same:.0e}: {losses}")


def tell(rank: int, text: str) -> None:
    """Print progress on the first rank, because the example takes minutes on CPU."""
    if rank == 0:
        print(f"... {text}", file=sys.stderr, flush=True)


def on_a_rank(rank: int, world: int, arguments: argparse.Namespace) -> None:
    device = torch.device(arguments.device)
    like = torch.empty(0, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    layer, group = layer_of(arguments, world), dist.group.WORLD
    assert group is not None
    moe = MoE(layer, group, like)
    ours = Ways(arguments.schedule, arguments.back)
    ways = {"serial": SERIAL, "weft": ours}
    x, grad = inputs(layer, rank, like)
    tell(rank, "selecting schedules: forward and backward for the first time")
    step(moe, x, grad, ours)
    timeline = weft.Timeline()
    results = {"serial": step(moe, x, grad, SERIAL), "weft": step(moe, x, grad, ours, timeline)}
    tell(rank, f"computing all {layer.experts} experts in float64, to compare with")
    errors = compare(moe, results)
    worst = {name: {way: errors[way].worst(name) for way in ways} for name in RESULTS}
    if rank == 0:
        print(f"{layer}, {world} ranks, {str(like.dtype).removeprefix('torch.')} on {device.type}")
        print(f"what rank 0 did forward:\n{what_ran(timeline, rank)}")
        for name, of in worst.items():
            print(f"{name:>13}: error {of['weft']:.2e} against float64; unfused calls: {of['serial']:.2e}")
    for name, of in worst.items():
        if not of["weft"] <= 2 * of["serial"]:
            raise RuntimeError(
                f"{name} is wrong: weft's error is {of['weft']:.2e}, more than twice the error of serial, {of['serial']:.2e}"
            )
    del results
    tell(rank, f"training for {arguments.steps} steps with each implementation")
    losses = {way: train(layer, group, like, of, arguments.steps) for way, of in ways.items()}
    compare_losses(losses, SAME_LOSS[like.dtype], rank)
    tell(rank, f"timing {arguments.repetitions} calls of each implementation")
    ms = milliseconds(moe, ways, arguments.repetitions)
    if rank == 0:
        same = ran_in_turn(timeline, rank)
        text = "the same schedule, so they differ by noise" if same else f"{ms['serial'] / ms['weft']:.2f}x"
        print(
            f"forward and backward: {ms['weft']:.2f} ms, unfused calls {ms['serial']:.2f} ms: {text}",
            flush=True,
        )


def layer_of(arguments: argparse.Namespace, ranks: int) -> Layer:
    """Return the layer to run; raise `ValueError` if its experts cannot be spread evenly."""
    full, on_cpu = PRESETS[arguments.preset], arguments.device == "cpu"
    shrunk = arguments.shrink or (SHRUNK if on_cpu else 1)
    layer = replace(full, hidden=full.hidden // shrunk, width=full.width // shrunk)
    layer = replace(layer, tokens=(256 if on_cpu else full.tokens) if arguments.tokens is None else arguments.tokens)
    if layer.experts % ranks:
        raise ValueError(
            f"{layer.experts} experts cannot be divided evenly over {ranks} ranks: use a number of ranks that divides them"
        )
    rows, local = layer.tokens * layer.top_k, layer.experts // ranks
    if arguments.schedule is not None:
        named(AllToAllMatmul.even(rows, 2 * layer.width, layer.hidden, local, ranks), arguments.schedule)
    if arguments.back is not None:
        named(MatmulAllToAll.even(rows, layer.hidden, layer.width, local, ranks), arguments.back)
    return layer


def parser() -> argparse.ArgumentParser:
    about, _, more = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--preset", choices=PRESETS, default="mixtral", help="the model of the layer (default: %(default)s)"
    )
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    made.add_argument(
        "--ranks", type=int, default=2, help="processes to start, if not under torchrun (default: %(default)s)"
    )
    made.add_argument("--tokens", type=int, help="tokens of each rank (default: 256 on CPU, 4096 on GPUs)")
    made.add_argument(
        "--shrink", type=int, help=f"divide hidden and width by this (default: {SHRUNK} on CPU, 1 on GPUs)"
    )
    made.add_argument(
        "--schedule", metavar="NAME", help="pin a schedule of the dispatch, such as dispatch[by=kernel,rest=each]"
    )
    made.add_argument(
        "--back", metavar="NAME", help="pin a schedule of the combine, such as combine[chunks=1,by=store]"
    )
    made.add_argument(
        "--steps", type=int, default=8, help="steps of training with each implementation (default: %(default)s)"
    )
    made.add_argument(
        "--repetitions", type=int, default=5, help="timed calls; the median is shown (default: %(default)s)"
    )
    return made


def main() -> None:
    arguments = parser().parse_args()
    under_torchrun = "RANK" in os.environ
    for name in ("ranks", "tokens", "shrink", "steps", "repetitions"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            parser().error(f"--{name} {value} must be at least 1")
    try:
        layer_of(arguments, int(os.environ["WORLD_SIZE"]) if under_torchrun else arguments.ranks)
    except ValueError as error:
        parser().error(str(error))
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    if not under_torchrun:
        run_ranks(arguments.ranks, on_a_rank, arguments, backend=backend)
        return
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    on_a_rank(dist.get_rank(), dist.get_world_size(), arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
