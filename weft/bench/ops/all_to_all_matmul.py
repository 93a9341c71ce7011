"""Benchmark of tokens that go to the ranks of their experts and are multiplied there: mixture-of-experts layers x variants.

Tokens are sorted by expert, a router has drawn how many there are for each (`weft.bench.ops.all_to_all_matmul`); weights lie as
[experts, K, N]; outputs are new at each call. Variants:

    serial    the baseline, as a careful user writes it: all_to_all_single of the splits, which the host reads, all_to_all_single of
              the tokens, a copy into the order of experts, torch's grouped GEMM
    padded    what can be captured without weft, the baseline of `graph`: as much room for every expert as the largest count of
              this workload needs, equal all_to_all_single, torch.bmm over everything. What padding costs shows
    weft      weft.all_to_all_matmul as it chooses; exactly the rows that arrive, for which the host waits in each call
    a name    weft.all_to_all_matmul with that schedule ("dispatch[by=dma,rest=each]"; weft-serial: its "serial"); the beginning
              of a name means all that begin so, "all" every one
    ...-bounded  the same with max_rows, the most rows that any rank gets, rounded up to 128: no wait on the host

Beside them run, for information, torch's GEMMs alone on rows that lie in the order of experts, grouped and one by one (weft's own
kernel can be faster), and the library's all-to-all of the tokens alone, sizes known.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Call, Mode, Ranks
from weft.bench.core.measure import Workload
from weft.bench.core.options import DTYPES, BenchOptions
from weft.bench.core.run import free_bytes
from weft.bench.core.tables import Record, geomean, milliseconds, number, share, times
from weft.bench.ops.any_operator import GEMM, NEVER_BELOW, Arm, GemmOperator, MeasuredGemms
from weft.bench.ops.gemms import BASELINE, OWN_SERIAL, WEFT, Pinned, Problems, Shape, gemm_limit
from weft.operator.calls import prepared_calls
from weft.ops.all_to_all_matmul import OPERATOR as SPEC
from weft.ops.all_to_all_matmul import all_to_all_matmul
from weft.runtime.exchanged import Sizes, exchange_counts, multiplied_by_library
from weft.schedule import AllToAllMatmul
from weft.words import counted

PADDED, BOUNDED = "padded", "-bounded"
BASELINES, MINE = (BASELINE, PADDED), (WEFT, WEFT + BOUNDED)
GEMM_EACH, EXCHANGE = "gemm-each", "exchange"
_PADDED_SHARE = 0.3  # of the free memory, for what `padded` makes in a call
_TYPED = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)-e([1-9]\d*)-top([1-9]\d*)(?:-zipf(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class MoeShape(Shape):
    """`tokens` on each rank, `top_k` of all ranks' `experts` for each, [k, n] in each expert."""

    tokens: int
    n: int
    k: int
    experts: int
    top_k: int
    skew: float = 0.0
    sources: tuple[str, ...] = ()

    written = "TOKENSxNxK-eEXPERTS-topK, with -zipfS for skew, such as 4096x28672x4096-e8-top2-zipf0.5"

    @classmethod
    def named(cls, name: str, groups: Mapping[str, Any]) -> list[MoeShape]:
        if typed := _TYPED.fullmatch(name):
            tokens, n, k, experts, top_k = (int(size) for size in typed.groups()[:5])
            return [cls(tokens, n, k, experts, top_k, float(typed[6] or 0))]
        group = groups.get(name, {"layers": {}})
        return [
            cls(tokens, layer["n"], layer["k"], group["experts"], group["top_k"], skew, (f"{name} {of_layer}",))
            for of_layer, layer in group["layers"].items()
            for tokens in group["tokens"]
            for skew in group["skews"]
        ]

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"{self.name}: a token goes to at most experts={self.experts}, not to top_k={self.top_k}")

    @property
    def name(self) -> str:
        zipf = f"-zipf{self.skew:g}" if self.skew else ""
        return f"{self.tokens}x{self.n}x{self.k}-e{self.experts}-top{self.top_k}{zipf}"

    @property
    def rows(self) -> int:
        """What a rank sends, to others and to itself: each token once for each of its experts."""
        return self.tokens * self.top_k

    def splits(self, world_size: int, which: int) -> torch.Tensor:
        """int64 [world_size, experts]: how many rows each rank has for each expert; the same on every rank and device."""
        popularity = torch.arange(1, self.experts + 1).double() ** -self.skew
        drawn = []
        for rank in range(world_size):
            generator = torch.Generator().manual_seed(1000 * which + rank)
            noise = -torch.empty(self.tokens, self.experts).exponential_(generator=generator).log()
            chosen = (popularity.log() + noise).topk(self.top_k, dim=1).indices
            drawn.append(torch.bincount(chosen.flatten(), minlength=self.experts))
        return torch.stack(drawn)


