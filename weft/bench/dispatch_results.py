"""What the dispatch of tokens with the GEMMs of experts took: records, a table on the terminal, what all shapes say together.

A variant whose name ends in "-bounded" is given the most rows that may arrive (`max_rows`) and never waits for the device; the
others return exactly what arrives, for which the host waits in each call. In `graph` only the bounded ones can run, and there
the baseline is `padded`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from weft.bench.harness import Mode
from weft.bench.matmul_operator import MeasuredArms, Tables
from weft.bench.operator import Record
from weft.bench.schedules import WEFT
from weft.bench.tables import geomean, milliseconds, number, share, times
from weft.words import counted

BASELINE, PADDED = "serial", "padded"
BASELINES = (BASELINE, PADDED)
BOUNDED = "-bounded"
MINE = (WEFT, WEFT + BOUNDED)
GEMM, GEMM_EACH, EXCHANGE = "gemm", "gemm-each", "exchange"

NEVER_BELOW = 0.98
"""Of the baseline's speed: what counts as not slower."""
NEAR_BEST = 0.03


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


class _Tables(Tables):
    baselines = BASELINES
    compared: ClassVar = {WEFT: (BASELINE,), WEFT + BOUNDED: BASELINES}  # exact rows are not compared with padding
    head, tail = ("tokens x N x K", "most / mean rows", "padded rows"), ("floor",)
    optional = (*head[1:], "best schedule", "of them")

    def described(self, record: Record) -> list[str]:
        padded = record["capacity"] * record["experts"] / record["rows"]
        return [record["config"], f"{record['rank_skew']:.2f}", f"{padded:.2f}x"]

    def judged(self, by_variant: Mapping[str, Record]) -> list[str]:
        return [milliseconds(next(iter(by_variant.values()))["floor_ms"])]

    def said(self, rows: Sequence[Record]) -> list[str]:
        """A sentence for each of `weft` and `weft-bounded`."""
        said = []
        for variant in MINE:
            mine = [r for r in rows if r["variant"] == variant]
            overs = self.overs(rows, variant)
            if not overs:
                continue
            means = [
                f"{times(geomean(speeds))} {over}" for over in overs if (speeds := [s for s, _ in _speeds(mine, over)])
            ]
            worst, where = min(_speeds(mine, overs[0]))
            not_slower = share([speed >= NEVER_BELOW for speed, _ in _speeds(mine, overs[0])])
            floors = number(geomean([r["floor_ratio"] for r in mine]), 2)
            text = (
                f"{variant} over {counted(len(mine), 'shape')}: {' and '.join(means)} in the geometric mean, at worst "
                f"{times(worst)} {overs[0]} ({where}), at least {NEVER_BELOW}x on {not_slower:.0%} of them; {floors} "
                "times the floor"
            )
            alike = [r for r in rows if r["variant"].endswith(BOUNDED) == variant.endswith(BOUNDED)]
            best = [(r["p50_ms"], found[0]) for r in mine if (found := self.fastest(alike, r["config"]))]
            if best:
                near = share([ms <= (1 + NEAR_BEST) * least for ms, least in best])
                text += f"; within {NEAR_BEST:.0%} of the best measured schedule of its kind on {near:.0%}"
            said.append(text + ".")
        return said


def _speeds(rows: Sequence[Record], over: str) -> list[tuple[float, str]]:
    return [(r["speedup_over"][over], r["config"]) for r in rows if over in r["speedup_over"]]


TABLES = _Tables()


@dataclass(frozen=True)
class MeasuredDispatch(MeasuredArms):
    load: Load
    chosen: Mapping[Mode, Mapping[str, str]]
    """Of those that choose, by mode and variant: the name of the schedule."""

    tables = TABLES
    beside = (GEMM, GEMM_EACH, EXCHANGE)

    def baseline(self, mode: Mode) -> str:
        return PADDED if mode == "graph" else BASELINE

    def floor_ms(self, mode: Mode) -> float:
        """The GEMMs of all that arrives, done the faster way and measured in the same run, or the busiest rank's bytes over
        its link: the longer."""
        gemms = [ms for name in (GEMM, GEMM_EACH) if (ms := self.ms(mode, name)) is not None]
        wire_ms = 1e3 * self.load.busiest_bytes / min(c.link for c in self.ceilings)
        return max(min(gemms, default=0.0), wire_ms)

    def described(self, mode: Mode) -> Record:
        return vars(self.load)

    def judged(self, mode: Mode, name: str) -> Record:
        return {"chosen": self.chosen.get(mode, {}).get(name)}

    def said(self) -> list[str]:
        load, link = self.load, self.ceilings[0].as_fields()["link_gbps"]
        return [
            f"{counted(load.tokens, 'token')} a rank, {load.top_k} of {counted(load.experts, 'expert')} each; most rows "
            f"over mean: {load.rank_skew:.2f} of ranks, {load.expert_skew:.2f} of experts; {PADDED} has room for "
            f"{counted(load.capacity, 'row')} of each expert on each rank; bounded variants for "
            f"{counted(load.max_rows, 'row')} in all",
            f"floor: the faster of {GEMM} and {GEMM_EACH}"
            + ("" if link is None else f", or {load.busiest_bytes / 1e6:.3g} MB at {link:.1f} GB/s: the longer"),
            f"all but {PADDED} and what ends in {BOUNDED} wait for the device in each call, in queued mode too: the host "
            f"must learn how many rows come",
            *(f"{variant}, {mode}, takes {name}" for mode, of in self.chosen.items() for variant, name in of.items()),
        ]
