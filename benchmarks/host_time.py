"""The CPU time per call: the wall time of 1,000 calls in a row without synchronisation.

The calls are so small that the GPU finishes a call before the CPU has launched the next call.

    python benchmarks/host_time.py [--ranks 2] [--calls 1000] [--samples 512] [--json FILE] [--profile]

It times an embedding module and GEMM operators at small shapes, and equivalent code written by hand with NCCL. The module has 26
tables of dimension 64. Each call of the module takes one of 50 global batches, which have 512 samples for each rank. A repetition
makes a row of each call, whose time is the slowest rank's mean. The script prints the median over five repetitions, and appends it
to FILE as one JSON object.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.bench.core.records import append, environment
from weft.embedding import EmbeddingBagConfig, KeyedJaggedTensor
from weft.launch import run_ranks
from weft.nn import ShardedEmbeddingBagCollection

TABLES, DIM, ROWS, BATCHES = 26, 64, 100_000, 50
REPETITIONS = 5


def calls_of(rank: int, world: int, device: torch.device, samples: int) -> dict[str, Callable[[int], Any]]:
    """Return {name: call}. Call i gets the number i, which selects its input. The results of calls are not used."""
    group = dist.group.WORLD
    assert group is not None
    tables = [EmbeddingBagConfig(ROWS, DIM, f"t{i}", [f"f{i}"]) for i in range(TABLES)]
    module = ShardedEmbeddingBagCollection(tables, group=group, device=device, input="global_batch").requires_grad_(
        False
    )
    generator = torch.Generator().manual_seed(3)  # the same batches on all ranks
    batches = []
    for _ in range(BATCHES):
        lengths = torch.randint(0, 5, (TABLES * samples * world,), generator=generator)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        keys = [f"f{i}" for i in range(TABLES)]
        batches.append(KeyedJaggedTensor(keys, values.to(device), lengths=lengths.to(device)))
    for batch in batches:
        batch.offsets()

    def embedding(i: int) -> Any:
        return module(batches[i % BATCHES])

    found: dict[str, Callable[[int], Any]] = {"embedding module": embedding}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for m, n, k in ((64, 512, 512), (512, 1024, 1024)):
        shards = [torch.randn(m // world, k, device=device).to(dtype) for _ in range(BATCHES)]
        w = torch.randn(n, k, device=device).to(dtype).t()
        gathered = torch.empty(m, k, device=device, dtype=dtype)

        def gather(i: int, shards: Any = shards, w: Any = w) -> Any:
            return weft.all_gather_matmul(shards[i % BATCHES], [w], 0, group, return_A=False)

        def by_hand(i: int, shards: Any = shards, w: Any = w, gathered: Any = gathered) -> Any:
            dist.all_gather_into_tensor(gathered, shards[i % BATCHES], group=group)
            return torch.mm(gathered, w)

        def by_hand_anew(i: int, shards: Any = shards, w: Any = w, gathered: Any = gathered) -> Any:
            whole = torch.empty_like(gathered)
            dist.all_gather_into_tensor(whole, shards[i % BATCHES], group=group)
            return torch.mm(whole, w)

        found[f"all_gather_matmul {m}x{n}x{k}"] = gather
        found[f"by hand, memory anew {m}x{n}x{k}"] = by_hand_anew
        found[f"by hand {m}x{n}x{k}"] = by_hand
    found |= _products(world, device, dtype)
    tokens, experts = 256, 8
    choose = random.Random(rank)
    rows = [torch.randn(tokens, 512, device=device).to(dtype) for _ in range(BATCHES)]
    splits = []
    for _ in range(BATCHES):
        cuts = sorted(choose.randrange(tokens + 1) for _ in range(experts - 1))
        splits.append(torch.tensor([b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)], device=device))
    w_experts = torch.randn(experts // world, 512, 512, device=device).to(dtype)

    def dispatch(i: int) -> Any:
        return weft.all_to_all_matmul(
            rows[i % BATCHES], w_experts, splits[i % BATCHES], group=group, max_rows=world * tokens
        )

    found["all_to_all_matmul, max_rows"] = dispatch
    return found


def _products(world: int, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[int], Any]]:
    """Return {name: call} of GEMMs with a collective: with weft's choice, with weft's serial schedule, and by hand. Calls
    cycle through 50 inputs at different addresses.
    """
    group, (m, n, k) = dist.group.WORLD, (512, 1024, 1024)
    xs = [torch.randn(m, k // world, device=device).to(dtype) for _ in range(BATCHES)]
    shards = [torch.randn(m // world, k, device=device).to(dtype) for _ in range(BATCHES)]
    w = torch.randn(n, k // world, device=device).to(dtype).t()
    whole = torch.randn(n, k, device=device).to(dtype).t()

    def reduce_scatter(i: int) -> Any:
        y = torch.empty(m // world, n, device=device, dtype=dtype)
        dist.reduce_scatter_tensor(y, torch.mm(xs[i % BATCHES], w), group=group)
        return y

    def all_reduce(i: int) -> Any:
        y = torch.mm(xs[i % BATCHES], w)
        dist.all_reduce(y, group=group)
        return y

    def all_gather(i: int) -> Any:
        gathered = torch.empty(m, k, device=device, dtype=dtype)
        dist.all_gather_into_tensor(gathered, shards[i % BATCHES], group=group)
        return torch.mm(gathered, whole)

    def calls(schedule: str | None) -> dict[str, Callable[[int], Any]]:
        one = {"schedule": schedule}
        return {
            "all_gather_matmul": lambda i: weft.all_gather_matmul(
                shards[i % BATCHES], [whole], 0, group, return_A=False, **one
            ),
            "matmul_reduce_scatter": lambda i: weft.matmul_reduce_scatter(xs[i % BATCHES], w, "sum", 0, group, **one),
            "matmul_all_reduce": lambda i: weft.matmul_all_reduce(xs[i % BATCHES], w, group, **one),
        }

    by_hand = {
        "all_gather_matmul": all_gather,
        "matmul_reduce_scatter": reduce_scatter,
        "matmul_all_reduce": all_reduce,
    }
    found: dict[str, Callable[[int], Any]] = {}
    for how, of in (("by hand", by_hand), ("in turn", calls("serial")), ("as chosen", calls(None))):
        found |= {f"{name}, {how}": call for name, call in of.items()}
    return found


def measure(rank: int, world: int, given: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device()) if given.device == "cuda" else torch.device("cpu")
    group = dist.group.WORLD
    if device.type == "cpu":
        torch.set_num_threads(1)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    calls = calls_of(rank, world, device, given.samples)
    rows: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for i in range(2 * BATCHES):
            call(i)
        synchronize()
    for _ in range(REPETITIONS):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            for i in range(given.calls):
                call(i)
            rows[name].append(1e6 * (time.perf_counter() - start) / given.calls)
    synchronize()
    profiles = {}
    for name, call in calls.items() if given.profile else ():
        profile = cProfile.Profile()
        synchronize()
        profile.enable()
        for i in range(given.calls):
            call(i)
        profile.disable()
        synchronize()
        profiles[name] = profile
    if rank == 0:
        for name, profile in profiles.items():
            print(name)
            pstats.Stats(profile).sort_stats("tottime").print_stats(28)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, rows)
    host = {
        name: round(statistics.median(max(of[name][i] for of in everyone) for i in range(REPETITIONS)), 1)
        for name in calls
    }
    how = {"ranks": world, "calls": given.calls, "samples": given.samples}
    return {"op": "host_time", **how, "host_us": host, **environment(given.device)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="Number of processes to start. Default: 2.")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu",
        help="Default: cuda if there is a GPU.",
    )  # fmt: skip
    parser.add_argument("--calls", type=int, default=1000, help="Number of calls in a row. Default: 1000.")
    parser.add_argument(
        "--samples", type=int, default=512,
        help="Samples of each rank in a global batch. With --ranks 1 take fewer, so that the GPU stays faster than the CPU.",
    )  # fmt: skip
    parser.add_argument(
        "--profile", action="store_true", help="Print a profile of rank 0's Python functions in further calls."
    )
    parser.add_argument("--json", type=Path, help="Append the times to this file.")
    given = parser.parse_args()
    backend = "nccl" if given.device == "cuda" else "gloo"
    found = run_ranks(given.ranks, measure, given, backend=backend, timeout_s=300.0)[0]
    print(json.dumps(found, indent=1))
    if given.json is not None:
        append(given.json, [found])


if __name__ == "__main__":
    main()
