"""What a GEMM with communication took: records, a table on the terminal, and what all shapes say together.

The ideal is the longer of the GEMM alone and the communication alone, measured in the same run and mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.bench import records
from weft.bench.ceilings import Ceilings
from weft.bench.console import print_table
from weft.bench.harness import Mode, Timing
from weft.bench.matmul_shapes import MatmulShape
from weft.bench.measure import Results
from weft.bench.operator import Record
from weft.bench.options import BenchOptions
from weft.bench.schedules import WEFT, Planned
from weft.bench.tables import geomean, markdown_table, milliseconds, number, share, times

BASELINE, ASYNCTP = "serial", "asynctp"
BASELINES = (BASELINE, ASYNCTP)
GEMM, COMMUNICATION, COLLECTIVE = "gemm", "communication", "collective"

NEVER_BELOW = 0.98
"""Of serial's speed: what counts as not slower."""
LARGE_M = 2048
"""From here on a shape counts in the mean time over the ideal."""
NEAR_BEST, NEAR_PREDICTION = 0.03, 0.10


@dataclass(frozen=True)
class MeasuredMatmul:
    shape: MatmulShape
    world_size: int
    arms: tuple[str, ...]
    results: Results
    planned: Planned | None
    ceilings: list[Ceilings]
    floor_ms: float
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[str, ...]:
        return self.results.wrong

    def ideal_ms(self, mode: Mode) -> float | None:
        alone = [self._ms(mode, name) for name in (GEMM, COMMUNICATION)]
        return max(ms for ms in alone if ms is not None) if None not in alone else None

    def records(self, options: BenchOptions, run: str) -> list[Record]:
        common = records.common_fields(
            options, self.shape.name, self.world_size, BASELINE, self.floor_ms, self.ceilings, run
        ) | {"m": self.shape.m, "n": self.shape.n, "k": self.shape.k, "sources": list(self.shape.sources)}
        rows = []
        for mode in options.modes:
            ideal = self.ideal_ms(mode)
            alone = {
                "gemm_ms": self._ms(mode, GEMM),
                "communication_ms": self._ms(mode, COMMUNICATION),
                "collective_ms": self._ms(mode, COLLECTIVE),
                "ideal_ms": ideal,
            }
            for name in self.arms:
                if self.results.timed(mode, name):
                    fields = records.arm_fields(self.results, mode, name, common, BASELINES)
                    fields |= {
                        "ideal_ratio": fields["p50_ms"] / ideal if ideal else None,
                        "added_us": self._added_us(mode, name),
                        "chosen": self.planned.chosen if self.planned and name == WEFT else None,
                        "predicted_ms": self._predicted_ms(mode, name),
                    }
                    rows.append(common | alone | fields)
        return rows

    def show(self, options: BenchOptions) -> None:
        others = [name for name in BASELINES if name in self.arms]
        rows = []
        for mode in options.modes:
            known = [name for name in self.arms if name in (*BASELINES, WEFT)]
            pinned = sorted(set(self.arms) - set(known), key=lambda name: self._ms(mode, name) or 0.0)
            for name in (*known, *pinned, GEMM, COMMUNICATION, COLLECTIVE):
                if self.results.timed(mode, name):
                    rows.append(self._row(mode, name, others))
        ceilings = self.ceilings[0].as_fields()
        link = "" if ceilings["link_gbps"] is None else f", {ceilings['link_gbps']:.1f} GB/s to a peer"
        captured = [f"{name} cannot be captured: {why}" for name, why in self.results.not_captured.items()]
        print_table(
            f"{options.op} {self.shape.name} ({'; '.join(self.shape.sources) or 'as asked for'}), {options.dtype}, "
            f"{self.world_size} ranks, {options.device}",
            ("variant", "mode", "ms", "p20 - p80", "skew", *(f"vs\n{o}" for o in others), "over\nideal", "over\nfloor",
             "added\nus", "host\nus", "first\nms", "predicted\nms", "error"),
            rows,
            (
                f"floor {self.floor_ms:.4f} ms from {ceilings['memory_gbps']:.1f} GB/s of memory a rank{link}, "
                f"{ceilings['matmul_tflops']:.4g} TFLOP/s; ideal: the longer of {GEMM} and {COMMUNICATION}",
                *([f"{WEFT} takes {self.planned.chosen}"] if self.planned and WEFT in self.arms else []),
                *captured,
                *self.notes,
                *self.wrong,
            ),
            section=1,
            optional=("predicted\nms", "p20 - p80", "skew", "first\nms", "error"),
        )  # fmt: skip

    def _row(self, mode: Mode, name: str, others: Sequence[str]) -> tuple[str, ...]:
        timing = self.results.timings[mode, name]
        cells = [
            name,
            mode,
            f"{timing.p50_ms:.4f}",
            f"{timing.p20_ms:.4f} - {timing.p80_ms:.4f}",
            f"{timing.skew_ms:.4f}",
        ]
        if name not in self.arms:
            return (*cells, *[""] * len(others), "", "", "", number(timing.host_us, 1), "", "", "")
        ideal = self.ideal_ms(mode)
        return (
            *cells,
            *(times(self.results.speedup(mode, name, o) if self.results.timed(mode, o) else None) for o in others),
            number(timing.p50_ms / ideal if ideal else None, 2),
            f"{timing.p50_ms / self.floor_ms:.2f}",
            number(self._added_us(mode, name), 1),
            number(timing.host_us, 1),
            f"{self.results.first_call_ms[name]:.1f}",
            number(self._predicted_ms(mode, name), 4),
            f"{self.results.errors[name]:.1e}",
        )

    def _ms(self, mode: Mode, name: str) -> float | None:
        timing: Timing | None = self.results.timings.get((mode, name))
        return None if timing is None else timing.p50_ms

    def _added_us(self, mode: Mode, name: str) -> float | None:
        """What a single call takes longer than the baseline's."""
        if mode != "single":
            return None
        timings = self.results.timings
        return 1e3 * (timings[mode, name].p50_ms - timings[mode, BASELINE].p50_ms)

    def _predicted_ms(self, mode: Mode, name: str) -> float | None:
        return None if mode == "single" or self.planned is None else self.planned.of(name)


