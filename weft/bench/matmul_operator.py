"""What the benchmarks of operators with a GEMM share: how they are called, what is recorded and printed of each configuration
(`MeasuredArms`), and of all of them together (`Tables`).

An arm is a baseline, or the operator as it chooses, or it is pinned to a schedule, after which it is named.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, TypeVar

from weft.bench import records, remarks
from weft.bench.ceilings import Ceilings
from weft.bench.console import print_table
from weft.bench.dispatch_shapes import MoeShape
from weft.bench.harness import Mode
from weft.bench.matmul_shapes import MatmulShape
from weft.bench.measure import Results
from weft.bench.operator import Operator, Preset, Record
from weft.bench.options import BenchOptions
from weft.bench.tables import markdown_table, milliseconds, number, share
from weft.words import counted

P = TypeVar("P", bound=Preset)

NEAR_BEST = 0.03
_MANY_KINDS = 3
_BY_KIND = "the fastest of each kind of schedule, and of how many"


class Tables(ABC):
    """Records of one mode as a table with a row for each shape, and sentences about all of them."""

    baselines: tuple[str, ...]
    compared: ClassVar[Mapping[str, tuple[str, ...]]]
    """Arms that choose: the baselines with which they are compared, their own first."""
    head: tuple[str, ...]
    tail: tuple[str, ...]
    """Columns before and after the times."""
    optional: tuple[str, ...] = ()
    """Columns that a narrow terminal leaves out, the last first."""

    @abstractmethod
    def described(self, record: Record) -> list[str]:
        """Cells of `head`, from any record of a shape."""

    @abstractmethod
    def judged(self, by_variant: Mapping[str, Record]) -> list[str]:
        """Cells of `tail`."""

    @abstractmethod
    def said(self, rows: Sequence[Record]) -> list[str]:
        """What the shapes say together, in sentences."""

    @abstractmethod
    def twin(self, record: Record) -> str | None:
        """Of an arm that chooses: the variant that runs the same schedule under its own name, if its choice is recorded."""

    def remarks(self, rows: Sequence[Record]) -> list[str]:
        """What has to be known of them, in sentences."""
        header, lines = self._lines(rows)
        gains = [cell for line in lines for name, cell in zip(header, line, strict=True) if " vs " in name]
        named = {(r["config"], r["variant"]): r for r in rows}
        pairs = [(r, other) for r in rows if (other := named.get((r["config"], self.twin(r) or "")))]
        return remarks.unclear(gains) + remarks.twins(pairs)

    def show(self, written: Sequence[Record], options: BenchOptions) -> None:
        """Print a table for each mode."""
        for mode in options.modes:
            rows = [r for r in written if r["mode"] == mode]
            if rows:
                title = f"{options.op}, {mode}, {options.dtype}, {options.device}, milliseconds"
                notes = self.said(rows) + self.remarks(rows) + self._on_host(rows)
                print_table(title, *self._lines(rows), notes, optional=self.optional)
                if by_kind := self._by_kind(rows):
                    print_table(f"{title}: {_BY_KIND}", *by_kind)

    def markdown(self, rows: Sequence[Record]) -> str:
        parts = [markdown_table(*self._lines(rows)), *self.said(rows), *self.remarks(rows), *self._on_host(rows)]
        if by_kind := self._by_kind(rows):
            parts += [f"{_BY_KIND.capitalize()}:", markdown_table(*by_kind)]
        return "\n\n".join(parts)

    def _by_kind(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]] | None:
        """(header, cells), where schedules of several kinds were pinned."""
        variants: dict[str, set[str]] = {}
        fastest: dict[str, dict[str, float]] = {}  # milliseconds by shape and kind
        for r in rows:
            if r["variant"] not in (*self.baselines, *self.compared):
                kind, of_shape = r["variant"].partition("[")[0], fastest.setdefault(r["config"], {})
                variants.setdefault(kind, set()).add(r["variant"])
                of_shape[kind] = min(r["p50_ms"], of_shape.get(kind, r["p50_ms"]))
        if len(variants) < _MANY_KINDS:
            return None
        header = [self.head[0], *(f"{kind} ({len(found)})" for kind, found in variants.items())]
        return header, [[config, *(milliseconds(ms.get(kind)) for kind in variants)] for config, ms in fastest.items()]

    def _on_host(self, rows: Sequence[Record]) -> list[str]:
        """What calls cost the host beside the device's time."""
        if rows[0]["mode"] != "queued":
            return []
        found = []
        for variant in (*self.baselines, *self.compared):
            busy = [r["host_us"] for r in rows if r["variant"] == variant and r.get("host_us")]
            first = [r["first_call_ms"] for r in rows if r["variant"] == variant and r.get("first_call_ms")]
            if busy and first:
                found.append(f"{median(busy):.0f} us and {median(first):.0f} ms with {variant}")
        if not found:
            return []
        return [
            f"A call keeps the host busy or waiting for, and the first one of a shape takes, in the median: {', '.join(found)}."
        ]

    def overs(self, rows: Sequence[Record], variant: str) -> list[str]:
        """Of the baselines with which `variant` is compared those that were measured."""
        there = {over for r in rows if r["variant"] == variant for over in r["speedup_over"]}
        return [over for over in self.compared[variant] if over in there]

    def pinned(self, rows: Sequence[Record], config: str) -> list[tuple[float, str]]:
        """(milliseconds, variant) of the schedules of a shape that were run under their names, the fastest first."""
        chosen = (*self.baselines, *self.compared)
        return sorted((r["p50_ms"], r["variant"]) for r in rows if r["config"] == config and r["variant"] not in chosen)

    def near_best(self, mine: Sequence[Record], rows: Sequence[Record]) -> tuple[float, int, int] | None:
        """On which share of shapes `mine` is about as fast as the fastest pinned schedule, and of how many, least and most."""
        others = [(r["p50_ms"], found) for r in mine if (found := self.pinned(rows, r["config"]))]
        if not others:
            return None
        near = share([ms <= (1 + NEAR_BEST) * found[0][0] for ms, found in others]) or 0.0
        return near, min(len(found) for _, found in others), max(len(found) for _, found in others)

    def _lines(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
        """(header, cells): shape, times, ratios, what they are judged by; where schedules were pinned the best of them."""
        variants = [v for v in (*self.baselines, *self.compared) if any(r["variant"] == v for r in rows)]
        compared = [(variant, over) for variant in self.compared for over in self.overs(rows, variant)]
        best = {r["config"]: self.pinned(rows, r["config"])[:1] for r in rows}
        pinned = any(best.values())
        header = [*self.head, *variants, *(f"{variant} vs {over}" for variant, over in compared), *self.tail]
        header += ["best schedule", "of them"] if pinned else []
        lines = []
        for config in best:
            by_variant = {r["variant"]: r for r in rows if r["config"] == config}
            cells = self.described(next(iter(by_variant.values())))
            cells += [milliseconds(by_variant.get(v, {}).get("p50_ms")) for v in variants]
            for v, over in compared:
                mine = by_variant.get(v)
                cells.append(remarks.gain(mine, by_variant.get(over), mine is not None and self.twin(mine) == over))
            cells += self.judged(by_variant)
            if pinned:
                cells += [cell for ms, name in best[config] for cell in (milliseconds(ms), name)] or ["", ""]
            lines.append(cells)
        return header, lines


def said_of_best(near: float, least: int, most: int) -> str:
    """Of `Tables.near_best`."""
    of = counted(most, "schedule") if least == most else f"{least} to {counted(most, 'schedule')}"
    return f"within {NEAR_BEST:.0%} of the fastest of {of} that ran under their names on {near:.0%}"


class MatmulOperator(Operator[P]):
    """Its presets are shapes, or are typed as shapes."""

    matmul = True
    small: str
    """A preset."""
    tables: Tables

    def modes(self, device: str) -> tuple[Mode, ...]:
        return ("single", "queued", "graph") if device == "cuda" else ("single", "queued")

    def default_dtype(self, device: str) -> str:
        return "bf16" if device == "cuda" else "fp32"

    def check_options(self, options: BenchOptions) -> None:
        if options.scale is not None:
            raise ValueError(
                f"scale={options.scale} is for tables: name a smaller shape, such as --preset {self.small}"
            )

    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        self.tables.show(written, options)

    def table(self, rows: Sequence[Record]) -> str:
        return self.tables.markdown(rows)


@dataclass(frozen=True)
class MeasuredArms(ABC):
    """One shape's results."""

    shape: MatmulShape | MoeShape
    world_size: int
    arms: tuple[str, ...]
    results: Results
    ceilings: list[Ceilings]
    notes: tuple[str, ...]

    tables: ClassVar[Tables]
    beside: ClassVar[tuple[str, ...]]
    """What was timed beside the arms."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Of an arm, beside those that all operators have."""

    @abstractmethod
    def roofline_ms(self, mode: Mode) -> float:
        """What bytes and operations take at the rates that were measured in the same run."""

    @abstractmethod
    def described(self, mode: Mode) -> Record:
        """Fields that all records of a mode share, beside those that all operators have."""

    @abstractmethod
    def judged(self, mode: Mode, name: str) -> Record:
        """Fields of an arm, beside those that all operators have."""

    @abstractmethod
    def said(self) -> list[str]:
        """Notes below the table."""

    def cells(self, mode: Mode, name: str) -> list[str]:
        """Of `columns`."""
        return []

    def baseline(self, mode: Mode) -> str:
        return self.tables.baselines[0]

    @property
    def wrong(self) -> tuple[str, ...]:
        return self.results.wrong

    def ms(self, mode: Mode, name: str) -> float | None:
        timing = self.results.timings.get((mode, name))
        return None if timing is None else timing.p50_ms

    def added_us(self, mode: Mode, name: str) -> float | None:
        """What a single call takes longer than the baseline's."""
        mine, base = self.ms(mode, name), self.ms(mode, self.baseline(mode))
        return 1e3 * (mine - base) if mode == "single" and mine is not None and base is not None else None

    def records(self, options: BenchOptions, run: str) -> list[Record]:
        rows = []
        for mode in options.modes:
            common = records.common_fields(
                options,
                self.shape.name,
                self.world_size,
                self.baseline(mode),
                self.roofline_ms(mode),
                self.ceilings,
                run,
            )
            common |= {"sources": list(self.shape.sources)} | self.described(mode)
            common |= {f"{name.replace('-', '_')}_ms": self.ms(mode, name) for name in self.beside}
            for name in self.arms:
                if self.results.timed(mode, name):
                    fields = records.arm_fields(self.results, mode, name, common, self.tables.baselines)
                    rows.append(common | fields | {"added_us": self.added_us(mode, name)} | self.judged(mode, name))
        return rows

    def show(self, options: BenchOptions) -> None:
        overs = [name for name in self.tables.baselines if name in self.arms]
        known = [name for name in self.arms if name in (*overs, *self.tables.compared)]
        rows = []
        for mode in options.modes:
            pinned = sorted(set(self.arms) - set(known), key=lambda name: self.ms(mode, name) or 0.0)
            timed = [name for name in (*known, *pinned, *self.beside) if self.results.timed(mode, name)]
            rows += [self._row(mode, name, overs) for name in timed]
        print_table(
            f"{options.op} {self.shape.name} ({'; '.join(self.shape.sources) or 'as asked for'}), {options.dtype}, "
            f"{counted(self.world_size, 'rank')}, {options.device}",
            ("variant", "mode", "ms", "p20 - p80", "skew", *(f"vs\n{over}" for over in overs), *self.columns, "over\nroofline",
             "added\nus", "host\nus", "first\nms", "error"),
            rows,
            (
                *self.said(),
                *(f"{name} cannot be captured: {why}" for name, why in self.results.not_captured.items()),
                *self.notes,
                *self.wrong,
            ),
            section=1,
            optional=(*self.columns, "p20 - p80", "skew", "first\nms", "error"),
        )  # fmt: skip

    def _row(self, mode: Mode, name: str, overs: Sequence[str]) -> list[str]:
        timing, results = self.results.timings[mode, name], self.results
        cells = [name, mode, f"{timing.p50_ms:.4f}", f"{timing.p20_ms:.4f} - {timing.p80_ms:.4f}"]
        cells.append(f"{timing.skew_ms:.4f}")
        host = number(timing.host_us, 1)
        if name not in self.arms:
            return [*cells, *[""] * (len(overs) + len(self.columns) + 2), host, "", ""]
        return [
            *cells,
            *(results.gain(mode, name, over) for over in overs),
            *self.cells(mode, name),
            f"{timing.p50_ms / self.roofline_ms(mode):.2f}",
            number(self.added_us(mode, name), 1),
            host,
            f"{results.first_call_ms[name]:.1f}",
            f"{results.errors[name]:.1e}",
        ]
