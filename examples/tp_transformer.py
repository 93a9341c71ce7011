"""Train a small Llama on a text by tensor parallelism, in which weft.nn overlaps every collective.

    python examples/tp_transformer.py                          # 2 CPU processes learn this repository's README, byte by byte
    python examples/tp_transformer.py --unfused                # also trains the same model with torch's collectives and GEMMs
    python examples/tp_transformer.py --ranks 4 --text FILE
    torchrun --nproc-per-node 2 examples/tp_transformer.py --device cuda --unfused
    python examples/tp_transformer.py --device cuda --unfused --dtype bf16 --hidden 4096 --head-dim 128 --length 8192 --batch 1

Each rank has a part of the weights of each block. Between blocks, it has a part of the sequence:

    x [B, S/W, H] = embedding of this rank's positions         replicated(weight): its gradient is the sum over ranks
    x = x + attention(norm(x))                                 weft.nn.ParallelAttention: all-gather + GEMMs of q, k and v as one
    x = x + mlp(norm(x))                                       weft.nn.ParallelMLP: ... GEMM + reduce-scatter as one
    loss = cross entropy of norm(x) @ weight.T                 of this rank's positions; the loss is the sum over ranks

With --unfused the example also trains a second model with the same weights and data. It gathers and scatters with torch's
collectives, before and after GEMMs. The example prints the losses of both models in each step, and fails if they differ by more
than rounding.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import weft
from weft.launch import run_ranks

README = Path(__file__).parents[1] / "README.md"
AGREE = {"fp32": 1e-3, "bf16": 3e-2}
"""The largest relative difference of losses: rounding errors grow from step to step."""


# -- the layers with torch: the same gathers and scatters, one after the other


def gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def scattered(x: torch.Tensor) -> torch.Tensor:
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), 1)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine


class Gather(torch.autograd.Function):
    """An all-gather along the sequence; backward scatters the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return scattered(grad)


