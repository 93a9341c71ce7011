"""Benchmark of MoE dispatch + GEMM: mixture-of-experts layers x variants.

Tokens are sorted by expert, and each expert gets a random number of them. Weights are [experts, K, N]. Variants
(details: benchmarks/README.md):

    serial    the baseline: all_to_all_single of the counts, which the CPU then reads; all_to_all_single of the tokens; torch's
              grouped GEMM
    padded    the baseline of mode `graph`, because a CUDA graph can capture it: each expert gets the same number of rows from each
              rank, by padding; all_to_all_single with equal splits; torch.bmm on all rows and the padding
    weft      weft's operator without max_rows: in each call the CPU waits for the number of arriving rows
    NAME      the same with the schedule NAME pinned
    NAME-bounded     the variant NAME with max_rows, so that the CPU does not wait. max_rows is the largest number of rows that
              arrive at any rank, rounded up to a multiple of 128

The benchmark also times, each alone: torch's grouped GEMM, and one torch GEMM per expert (both on rows sorted by
expert). It also times NCCL's all-to-all of tokens alone, with sizes known to the CPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Call, Mode
from weft.bench.core.measure import Results
from weft.bench.core.options import BenchOptions
from weft.bench.core.run import free_bytes
from weft.bench.core.tables import Record, geomean, milliseconds, number, share, times
from weft.bench.ops.any_operator import GEMM, NEVER_BELOW, GemmOperator, GemmVariants, Variant
from weft.bench.ops.gemms import BASELINE, OWN_SERIAL, WEFT, gemm_limit, roundings, serial_twin
from weft.bench.ops.moe_shape import BOUNDED, MoeShape
from weft.operator.spec import Operator as Spec
from weft.ops.all_to_all_matmul import OPERATOR as SPEC
from weft.ops.all_to_all_matmul import all_to_all_matmul
from weft.runtime.unfused import experts
from weft.runtime.unfused.sizes import Sizes
from weft.words import counted

PADDED = "padded"
GEMM_EACH, EXCHANGE = "gemm-each", "exchange"
_PADDED_SHARE = 0.3  # fraction of the free memory that tensors of a `padded` call may use


@dataclass(frozen=True)
class RouterLoad:
    """The load of ranks and experts after routing.

    max_rows: the argument `max_rows` of bounded variants.
    capacity: the number of rows that each expert gets from each rank in variant `padded`.
    rank_skew, expert_skew: the rows of the busiest rank or expert, divided by the mean over ranks or experts.
    busiest_bytes: the bytes that the busiest rank sends or receives, whichever is more.

    max_rows and capacity are maxima over the input sets; the other fields are means.
    """

    max_rows: int
    capacity: int
    rank_skew: float
    expert_skew: float
    busiest_bytes: float


class ExpertVariants(GemmVariants):
    """Variants with normally distributed rows. Weights are scaled so that results are about 1.

    Each input set has its own rows, and its own numbers of rows for each expert (`splits`).
    """

    baselines: ClassVar[tuple[str, ...]] = (BASELINE, PADDED)
    compared: ClassVar = {
        WEFT: (BASELINE,),
        WEFT + BOUNDED: baselines,
    }  # variants with exact rows are not compared with padding
    beside = (GEMM, GEMM_EACH, EXCHANGE)
    sent_columns: ClassVar = "k"
    arrived: Sequence[torch.Tensor]
    """The rows at this rank's experts, [rows, k], by expert and then by source rank."""
    moved: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """For each input set, the tensors (received, sent) with which the exchange is timed alone."""
    most: int | None = None
    """The largest number of tokens of any call; None if all calls have the same number."""

    def draw(self) -> None:
        ranks, shape = self.ranks, self.config
        self.experts = shape.experts // ranks.world_size
        self.all_splits = [shape.splits(ranks.world_size, which) for which in range(self.input_sets)]
        self.splits = [splits[ranks.rank].to(ranks.device) for splits in self.all_splits]
        self.received = [self.counts(which).to(ranks.device) for which in range(self.input_sets)]
        self.draw_rows()
        self.w = torch.empty(self.experts, shape.k, shape.n, dtype=self.dtype, device=ranks.device)
        # one expert at a time: fp32 copies of all weights would triple the memory
        for i, of_expert in enumerate(self.w):
            of_expert.copy_(self.expert(ranks.rank, i))

    @abstractmethod
    def draw_rows(self) -> None: ...

    def rows_drawn(self, which: int, rank: int, count: int) -> torch.Tensor:
        return self.normal(1000 * which + rank, count, self.config.k).to(self.dtype)

    def expert(self, rank: int, number: int) -> torch.Tensor:
        shape = self.config
        drawn = self.normal(10_000 * (1 + rank) + number, shape.k, shape.n).mul_(shape.k**-0.5)
        return drawn.to(self.dtype)

    def counts(self, which: int, rank: int | None = None) -> torch.Tensor:
        """Return the number of rows from each source rank for each expert of `rank`, on the CPU: int64 [world size,
        local experts].

        which: the number of the input set. rank: the rank that has the experts; None for this rank.
        """
        first = (self.ranks.rank if rank is None else rank) * self.experts
        return self.all_splits[which][:, first : first + self.experts]

    def is_mine(self, p: Any, variant: str) -> bool:
        mine, exact = self.problem, not variant.endswith(BOUNDED)
        return bool((p.experts, p.n, p.k, p.dtype, p.exact) == (mine.experts, mine.n, mine.k, mine.dtype, exact))

    @cached_property
    def load(self) -> RouterLoad:
        world = self.ranks.world_size
        splits = torch.stack(self.all_splits).view(self.input_sets, world, world, self.experts)
        between = splits.sum(3)  # rows [input set, from, to]
        of_rank, of_expert = between.sum(1), splits.sum(1).flatten(1)
        leaving = between.masked_fill(torch.eye(world, dtype=torch.bool), 0)
        busiest = torch.maximum(leaving.sum(2), leaving.sum(1)).amax(1).double().mean()
        return RouterLoad(
            max_rows=_round_up(int(of_rank.max()), 128),
            capacity=_round_up(int(splits.max()), 8),
            rank_skew=float((of_rank.amax(1) / of_rank.double().mean(1)).mean()),
            expert_skew=float((of_expert.amax(1) / of_expert.double().mean(1)).mean()),
            busiest_bytes=float(busiest) * getattr(self.config, self.sent_columns) * self.dtype.itemsize,
        )

    def baseline(self, mode: Mode) -> str:
        return PADDED if mode == "graph" else BASELINE

    def pair(self, mode: Mode) -> tuple[str, str]:
        """Return the names of the two variants to compare: (weft's, the baseline). In mode "graph" these are `weft-bounded` and
        `padded`. A graph that captured one of these can be replayed with other numbers of rows for each expert.
        """
        return WEFT + BOUNDED * (mode == "graph"), self.baseline(mode)

    def alone_ms(self, mode: Mode, found: Results) -> tuple[float | None, float | None]:
        gemms = [ms for name in (GEMM, GEMM_EACH) if (ms := found.ms(mode, name)) is not None]
        return min(gemms, default=None), found.ms(mode, EXCHANGE)

    def cut_to(self, whole: Self) -> None:
        """Copy the inputs from `whole`, which has a larger shape, and keep `config.rows` rows of each rank. The experts get
        these rows in the same proportion as in the larger shape.
        """
        self.most = whole.config.rows
        self.all_splits = [_in_proportion(splits, self.config.rows) for splits in whole.all_splits]
        self.splits = [splits[self.ranks.rank].to(self.ranks.device) for splits in self.all_splits]
        self.received = [self.counts(which).to(self.ranks.device) for which in range(self.input_sets)]
        self.known = [Sizes(*tables) for tables in zip(self.splits, self.received, strict=True)]
        self.cut_rows(whole)

    @abstractmethod
    def cut_rows(self, whole: Self) -> None:
        """Copy this rank's rows from `whole`, which has the inputs of a larger shape. The numbers of rows for each expert are
        already in `self.splits` and `self.received`.
        """

    def roofline_ms(self, ceilings: Sequence[Ceilings]) -> float:
        """Return a lower bound in ms: the longest of the busiest rank's memory time, GEMM time and link time at peak
        rates.

        In memory, each row and each weight is read once, and each result is written once.
        """
        shape, load = self.config, self.load
        rows = load.rank_skew * shape.rows
        traffic = (self.experts * shape.k * shape.n + rows * (shape.k + shape.n)) * self.dtype.itemsize
        flops = 2 * rows * shape.k * shape.n
        return max(c.ms(traffic, load.busiest_bytes, flops) for c in ceilings)

    def shared(self, mode: Mode, found: Results, ceilings: Sequence[Ceilings]) -> Record:
        sizes = {field: getattr(self.config, field) for field in ("n", "k", "experts", "top_k", "skew", "rows")}
        return {"tokens": self.config.m} | sizes | asdict(self.load) | super().shared(mode, found, ceilings)

    def notes(self, records: Sequence[Record], ceilings: Sequence[Ceilings]) -> list[str]:
        shape, load = self.config, self.load
        rooms = (
            f"; {PADDED} has room for {counted(load.capacity, 'row')} of each expert on each rank; bounded variants for "
            f"{counted(load.max_rows, 'row')} in all"
        )
        return [
            f"{counted(shape.m, 'token')} a rank, {shape.top_k} of {counted(shape.experts, 'expert')} each; most rows over mean: "
            f"{load.rank_skew:.2f} of ranks, {load.expert_skew:.2f} of experts{rooms}",
            *super().notes(records, ceilings),
        ]

    # --- variants, and what runs beside them ---

    def others(self, wanted: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Call], list[str]]:
        self.known = [Sizes(*tables) for tables in zip(self.splits, self.received, strict=True)]
        self.ends = [received.sum(0).cumsum(0, dtype=torch.int32) for received in self.received]
        beside: dict[str, Call] = {GEMM: self.gemm, GEMM_EACH: self.gemm_each, EXCHANGE: self.exchange}
        if any(size * self.dtype.itemsize % 16 for size in (self.config.n, self.config.k)):
            del beside[GEMM]  # torch's grouped GEMM needs rows aligned to 16 bytes
        variants: dict[str, Variant] = {BASELINE: self.serial}
        # Rows as sent, as received, and sorted, each of k or n columns; and the input or the result.
        columns = self.config.k + self.config.n + 2 * getattr(self.config, self.sent_columns)
        needed = self.config.experts * self.load.capacity * columns * self.dtype.itemsize
        if needed <= _PADDED_SHARE * free_bytes(self.ranks):
            return variants | {PADDED: self.padded}, beside, []
        return variants, beside, [f"{PADDED} not measured, not enough memory: it needs {needed / 1e9:.1f} GB"]

    def gemm(self, which: int) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(self.arrived[which], self.w, offs=self.ends[which])

    def gemm_each(self, which: int) -> torch.Tensor:
        x, sizes = self.arrived[which], self.known[which].host.of_experts
        y = x.new_empty(x.shape[0], self.config.n)
        for w, part, rows in zip(self.w, x.split(sizes), y.split(sizes), strict=True):
            torch.mm(part, w, out=rows)
        return y

    @abstractmethod
    def exchange(self, which: int) -> None: ...

    @abstractmethod
    def serial(self, which: int) -> torch.Tensor: ...

    @abstractmethod
    def padded(self, which: int) -> torch.Tensor: ...

    @cached_property
    def slots(self) -> torch.Tensor:
        """The numbers 0 to capacity - 1, int64."""
        return torch.arange(self.load.capacity, device=self.ranks.device)

    def padded_rows(self, splits: torch.Tensor, most: int) -> torch.Tensor:
        """Return the row of each slot of a padded tensor: int64 [lists, capacity]. Slots beyond a list's length repeat other rows.

        splits: the lengths of consecutive lists of rows, int64 [lists]. most: the number of all rows, at least 1.
        """
        return ((splits.cumsum(0) - splits).unsqueeze(1) + self.slots).clamp_(max=most - 1)