@dataclass(frozen=True)
class Summary:
    """What the shapes of one mode say together. None: nothing of the kind was measured."""

    shapes: int
    over_serial: float | None
    over_asynctp: float | None
    worst: tuple[float, str]  # speed over serial, shape
    not_slower: float  # share of shapes
    over_ideal: float | None
    most_added: tuple[float, str] | None  # us, shape; single calls
    near_best: float | None  # share of shapes
    near_prediction: float | None

    @classmethod
    def of(cls, rows: Sequence[Record]) -> Summary | None:
        """Of one mode's records; None if there is none of `weft`."""
        mine = [r for r in rows if r["variant"] == WEFT]
        if not mine:
            return None
        overs = [(r["speedup"], r["config"]) for r in mine]
        added = [(r["added_us"], r["config"]) for r in mine if r["added_us"] is not None]
        best = {config: min(ms.values()) for config, ms in _of_schedules(rows).items()}
        predicted = [r for r in mine if r["predicted_ms"] is not None]
        return cls(
            shapes=len(mine),
            over_serial=geomean([speed for speed, _ in overs]),
            over_asynctp=geomean([r["speedup_over"][ASYNCTP] for r in mine if ASYNCTP in r["speedup_over"]]),
            worst=min(overs),
            not_slower=share([speed >= NEVER_BELOW for speed, _ in overs]) or 0.0,
            over_ideal=geomean([r["ideal_ratio"] for r in mine if r["m"] >= LARGE_M and r["ideal_ratio"] is not None]),
            most_added=max(added, default=None),
            near_best=share([r["p50_ms"] <= (1 + NEAR_BEST) * best[r["config"]] for r in mine if r["config"] in best]),
            near_prediction=share([abs(r["predicted_ms"] / r["p50_ms"] - 1) <= NEAR_PREDICTION for r in predicted]),
        )

    def __str__(self) -> str:
        speed, shape = self.worst
        said = [
            f"{WEFT} over {self.shapes} shapes: {times(self.over_serial)} {BASELINE} in the geometric mean, at worst "
            f"{times(speed)} ({shape}), at least {NEVER_BELOW}x on {self.not_slower:.0%} of them"
        ]
        if self.over_asynctp is not None:
            said.append(f"{times(self.over_asynctp)} {ASYNCTP}")
        if self.over_ideal is not None:
            said.append(f"{self.over_ideal:.3f} of the ideal time for M >= {LARGE_M}")
        if self.most_added is not None:
            said.append(f"at most {self.most_added[0]:.1f} us more than {BASELINE} ({self.most_added[1]})")
        if self.near_best is not None:
            said.append(f"within {NEAR_BEST:.0%} of the best measured schedule on {self.near_best:.0%}")
        if self.near_prediction is not None:
            said.append(f"within {NEAR_PREDICTION:.0%} of the predicted time on {self.near_prediction:.0%}")
        return "; ".join(said) + "."


def _of_schedules(rows: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Shape -> schedule -> milliseconds, of what was pinned."""
    found: dict[str, dict[str, float]] = {}
    for r in rows:
        if r["variant"] not in (*BASELINES, WEFT):
            found.setdefault(r["config"], {})[r["variant"]] = r["p50_ms"]
    return found


def show_summary(written: Sequence[Record], options: BenchOptions) -> None:
    """Print a line for each shape and mode, and what they say together."""
    for mode in options.modes:
        rows = [r for r in written if r["mode"] == mode]
        if rows:
            header, lines = _lines(rows)
            summary = Summary.of(rows)
            print_table(
                f"{options.op}, {mode}, {options.dtype}, {options.device}, milliseconds", header, lines,
                () if summary is None else (str(summary),),
            )  # fmt: skip


def table(rows: Sequence[Record]) -> str:
    """Markdown: a row for each shape, and a sentence about all of them."""
    summary = Summary.of(rows)
    return markdown_table(*_lines(rows)) + (f"\n\n{summary}" if summary is not None else "")


def _lines(rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """(header, cells): shape, baselines, weft, its ratios, the ideal; where schedules were pinned also the best of them."""
    schedules = _of_schedules(rows)
    variants = [v for v in (*BASELINES, WEFT) if any(r["variant"] == v for r in rows)]
    over = [v for v in variants if v in BASELINES and WEFT in variants]
    header = ["M x N x K", *variants, *(f"{WEFT} vs {v}" for v in over), "ideal"]
    header += [f"{WEFT} / ideal"] if over else []
    header += ["best schedule", "of them"] if schedules else []
    lines = []
    for config in dict.fromkeys(r["config"] for r in rows):
        by_variant = {r["variant"]: r for r in rows if r["config"] == config}
        mine, any_of_them = by_variant.get(WEFT), next(iter(by_variant.values()))
        cells = [config, *(milliseconds(by_variant.get(v, {}).get("p50_ms")) for v in variants)]
        cells += [times(mine["speedup_over"].get(v)) if mine else "" for v in over]
        cells.append(milliseconds(any_of_them["ideal_ms"]))
        cells += [number(mine["ideal_ratio"] if mine else None, 2)] if over else []
        if schedules:
            best = min(schedules.get(config, {}).items(), key=lambda item: item[1], default=("", None))
            cells += [milliseconds(best[1]), best[0]]
        lines.append(cells)
    return header, lines