class Scatter(torch.autograd.Function):
    """A reduce-scatter along the sequence; backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return scattered(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gathered(grad)


class UnfusedAttention(weft.nn.ParallelAttention):
    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        whole = Gather.apply(x)
        q, k, v = (F.linear(whole, layer.weight) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return Scatter.apply(F.linear(self.attend(q, k, v, rotary), self.o_proj.weight))


class UnfusedMLP(weft.nn.ParallelMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = Gather.apply(x)
        h = F.silu(F.linear(whole, self.gate_proj.weight)) * F.linear(whole, self.up_proj.weight)
        return Scatter.apply(F.linear(h, self.down_proj.weight))


# -- the model


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, fused: bool, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        attention = weft.nn.ParallelAttention if fused else UnfusedAttention
        mlp = weft.nn.ParallelMLP if fused else UnfusedMLP
        self.attention_norm = weft.nn.RMSNorm(hidden, group=group, device=device)
        self.attention = attention(hidden, heads, heads // 2, group=group, device=device)
        self.mlp_norm = weft.nn.RMSNorm(hidden, group=group, device=device)
        self.mlp = mlp(hidden, 3 * hidden, group=group, device=device)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """A Llama over bytes. All ranks draw the same weights from one seed, and each layer keeps this rank's part."""

    def __init__(self, arguments: argparse.Namespace, fused: bool, device: torch.device) -> None:
        super().__init__()
        group, hidden, self.head_dim = dist.group.WORLD, arguments.hidden, arguments.head_dim
        assert group is not None
        torch.manual_seed(0)
        self.group = group
        self.embedding = nn.Embedding(256, hidden, device=device)
        self.blocks = nn.ModuleList(
            Block(hidden, hidden // self.head_dim, fused, group, device) for _ in range(arguments.layers)
        )
        self.norm = weft.nn.RMSNorm(hidden, group=group, device=device)
        self.head = nn.Linear(hidden, 256, bias=False, device=device)
        self.to(torch.bfloat16 if arguments.dtype == "bf16" else torch.float32)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand of the mean cross entropy over all bytes. text: [B, S + 1], the same on all ranks."""
        (batch, length), rank, world = text[:, 1:].shape, self.group.rank(), self.group.size()
        seen, wanted = (t.chunk(world, 1)[rank] for t in (text[:, :-1], text[:, 1:]))
        rotary = weft.nn.rotary_embedding(length, self.head_dim, device=text.device)
        x = F.embedding(seen, weft.nn.replicated(self.embedding.weight, self.group))
        for block in self.blocks:
            x = block(x, rotary)
        logits = F.linear(self.norm(x), weft.nn.replicated(self.head.weight, self.group))
        return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum") / (batch * length)


# -- training


class Training:
    def __init__(self, arguments: argparse.Namespace, fused: bool, device: torch.device) -> None:
        self.model = Llama(arguments, fused, device)
        rate = 3e-3 * min(1.0, 128 / arguments.hidden)  # wide models diverge at the rate of narrow ones
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.0)
        self.times_s: list[float] = []

    def step(self, text: torch.Tensor) -> float:
        """Train one step; return the loss before it."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(text)
        loss.backward()
        self.optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        found = total.item()  # item() waits for the device
        self.times_s.append(time.perf_counter() - start)
        return found

    @property
    def ms(self) -> float:
        """The median time of a step, without the first steps, which include set-up."""
        times = sorted(self.times_s[min(3, len(self.times_s) - 1) :])
        return 1e3 * times[len(times) // 2]


def batch_of(content: torch.Tensor, step: int, arguments: argparse.Namespace) -> torch.Tensor:
    """Return B random excerpts of the text, the same on all ranks: [B, S + 1] bytes."""
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(len(content) - arguments.length, (arguments.batch, 1), generator=random)
    return content[starts + torch.arange(arguments.length + 1)].long()


def on_a_rank(rank: int, world: int, arguments: argparse.Namespace) -> None:
    device = torch.device(arguments.device)
    content = torch.frombuffer(bytearray(arguments.text.read_bytes()), dtype=torch.uint8)
    ways = {"weft": Training(arguments, True, device)}
    if arguments.unfused:
        ways["unfused"] = Training(arguments, False, device)
    if rank == 0:
        weights = sum(p.numel() for p in ways["weft"].model.parameters())
        print(f"{len(content)} bytes of {arguments.text}; {weights} weights on each of {world} ranks, {device.type}")
    losses, worst = [], 0.0
    for step in range(arguments.steps):
        text = batch_of(content, step, arguments).to(device)
        found = {name: way.step(text) for name, way in ways.items()}
        losses.append(found["weft"])
        line = f"step {step:4}  loss {found['weft']:.6f}"
        if arguments.unfused:
            apart = abs(found["unfused"] / found["weft"] - 1)
            worst = max(worst, apart)
            line += f"  unfused {found['unfused']:.6f}  apart {apart:.1e}"
        if rank == 0:
            print(line, flush=True)
    few = max(1, arguments.steps // 10)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    if rank == 0:
        each = ", ".join(f"{name} {way.ms:.1f} ms" for name, way in ways.items())
        print(f"loss {first:.3f} -> {last:.3f}; a step: {each}")
        if arguments.unfused:
            print(f"losses are at most {worst:.1e} apart")
    if arguments.steps >= 10 and not last < first:
        raise RuntimeError(f"the loss does not fall: {first:.3f} at first, {last:.3f} in the end")
    agree = AGREE[arguments.dtype]
    if not worst <= agree:
        raise RuntimeError(f"losses differ by {worst:.1e} (relative), but rounding explains at most {agree}")


def parser() -> argparse.ArgumentParser:
    about, _, more = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--text", type=Path, default=README, metavar="FILE", help="text to learn (default: README.md)")
    made.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one GPU per rank (default: %(default)s)"
    )
    made.add_argument(
        "--ranks", type=int, default=2, help="processes to start, if not under torchrun (default: %(default)s)"
    )
    made.add_argument("--steps", type=int, default=60, help="steps of AdamW (default: %(default)s)")
    made.add_argument(
        "--unfused", action="store_true", help="also train the same model with torch's collectives, and compare"
    )
    made.add_argument("--layers", type=int, default=2, help="blocks (default: %(default)s)")
    made.add_argument("--dtype", choices=AGREE, default="fp32", help="(default: %(default)s)")
    made.add_argument("--hidden", type=int, default=128, help="width of the model (default: %(default)s)")
    made.add_argument("--head-dim", type=int, default=16, help="width of a head (default: %(default)s)")
    made.add_argument("--length", type=int, default=128, help="bytes of a sequence (default: %(default)s)")
    made.add_argument("--batch", type=int, default=8, help="sequences of a step (default: %(default)s)")
    return made


def check(arguments: argparse.Namespace, ranks: int) -> None:
    """Raise `ValueError` for a configuration that cannot be trained."""
    for name in ("ranks", "steps", "layers", "batch", "hidden", "head_dim", "length"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least 1")
    if not arguments.text.is_file():
        raise ValueError(f"--text {arguments.text} does not exist: give the path of a text file")
    if arguments.text.stat().st_size <= arguments.length:
        raise ValueError(
            f"--text {arguments.text} has {arguments.text.stat().st_size} bytes: give a file with more than --length "
            f"{arguments.length} bytes"
        )
    if arguments.length % ranks:
        raise ValueError(f"--length {arguments.length} must be divisible by --ranks {ranks}: change one of them")
    if arguments.hidden % (2 * arguments.head_dim * ranks) or arguments.head_dim % 2:
        raise ValueError(
            f"--hidden {arguments.hidden} must be divisible by {2 * arguments.head_dim * ranks} (2 query heads per key head x "
            f"--head-dim {arguments.head_dim} x {ranks} ranks), and --head-dim must be even: change one of them"
        )


def main() -> None:
    arguments = parser().parse_args()
    under_torchrun = "RANK" in os.environ
    try:
        check(arguments, int(os.environ["WORLD_SIZE"]) if under_torchrun else arguments.ranks)
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
