"""Benchmark of the all-gather that feeds a GEMM: shapes x variants.

Inputs are ordinary tensors (those of shapes named "-symmetric" lie in torch's symmetric memory), the weight lies as `nn.Linear`
has it, outputs are new at each call. With fp8 the operators are the scaled ones, with a scale for each whole tensor, and results
are bf16. Variants:

    serial    the baseline: all_gather_into_tensor into a buffer made beforehand, torch.mm (fp8: torch._scaled_mm)
    asynctp   torch's own, torch.ops.symm_mem.fused_all_gather_matmul(..., return_A=False); GPUs only
    weft      weft.all_gather_matmul as it chooses
    a name    weft.all_gather_matmul with that schedule ("shard[chunks=2,send=in_turn,by=dma]"; weft-serial: its "serial"); the
              beginning of a name means all that begin so, "all" every one

Beside them run the two halves of an ideal overlap: the GEMM alone on gathered rows, and the shard's copies to the peers alone
(copy engines on GPUs, memcpy into shared memory on CPUs). For information also the library's all-gather alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from weft.bench.core import remarks
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Call, Mode, Ranks
from weft.bench.core.measure import Arms, Step, measure_arms
from weft.bench.core.operator import Record
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.remarks import MULTICAST_M
from weft.bench.core.tables import geomean, milliseconds, number, share, times
from weft.bench.ops.gemms import (
    OWN_SERIAL,
    WEFT,
    MatmulOperator,
    MatmulShape,
    MeasuredArms,
    Planned,
    PlannedWorkload,
    Tables,
    cannot,
    check_applicable,
    check_room,
    check_variants,
    find_shapes,
    fitting,
    gemm_limit,
    said_of_best,
    schedule_of,
    shapes_file,
    wanted_schedules,
)
from weft.ops import all_gather_matmul as plain
from weft.ops import all_gather_scaled_matmul as scaled
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.all_gather_scaled_matmul import all_gather_scaled_matmul
from weft.runtime.collectives import all_gather_single, sendable
from weft.runtime.scaled_matmul import scaled_matmul
from weft.schedule import AllGatherMatmul, Compute, Schedule, described
from weft.symm import SymmetricBuffer
from weft.words import counted

BASELINE, ASYNCTP = "serial", "asynctp"
BASELINES = (BASELINE, ASYNCTP)
GEMM, COMMUNICATION, COLLECTIVE = "gemm", "communication", "collective"

NEVER_BELOW = 0.98
"""Of serial's speed: what counts as not slower."""
LARGE_M = 2048
"""From here on a shape counts in the mean time over the ideal."""
NEAR_PREDICTION = 0.10


