"""Benchmark of all-gather + GEMM: shapes x variants. benchmarks/README.md explains shapes, variants and numbers.

With `--dtype fp8` it measures all_gather_scaled_matmul, with one scale per tensor and bf16 results. A shape whose name
ends in "-symmetric" has its input in torch's symmetric memory. `weft.bench.ops.ficco_shapes` has presets of the FiCCO
paper's GEMMs. Variants in addition to weft's:

    serial    the baseline: all_gather_into_tensor into a preallocated buffer, then torch.mm (fp8: torch._scaled_mm)
    asynctp   torch's operator fused_all_gather_matmul(..., return_A=False); GPUs only
    prefetch  while this call's GEMM runs, NCCL gathers the next call's x on a second stream, as FSDP prefetches weights. The
              gathers of the first timed calls may run before the timing starts. GPUs only; runs only if named

The benchmark also times, each alone: the GEMM on gathered rows, the copies of this rank's shard to its peers, and
NCCL's all-gather. The ideal time is the longer of the GEMM and the copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar, Self

import torch

from weft import plan
from weft.bench.core import remarks
from weft.bench.core.harness import Call, Ranks
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.remarks import MULTICAST_M
from weft.bench.core.tables import Record, geomean, times
from weft.bench.ops.any_operator import GemmVariants, Variant
from weft.bench.ops.asynctp import ASYNCTP, TorchOperator, TorchVariants
from weft.bench.ops.ficco_shapes import GatherShape, fitted
from weft.bench.ops.gemms import BASELINE, WEFT, GemmShape, find_shapes, gemm_limit, roundings, shapes_file
from weft.builders import named
from weft.operator.this_machine import device_name
from weft.ops import all_gather_matmul as plain
from weft.ops import all_gather_scaled_matmul as scaled
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.all_gather_scaled_matmul import all_gather_scaled_matmul
from weft.runtime.collectives import all_gather_by_torch, sendable
from weft.runtime.scaled_matmul import scaled_matmul

PREFETCH = "prefetch"
_PLACES = 3  # buffers: the previous GEMM reads one, this GEMM reads one, and a gather fills one
_BLOCK = 4096  # rows of the reference per computation


class GatherVariants(TorchVariants):
    """Variants with normally distributed x and w. Each input set has its own x. w is scaled so that outputs are about 1."""

    baselines = (*TorchVariants.baselines, PREFETCH)
    compared: ClassVar = {WEFT: baselines}
    rules = (plan.AUTOTUNE, plan.HEURISTIC)

    def draw(self) -> None:
        self.scaled, (n, k) = self.problem.scaled is not None, (self.config.n, self.config.k)
        if self.scaled:
            self.spec, self.dtype = scaled.OPERATOR, torch.bfloat16
        self.x_shards = [self._x_shard(which, self.ranks.rank) for which in range(self.input_sets)]
        if self.config.symmetric:
            self.x_shards = [_symmetric(x, self.ranks) for x in self.x_shards]
        w = self.normal(77 + self.ranks.rank, n, k)
        # fp8 cannot represent small numbers, so make the scale small instead of w.
        self.w = (w if self.scaled else w * k**-0.5).to(self.operands).t()
        self.x_scale = torch.ones(1, 1, device=self.ranks.device)
        self.scale_of_x = self.x_scale[0]  # [1]: torch's operator interprets [1, 1] as a scale per row
        self.w_scale = self.x_scale * (k**-0.5 if self.scaled else 1.0)

    def _x_shard(self, which: int, rank: int) -> torch.Tensor:
        return self.normal(1000 * which + rank, self.problem.rows[rank], self.config.k).to(self.operands)

    def cut_to(self, whole: Self) -> None:
        self.x_shards = [x[: self.problem.rows[self.ranks.rank]] for x in whole.x_shards]
        self.gathered = whole.gathered[: self.config.m]

    def whole(self, which: int) -> torch.Tensor:
        """Return the gathered x, [m, k]. Its shards are drawn again from their seeds, without communication."""
        return torch.cat([self._x_shard(which, rank) for rank in range(self.ranks.world_size)])

    def reference(self, which: int) -> torch.Tensor:
        w, x = self.w.double().mul_(self.w_scale.double()), self.whole(which)
        y = torch.empty(self.config.m, self.config.n, dtype=torch.float64, device=self.ranks.device)
        for part, rows in zip(x.split(_BLOCK), y.split(_BLOCK), strict=True):
            torch.mm(part.double(), w, out=rows)
        return y

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """Return the error limit. FiCCO's 2D schedules have a higher limit, because they round an output once per step."""
        chosen = [choice.schedule for choice in self.choices.values()] if name in (WEFT, *self.rules) else []
        if name == plan.HEURISTIC and (pick := plan.pick_here(self.problem, device_name(self.ranks.device))[0]):
            chosen = [named(self.problem, pick).build()]
        of = [self.schedules[name]] if name in self.schedules else chosen
        most = max(map(roundings, of), default=1)
        return gemm_limit(self.dtype, self.config.k, None if name == BASELINE else errors[BASELINE], most)

    def moved(self) -> tuple[float, float, float]:
        p, (m, n, k) = self.problem, (self.config.m, self.config.n, self.config.k)
        memory = (m * k + k * n) * self.operands.itemsize + m * n * self.dtype.itemsize
        return memory, p.largest_shard_bytes * (p.world_size - 1), p.flops

    # --- variants, and what runs beside them ---

    @cached_property
    def gathered(self) -> torch.Tensor:
        return self.x_shards[0].new_empty(self.config.m, self.config.k)

    def alone(self) -> tuple[Call, Call, Call]:
        made = self.whole(0)
        return (
            lambda which: self.gemm(made),
            lambda which: self.copy_to_peers((self.x_shards[which], target) for target in self._targets),
            self.gather,
        )

    def gemm(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ w by cuBLAS. x: the gathered rows, [m, k]."""
        if not self.scaled:
            return torch.mm(x, self.w)
        y = torch.empty(self.config.m, self.config.n, dtype=self.dtype, device=x.device)
        scaled_matmul(x, self.w, self.x_scale, self.w_scale, fast=False, out=y)
        return y

    def gather(self, which: int) -> None:
        x = sendable(self.x_shards[which])
        all_gather_by_torch(sendable(self.gathered), x, group=self.ranks.group)

    def serial(self, which: int) -> torch.Tensor:
        self.gather(which)
        return self.gemm(self.gathered)

    def others(self, wanted: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Call], list[str]]:
        variants, beside, notes = super().others(wanted)
        return variants | ({PREFETCH: self.prefetched()} if PREFETCH in wanted else {}), beside, notes

    def prefetched(self) -> Variant:
        """Return the variant that gathers the next call's x during this call's GEMM, on a second stream of high
        priority.

        The gather for call i + 1 can start when the GEMM of call i - 1 starts. So the gathers for the first two timed
        calls can run before the timing starts, which favours this variant.
        """
        side = torch.cuda.Stream(self.ranks.device, priority=-1)
        places = [torch.empty_like(self.gathered) for _ in range(_PLACES)]
        free: list[torch.cuda.Event | None] = [None] * _PLACES  # after the last GEMM that read the place
        ready: dict[int, tuple[int, torch.cuda.Event]] = {}  # input set -> (place, after its gather)
        begun = [torch.cuda.current_stream().record_event()]  # recorded before the previous call's GEMM
        turn = itertools.cycle(range(_PLACES))

        def gather(which: int) -> None:
            place = next(turn)
            for event in (free[place], begun[0]):
                if event is not None:
                    side.wait_event(event)
            with torch.cuda.stream(side):
                all_gather_by_torch(sendable(places[place]), sendable(self.x_shards[which]), group=self.ranks.group)
            ready[which] = place, side.record_event()

        def call(which: int) -> torch.Tensor:
            main = torch.cuda.current_stream()
            if which not in ready:
                ready.clear()  # gathered for another call; its place may be overwritten before such a call
                gather(which)
            place, gathered = ready.pop(which)
            gather((which + 1) % self.input_sets)
            main.wait_event(gathered)
            begun[0] = main.record_event()
            y = self.gemm(places[place])
            free[place] = main.record_event()
            return y

        return call

    def torchs(self) -> Variant:
        group_name, ops = self.ranks.group.group_name, torch.ops.symm_mem

        def call(which: int) -> torch.Tensor:
            x = self.x_shards[which]
            if self.scaled:
                _, (y,) = ops.fused_all_gather_scaled_matmul(
                    x, [self.w], self.scale_of_x, [self.w_scale], 0, group_name, [None], [None], [self.dtype], [False]
                )
            else:
                _, (y,) = ops.fused_all_gather_matmul(x, [self.w], 0, group_name, return_A=False)
            return y

        return call

    def public(self, which: int, schedule: str | None) -> torch.Tensor:
        x, group = self.x_shards[which], self.ranks.group
        if self.scaled:
            _, (y,) = all_gather_scaled_matmul(
                x, [self.w], self.scale_of_x, [self.w_scale], 0, group, return_A=False, schedule=schedule
            )
        else:
            _, (y,) = all_gather_matmul(x, [self.w], 0, group, return_A=False, schedule=schedule)
        return y

    @cached_property
    def _targets(self) -> list[torch.Tensor]:
        """The blocks in peers' memory to which this rank copies its shard when only the copies are timed."""
        return self.places(self.problem.rows[self.ranks.rank], self.config.k, self.operands)


def _symmetric(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return a copy of x in torch's symmetric memory. All ranks must make this call."""
    import torch.distributed._symmetric_memory as symm_mem

    copy = symm_mem.empty(x.shape, dtype=x.dtype, device=x.device)
    symm_mem.rendezvous(copy, ranks.group.group_name)
    return copy.copy_(x)


class _AllGatherBenchmark(TorchOperator):
    fp8 = True
    variants, shape = GatherVariants, GatherShape

    def presets(self, options: BenchOptions) -> Sequence[GemmShape]:
        shapes = find_shapes(GatherShape, shapes_file(self.name), options)
        return [shape.on(options.ranks) for shape in shapes]

    def workload(self, preset: GemmShape, ranks: Ranks, options: BenchOptions) -> GemmVariants:
        if not isinstance(preset, GatherShape):
            return super().workload(preset, ranks, options)
        names, item_bytes = [name for name in options.variants if self.pinned(name)], DTYPES[options.dtype].itemsize
        return super().workload(fitted(preset, ranks, self.name, options.dtype, item_bytes, names), ranks, options)

    def check_options(self, options: BenchOptions) -> None:
        for shape in self.presets(options):
            if shape.symmetric and options.device != "cuda":
                raise ValueError(f"preset {shape.name}: torch has symmetric memory only on GPUs: use --device cuda")
        if PREFETCH in options.variants and options.device != "cuda":
            raise ValueError(f"variant {PREFETCH!r} runs only on GPUs: use --device cuda, or leave the variant out")
        super().check_options(options)

    def summary_of_peers(self, mine: Sequence[Record]) -> list[str]:
        """Return a sentence on weft's speedup over AsyncTP. Shapes with M <= `MULTICAST_M` have their own mean, because
        AsyncTP gathers them by NVLink multicast where the machine has it.
        """
        some = [(r["m"] <= MULTICAST_M, r["speedup_over"][ASYNCTP]) for r in mine if ASYNCTP in r["speedup_over"]]
        small, large = (times(geomean([over for few, over in some if few == which])) for which in (True, False))
        if small:
            return [
                f"Relative to {ASYNCTP} the mean is {small} for M <= {MULTICAST_M}{f', and {large} above' if large else ''}"
            ]
        return [f"Relative to {ASYNCTP} the mean is {large}; all shapes have M > {MULTICAST_M}"] if large else []

    def remarks_of_asynctp(self, rows: Sequence[Record]) -> list[str]:
        return remarks.of_asynctp(rows)


OPERATOR = _AllGatherBenchmark(plain.OPERATOR)
