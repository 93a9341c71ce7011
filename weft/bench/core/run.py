"""A benchmark run: start ranks or use torchrun's, measure each configuration, print and record the results.

Peak rates are measured first, while memory is free. If a variant computes a wrong result, the run continues without its
time, and ends with an error that names the variant.
"""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weft import env
from weft.bench.core import records
from weft.bench.core.arguments import appended
from weft.bench.core.ceilings import Ceilings, measure_ceilings
from weft.bench.core.console import progress
from weft.bench.core.harness import Ranks
from weft.bench.core.measure import STEPS
from weft.bench.core.operator import OperatorBenchmark
from weft.bench.core.operators import operator
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.tables import Record
from weft.errors import WeftError
from weft.hw import available_memory_bytes
from weft.launch import run_ranks
from weft.symm import communicator

O = TypeVar("O")  # noqa: E741


def bench(options: BenchOptions) -> list[Record]:
    """Run a benchmark on `options.ranks` processes of this machine, or, under torchrun, as one of its ranks.

    Rank 0 prints the tables and appends the records to `options.json`. Return the records; under torchrun only on rank
    0. If a variant computed a wrong result, raise `WeftError` at the end.
    """
    return on_ranks(run_rank, options.ranks, options.device, options)


def on_ranks(rank_of_run: Callable[[int, int, O], list[Record]], ranks: int, device: str, options: O) -> list[Record]:
    """Call `rank_of_run(rank, world_size, options)` on `ranks` new processes and return rank 0's result.

    Under torchrun, this process already is a rank: make the call here, and return its result.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no GPU: run `weft doctor`, or use device='cpu'")
    backend = "nccl" if device == "cuda" else "gloo"
    if not env.under_torchrun():
        found: list[Record] = run_ranks(ranks, rank_of_run, options, backend=backend, timeout_s=24 * 3600.0)[0]
        return found
    if device == "cuda":
        torch.cuda.set_device(env.local_rank())
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    try:
        return rank_of_run(dist.get_rank(), dist.get_world_size(), options)
    finally:
        dist.destroy_process_group()


def run_rank(rank: int, world_size: int, options: BenchOptions) -> list[Record]:
    """Run one rank's part of `bench` in the default process group. Return the records on rank 0, an empty list on others."""
    ranks = make_ranks(options.device)
    op: OperatorBenchmark[Any] = operator(options.op)
    presets = op.presets(options)
    ceilings = ceilings_for(options, ranks)
    release(ranks)
    written: list[Record] = []
    wrong: list[str] = []
    run = uuid.uuid4().hex[:12]
    for number, preset in enumerate(presets, 1):
        with progress(STEPS + len(options.modes), shown=rank == 0, prefix=f"{number}/{len(presets)} ") as step:
            measured = op.measure(preset, ranks, options, ceilings, step)
        wrong += measured.wrong
        if rank == 0:
            for record in measured.records:
                record["run"] = run
            written += measured.records
            if options.json is not None:
                records.append(options.json, measured.records)
            op.show(measured, options)
        del measured
        release(ranks)
    if rank == 0 and len(presets) > 1:
        op.show_summary(written, options)
    if rank == 0 and options.json is not None:
        print(appended(options.json, len(written)), flush=True)
    if wrong:
        raise WeftError("\n".join(wrong))
    return written


def ceilings_for(options: BenchOptions, ranks: Ranks) -> list[Ceilings]:
    """Return the peak rates of these ranks. All ranks must make this call."""
    # Reduce the size only on CPU, because on GPUs the time of a small copy is mostly launch time.
    size = 16 << 20 if options.quick and ranks.device.type == "cpu" else None
    return measure_ceilings(ranks, size, DTYPES[options.dtype] if operator(options.op).matmul else None)


def make_ranks(device: str, timeout: timedelta | None = None) -> Ranks:
    """Return `Ranks` for the default process group. On CPU, also limit torch to this rank's share of the cores.

    timeout: how long a collective of the control group may take; None for torch's default.
    """
    assert dist.group.WORLD is not None
    if device == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    here = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    return Ranks(dist.group.WORLD, dist.new_group(backend="gloo", timeout=timeout), here)


def free_bytes(ranks: Ranks) -> float:
    """Return the free memory in bytes of the rank that has least. All ranks must make this call."""
    on_gpu = ranks.device.type == "cuda"
    mine = torch.cuda.mem_get_info(ranks.device)[0] if on_gpu else available_memory_bytes() / ranks.world_size
    return -ranks.most(-mine)


def release(ranks: Ranks) -> None:
    """Free the memory that the last measured configuration used. All ranks must make this call."""
    gc.collect()
    ranks.meet()
    communicator(ranks.group, ranks.device).close()  # frees the symmetric memory of all variants
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    dist.barrier(ranks.control)