@dataclass(frozen=True)
class Summary:
    """What the shapes of one mode say together. None: nothing of the kind was measured."""

    shapes: int
    over_serial: float | None
    over_asynctp: tuple[float | None, float | None]  # up to, and above, the rows for which it would use multicast
    worst: tuple[float, str]  # speed over serial, shape
    not_slower: float  # share of shapes
    over_ideal: float | None
    most_added: tuple[float, str] | None  # us, shape; single calls
    near_best: (
        tuple[float, int, int] | None
    )  # share of shapes; how many schedules, at least and at most, it is the best of
    near_calibrated: float | None  # share of shapes; by the shape's own GEMMs
    near_blind: float | None
    blind_error: float | None  # of predictions without a GEMM of the shape timed, in the geometric mean: 0.1 is 10% off

    @classmethod
    def of(cls, rows: Sequence[Record]) -> Summary | None:
        """Of one mode's records; None if there is none of `weft`."""
        mine = [r for r in rows if r["variant"] == WEFT]
        if not mine:
            return None
        overs = [(r["speedup"], r["config"]) for r in mine if r["speedup"] is not None]
        if not overs:
            return None
        added = [(r["added_us"], r["config"]) for r in mine if r["added_us"] is not None]
        small, large = ([r for r in mine if (r["m"] <= MULTICAST_M) == small] for small in (True, False))
        return cls(
            shapes=len(mine),
            over_serial=geomean([speed for speed, _ in overs]),
            over_asynctp=(_over_asynctp(small), _over_asynctp(large)),
            worst=min(overs),
            not_slower=share([speed >= NEVER_BELOW for speed, _ in overs]) or 0.0,
            over_ideal=geomean([r["ideal_ratio"] for r in mine if r["m"] >= LARGE_M and r["ideal_ratio"] is not None]),
            most_added=max(added, default=None),
            near_best=TABLES.near_best(mine, rows),
            near_calibrated=_near(mine, "predicted_ms"),
            near_blind=_near(mine, "predicted_blind_ms"),
            blind_error=_error(mine, "predicted_blind_ms"),
        )

    def __str__(self) -> str:
        speed, shape = self.worst
        said = [
            f"{WEFT} over {counted(self.shapes, 'shape')}: {times(self.over_serial)} {BASELINE} in the geometric mean, at worst "
            f"{times(speed)} ({shape}), at least {NEVER_BELOW}x on {self.not_slower:.0%} of them"
        ]
        small, large = (times(mean) for mean in self.over_asynctp)
        if small:
            said.append(f"{small} {ASYNCTP} for M <= {MULTICAST_M}{f' and {large} above' if large else ''}")
        elif large:
            said.append(f"{large} {ASYNCTP}, all for M > {MULTICAST_M}")
        if self.over_ideal is not None:
            said.append(f"{self.over_ideal:.3f} of the ideal time for M >= {LARGE_M}")
        if self.most_added is not None:
            us, shape = self.most_added
            said.append(
                f"at most {us:.1f} us more than {BASELINE} ({shape})" if us > 0 else f"never longer than {BASELINE}"
            )
        if self.near_best is not None:
            said.append(said_of_best(*self.near_best))
        if self.near_calibrated is not None:
            blind = (
                f", on {self.near_blind:.0%} blind, which are {self.blind_error:.1%} off in the geometric mean"
                if self.near_blind is not None
                else "; blind ones were not recorded"
            )
            said.append(
                f"within {NEAR_PREDICTION:.0%} of the predicted time on {self.near_calibrated:.0%} where predictions were "
                f"calibrated by the shape's own GEMMs{blind}"
            )
        return "; ".join(said) + "."


def _over_asynctp(rows: Sequence[Record]) -> float | None:
    return geomean([r["speedup_over"][ASYNCTP] for r in rows if ASYNCTP in r["speedup_over"]])


def _near(rows: Sequence[Record], prediction: str) -> float | None:
    """Share of those that were predicted."""
    predicted = [r for r in rows if r[prediction] is not None]
    return share([abs(r[prediction] / r["p50_ms"] - 1) <= NEAR_PREDICTION for r in predicted])


def _error(rows: Sequence[Record], prediction: str) -> float | None:
    """How far off predictions are, too long or too short alike."""
    off = [max(r[prediction] / r["p50_ms"], r["p50_ms"] / r[prediction]) for r in rows if r[prediction] is not None]
    mean = geomean(off)
    return None if mean is None else mean - 1


class _Tables(Tables):
    baselines = BASELINES
    compared: ClassVar = {WEFT: BASELINES}
    head, tail = ("M x N x K",), ("ideal", f"{WEFT} / ideal")

    def described(self, record: Record) -> list[str]:
        return [record["config"]]

    def judged(self, by_variant: Mapping[str, Record]) -> list[str]:
        of_any = next(iter(by_variant.values()))
        return [milliseconds(of_any["ideal_ms"]), number(by_variant.get(WEFT, {}).get("ideal_ratio"), 2)]

    def said(self, rows: Sequence[Record]) -> list[str]:
        summary = Summary.of(rows)
        return [] if summary is None else [str(summary)]

    def twin(self, record: Record) -> str | None:
        if record["variant"] == OWN_SERIAL:
            return BASELINE
        return {"serial": BASELINE}.get(record["chosen"], record["chosen"]) if record["variant"] == WEFT else None

    def remarks(self, rows: Sequence[Record]) -> list[str]:
        peers = remarks.of_asynctp(rows) if any(r["variant"] == ASYNCTP for r in rows) else []
        return [*super().remarks(rows), *peers, *remarks.of_nccl(rows)]


TABLES = _Tables()