@dataclass(frozen=True)
class Load:
    """What the router's choice means for a configuration; the worst or, of skews, the mean input set.

    capacity: rows that `padded` has for each expert on each rank. max_rows: what bounded variants are given. rank_skew and
    expert_skew: most over mean of the rows of a rank, and of an expert. busiest_bytes: out of or into the busiest rank."""

    max_rows: int
    capacity: int
    rank_skew: float
    expert_skew: float
    busiest_bytes: float


# Exact rows are not compared with padding.
_COMPARED: Mapping[str, tuple[str, ...]] = {WEFT: (BASELINE,), WEFT + BOUNDED: BASELINES}


def _problem(shape: MoeShape, ranks: int, dtype: str) -> AllToAllMatmul:
    return AllToAllMatmul.even(shape.rows, shape.n, shape.k, shape.experts // ranks, ranks, dtype)


class DispatchWorkload(Workload):
    """Normally distributed tokens, weights scaled so that outputs are about 1; other tokens and splits in each input set."""

    claims = tuple((variant, over) for variant, overs in _COMPARED.items() for over in overs)

    def __init__(self, shape: MoeShape, ranks: Ranks, dtype: str, input_sets: int) -> None:
        self.shape, self.ranks, self.dtype, self.input_sets = shape, ranks, DTYPES[dtype], input_sets
        self.name = shape.name
        self.experts = shape.experts // ranks.world_size
        self.all_splits = [shape.splits(ranks.world_size, which) for which in range(input_sets)]
        self.tokens = [self._tokens(which, ranks.rank) for which in range(input_sets)]
        self.splits = [splits[ranks.rank].to(ranks.device) for splits in self.all_splits]
        generator = torch.Generator(ranks.device).manual_seed(77 + ranks.rank)
        self.w = torch.empty(self.experts, shape.k, shape.n, dtype=self.dtype, device=ranks.device)
        for of_expert in self.w:  # one by one: in fp32 all together take as much again, twice
            drawn = torch.randn(shape.k, shape.n, generator=generator, device=ranks.device)
            of_expert.copy_(drawn.mul_(shape.k**-0.5))
        self.problem = _problem(shape, ranks.world_size, dtype)

    def counts(self, which: int) -> torch.Tensor:
        """int64 [world size, experts], on the host: what each rank sends here for each expert of this rank."""
        first = self.ranks.rank * self.experts
        return self.all_splits[which][:, first : first + self.experts]

    def ordered(self, which: int) -> torch.Tensor:
        """What arrives, by expert and then by source, made and not sent: [rows, k]."""
        parts = []
        for source in range(self.ranks.world_size):
            splits = self.all_splits[which][source]
            first = self.ranks.rank * self.experts
            parts.append(self._tokens(which, source).split(splits.tolist())[first : first + self.experts])
        return torch.cat([part for of_expert in zip(*parts, strict=True) for part in of_expert])

    def reference(self, which: int) -> torch.Tensor:
        x = self.ordered(which)
        y = torch.empty(x.shape[0], self.shape.n, dtype=torch.float64, device=x.device)
        sizes = self.counts(which).sum(0).tolist()
        for w, part, rows in zip(self.w, x.split(sizes), y.split(sizes), strict=True):
            torch.mm(part.double(), w.double(), out=rows)
        return y

    def rows_of(self, name: str, output: torch.Tensor, which: int) -> torch.Tensor:
        """Of `padded` the rows that hold tokens; of bounded variants those that arrive, which come first."""
        counts = self.counts(which)
        if name != PADDED:
            return output[: int(counts.sum())] if name.endswith(BOUNDED) else output
        here = torch.arange(self.load.capacity) < counts.t().unsqueeze(-1)  # [experts, sources, capacity]
        return output[here.flatten().to(output.device)]

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        return gemm_limit(self.dtype, self.shape.k, None if name == BASELINE else errors[BASELINE])

    def taken(self, variant: str, mode: Mode) -> str:
        """Which schedule the operator took for a variant that pins none; serial if it was not called."""
        group, p = self.ranks.group, self.problem
        like = (p.experts, p.n, p.k, p.dtype, not variant.endswith(BOUNDED))
        found = [one for one in prepared_calls(SPEC, group) if one.pinned is None]
        takes = [c.taken for c in found if (c.p.experts, c.p.n, c.p.k, c.p.dtype, c.p.exact) == like]
        return takes[-1][mode == "graph"] if takes else "serial"

    def twins(self, mode: Mode) -> dict[str, str]:
        """With `max_rows`, weft's serial schedule is not what the baseline does: its result has another shape."""
        return {WEFT: BASELINE} if self.taken(WEFT, mode) == "serial" else {}

    @cached_property
    def load(self) -> Load:
        shape, world = self.shape, self.ranks.world_size
        splits = torch.stack(self.all_splits).view(self.input_sets, world, world, self.experts)
        between = splits.sum(3)  # rows [input set, from, to]
        of_rank, of_expert = between.sum(1), splits.sum(1).flatten(1)
        leaving = between.masked_fill(torch.eye(world, dtype=torch.bool), 0)
        busiest = torch.maximum(leaving.sum(2), leaving.sum(1)).amax(1).double().mean()
        return Load(
            max_rows=_round_up(int(of_rank.max()), 128),
            capacity=_round_up(int(splits.max()), 8),
            rank_skew=float((of_rank.amax(1) / of_rank.double().mean(1)).mean()),
            expert_skew=float((of_expert.amax(1) / of_expert.double().mean(1)).mean()),
            busiest_bytes=float(busiest) * shape.k * self.dtype.itemsize,
        )  # fmt: skip

    def _tokens(self, which: int, rank: int) -> torch.Tensor:
        generator = torch.Generator(self.ranks.device).manual_seed(1000 * which + rank)
        size = (self.shape.rows, self.shape.k)
        return torch.randn(size, generator=generator, device=self.ranks.device).to(self.dtype)


class Serial:
    """The library's calls in turn: `weft.runtime.exchanged`, which is also the operator's serial schedule."""

    def __init__(self, work: DispatchWorkload) -> None:
        self.work = work

    def __call__(self, which: int) -> torch.Tensor:
        work, group = self.work, self.work.ranks.group
        sizes = Sizes(work.splits[which], exchange_counts(work.splits[which], group))
        return multiplied_by_library(work.tokens[which], work.w, sizes, group, None)


class Padded:
    """Room for `capacity` rows of each expert on each rank: sizes are known, so that nobody waits for them."""

    def __init__(self, work: DispatchWorkload) -> None:
        self.work = work
        self.slots = torch.arange(work.load.capacity, device=work.ranks.device)

    @staticmethod
    def bytes(work: DispatchWorkload) -> float:
        """Sent, received, in the order of experts; and multiplied."""
        rows = work.shape.experts * work.load.capacity
        return float(rows * (3 * work.shape.k + work.shape.n) * work.dtype.itemsize)

    def __call__(self, which: int) -> torch.Tensor:
        """[experts * world size * capacity, n], by expert and then by source; slots that are not used hold other tokens."""
        work, world = self.work, self.work.ranks.world_size
        splits, tokens = work.splits[which], work.tokens[which]
        rows = ((splits.cumsum(0) - splits).unsqueeze(1) + self.slots).clamp_(max=tokens.shape[0] - 1)
        padded = tokens.index_select(0, rows.flatten())
        arrived = torch.empty_like(padded)
        dist.all_to_all_single(arrived, padded, group=work.ranks.group)
        by_source = arrived.view(world, work.experts, -1, work.shape.k)
        return torch.bmm(by_source.transpose(0, 1).reshape(work.experts, -1, work.shape.k), work.w).flatten(0, 1)


class Weft:
    """weft's operator, with a schedule or as it chooses, for exactly the rows that arrive or for at most so many."""

    def __init__(self, work: DispatchWorkload, schedule: str | None, *, bounded: bool) -> None:
        self.work, self.schedule = work, schedule
        self.max_rows = work.load.max_rows if bounded else None

    def __call__(self, which: int) -> torch.Tensor:
        work = self.work
        y = all_to_all_matmul(
            work.tokens[which], work.w, work.splits[which], group=work.ranks.group, max_rows=self.max_rows,
            schedule=self.schedule,
        )  # fmt: skip
        assert isinstance(y, torch.Tensor)
        return y


class Alone:
    """The GEMMs and the exchange, each by itself, on what arrives."""

    def __init__(self, work: DispatchWorkload) -> None:
        self.work = work
        self.ordered = [work.ordered(which) for which in range(work.input_sets)]
        self.sizes = [work.counts(which).sum(0).tolist() for which in range(work.input_sets)]
        ends = [torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32) for sizes in self.sizes]
        self.ends = [of_set.to(work.ranks.device) for of_set in ends]
        self.arrived = [torch.empty_like(x) for x in self.ordered]

    def gemm(self, which: int) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(self.ordered[which], self.work.w, offs=self.ends[which])

    def gemm_each(self, which: int) -> torch.Tensor:
        x, sizes = self.ordered[which], self.sizes[which]
        y = x.new_empty(x.shape[0], self.work.shape.n)
        for w, part, rows in zip(self.work.w, x.split(sizes), y.split(sizes), strict=True):
            torch.mm(part, w, out=rows)
        return y

    def exchange(self, which: int) -> None:
        work, rank = self.work, self.work.ranks.rank
        between = work.all_splits[which].view(work.ranks.world_size, work.ranks.world_size, -1).sum(2)
        dist.all_to_all_single(
            self.arrived[which],
            work.tokens[which],
            between[:, rank].tolist(),
            between[rank].tolist(),
            group=work.ranks.group,
        )