class DispatchVariants(ExpertVariants):
    def waits(self, name: str) -> bool:
        return name != PADDED and not name.endswith(BOUNDED)

    def notes(self, records: Sequence[Record], ceilings: Sequence[Ceilings]) -> list[str]:
        return [
            f"all variants except {PADDED} and variants that end in {BOUNDED} synchronise with the device in each call, in "
            f"queued mode too, because the CPU must read the number of arriving rows",
            *super().notes(records, ceilings),
        ]

    def draw_rows(self) -> None:
        self.tokens = [self._tokens(which, self.ranks.rank) for which in range(self.input_sets)]

    def cut_rows(self, whole: Self) -> None:
        self.tokens = [tokens[: self.config.rows] for tokens in whole.tokens]

    def _tokens(self, which: int, rank: int) -> torch.Tensor:
        return self.rows_drawn(which, rank, self.config.rows)

    def ordered(self, which: int) -> torch.Tensor:
        """Return the rows that this rank's experts receive, [rows, k], sorted by expert and then by source rank.

        which: the number of the input set. Peers' rows are drawn again from their seeds, without communication.
        """
        first, parts = self.ranks.rank * self.experts, []
        for source, splits in enumerate(self.all_splits[which]):
            parts.append(self._tokens(which, source).split(splits.tolist())[first : first + self.experts])
        return torch.cat([part for of_expert in zip(*parts, strict=True) for part in of_expert])

    def reference(self, which: int) -> torch.Tensor:
        x = self.ordered(which)
        y = torch.empty(x.shape[0], self.config.n, dtype=torch.float64, device=x.device)
        sizes = self.counts(which).sum(0).tolist()
        for w, part, rows in zip(self.w, x.split(sizes), y.split(sizes), strict=True):
            torch.mm(part.double(), w.double(), out=rows)
        return y

    def rows_of(self, name: str, output: torch.Tensor, which: int) -> torch.Tensor:
        """Return the rows of `output` without the padding of variant `padded`, and without the unused rows of bounded
        variants.
        """
        counts = self.counts(which)
        if name != PADDED:
            return output[: int(counts.sum())] if name.endswith(BOUNDED) else output
        here = torch.arange(self.load.capacity) < counts.t().unsqueeze(-1)  # [experts, sources, capacity]
        return output[here.flatten().to(output.device)]

    def others(self, wanted: Sequence[str]) -> tuple[dict[str, Variant], dict[str, Call], list[str]]:
        self.arrived = [self.ordered(which) for which in range(self.input_sets)]
        self.moved = [(torch.empty_like(x), tokens) for x, tokens in zip(self.arrived, self.tokens, strict=True)]
        return super().others(wanted)

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """Return the error limit. FiCCO's 2D schedules have a higher limit, because they round y once per step."""
        most = roundings(self.schedules[name]) if name in self.schedules else 1
        return gemm_limit(self.dtype, self.config.k, None if name == BASELINE else errors[BASELINE], most)

    def exchange(self, which: int) -> None:
        sizes = self.known[which].host
        dist.all_to_all_single(*self.moved[which], sizes.came, sizes.sent, group=self.ranks.group)

    def serial(self, which: int) -> torch.Tensor:
        group = self.ranks.group
        sizes = Sizes(self.splits[which], experts.exchange_counts(self.splits[which], group))
        return experts.all_to_all_matmul(self.tokens[which], self.w, sizes, group, None)[0]

    def padded(self, which: int) -> torch.Tensor:
        """Run variant `padded`: each expert gets `capacity` rows from each source rank, so that the CPU need not know
        sizes.

        Return y [local experts * world size * capacity, n], by expert and then by source. Padding rows repeat other
        tokens.
        """
        splits, tokens = self.splits[which], self.tokens[which]
        padded = tokens.index_select(0, self.padded_rows(splits, tokens.shape[0]).flatten())
        arrived = torch.empty_like(padded)
        dist.all_to_all_single(arrived, padded, group=self.ranks.group)
        by_source = arrived.view(self.ranks.world_size, self.experts, -1, self.config.k)
        return torch.bmm(by_source.transpose(0, 1).reshape(self.experts, -1, self.config.k), self.w).flatten(0, 1)

    def weft(self, variant: str, schedule: str | None) -> Variant:
        """Return the function that calls weft's operator, with `max_rows` if the variant is bounded."""
        max_rows = self.load.max_rows if variant.endswith(BOUNDED) else None

        def call(which: int) -> torch.Tensor:
            y = all_to_all_matmul(
                self.tokens[which], self.w, self.splits[which], group=self.ranks.group, max_rows=max_rows, schedule=schedule,
                capacity=self.most,
            )  # fmt: skip
            assert isinstance(y, torch.Tensor)
            return y

        return call