@dataclass(frozen=True)
class MeasuredMatmul(MeasuredArms):
    shape: MatmulShape
    planned: Mapping[Mode, Planned]
    taken: Mapping[Mode, str]
    """Which schedule the operator took."""
    least_ms: float

    tables = TABLES
    beside = (GEMM, COMMUNICATION, COLLECTIVE)
    columns = ("over\nideal", "calibrated\nms", "blind\nms")

    def roofline_ms(self, mode: Mode) -> float:
        return self.least_ms

    def ideal_ms(self, mode: Mode) -> float | None:
        alone = [self.ms(mode, name) for name in (GEMM, COMMUNICATION)]
        return max(ms for ms in alone if ms is not None) if None not in alone else None

    def described(self, mode: Mode) -> Record:
        return {"m": self.shape.m, "n": self.shape.n, "k": self.shape.k, "ideal_ms": self.ideal_ms(mode)}

    def judged(self, mode: Mode, name: str) -> Record:
        ms, ideal = self.ms(mode, name), self.ideal_ms(mode)
        taken = self.taken.get(mode, "serial")
        schedule, planned = schedule_of(name, taken), self.planned.get(mode)
        return {
            "ideal_ratio": ms / ideal if ms and ideal else None,
            "chosen": taken if name == WEFT else None,
            "predicted_ms": planned.calibrated_ms.get(schedule) if planned else None,
            "predicted_blind_ms": planned.blind_ms.get(schedule) if planned else None,
        }

    def cells(self, mode: Mode, name: str) -> list[str]:
        found = self.judged(mode, name)
        return [
            number(found["ideal_ratio"], 2),
            number(found["predicted_ms"], 4),
            number(found["predicted_blind_ms"], 4),
        ]

    def said(self) -> list[str]:
        ceilings = self.ceilings[0].as_fields()
        link = "" if ceilings["link_gbps"] is None else f", {ceilings['link_gbps']:.1f} GB/s to a peer"
        return [
            f"roofline {self.least_ms:.4f} ms from {ceilings['memory_gbps']:.1f} GB/s of memory a rank{link}, "
            f"{ceilings['matmul_tflops']:.4g} TFLOP/s; ideal: the longer of {GEMM} and {COMMUNICATION}",
            *(f"{WEFT}, {mode}, takes {name}" for mode, name in self.taken.items()),
        ]


_FIXED = (BASELINE, ASYNCTP, WEFT)
_BLOCK = 4096  # rows of the reference that are computed at a time


class MatmulWorkload(PlannedWorkload):
    """Normally distributed x and w, x other for each input set, w scaled so that outputs are about 1."""

    claims = ((WEFT, BASELINE), (WEFT, ASYNCTP))

    def __init__(self, shape: MatmulShape, ranks: Ranks, dtype: torch.dtype, input_sets: int) -> None:
        self.shape, self.ranks, self.operands, self.input_sets = shape, ranks, dtype, input_sets
        self.name = shape.name
        self.problem = _problem(shape, ranks.world_size, next(name for name, d in DTYPES.items() if d == dtype))
        self.scaled = self.problem.scaled is not None
        self.spec = (scaled if self.scaled else plain).OPERATOR
        self.dtype = torch.bfloat16 if self.scaled else dtype
        self.x_shards = [self._x_shard(which, ranks.rank) for which in range(input_sets)]
        if shape.symmetric:
            self.x_shards = [_symmetric(x, ranks) for x in self.x_shards]
        generator = torch.Generator(ranks.device).manual_seed(77 + ranks.rank)
        w = torch.randn(shape.n, shape.k, generator=generator, device=ranks.device)
        # fp8 has no room for small numbers: there the scale makes w small.
        self.w = (w if self.scaled else w * shape.k**-0.5).to(dtype).t()
        self.x_scale = torch.ones(1, 1, device=ranks.device)
        self.w_scale = self.x_scale * (shape.k**-0.5 if self.scaled else 1.0)
        self.roundings: dict[str, int] = {}  # of an output by each variant that pins a schedule

    def whole(self, which: int) -> torch.Tensor:
        """The gathered x, made and not gathered: [m, k]."""
        return torch.cat([self._x_shard(which, rank) for rank in range(self.ranks.world_size)])

    def gemm(self, x: torch.Tensor) -> torch.Tensor:
        """By the library, on gathered rows."""
        if not self.scaled:
            return torch.mm(x, self.w)
        y = torch.empty(self.shape.m, self.shape.n, dtype=self.dtype, device=x.device)
        scaled_matmul(x, self.w, self.x_scale, self.w_scale, fast=False, out=y)
        return y

    def reference(self, which: int) -> torch.Tensor:
        w, x = self.w.double() * self.w_scale.double(), self.whole(which)
        y = torch.empty(self.shape.m, self.shape.n, dtype=torch.float64, device=self.ranks.device)
        for part, rows in zip(x.split(_BLOCK), y.split(_BLOCK), strict=True):
            torch.mm(part.double(), w, out=rows)
        return y

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """FiCCO's 2D schedules round an output at every step."""
        times = self.roundings.get(name, 1)
        if name == WEFT and self.choices:
            times = max(roundings(choice.schedule) for choice in self.choices.values())
        return gemm_limit(self.dtype, self.shape.k, None if name == BASELINE else errors[BASELINE], times)

    def roofline_ms(self, ceilings: Ceilings) -> float:
        """x, w and y once through memory, the GEMM, or the shard over the link: the longest."""
        p, (m, n, k) = self.problem, (self.shape.m, self.shape.n, self.shape.k)
        memory = ((m * k + k * n) * self.operands.itemsize + m * n * self.dtype.itemsize) / ceilings.memory
        wire = p.largest_shard_bytes * (p.world_size - 1) / ceilings.link
        assert ceilings.matmul is not None
        return 1e3 * max(memory, wire, p.flops / ceilings.matmul)

    def _x_shard(self, which: int, rank: int) -> torch.Tensor:
        generator = torch.Generator(self.ranks.device).manual_seed(1000 * which + rank)
        size = (self.problem.rows[rank], self.shape.k)
        return torch.randn(size, generator=generator, device=self.ranks.device).to(self.operands)


