"""What the dispatch of tokens with the GEMMs of experts took: records, a table on the terminal, what all shapes say together.

A variant whose name ends in "-bounded" is given the most rows that may arrive (`max_rows`) and never waits for the device; the
others return exactly what arrives, for which the host waits in each call. In `graph` only the bounded ones can run, and there
the baseline is `padded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.bench import records
from weft.bench.ceilings import Ceilings
from weft.bench.console import print_table
from weft.bench.harness import Mode
from weft.bench.measure import Results
from weft.bench.operator import Record
from weft.bench.options import BenchOptions
from weft.bench.schedules import WEFT
from weft.bench.tables import geomean, markdown_table, milliseconds, number, share, times

BASELINE, PADDED = "serial", "padded"
BASELINES = (BASELINE, PADDED)
BOUNDED = "-bounded"
MINE = (WEFT, WEFT + BOUNDED)
GEMM, GEMM_EACH, EXCHANGE = "gemm", "gemm-each", "exchange"
BESIDE = (GEMM, GEMM_EACH, EXCHANGE)

_DESCRIBED = ("tokens x N x K", "most / mean rows", "padded rows")
_BEST = ("best schedule", "of them")

NEVER_BELOW = 0.98
"""Of the baseline's speed: what counts as not slower."""
NEAR_BEST = 0.03


def baseline_of(mode: Mode) -> str:
    return PADDED if mode == "graph" else BASELINE


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


@dataclass(frozen=True)
class MeasuredDispatch:
    config: str
    sources: tuple[str, ...]
    load: Load
    world_size: int
    arms: tuple[str, ...]
    results: Results
    chosen: dict[str, str]
    """Variant -> name of the schedule, of those that choose."""
    ceilings: list[Ceilings]
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[str, ...]:
        return self.results.wrong

    def floor_ms(self, mode: Mode) -> float:
        """The GEMMs of all that arrives, done the faster way and measured in the same run, or the busiest rank's bytes over
        its link: the longer."""
        gemms = [ms for name in (GEMM, GEMM_EACH) if (ms := self._ms(mode, name)) is not None]
        wire_ms = 1e3 * self.load.busiest_bytes / min(c.link for c in self.ceilings)
        return max(min(gemms, default=0.0), wire_ms)

    def records(self, options: BenchOptions, run: str) -> list[Record]:
        rows = []
        for mode in options.modes:
            common = records.common_fields(
                options, self.config, self.world_size, baseline_of(mode), self.floor_ms(mode), self.ceilings, run
            )
            common |= vars(self.load) | {"sources": list(self.sources)}
            common |= {f"{name.replace('-', '_')}_ms": self._ms(mode, name) for name in BESIDE}
            for name in self.arms:
                if self.results.timed(mode, name):
                    fields = records.arm_fields(self.results, mode, name, common, BASELINES)
                    fields |= {"added_us": self._added_us(mode, name), "chosen": self.chosen.get(name)}
                    rows.append(common | fields)
        return rows

    def show(self, options: BenchOptions) -> None:
        rows = []
        for mode in options.modes:
            known = [name for name in self.arms if name in (*BASELINES, *MINE)]
            pinned = sorted(set(self.arms) - set(known), key=lambda name: self._ms(mode, name) or 0.0)
            rows += [self._row(mode, name) for name in (*known, *pinned, *BESIDE) if self.results.timed(mode, name)]
        load, link = self.load, self.ceilings[0].as_fields()["link_gbps"]
        print_table(
            f"{options.op} {self.config} ({'; '.join(self.sources) or 'as asked for'}), {options.dtype}, "
            f"{self.world_size} ranks, {options.device}",
            ("variant", "mode", "ms", "p20 - p80", "skew", *(f"vs\n{name}" for name in BASELINES), "over\nfloor", "added\nus",
             "host\nus", "first\nms", "error"),
            rows,
            (
                f"{load.tokens} tokens a rank, {load.top_k} of {load.experts} experts each; most rows over mean: "
                f"{load.rank_skew:.2f} of ranks, {load.expert_skew:.2f} of experts; {PADDED} has room for {load.capacity} rows "
                f"of each expert on each rank; bounded variants for {load.max_rows} rows in all",
                f"floor: the faster of {GEMM} and {GEMM_EACH}"
                + ("" if link is None else f", or {load.busiest_bytes / 1e6:.3g} MB at {link:.1f} GB/s: the longer"),
                f"all but {PADDED} and what ends in {BOUNDED} wait for the device in each call, in queued mode too: the host "
                f"must learn how many rows come",
                *(f"{variant} takes {name}" for variant, name in self.chosen.items()),
                *(f"{name} cannot be captured: {why}" for name, why in self.results.not_captured.items()),
                *self.notes,
                *self.wrong,
            ),
            section=1,
            optional=("p20 - p80", "skew", "first\nms", "error"),
        )  # fmt: skip

    def _row(self, mode: Mode, name: str) -> tuple[str, ...]:
        timing, results = self.results.timings[mode, name], self.results
        cells = [
            name,
            mode,
            f"{timing.p50_ms:.4f}",
            f"{timing.p20_ms:.4f} - {timing.p80_ms:.4f}",
            f"{timing.skew_ms:.4f}",
        ]
        if name not in self.arms:
            return (*cells, *[""] * (len(BASELINES) + 2), number(timing.host_us, 1), "", "")
        return (
            *cells,
            *(times(results.speedup(mode, name, o) if results.timed(mode, o) else None) for o in BASELINES),
            f"{timing.p50_ms / self.floor_ms(mode):.2f}",
            number(self._added_us(mode, name), 1),
            number(timing.host_us, 1),
            f"{results.first_call_ms[name]:.1f}",
            f"{results.errors[name]:.1e}",
        )

    def _ms(self, mode: Mode, name: str) -> float | None:
        timing = self.results.timings.get((mode, name))
        return None if timing is None else timing.p50_ms

    def _added_us(self, mode: Mode, name: str) -> float | None:
        """What a single call takes longer than the baseline's."""
        mine, base = self._ms(mode, name), self._ms(mode, BASELINE)
        return 1e3 * (mine - base) if mode == "single" and mine is not None and base is not None else None


