"""The time and memory of first calls of all_gather_matmul with random M.

    python benchmarks/any_size.py [--ranks 2] [--device cuda] [--calls 1000] [--json FILE]

The steps:

1. Make `--warm` calls with random M.
2. Time `--calls` calls, each with a synchronisation. A call with a new M is a first call. A few rows and columns of each result
   are compared with the product in float64.
3. Repeat the last M, for the time of a steady call.
4. Time `--sizes` different M in `--passes` passes, alternating with NCCL's all-gather and torch.mm called by hand. For every other
   M the call by hand comes first, because the first GEMM of a size may load a kernel of cuBLAS.

It appends one JSON object to FILE.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.bench.core.records import append, environment
from weft.launch import run_ranks
from weft.operator.calls import prepared_calls
from weft.ops.all_gather_matmul import OPERATOR


def measure(rank: int, world: int, given: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device()) if given.device == "cuda" else torch.device("cpu")
    group, choose = dist.group.WORLD, random.Random(given.seed)
    assert group is not None
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    w = (
        torch.randn(given.n, given.k, device=device, generator=torch.Generator(device).manual_seed(5)).to(dtype).t()
        * given.k**-0.5
    )
    x = torch.randn(
        given.most // world + 1, given.k, device=device, generator=torch.Generator(device).manual_seed(6)
    ).to(dtype)
    if device.type == "cpu":
        torch.set_num_threads(1)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def call(m: int) -> tuple[float, float]:
        """Return (milliseconds with the synchronisation, milliseconds without)."""
        shard = x[: m // world]
        synchronize()
        dist.barrier(group)
        synchronize()
        start = time.perf_counter()
        _, (y,) = weft.all_gather_matmul(shard, [w], 0, group, return_A=False)
        host = time.perf_counter() - start
        synchronize()
        took = time.perf_counter() - start
        rows = torch.randint(m // world, (4,)) + m // world * torch.randint(world, (4,))
        exact = x[(rows % (m // world)).to(device)].double() @ w[:, :16].double()
        error = float((y[rows.to(device), :16].double() - exact).abs().max())
        assert error < 0.05, f"M={m}: off by {error}"
        return 1e3 * took, 1e3 * host

    def by_hand(m: int) -> float:
        """Return milliseconds of an all-gather, a GEMM and a synchronisation."""
        shard = x[: m // world]
        synchronize()
        dist.barrier(group)
        synchronize()
        start = time.perf_counter()
        whole = shard.new_empty(m, given.k)
        dist.all_gather_into_tensor(whole, shard, group=group)
        torch.mm(whole, w)
        synchronize()
        return 1e3 * (time.perf_counter() - start)

    def compiled() -> int:
        return len(prepared_calls(OPERATOR, group))

    def passes() -> list[dict[str, float]]:
        """Return, for each pass over the sizes, the slowest rank's mean and median, of weft and by hand."""
        sizes = random.Random(given.seed + 1).sample(range(1, given.most // world + 1), given.sizes)
        found = []
        for _ in range(given.passes):
            before = compiled()
            mine = []
            for number, size in enumerate(sizes):
                theirs_first = by_hand(world * size) if number % 2 else None
                ours_ms = call(world * size)[0]
                mine.append((ours_ms, by_hand(world * size) if theirs_first is None else theirs_first))
            of_ranks: list[Any] = [None] * world
            dist.all_gather_object(of_ranks, mine)
            ours, theirs = ([max(of[i][which] for of in of_ranks) for i in range(len(sizes))] for which in (0, 1))
            ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
            found.append(
                {
                    "mean_ms": statistics.mean(ours),
                    "median_ms": statistics.median(ours),
                    "by_hand_mean_ms": statistics.mean(theirs),
                    "by_hand_median_ms": statistics.median(theirs),
                    "geomean_over_by_hand": statistics.geometric_mean(ratios),
                    "worst_over_by_hand": max(ratios),
                    "compiled": compiled() - before,
                }
            )
        return found

    def draw() -> int:
        return world * choose.randrange(1, given.most // world + 1)

    seen, warm = set[int](), []
    for _ in range(given.warm):
        seen.add(m := draw())
        warm.append(call(m)[0])
    before = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    firsts, all_m = list[tuple[float, float, int]](), []
    profile = cProfile.Profile() if given.profile and rank == 0 else None
    if profile:
        profile.enable()
    for _ in range(given.calls):
        m = draw()
        took, host = call(m)
        if m not in seen:
            firsts.append((took, host, m))
        seen.add(m)
        all_m.append(m)
    if profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("cumulative").print_stats(70)
    steady = [call(m) for m in all_m[-32:] for _ in range(2)][1::2]
    in_turn = passes()
    memory: dict[str, Any] = {}
    if device.type == "cuda":
        from weft.symm.cuda import slab_bytes

        comm = weft.symm.communicator(group, device)
        memory = {
            "symmetric_bytes": slab_bytes(comm), "largest_needs": max(seen) * given.k * dtype.itemsize,
            "taken_since_warm_up": before - torch.cuda.mem_get_info(device)[0],
        }  # fmt: skip
    slowest: list[Any] = [None] * world
    dist.all_gather_object(slowest, [(took, host) for took, host, _ in firsts])
    worst = [
        (max(of[i][0] for of in slowest), max(of[i][1] for of in slowest), firsts[i][2]) for i in range(len(firsts))
    ]
    times = sorted(took for took, _, _ in worst)
    return {
        "op": "any_size", "ranks": world, "n": given.n, "k": given.k, "most": given.most, "seed": given.seed,
        "first_calls": len(worst),
        "first_ms": {"p50": statistics.median(times), "p99": times[int(0.99 * len(times))], "max": times[-1]},
        "first_host_ms": {"p50": statistics.median(h for _, h, _ in worst), "max": max(h for _, h, _ in worst)},
        "slowest_firsts": [[round(took, 2), m] for took, _, m in sorted(worst, reverse=True)[:8]],
        "warm_ms": [round(one, 2) for one in warm],
        "steady_ms_p50": statistics.median(took for took, _ in steady),
        "steady_host_ms_p50": statistics.median(h for _, h in steady),
        "sizes_in_turn": given.sizes, "passes": in_turn,
        **memory, **environment(given.device),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="Number of processes to start. Default: 2.")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu",
        help="Default: cuda if there is a GPU.",
    )  # fmt: skip
    parser.add_argument("--calls", type=int, default=1000, help="Number of timed calls. Default: 1000.")
    parser.add_argument("--warm", type=int, default=20, help="Number of calls before the timed calls. Default: 20.")
    parser.add_argument("--most", type=int, default=32768, help="The largest M. Default: 32768.")
    parser.add_argument("--sizes", type=int, default=100, help="Number of values of M in a pass. Default: 100.")
    parser.add_argument("--passes", type=int, default=4, help="Number of passes over these values. Default: 4.")
    parser.add_argument("--n", type=int, default=4096, help="Columns of the weight. Default: 4096.")
    parser.add_argument("--k", type=int, default=8192, help="Rows of the weight. Default: 8192.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the values of M. Default: 0.")
    parser.add_argument(
        "--profile", action="store_true", help="Print a profile of rank 0's Python functions during the calls."
    )
    parser.add_argument("--json", type=Path, help="Append the result to this file.")
    given = parser.parse_args()
    backend = "nccl" if given.device == "cuda" else "gloo"
    found = run_ranks(given.ranks, measure, given, backend=backend, timeout_s=900.0)[0]
    print(json.dumps(found, indent=1))
    if given.json is not None:
        append(given.json, [found])


if __name__ == "__main__":
    main()
