"""Benchmark of embedding pooling fused with the all-to-all: presets x variants x modes, checked, timed, recorded.

For each configuration all ranks build the same workload, every variant must agree with the float64 reference on
poisoned memory, and only then arms are timed in turns. The floor is what ceilings measured in the same run allow.
"""

from __future__ import annotations

import gc
import math
import os
import uuid
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from weft import env
from weft.bench import records
from weft.bench.arms import BASELINE, DEFAULT_VARIANTS, Arm, FusedArm, SerialArm, make_arm, why_not
from weft.bench.ceilings import measure_ceilings
from weft.bench.console import progress
from weft.bench.harness import Mode, Ranks, Timing, time_arms
from weft.bench.options import DTYPES, BenchOptions
from weft.bench.presets import EmbeddingPreset, Scale, find_presets, fitting_scale
from weft.bench.results import POOL, Measured, print_means, print_measured, to_records
from weft.bench.workload import Traffic, Workload
from weft.hw import available_memory_bytes
from weft.launch import run_ranks
from weft.symm import domain


def bench(options: BenchOptions) -> list[dict[str, Any]]:
    """Run on `options.ranks` processes of this machine, or, under torchrun, as one of its ranks.

    Rank 0 prints the tables and appends the records to `options.json`. Returns the records (under torchrun: on rank 0,
    elsewhere none).
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' but torch sees no GPU here: run `weft doctor`, or use device='cpu'")
    if not env.under_torchrun():
        backend = "nccl" if options.device == "cuda" else "gloo"
        return run_ranks(options.ranks, run_rank, options, backend=backend, timeout_s=24 * 3600.0)[0]
    if options.device == "cuda":
        torch.cuda.set_device(env.local_rank())
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", timeout=timedelta(minutes=5))
    try:
        return run_rank(dist.get_rank(), dist.get_world_size(), options)
    finally:
        dist.destroy_process_group()


def run_rank(rank: int, world_size: int, options: BenchOptions) -> list[dict[str, Any]]:
    """One rank's part in `bench`; the default process group exists. Returns the records on rank 0, none elsewhere."""
    ranks = make_ranks(options.device)
    presets = find_presets(options.preset)
    written: list[dict[str, Any]] = []
    run = uuid.uuid4().hex[:12]
    for number, preset in enumerate(presets, 1):
        with progress(1 + len(options.modes), shown=rank == 0, prefix=f"{number}/{len(presets)} ") as step:
            measured = measure(preset, ranks, options, step)
        if rank == 0:
            print_measured(measured, preset, options)
            found = to_records(measured, options, run)
            written += found
            if options.json is not None:
                records.append(options.json, found)
        del measured
        release(ranks)
    if rank == 0 and len(presets) > 1:
        print_means(written, options)
    return written


def make_ranks(device: str) -> Ranks:
    """The default group's ranks; each takes its share of the cores, as every arm will."""
    world_size = dist.get_world_size()
    assert dist.group.WORLD is not None
    if device == "cuda":
        return Ranks(
            dist.group.WORLD, dist.new_group(backend="gloo"), torch.device("cuda", torch.cuda.current_device())
        )
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    return Ranks(dist.group.WORLD, dist.new_group(backend="gloo"), torch.device("cpu"))


def release(ranks: Ranks) -> None:
    """Give back what the last configuration held, on all ranks before the next one measures what is free."""
    gc.collect()
    ranks.synchronize()
    dist.barrier(ranks.control)
    domain(ranks.group, ranks.device).close()  # result buffers of every variant; the next configuration makes its own
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    dist.barrier(ranks.control)


