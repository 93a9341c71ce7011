"""What the dispatch of tokens with the GEMMs of experts took: records, a table on the terminal, what all shapes say together.

A variant whose name ends in "-bounded" is given the most rows that may arrive (`max_rows`) and never waits for the device; the
others return exactly what arrives, for which the host waits in each call. In `graph` only the bounded ones can run, and there
the baseline is `padded`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from weft.bench.ceilings import Ceilings
from weft.bench.harness import Mode
from weft.bench.matmul_operator import MeasuredArms, Tables, said_of_best
from weft.bench.operator import Record
from weft.bench.schedules import OWN_SERIAL, WEFT
from weft.bench.tables import geomean, milliseconds, number, share, times
from weft.words import counted

BASELINE, PADDED = "serial", "padded"
BASELINES = (BASELINE, PADDED)
BOUNDED = "-bounded"
MINE = (WEFT, WEFT + BOUNDED)
GEMM, GEMM_EACH, EXCHANGE = "gemm", "gemm-each", "exchange"

NEVER_BELOW = 0.98
"""Of the baseline's speed: what counts as not slower."""


@dataclass(frozen=True)
class Load:
    """What the router's choice means for a configuration; the worst or, of skews, the mean input set.

    capacity: rows that `padded` has for each expert on each rank. max_rows: what bounded variants are given. rank_skew and
    expert_skew: most over mean of the rows of a rank, and of an expert. busiest_bytes: out of or into the busiest rank."""

    tokens: int
    top_k: int
    experts: int
    n: int
    k: int
    skew: float
    rows: int
    max_rows: int
    capacity: int
    rank_skew: float
    expert_skew: float
    busiest_bytes: float

    def seconds(self, rates: Ceilings, world_size: int, item_bytes: int) -> float:
        """What the busiest rank needs at these rates."""
        rows, experts = self.rank_skew * self.rows, self.experts // world_size
        traffic = (experts * self.k * self.n + rows * (self.k + self.n)) * item_bytes
        computing = 0.0 if rates.matmul is None else 2 * rows * self.k * self.n / rates.matmul
        return max(traffic / rates.memory, computing, self.busiest_bytes / rates.link)


class _Tables(Tables):
    baselines = BASELINES
    compared: ClassVar = {WEFT: (BASELINE,), WEFT + BOUNDED: BASELINES}  # exact rows are not compared with padding
    head, tail = ("tokens x N x K", "most / mean rows", "padded rows"), ("GEMMs alone", "roofline")
    optional = (*head[1:], "best schedule", "of them", "GEMMs alone")

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
        if near := self.near_best(mine, alike):
            said_of_all.append(said_of_best(*near))
        return "; ".join(said_of_all) + "."

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


TABLES = _Tables()


@dataclass(frozen=True)
class MeasuredDispatch(MeasuredArms):
    load: Load
    item_bytes: int
    chosen: Mapping[Mode, Mapping[str, str]]
    """Of those that choose, by mode and variant: the name of the schedule."""

    tables = TABLES
    beside = (GEMM, GEMM_EACH, EXCHANGE)

    def baseline(self, mode: Mode) -> str:
        return PADDED if mode == "graph" else BASELINE

    def roofline_ms(self, mode: Mode) -> float:
        """Of the busiest rank: its rows and its experts once through memory, its GEMMs, its bytes over the link: the longest."""
        return 1e3 * max(self.load.seconds(ceilings, self.world_size, self.item_bytes) for ceilings in self.ceilings)

    def described(self, mode: Mode) -> Record:
        return vars(self.load)

    def judged(self, mode: Mode, name: str) -> Record:
        return {"chosen": self.chosen.get(mode, {}).get(name)}

    def said(self) -> list[str]:
        load, rates = self.load, self.ceilings[0].as_fields()
        link = "" if rates["link_gbps"] is None else f", {rates['link_gbps']:.1f} GB/s to a peer"
        return [
            f"{counted(load.tokens, 'token')} a rank, {load.top_k} of {counted(load.experts, 'expert')} each; most rows "
            f"over mean: {load.rank_skew:.2f} of ranks, {load.expert_skew:.2f} of experts; {PADDED} has room for "
            f"{counted(load.capacity, 'row')} of each expert on each rank; bounded variants for "
            f"{counted(load.max_rows, 'row')} in all",
            f"roofline {self.roofline_ms('queued'):.4f} ms from {rates['memory_gbps']:.1f} GB/s of memory a rank{link}, "
            f"{rates['matmul_tflops']:.4g} TFLOP/s",
            f"all but {PADDED} and what ends in {BOUNDED} wait for the device in each call, in queued mode too: the host "
            f"must learn how many rows come",
            *(f"{variant}, {mode}, takes {name}" for mode, of in self.chosen.items() for variant, name in of.items()),
        ]