@dataclass(frozen=True)
class MeasuredDispatch(MeasuredGemms):
    """chosen: of those that choose, by mode and variant: the name of the schedule."""

    load: Load
    item_bytes: int
    chosen: Mapping[Mode, Mapping[str, str]]

    baselines = BASELINES
    fixed = (*BASELINES, *MINE)
    beside = (GEMM, GEMM_EACH, EXCHANGE)

    def baseline(self, mode: Mode) -> str:
        return PADDED if mode == "graph" else BASELINE

    def roofline_ms(self, mode: Mode) -> float:
        """Of the busiest rank: its rows and its experts once through memory, its GEMMs, its bytes over the link: the longest."""
        shape, load = self.config, self.load
        rows, experts = load.rank_skew * shape.rows, shape.experts // self.world_size
        traffic = (experts * shape.k * shape.n + rows * (shape.k + shape.n)) * self.item_bytes
        flops = 2 * rows * shape.k * shape.n
        return 1e3 * max(
            max(traffic / c.memory, flops / (c.matmul or math.inf), load.busiest_bytes / c.link) for c in self.ceilings
        )

    def described(self, mode: Mode) -> Record:
        return asdict(self.config) | {"rows": self.config.rows} | asdict(self.load) | super().described(mode)

    def judged(self, mode: Mode, name: str) -> Record:
        return super().judged(mode, name) | {"chosen": self.chosen.get(mode, {}).get(name)}

    def said(self) -> list[str]:
        shape, load = self.config, self.load
        return [
            f"{counted(shape.tokens, 'token')} a rank, {shape.top_k} of {counted(shape.experts, 'expert')} each; most rows "
            f"over mean: {load.rank_skew:.2f} of ranks, {load.expert_skew:.2f} of experts; {PADDED} has room for "
            f"{counted(load.capacity, 'row')} of each expert on each rank; bounded variants for "
            f"{counted(load.max_rows, 'row')} in all",
            f"roofline {self.roofline_ms('queued'):.4f} ms from {self.ceilings[0]}",
            f"all but {PADDED} and what ends in {BOUNDED} wait for the device in each call, in queued mode too: the host "
            f"must learn how many rows come",
            *(f"{variant}, {mode}, takes {name}" for mode, of in self.chosen.items() for variant, name in of.items()),
        ]