def measure(
    preset: EmbeddingPreset, ranks: Ranks, options: BenchOptions, step: Callable[[str, float], None]
) -> Measured:
    """Build, check, time one preset. Collective; the same result on every rank."""
    step(f"{preset.name}: building tables and inputs", 0)
    config = preset.config(ranks.world_size, choose_scale(preset, ranks, options), DTYPES[options.dtype])
    work = Workload(config, ranks, input_sets=2 if options.quick else 3)
    wanted = options.variants or DEFAULT_VARIANTS
    names = list(dict.fromkeys([BASELINE, *wanted]))
    arms = {name: make_arm(name, work) for name in names if why_not(name, ranks.device) is None}
    step(f"{preset.name}: checking every variant against float64", 0.5)
    memory = {name: _peak_bytes(arm, ranks) for name, arm in arms.items()}
    errors = check(arms, work)
    step(f"{preset.name}: measuring bandwidth", 0.5)
    small = options.quick and ranks.device.type == "cpu"  # on a GPU the launch would be most of a small copy
    ceilings = measure_ceilings(ranks, (16 << 20) if small else None)
    calls: dict[str, Callable[[int], object]] = dict(arms)
    calls |= {name + POOL: arm.pool for name, arm in arms.items() if isinstance(arm, SerialArm)}
    timings: dict[tuple[Mode, str], Timing] = {}
    for mode in options.modes:
        timed = time_arms(
            calls,
            ranks,
            mode,
            input_sets=work.input_sets,
            seconds=0.1 if options.quick else 1.0,
            repetitions=(3, 5) if options.quick else (9, 25),
            advance=partial(step, f"{preset.name}: timing, {mode}"),
        )
        timings |= {(mode, name): timing for name, timing in timed.items()}
    mine = work.traffic()
    fields = list(Traffic.__dataclass_fields__)
    traffic = [Traffic(*values) for values in ranks.gather([getattr(mine, field) for field in fields])]
    kernels = {name: arm.kernel() for name, arm in arms.items() if isinstance(arm, FusedArm)}
    compiled = {name: kernel for name, kernel in kernels.items() if kernel is not None}
    return Measured(work, timings, errors, arms, traffic, ceilings, memory, compiled)


def choose_scale(preset: EmbeddingPreset, ranks: Ranks, options: BenchOptions) -> Scale:
    """`options.scale`, or the largest that fits here; all ranks choose the same."""
    if options.scale is not None:
        scale = Fraction(options.scale).limit_denominator(1 << 16)
        return Scale(scale, scale)
    dtype = DTYPES[options.dtype]
    if ranks.device.type == "cuda":
        free = -ranks.most(-torch.cuda.mem_get_info(ranks.device)[0])
        # FBGEMM holds a copy of the tables. All arms together hold about ten outputs, the reference counts as two.
        share = 0.43 if why_not("fbgemm", ranks.device) is None else 0.75
        rows_bytes = 2e9 if options.quick else math.inf
        return fitting_scale(
            preset, ranks.world_size, dtype, table_bytes=share * free, rows_bytes=rows_bytes, output_bytes=0.05 * free
        )
    free = -ranks.most(-available_memory_bytes()) / (16 if options.quick else 1)
    rows_bytes = (min(64, options.read_mib) if options.quick else options.read_mib) * 2**20 * torch.get_num_threads()
    share = free / ranks.world_size
    return fitting_scale(
        preset, ranks.world_size, dtype, table_bytes=share / 3, rows_bytes=rows_bytes, output_bytes=0.05 * share
    )


def check(arms: dict[str, Arm], work: Workload) -> dict[str, float]:
    """The error of each arm, relative to the largest element, over all input sets. Collective.

    Before each checked call the arm computes another input set and its result is filled with NaN and dropped, so that
    memory which is not written anew shows. A variant may err at most twice as much as plain torch in the same dtype
    (`nn.EmbeddingBag`, checked first), or by one rounding of the largest element; plain torch by one rounding for each
    row of the longest bag. Raises RuntimeError otherwise.
    """
    eps = torch.finfo(work.config.sharding.dtype).eps
    longest = max(2 * bag.mean for bag in work.config.bags)
    errors = dict.fromkeys(arms, 0.0)
    for which in range(work.input_sets):
        reference = work.reference(which)
        for name, arm in arms.items():
            stale = arm((which + 1) % work.input_sets)
            stale.fill_(math.nan)
            del stale
            output = arm(which)
            work.ranks.synchronize()
            errors[name] = max(errors[name], work.error(output, reference))
            del output
    for name, error in errors.items():
        limit = eps * longest if name == BASELINE else max(2 * errors[BASELINE], eps)
        if not error <= limit:
            raise RuntimeError(
                f"{work.config.name}: {name} differs from the float64 reference by {error:.3g} of the largest element; "
                f"at most {limit:.3g} is allowed: nothing was timed"
            )
    return errors


def _peak_bytes(arm: Arm, ranks: Ranks) -> tuple[int, str]:
    """Bytes beyond tables and inputs at the worst moment of a call, on the worst rank, and how that is known."""
    if ranks.device.type == "cuda" and isinstance(arm, SerialArm):
        arm(0)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = arm(0)
        torch.cuda.synchronize()
        del output
        return int(ranks.most(torch.cuda.max_memory_allocated() - before)), "measured"
    return int(ranks.most(arm.extra_bytes())), "counted"