def _symmetric(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The same in memory that torch's operators know to be symmetric. Collective."""
    import torch.distributed._symmetric_memory as symm_mem

    copy = symm_mem.empty(x.shape, dtype=x.dtype, device=x.device)
    symm_mem.rendezvous(copy, ranks.group.group_name)
    return copy.copy_(x)


class Serial:
    def __init__(self, work: MatmulWorkload) -> None:
        self.work = work
        self.gathered = work.x_shards[0].new_empty(work.shape.m, work.shape.k)

    def __call__(self, which: int) -> torch.Tensor:
        self.gather(which)
        return self.work.gemm(self.gathered)

    def gather(self, which: int) -> None:
        x = sendable(self.work.x_shards[which])
        all_gather_single(sendable(self.gathered), x, group=self.work.ranks.group)


class AsyncTP:
    def __init__(self, work: MatmulWorkload) -> None:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        self.work, self.group_name = work, work.ranks.group.group_name
        with warnings.catch_warnings():  # torch 2.13 does without
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(self.group_name)

    def __call__(self, which: int) -> torch.Tensor:
        work, x, ops = self.work, self.work.x_shards[which], torch.ops.symm_mem
        if work.scaled:
            _, (y,) = ops.fused_all_gather_scaled_matmul(
                x, [work.w], work.x_scale[0], [work.w_scale], 0, self.group_name, [None], [None], [work.dtype], [False]
            )
        else:
            _, (y,) = ops.fused_all_gather_matmul(x, [work.w], 0, self.group_name, return_A=False)
        return y


class Weft:
    """weft's operator, with a schedule or as it chooses."""

    def __init__(self, work: MatmulWorkload, schedule: str | None) -> None:
        self.work, self.schedule = work, schedule

    def __call__(self, which: int) -> torch.Tensor:
        work, x, how = self.work, self.work.x_shards[which], {"return_A": False, "schedule": self.schedule}
        if work.scaled:
            scales = work.x_scale[0], [work.w_scale]
            _, (y,) = all_gather_scaled_matmul(x, [work.w], *scales, 0, work.ranks.group, **how)  # type: ignore[arg-type]
        else:
            _, (y,) = all_gather_matmul(x, [work.w], 0, work.ranks.group, **how)  # type: ignore[arg-type]
        return y


class Alone:
    """The two halves of the work, each by itself."""

    def __init__(self, work: MatmulWorkload) -> None:
        self.work, self.whole = work, work.whole(0)
        device, peers = work.ranks.device, work.ranks.world_size - 1
        self.streams = [torch.cuda.Stream(device) for _ in range(peers)] if device.type == "cuda" else []

    def gemm(self, which: int) -> torch.Tensor:
        return self.work.gemm(self.whole)

    def communication(self, which: int) -> None:
        """The shard to every peer; on GPUs by copy engines, one stream for each."""
        x = self.work.x_shards[which]
        if not self.streams:
            for target in self._targets:
                target.copy_(x)
            return
        here = torch.cuda.current_stream()
        for stream, target in zip(self.streams, self._targets, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                target.copy_(x)
            here.wait_stream(stream)

    @cached_property
    def _targets(self) -> list[torch.Tensor]:
        """This rank's rows in each peer's memory, the next rank's first. Made late: a first call pays for its own memory."""
        work, rank, world = self.work, self.work.ranks.rank, self.work.ranks.world_size
        shape = (work.shape.m, work.shape.k)
        self._buffer = SymmetricBuffer(shape, work.operands, group=work.ranks.group, device=work.ranks.device)
        return [self._buffer.peer((rank + i) % world).chunk(world)[rank] for i in range(1, world)]


def _problem(shape: MatmulShape, ranks: int, dtype: str) -> AllGatherMatmul:
    found = described("all_gather_matmul", m=shape.m, n=shape.n, k=shape.k, ranks=ranks, dtype=dtype)
    assert isinstance(found, AllGatherMatmul)
    return found


def roundings(schedule: Schedule) -> int:
    """How often an output is rounded to its dtype at most: every step that adds to it rounds it again."""
    count: dict[object, int] = {}
    for lane in schedule.of_rank(0):
        for step in lane.steps:
            if isinstance(step, Compute) and step.accumulate:
                count[step.out] = count.get(step.out, 1) + 1
    return max(count.values(), default=1)


class _AllGatherMatmul(MatmulOperator[MatmulShape]):
    name, small = "all_gather_matmul", "512x1024x256"
    fp8 = True
    tables = TABLES

    def check_options(self, options: BenchOptions) -> None:
        super().check_options(options)
        problems = []
        for shape in self.presets(options):
            problems.append(_problem(shape, options.ranks, options.dtype))  # says which number of rows would do
            if shape.symmetric and options.device != "cuda":
                raise ValueError(f"preset {shape.name}: torch has symmetric memory on GPUs only")
        if ASYNCTP in options.variants and options.device != "cuda":
            raise ValueError(f"variant {ASYNCTP!r} cannot run here: torch has it for GPUs only")
        check_variants(options.variants, AllGatherMatmul.even(options.ranks, 1, 1, options.ranks), _FIXED)
        check_applicable(options.variants, [[(p, "")] for p in problems], _FIXED)

    def presets(self, options: BenchOptions) -> Sequence[MatmulShape]:
        return find_shapes(shapes_file(self.name), options.preset, options.device)

    def measure(
        self, preset: MatmulShape, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step
    ) -> MeasuredMatmul:
        step(f"{preset.name}: making inputs", 0)
        item_bytes = DTYPES[options.dtype].itemsize
        check_room(preset.name, (preset.m + preset.n) * preset.k * item_bytes, preset.m * preset.n, ranks)
        work = MatmulWorkload(preset, ranks, DTYPES[options.dtype], input_sets=2)
        serial, alone = Serial(work), Alone(work)
        arms, notes = _arms(work, serial, options)
        beside: dict[str, Call] = {GEMM: alone.gemm, COMMUNICATION: alone.communication, COLLECTIVE: serial.gather}
        results = measure_arms(
            work, arms, beside, modes=options.modes, seconds=options.time_s, repetitions=options.repetitions, step=step
        )
        taken = {mode: work.taken(mode) for mode in options.modes} if WEFT in arms else {}
        return MeasuredMatmul(
            preset, ranks.world_size, tuple(arms), results, ceilings, tuple(notes), work.planned, taken,
            max(work.roofline_ms(c) for c in ceilings),
        )  # fmt: skip


OPERATOR = _AllGatherMatmul()


def _arms(work: MatmulWorkload, serial: Serial, options: BenchOptions) -> tuple[Arms, list[str]]:
    """(arms, the baseline first; what was left out)"""
    wanted = options.variants or (ASYNCTP, WEFT)
    arms: dict[str, Serial | AsyncTP | Weft] = {BASELINE: serial}
    if ASYNCTP in wanted and work.ranks.device.type == "cuda":
        arms[ASYNCTP] = AsyncTP(work)
    if WEFT in wanted:
        arms[WEFT] = Weft(work, None)
    pinned, notes = fitting(wanted_schedules(work.problem, wanted, _FIXED), work.ranks)
    for variant, candidate, schedule in pinned:
        arms[variant] = Weft(work, candidate.name)
        work.roundings[variant] = roundings(schedule)
    return arms, notes + cannot(wanted, [(work.problem, "")], _FIXED)