class _AllToAllMatmul(GemmOperator[MoeShape]):
    name, shape, small = "all_to_all_matmul", MoeShape, "512x1024x256-e8-top2"
    results, baselines = MeasuredDispatch, BASELINES
    compared: ClassVar = _COMPARED
    head, tail = ("tokens x N x K", "most / mean rows", "padded rows"), ("GEMMs alone", "roofline")
    optional = (*head[1:], "best schedule", "of them", "GEMMs alone")

    def check_options(self, options: BenchOptions) -> None:
        for shape in self.presets(options):
            if shape.experts % options.ranks:
                fitting_ranks = [ranks for ranks in range(1, shape.experts + 1) if shape.experts % ranks == 0]
                raise ValueError(
                    f"{shape.name}: {counted(shape.experts, 'expert')} cannot be spread evenly over {options.ranks} "
                    f"ranks: use one of {', '.join(map(str, fitting_ranks))}"
                )
        super().check_options(options)

    def problems(self, shape: MoeShape, ranks: int, dtype: str) -> Problems:
        """Of calls with and without max_rows."""
        p = _problem(shape, ranks, dtype)
        return (p, ""), (replace(p, exact=False), BOUNDED)

    def room(self, shape: MoeShape, ranks: Ranks, item_bytes: int) -> tuple[float, int]:
        elements = (2 * shape.rows + shape.experts // ranks.world_size * shape.n) * shape.k
        return elements * item_bytes, shape.rows * shape.n

    def workload(self, shape: MoeShape, ranks: Ranks, dtype: str) -> DispatchWorkload:
        return DispatchWorkload(shape, ranks, dtype, input_sets=2)

    def arms(self, work: DispatchWorkload, wanted: Sequence[str]) -> tuple[dict[str, Arm], dict[str, Call], list[str]]:
        alone, notes = Alone(work), []
        arms: dict[str, Arm] = {BASELINE: Serial(work)}
        if Padded.bytes(work) <= _PADDED_SHARE * -work.ranks.most(-free_bytes(work.ranks)):
            arms[PADDED] = Padded(work)
        else:
            notes.append(f"{PADDED} not measured, no memory: it needs {Padded.bytes(work) / 1e9:.1f} GB")
        for name in MINE:
            if not wanted or WEFT in wanted or name in wanted:
                arms[name] = Weft(work, None, bounded=name != WEFT)
        beside: dict[str, Call] = {GEMM: alone.gemm, GEMM_EACH: alone.gemm_each, EXCHANGE: alone.exchange}
        if any(size * work.dtype.itemsize % 16 for size in (work.shape.n, work.shape.k)):
            del beside[GEMM]  # torch's grouped GEMM refuses rows that do not begin at multiples of 16 bytes
        return arms, beside, notes

    def can_be_pinned(self, one: Pinned) -> bool:
        return one.variant != OWN_SERIAL + BOUNDED  # the library's calls need sizes on the host

    def waits(self, name: str) -> bool:
        return name != PADDED and not name.endswith(BOUNDED)

    def pinned_arm(self, work: DispatchWorkload, one: Pinned) -> Arm:
        return Weft(work, one.candidate.name, bounded=one.variant.endswith(BOUNDED))

    def facts(
        self, work: DispatchWorkload, arms: Mapping[str, Arm], ceilings: list[Ceilings], modes: Sequence[Mode]
    ) -> tuple[Any, ...]:
        chosen = {mode: {name: work.taken(name, mode) for name in MINE if name in arms} for mode in modes}
        return work.load, work.dtype.itemsize, chosen

    def described(self, record: Record) -> list[str]:
        padded = record["capacity"] * record["experts"] / record["rows"]
        return [record["config"], f"{record['rank_skew']:.2f}", f"{padded:.2f}x"]

    def judged(self, by_variant: Mapping[str, Record]) -> list[str]:
        of_any = next(iter(by_variant.values()))
        alone = [of_any[name] for name in ("gemm_ms", "gemm_each_ms") if of_any[name] is not None]
        return [milliseconds(min(alone, default=None)), milliseconds(of_any["roofline_ms"])]

    def said(self, rows: Sequence[Record]) -> list[str]:
        """A sentence for each of `weft` and `weft-bounded`: even and skewed routing apart, for what padding costs is the skew."""
        return [text for variant in MINE if (text := self._said_of(variant, rows))]

    def _said_of(self, variant: str, rows: Sequence[Record]) -> str:
        mine = [r for r in rows if r["variant"] == variant]
        overs = self.overs(rows, variant)
        if not overs:
            return ""
        means = []
        for what, some in (("even", [r for r in mine if not r["skew"]]), ("skewed", [r for r in mine if r["skew"]])):
            found = [(geomean([speed for speed, _ in _speeds(some, over)]), over) for over in overs]
            if some:
                said = " and ".join(f"{times(mean)} {over}" for mean, over in found if mean is not None)
                means.append(f"{said} over {len(some)} with {what} routing")
        worst = [f"{times(speed)} {over} ({where})" for over in overs for speed, where in [min(_speeds(mine, over))]]
        not_slower = share([speed >= NEVER_BELOW for speed, _ in _speeds(mine, overs[0])])
        said_of_all = [
            f"{variant} over {counted(len(mine), 'shape')}, in the geometric mean: {', '.join(means)}",
            f"at worst {' and '.join(worst)}",
            f"at least {NEVER_BELOW}x {overs[0]} on {not_slower:.0%}",
            f"{number(geomean([r['roofline_ratio'] for r in mine]), 2)} times the roofline",
        ]
        alike = [r for r in rows if r["variant"].endswith(BOUNDED) == variant.endswith(BOUNDED)]
        return "; ".join([*said_of_all, *self.said_of_best(mine, alike)]) + "."

    def twin(self, record: Record) -> str | None:
        """With `max_rows` the serial schedule is not the baseline, whose result has another shape, and it cannot be pinned."""
        variant = record["variant"]
        if variant not in MINE or record["chosen"] is None:
            return BASELINE if variant == OWN_SERIAL else None
        queued, _, captured = record["chosen"].partition(", in graphs ")  # as harness 3 had both
        taken = captured or queued if record["mode"] == "graph" else queued
        if taken == "serial":
            return BASELINE if variant == WEFT else None
        return taken + BOUNDED * variant.endswith(BOUNDED)


def _speeds(rows: Sequence[Record], over: str) -> list[tuple[float, str]]:
    return [(r["speedup_over"][over], r["config"]) for r in rows if over in r["speedup_over"]]


def _round_up(rows: int, to: int) -> int:
    return -(-rows // to) * to


OPERATOR = _AllToAllMatmul()
