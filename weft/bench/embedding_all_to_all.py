"""Benchmark of embedding pooling fused with the all-to-all: presets x variants.

For each configuration all ranks build the same tables and inputs, scaled to what fits this machine. The roofline is
what the bytes that move take at the rates measured in the same run; what a cache holds can take less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from weft.bench.ceilings import Ceilings
from weft.bench.embedding_arms import BASELINES, DEFAULT_VARIANTS, Arm, FusedArm, SerialArm, make_arm, why_not
from weft.bench.embedding_presets import EmbeddingPreset, Scale, find_presets, fitting_scale
from weft.bench.embedding_results import DEFAULT, POOL, MeasuredEmbedding, show_means, table
from weft.bench.embedding_workload import BASELINE, EmbeddingWorkload, Traffic
from weft.bench.harness import Call, Mode, Ranks
from weft.bench.measure import Step, measure_arms
from weft.bench.operator import Operator, Record
from weft.bench.options import DTYPES, BenchOptions
from weft.hw import available_memory_bytes


class _EmbeddingAllToAll(Operator[EmbeddingPreset]):
    name = "embedding_all_to_all"

    def modes(self, device: str) -> tuple[Mode, ...]:
        return ("single", "queued")

    def default_dtype(self, device: str) -> str:
        return "fp32"

    def check_options(self, options: BenchOptions) -> None:
        if options.scale is not None and not 0 < options.scale <= 1:
            raise ValueError(f"scale={options.scale} must be above 0 and at most 1: it shrinks batch and tables")
        find_presets(options.preset)
        for name in options.variants:
            reason = why_not(name, torch.device(options.device))
            if reason is not None:
                raise ValueError(f"variant {name!r} cannot run here: {reason}")

    def presets(self, options: BenchOptions) -> Sequence[EmbeddingPreset]:
        return find_presets(options.preset)

    def measure(
        self, preset: EmbeddingPreset, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step
    ) -> MeasuredEmbedding:
        return measure(preset, ranks, options, ceilings, step)

    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        show_means(written, options)

    def table(self, rows: Sequence[Record]) -> str:
        return table(rows)


OPERATOR = _EmbeddingAllToAll()


def measure(
    preset: EmbeddingPreset, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step
) -> MeasuredEmbedding:
    """Build, check, time one preset. Collective; the same result on every rank."""
    step(f"{preset.name}: building tables and inputs", 0)
    config = preset.config(ranks.world_size, choose_scale(preset, ranks, options), DTYPES[options.dtype])
    work = EmbeddingWorkload(config, ranks, input_sets=2 if options.quick else 3)
    work.claims = [(DEFAULT, baseline) for baseline in BASELINES]
    names = list(dict.fromkeys([BASELINE, *(options.variants or DEFAULT_VARIANTS)]))
    arms = {name: make_arm(name, work) for name in names if why_not(name, ranks.device) is None}
    pools: dict[str, Call] = {name + POOL: arm.pool for name, arm in arms.items() if isinstance(arm, SerialArm)}
    results = measure_arms(
        work,
        arms,
        pools,
        modes=options.modes,
        seconds=options.time_s,
        repetitions=options.repetitions,
        step=step,
    )
    memory = {name: _peak_bytes(arm, ranks) for name, arm in arms.items()}
    mine = work.traffic()
    fields = list(Traffic.__dataclass_fields__)
    traffic = [Traffic(*values) for values in ranks.gather([getattr(mine, field) for field in fields])]
    kernels = {name: arm.kernel() for name, arm in arms.items() if isinstance(arm, FusedArm)}
    compiled = {name: kernel for name, kernel in kernels.items() if kernel is not None}
    return MeasuredEmbedding(preset, work, results, arms, traffic, ceilings, memory, compiled)


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
