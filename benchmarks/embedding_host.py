"""The CPU time of an embedding training step on two ranks, by Python function and by torch and CUDA operation.

    python benchmarks/embedding_host.py [--device cuda] [--tables 26,128] [--rule SGD] [--nondeterministic]

Batches are small, so the CPU limits a step. The script prints rank 0's microseconds per step without a profiler. Then
it lists the functions with the most own time under cProfile, and the operations with the most time under torch's
profiler.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import time

import torch
import torch.distributed as dist

from weft.embedding import EmbeddingBagConfig, EmbeddingOptimizer, KeyedJaggedTensor
from weft.embedding.optimizers import OPTIMIZERS
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection

SAMPLES, STEPS = 64, 100


def measured(
    group: dist.ProcessGroup, kind: str, tables: int, optimizer: EmbeddingOptimizer, deterministic: bool
) -> str:
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    names = [f"f{number}" for number in range(tables)]
    configs = [EmbeddingBagConfig(1000, 64, f"t{number}", (name,)) for number, name in enumerate(names)]
    module = ShardedEmbeddingBagCollection(
        configs, group=group, device=device, optimizer=optimizer, deterministic=deterministic, input="global_batch"
    )
    bags = tables * SAMPLES
    ids, lengths = torch.randint(1000, (bags,), device=device), torch.ones(bags, dtype=torch.int64, device=device)
    features = KeyedJaggedTensor(names, ids, lengths=lengths, offsets=torch.arange(bags + 1, device=device))
    grad = torch.randn(SAMPLES // group.size(), 64 * tables, device=device)

    def steps() -> float:
        if kind == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            module(features).values().backward(grad)
        return (time.perf_counter() - begin) / STEPS * 1e6

    steps()
    said = [f"{tables} tables: {min(steps() for _ in range(5)):.0f} us a step, rank {group.rank()} of {group.size()}"]
    profile, text = cProfile.Profile(), io.StringIO()
    with torch.autograd.set_multithreading_enabled(False):  # run backward on this thread, so that the profiler sees it
        said.append(f"with backward on the caller's thread: {min(steps() for _ in range(5)):.0f} us")
        profile.runcall(steps)
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(30)
    said.append(text.getvalue())
    with torch.profiler.profile() as torchs:
        steps()
    said.append(torchs.key_averages().table(sort_by="self_cpu_time_total", row_limit=40))
    return "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="default: cuda")
    parser.add_argument("--tables", default="26,128", help="numbers of tables to measure; default: 26,128")
    parser.add_argument(
        "--rule", choices=OPTIMIZERS, default="RowwiseAdagrad", help="optimizer; default: RowwiseAdagrad"
    )
    parser.add_argument("--nondeterministic", action="store_true", help="allow sums of gradients in any order")
    given = parser.parse_args()
    with Pool(2, backend="nccl" if given.device == "cuda" else "gloo") as pool:
        for tables in map(int, given.tables.split(",")):
            call = given.device, tables, OPTIMIZERS[given.rule](lr=0.1), not given.nondeterministic
            print(pool.run(measured, *call, timeout_s=300)[0], flush=True)


if __name__ == "__main__":
    main()
