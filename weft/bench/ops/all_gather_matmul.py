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
from functools import cached_property
from typing import Any, ClassVar

import torch

from weft.bench.core import remarks
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Call, Ranks
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.remarks import MULTICAST_M
from weft.bench.core.tables import Record, geomean, times
from weft.bench.ops.any_operator import COMMUNICATION, GEMM, AnyOperator, Arm, MeasuredMatmul
from weft.bench.ops.gemms import BASELINE, WEFT, MatmulShape, Pinned, PlannedWorkload, gemm_limit
from weft.ops import all_gather_matmul as plain
from weft.ops import all_gather_scaled_matmul as scaled
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.all_gather_scaled_matmul import all_gather_scaled_matmul
from weft.runtime.collectives import all_gather_single, sendable
from weft.runtime.scaled_matmul import scaled_matmul
from weft.schedule import Compute, Schedule, described
from weft.symm import SymmetricBuffer

ASYNCTP, COLLECTIVE = "asynctp", "collective"
BASELINES = (BASELINE, ASYNCTP)
_BLOCK = 4096  # rows of the reference that are computed at a time


class MatmulWorkload(PlannedWorkload):
    """Normally distributed x and w, x other for each input set, w scaled so that outputs are about 1."""

    claims = ((WEFT, BASELINE), (WEFT, ASYNCTP))
    problem: Any

    def __init__(self, shape: MatmulShape, ranks: Ranks, dtype: str, input_sets: int) -> None:
        self.shape, self.ranks, self.operands, self.input_sets = shape, ranks, DTYPES[dtype], input_sets
        self.name = shape.name
        op = plain.OPERATOR.name
        self.problem = described(op, m=shape.m, n=shape.n, k=shape.k, ranks=ranks.world_size, dtype=dtype)
        self.scaled = self.problem.scaled is not None
        self.spec = (scaled if self.scaled else plain).OPERATOR
        self.dtype = torch.bfloat16 if self.scaled else self.operands
        self.x_shards = [self._x_shard(which, ranks.rank) for which in range(input_sets)]
        if shape.symmetric:
            self.x_shards = [_symmetric(x, ranks) for x in self.x_shards]
        generator = torch.Generator(ranks.device).manual_seed(77 + ranks.rank)
        w = torch.randn(shape.n, shape.k, generator=generator, device=ranks.device)
        # fp8 has no room for small numbers: there the scale makes w small.
        self.w = (w if self.scaled else w * shape.k**-0.5).to(self.operands).t()
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


def roundings(schedule: Schedule) -> int:
    """How often an output is rounded to its dtype at most: every step that adds to it rounds it again."""
    count: dict[object, int] = {}
    for lane in schedule.of_rank(0):
        for step in lane.steps:
            if isinstance(step, Compute) and step.accumulate:
                count[step.out] = count.get(step.out, 1) + 1
    return max(count.values(), default=1)


class MeasuredGather(MeasuredMatmul):
    baselines, fixed = BASELINES, (*BASELINES, WEFT)
    beside = (GEMM, COMMUNICATION, COLLECTIVE)


class _AllGatherMatmul(AnyOperator):
    fp8 = True
    baselines = BASELINES
    compared: ClassVar = {WEFT: BASELINES}
    results = MeasuredGather

    def check_options(self, options: BenchOptions) -> None:
        for shape in self.presets(options):
            if shape.symmetric and options.device != "cuda":
                raise ValueError(f"preset {shape.name}: torch has symmetric memory on GPUs only")
        if ASYNCTP in options.variants and options.device != "cuda":
            raise ValueError(f"variant {ASYNCTP!r} cannot run here: torch has it for GPUs only")
        super().check_options(options)

    def room(self, shape: MatmulShape, ranks: Ranks, item_bytes: int) -> tuple[float, int]:
        return (shape.m + shape.n) * shape.k * item_bytes, shape.m * shape.n

    def workload(self, shape: MatmulShape, ranks: Ranks, dtype: str) -> MatmulWorkload:
        return MatmulWorkload(shape, ranks, dtype, input_sets=2)

    def arms(self, work: MatmulWorkload, wanted: Sequence[str]) -> tuple[dict[str, Arm], dict[str, Call], list[str]]:
        serial, alone, wanted = Serial(work), Alone(work), wanted or (ASYNCTP, WEFT)
        arms: dict[str, Arm] = {BASELINE: serial}
        if ASYNCTP in wanted and work.ranks.device.type == "cuda":
            arms[ASYNCTP] = AsyncTP(work)
        if WEFT in wanted:
            arms[WEFT] = Weft(work, None)
        return arms, {GEMM: alone.gemm, COMMUNICATION: alone.communication, COLLECTIVE: serial.gather}, []

    def pinned_arm(self, work: MatmulWorkload, one: Pinned) -> Arm:
        work.roundings[one.variant] = roundings(one.schedule)
        return Weft(work, one.candidate.name)

    def said_of_peers(self, mine: Sequence[Record]) -> list[str]:
        """torch's own up to, and above, the rows for which it would use multicast."""
        some = [(r["m"] <= MULTICAST_M, r["speedup_over"][ASYNCTP]) for r in mine if ASYNCTP in r["speedup_over"]]
        small, large = (times(geomean([over for few, over in some if few == which])) for which in (True, False))
        if small:
            return [f"{small} {ASYNCTP} for M <= {MULTICAST_M}{f' and {large} above' if large else ''}"]
        return [f"{large} {ASYNCTP}, all for M > {MULTICAST_M}"] if large else []

    def remarks(self, rows: Sequence[Record]) -> list[str]:
        peers = remarks.of_asynctp(rows) if any(r["variant"] == ASYNCTP for r in rows) else []
        return [*super().remarks(rows), *peers, *remarks.of_nccl(rows)]


OPERATOR = _AllGatherMatmul(plain.OPERATOR)