class ExpertsOperator(GemmOperator[MoeShape]):
    variants: type[ExpertVariants] = DispatchVariants
    shape = MoeShape
    tail = ("GEMMs alone", "roofline")

    def __init__(self, spec: Spec[Any], variants: type[ExpertVariants] | None = None) -> None:
        super().__init__(spec, variants)
        self.head = ("tokens x N x K", "most / mean rows", "padded rows")
        self.optional = (*self.head[1:], "best pinned, ms", "best pinned schedule", "GEMMs alone")

    def check_options(self, options: BenchOptions) -> None:
        for shape in self.presets(options):
            if shape.experts % options.ranks:
                *some, most = [str(ranks) for ranks in range(1, shape.experts + 1) if shape.experts % ranks == 0]
                fitting = f"{', '.join(some)} or {most} ranks" if some else "1 rank"
                raise ValueError(
                    f"{shape.name}: {counted(shape.experts, 'expert')} cannot be divided evenly over "
                    f"{options.ranks} ranks: use {fitting}"
                )
        super().check_options(options)

    def described(self, record: Record) -> list[str]:
        padded = record["capacity"] * record["experts"] / record["rows"]
        return [record["config"], f"{record['rank_skew']:.2f}", f"{padded:.2f}x"]

    def derived_cells(self, by_variant: Mapping[str, Record]) -> list[str]:
        of_any = next(iter(by_variant.values()))
        alone = [of_any[name] for name in ("gemm_ms", "gemm_each_ms") if of_any[name] is not None]
        return [milliseconds(min(alone, default=None)), milliseconds(of_any["roofline_ms"])]

    def sentences(self, rows: Sequence[Record]) -> list[str]:
        """Return a sentence on the speed of `weft`, and a sentence on the speed of `weft-bounded`.

        Even and skewed routing have separate means, because padding costs most with skewed routing.
        """
        return [text for variant in self.variants.compared if (text := self._summary_of(variant, rows))]

    def _summary_of(self, variant: str, rows: Sequence[Record]) -> str:
        mine = [r for r in rows if r["variant"] == variant]
        overs = self.compared(rows)[variant]
        if not overs:
            return ""
        means = []
        for what, some in (("even", [r for r in mine if not r["skew"]]), ("skewed", [r for r in mine if r["skew"]])):
            found = [(geomean([speed for speed, _ in _speeds(some, over)]), over) for over in overs]
            if some:
                said = " and ".join(f"{times(mean)} {over}" for mean, over in found if mean is not None)
                means.append(f"with {what} routing ({counted(len(some), 'shape')}) {said}")
        worst = [f"{times(speed)} {over} ({where})" for over in overs for speed, where in [min(_speeds(mine, over))]]
        not_slower = share([speed >= NEVER_BELOW for speed, _ in _speeds(mine, overs[0])])
        of_all = [
            f"Geometric means of the speed of {variant}: {'; '.join(means)}",
            f"The worst speed is {' and '.join(worst)}",
            f"{not_slower:.0%} of the shapes reach at least {NEVER_BELOW}x {overs[0]}",
            f"The geometric mean of the time is {number(geomean([r['roofline_ratio'] for r in mine]), 2)} times the roofline",
        ]
        alike = [r for r in rows if r["variant"].endswith(BOUNDED) == variant.endswith(BOUNDED)]
        return ". ".join([*of_all, *self.summary_of_best(mine, alike)]) + "."

    def twin(self, record: Record) -> str | None:
        """Return the variant in which the schedule of `record` is pinned; None if there is no such variant.

        There is none for a bounded call with the serial schedule: `max_rows` cannot be combined with a pinned serial schedule.
        """
        variant = record["variant"]
        if variant not in self.variants.compared or record["chosen"] is None:
            return serial_twin(record) if variant == OWN_SERIAL else None
        queued, _, captured = record["chosen"].partition(", in graphs ")  # harness 3 recorded both in one field
        taken = captured or queued if record["mode"] == "graph" else queued
        if taken == "serial":
            return serial_twin(record) if variant == WEFT else None
        return taken + BOUNDED * variant.endswith(BOUNDED)


def _speeds(rows: Sequence[Record], over: str) -> list[tuple[float, str]]:
    return [(r["speedup_over"][over], r["config"]) for r in rows if over in r["speedup_over"]]


def _in_proportion(splits: torch.Tensor, rows: int) -> torch.Tensor:
    """Scale each rank's numbers of rows for the experts, int64 [world size, experts], so that the numbers of a rank sum to
    `rows`. The remainder of the division goes to the first experts.
    """
    of_rank = splits.sum(1, keepdim=True)
    fewer = splits * rows // of_rank
    left = rows - fewer.sum(1, keepdim=True)
    return fewer + (torch.arange(splits.shape[1]) < left)


def _round_up(rows: int, to: int) -> int:
    return -(-rows // to) * to


OPERATOR = ExpertsOperator(SPEC)