def show_summary(written: Sequence[Record], options: BenchOptions) -> None:
    """Print a line for each shape and mode, and what they say together."""
    for mode in options.modes:
        rows = [r for r in written if r["mode"] == mode]
        if rows:
            title = f"{options.op}, {mode}, {options.dtype}, {options.device}, milliseconds"
            print_table(title, *_lines(rows), tuple(_summaries(rows)), optional=(*_DESCRIBED[1:], *_BEST))


def table(rows: Sequence[Record]) -> str:
    """Markdown: a row for each shape, and what all of them say of `weft` and of `weft-bounded`."""
    return "\n\n".join([markdown_table(*_lines(rows)), *_summaries(rows)])


def _lines(rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """(header, cells): shape, its skew, what padding adds, baselines, weft, its ratios, the floor; where schedules were pinned
    the best of them."""
    variants = [v for v in (*BASELINES, *MINE) if any(r["variant"] == v for r in rows)]
    compared = [(variant, over) for variant in MINE for over in _overs(rows, variant)]
    pinned = any(_best(rows, r["config"]) for r in rows)
    header = [*_DESCRIBED, *variants, *(f"{variant} vs {over}" for variant, over in compared), "floor"]
    header += _BEST if pinned else ()
    lines = []
    for config in dict.fromkeys(r["config"] for r in rows):
        by_variant = {r["variant"]: r for r in rows if r["config"] == config}
        one = next(iter(by_variant.values()))
        cells = [config, f"{one['rank_skew']:.2f}", f"{one['capacity'] * one['experts'] / one['rows']:.2f}x"]
        cells += [milliseconds(by_variant.get(v, {}).get("p50_ms")) for v in variants]
        cells += [times(by_variant.get(v, {}).get("speedup_over", {}).get(over)) for v, over in compared]
        cells.append(milliseconds(one["floor_ms"]))
        if pinned:
            ms, name = _best(rows, config) or (None, "")
            cells += [milliseconds(ms), name]
        lines.append(cells)
    return header, lines


def _summaries(rows: Sequence[Record]) -> list[str]:
    """What the shapes of one mode say together, a sentence for each of `weft` and `weft-bounded`."""
    said = []
    for variant in MINE:
        mine = [r for r in rows if r["variant"] == variant]
        overs = _overs(rows, variant)
        if not overs:
            continue
        means = [
            f"{times(geomean(speeds))} {over}" for over in overs if (speeds := [s for s, _ in _speeds(mine, over)])
        ]
        worst, where = min(_speeds(mine, overs[0]))
        not_slower = share([speed >= NEVER_BELOW for speed, _ in _speeds(mine, overs[0])])
        floors = number(geomean([r["floor_ratio"] for r in mine]), 2)
        text = (
            f"{variant} over {len(mine)} shapes: {' and '.join(means)} in the geometric mean, at worst {times(worst)} {overs[0]} "
            f"({where}), at least {NEVER_BELOW}x on {not_slower:.0%} of them; {floors} times the floor"
        )
        best = [
            (r["p50_ms"], found[0]) for r in mine if (found := _best(rows, r["config"], (variant.removeprefix(WEFT),)))
        ]
        if best:
            near = share([ms <= (1 + NEAR_BEST) * least for ms, least in best])
            text += f"; within {NEAR_BEST:.0%} of the best measured schedule of its kind on {near:.0%}"
        said.append(text + ".")
    return said


def _overs(rows: Sequence[Record], variant: str) -> list[str]:
    """With which baselines `variant` is compared, its own first. What returns exact rows is not compared with padding."""
    there = {over for r in rows if r["variant"] == variant for over in r["speedup_over"]}
    return [over for over in ((BASELINE,) if variant == WEFT else BASELINES) if over in there]


def _speeds(rows: Sequence[Record], over: str) -> list[tuple[float, str]]:
    return [(r["speedup_over"][over], r["config"]) for r in rows if over in r["speedup_over"]]


def _best(rows: Sequence[Record], config: str, endings: Sequence[str] = ("", BOUNDED)) -> tuple[float, str] | None:
    """(milliseconds, name) of the fastest pinned schedule, of those that return exact rows ("") or are bounded, or both."""
    pinned = [r for r in rows if r["config"] == config and r["variant"] not in (*BASELINES, *MINE)]
    kind = [r for r in pinned if (BOUNDED if r["variant"].endswith(BOUNDED) else "") in endings]
    return min(((r["p50_ms"], r["variant"]) for r in kind), default=None)
