"""Benchmark of any operator whose spec can draw calls and say what they come to: shapes x variants.

Variants are the serial schedule, which is the baseline, `weft`, the operator as it chooses, and names of schedules, or how they
begin.
Operators with baselines of their own have a file of their own beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Ranks
from weft.bench.core.measure import Step, measure_arms
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.ops.all_gather_matmul import BASELINE, TABLES, MeasuredMatmul
from weft.bench.ops.gemms import (
    WEFT,
    MatmulOperator,
    MatmulShape,
    PlannedWorkload,
    cannot,
    check_variants,
    find_shapes,
    fitting,
    gemm_limit,
    shapes_file,
    wanted_schedules,
)
from weft.operator.calls import made
from weft.operator.spec import Operator
from weft.schedule import described

_FIXED = (BASELINE, WEFT)


class SpecWorkload(PlannedWorkload):
    """Random calls, other ones for each input set; of the results the first is compared."""

    claims = ((WEFT, BASELINE),)

    def __init__(self, spec: Operator[Any], shape: MatmulShape, ranks: Ranks, dtype: str, input_sets: int) -> None:
        self.spec, self.shape, self.ranks, self.input_sets, self.name = spec, shape, ranks, input_sets, shape.name
        self.problem = described(spec.name, m=shape.m, n=shape.n, k=shape.k, ranks=ranks.world_size, dtype=dtype)
        self.dtype = DTYPES[dtype]
        self.calls = [self._drawn(which, ranks.rank) for which in range(input_sets)]

    def reference(self, which: int) -> torch.Tensor:
        calls = [self._drawn(which, rank) for rank in range(self.ranks.world_size)]
        return self.spec.expected(self.problem, self.ranks.rank, calls)[0]

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        return gemm_limit(self.dtype, self.shape.k, None if name == BASELINE else errors[BASELINE])

    def roofline_ms(self, ceilings: Ceilings) -> float:
        """Inputs and results once through memory."""
        outputs = self.spec.outputs(self.calls[0], self.ranks.world_size).values()
        tensors = [t for t in (*self.spec.tensors(self.calls[0]), *outputs) if isinstance(t, torch.Tensor)]
        return 1e3 * sum(t.nbytes for t in tensors) / ceilings.memory

    def _drawn(self, which: int, rank: int) -> Any:
        generator = torch.Generator(self.ranks.device).manual_seed(1000 * which + rank)
        return self.spec.drawn(self.problem, rank, generator)


class Weft:
    """The operator, with a schedule or as it chooses."""

    def __init__(self, work: SpecWorkload, schedule: str | None) -> None:
        self.work, self.schedule = work, schedule

    def __call__(self, which: int) -> torch.Tensor:
        call, work = self.work.calls[which], self.work
        like = next(t for t in work.spec.tensors(call) if t is not None)
        return made(work.spec, work.ranks.group, like, lambda _: call, schedule=self.schedule)[0]


class AnyOperator(MatmulOperator[MatmulShape]):
    small, tables = "512x1024x256", TABLES

    def __init__(self, spec: Operator[Any]) -> None:
        self.name, self.spec = spec.name, spec

    def check_options(self, options: BenchOptions) -> None:
        super().check_options(options)
        for shape in self.presets(options):
            p = described(self.name, m=shape.m, n=shape.n, k=shape.k, ranks=options.ranks, dtype=options.dtype)
            check_variants(options.variants, p, _FIXED)

    def presets(self, options: BenchOptions) -> Sequence[MatmulShape]:
        return find_shapes(shapes_file("all_gather_matmul"), options.preset, options.device)

    def measure(
        self, preset: MatmulShape, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step
    ) -> MeasuredMatmul:
        step(f"{preset.name}: making inputs", 0)
        work = SpecWorkload(self.spec, preset, ranks, options.dtype, input_sets=2)
        wanted = options.variants or (WEFT,)
        arms = {BASELINE: Weft(work, "serial")} | ({WEFT: Weft(work, None)} if WEFT in wanted else {})
        pinned, notes = fitting(wanted_schedules(work.problem, wanted, _FIXED), ranks)
        arms |= {variant: Weft(work, candidate.name) for variant, candidate, _ in pinned}
        results = measure_arms(
            work, arms, {}, modes=options.modes, seconds=options.time_s, repetitions=options.repetitions, step=step
        )
        taken = {mode: work.taken(mode) for mode in options.modes} if WEFT in arms else {}
        notes += cannot(wanted, [(work.problem, "")], _FIXED)
        return MeasuredMatmul(
            preset, ranks.world_size, tuple(arms), results, ceilings, tuple(notes), work.planned, taken,
            max(work.roofline_ms(c) for c in ceilings),
        )  # fmt: skip
