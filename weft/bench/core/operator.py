"""The base classes of benchmarks. An `OperatorBenchmark` has an operator's presets and tables. For each preset it makes
a `Variants` with inputs, variants, baselines and the number of bytes to move.

An operator with its own baselines has a module in `weft.bench.ops` with the operator's name, and in it the benchmark
`OPERATOR`. All operators share timing, checks, records, command line and documents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import ClassVar, Generic, Self, TypeVar

import torch

from weft.bench.core import records, remarks
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.console import print_table
from weft.bench.core.harness import Call, Mode, Ranks
from weft.bench.core.measure import Results, Step, VariantCalls, Workload, measure_variants
from weft.bench.core.options import BenchOptions
from weft.bench.core.tables import Record, by_config, cell, markdown_table, milliseconds, table, times
from weft.words import counted

P = TypeVar("P")
Columns = Mapping[str, Callable[[Record], str]]


@dataclass(frozen=True)
class Measured:
    """The results of a benchmark on one configuration. records: a record for each (variant, mode).

    beside: the times of other calls, such as the GEMM alone.
    title, notes: for the table on the terminal.
    wrong: error texts of variants with a wrong result, which have no times.
    """

    records: list[Record]
    beside: Sequence[Record] = ()
    title: str = ""
    notes: Sequence[str] = ()
    wrong: Sequence[str] = ()


class Variants(Workload):
    """The inputs of one configuration of a benchmark on one rank, and the variants (implementations of the operator) that
    compute its output.
    """

    about: str
    """A description of the configuration, which follows the configuration's `name` in titles."""
    baselines: ClassVar[tuple[str, ...]]

    @abstractmethod
    def variants(self, wanted: Sequence[str]) -> tuple[VariantCalls, Mapping[str, Call], list[str]]:
        """Return three values: the variants, of which the first is the baseline; other calls to time, such as the GEMM alone;
        and notes on omitted variants.

        wanted: names of variants; empty for the default variants.
        """

    @abstractmethod
    def roofline_ms(self, ceilings: Sequence[Ceilings]) -> float | None:
        """Return a lower bound of the time in ms, from bytes, FLOPs and the peak rates of each rank (`ceilings`).

        Return None if the benchmark does not count bytes and FLOPs. All ranks must make this call.
        """

    def baseline(self, mode: Mode) -> str:
        return self.baselines[0]

    @abstractmethod
    def shared(self, mode: Mode, found: Results, ceilings: Sequence[Ceilings]) -> Record:
        """Return record fields of this operator that are equal for all variants of a mode.

        found: the times and errors so far.
        ceilings: each rank's peak rates.
        """

    @abstractmethod
    def derived(self, mode: Mode, name: str, found: Results) -> Record:
        """Return record fields of this operator that describe variant `name`. All ranks must make this call.

        found: the times and errors so far.
        """

    @abstractmethod
    def notes(self, records: Sequence[Record], ceilings: Sequence[Ceilings]) -> list[str]:
        """Return the notes to print below the table of results."""

    def measured(self, options: BenchOptions, ceilings: list[Ceilings], step: Step) -> Measured:
        """Check and time the variants. All ranks must make this call; every rank returns the same times.

        ceilings: each rank's peak rates.
        step: the progress display.
        """
        variants, beside, notes = self.variants(options.variants)
        found = measure_variants(
            self,
            variants,
            beside,
            modes=options.modes,
            seconds=options.time_s,
            repetitions=options.repetitions,
            step=step,
        )
        counters = self._counted(variants, beside, found, options)
        rows = [row for mode in options.modes for row in self._records(mode, variants, found, options, ceilings)]
        for row in rows:
            if counters and row["mode"] == options.modes[0]:
                row["counters"] = counters.get(row["variant"])
                row["counters_beside"] = {name: of for name, of in counters.items() if name in beside}
        notes = [*self.notes(rows, ceilings), *notes]
        notes += [f"{name} cannot be captured: {why}" for name, why in found.not_captured.items()]
        return self.as_measured(rows, beside, found, notes, options)

    def as_measured(
        self, rows: list[Record], beside: Mapping[str, Call], found: Results, notes: list[str], options: BenchOptions
    ) -> Measured:
        """Return `Measured` with the records `rows`, a title, the `notes`, and the times of the calls `beside`, such as the
        GEMM alone. `found` contains these times.
        """
        timed = [(mode, name, timing) for (mode, name), timing in found.timings.items() if name in beside]
        others = [{"variant": name, "mode": mode} | timing.as_fields() for mode, name, timing in timed]
        where = f"{options.dtype}, {counted(self.ranks.world_size, 'rank')}, {options.device}"
        title = f"{options.op} {self.name} ({self.about}), {where}"
        return Measured(rows, others, title, notes, tuple(found.wrong.values()))

    def _counted(
        self, variants: VariantCalls, beside: Mapping[str, Call], found: Results, options: BenchOptions
    ) -> dict[str, Record]:
        """Return {call: record fields with its power and memory traffic}, from the GPU driver's counters, for the first mode.
        Return {} unless the options ask for counters.
        """
        if not options.counters:
            return {}
        from weft.bench.core.counted import count

        calls: dict[str, Call] = {**variants, **beside}
        return count(calls, self.ranks, self.input_sets, lambda name: found.ms(options.modes[0], name))

    def _records(
        self, mode: Mode, variants: VariantCalls, found: Results, options: BenchOptions, ceilings: list[Ceilings]
    ) -> list[Record]:
        base, roofline_ms, world = self.baseline(mode), self.roofline_ms(ceilings), self.ranks.world_size
        common = records.common_fields(options, self.name, world, base, roofline_ms, ceilings)
        common |= self.shared(mode, found, ceilings)
        rows = []
        for name in variants:
            if (ms := found.ms(mode, name)) is None:
                continue
            over = {o: base_ms / ms for o in self.baselines if (base_ms := found.ms(mode, o)) is not None}
            mine = {
                "variant": name, "mode": mode, **found.timings[mode, name].as_fields(), "first_call_ms": found.first_call_ms[name],
                "speedup": over.get(base), "speedup_over": over, "roofline_ratio": ms / roofline_ms if roofline_ms else None,
                "error": found.errors[name],
            }  # fmt: skip
            rows.append(common | mine | self.derived(mode, name, found))
        return rows


class ChoosingVariants(Variants):
    """Variants for `weft bench never-slower`: an operator that selects its schedule is compared with serial calls."""

    @abstractmethod
    def pair(self, mode: Mode) -> tuple[str, str]:
        """Return the names of the two variants to compare: weft's operator, which selects its schedule, and the baseline of
        hand-written serial calls.
        """

    @abstractmethod
    def taken(self, variant: str, mode: Mode) -> str:
        """Return the name of the schedule that the operator selected in the last call of `variant`."""

    @abstractmethod
    def alone_ms(self, mode: Mode, found: Results) -> tuple[float | None, float | None]:
        """Return (ms of the computation alone, ms of the collective alone) from the results `found`. A time is None if
        it was not measured.
        """

    @abstractmethod
    def variant(self, name: str) -> Callable[[int], torch.Tensor]:
        """Return a function that calls variant `name` in eager mode. Its argument is the number of an input set."""

    @abstractmethod
    def resized(self, size: int) -> Self:
        """Return variants with the same weights and smaller inputs: the first `size` rows (tokens, samples) of these inputs."""


class OperatorBenchmark(ABC, Generic[P]):
    """The benchmark of an operator: its presets (named configurations), variants and tables. P: the class of the presets.

    Override `measure` and the methods for tables if the benchmark does not use `Variants`.
    """

    name: str
    matmul: bool = False  # True if the roofline needs the rate of a GEMM
    fp8: bool = False  # True if the operator supports fp8 operands
    refuses: Mapping[str, str] = {
        "pictures": "draws no pictures: do not pass it",
        "option": "has no options: do not pass it",
    }
    baselines: tuple[str, ...] = ()
    columns: ClassVar[Columns] = {}
    """Columns that only this operator adds to the table of one configuration, which has a line for each variant."""
    narrow: ClassVar[tuple[str, ...]] = ("p20 - p80", "skew", "first\nms", "error")
    """The columns that a narrow terminal omits from the table of one configuration. The last of them is omitted first.
    """
    optional: tuple[str, ...] = ()
    """The columns that a narrow terminal omits from the table of all configurations, which has a line for each
    configuration.
    """
    head: tuple[str, ...] = ()
    time: str = "{}"
    tail: tuple[str, ...] = ()
    """Column headers of the table of all configurations. `head`: the columns before the times. `time`: the column with
    the times of a variant, whose name replaces {}. `tail`: the columns after the speedups.
    """

    def modes(self, device: str) -> tuple[Mode, ...]:
        """Return the modes to time on this type of device."""
        return ("single", "queued", "graph") if device == "cuda" else ("single", "queued")

    def default_dtype(self, device: str) -> str:
        """Return the default dtype."""
        return "bf16" if device == "cuda" else "fp32"

    @abstractmethod
    def check_options(self, options: BenchOptions) -> None:
        """Raise ValueError, with the fix, for an invalid preset or variant."""

    @abstractmethod
    def presets(self, options: BenchOptions) -> Sequence[P]:
        """Return the presets (named configurations) that `options.preset` names."""

    # --- presets that become variants ---

    def workload(self, preset: P, ranks: Ranks, options: BenchOptions) -> Variants:
        raise NotImplementedError

    def compared(self, rows: Sequence[Record]) -> Mapping[str, tuple[str, ...]]:
        """Return the speedups that the table shows: {variant: the baselines with which it is compared, the main baseline first}."""
        raise NotImplementedError

    def shown(self, rows: Sequence[Record]) -> list[str]:
        """Return the variants whose times the table shows, baselines first. Variants that run a schedule pinned by name
        are left out.
        """
        there = dict.fromkeys(r["variant"] for r in rows if not self.pinned(r["variant"]))
        return [*(v for v in self.baselines if v in there), *(v for v in there if v not in self.baselines)]

    def described(self, record: Record) -> list[str]:
        """Return the cells of a table row for the columns `head`, which describe a configuration. record: any record of the
        configuration.
        """
        return [record["config"]]

    def derived_cells(self, by_variant: Mapping[str, Record]) -> list[str]:
        """Return the cells of a table row for the columns `tail`, which follow the speedups. by_variant: the records of this
        configuration, by variant.
        """
        return []

    def twin(self, record: Record) -> str | None:
        """Return the variant in which the schedule of `record` is pinned; None if there is no such variant."""
        return None

    def pinned(self, variant: str) -> bool:
        """True if the variant runs a schedule that was pinned by name. Tables show such variants last, the fastest first."""
        return False

    def measure(self, preset: P, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step) -> Measured:
        """Make inputs, and check and time the configuration `preset`. All ranks must make this call; every rank returns
        the same result.

        ceilings: each rank's peak rates.
        step: the progress display.
        """
        step(f"{preset.name}: making inputs", 0)  # type: ignore[attr-defined]
        return self.workload(preset, ranks, options).measured(options, ceilings, step)

    def show(self, found: Measured, options: BenchOptions) -> None:
        """Print the table of one configuration. found: the results of the configuration."""
        by_name = {(r["mode"], r["variant"]): r for r in found.records}
        rows: list[Record] = []
        for mode in options.modes:
            mine = [r for r in found.records if r["mode"] == mode]
            rows += sorted(mine, key=lambda r: r["p50_ms"] if self.pinned(r["variant"]) else 0.0)
            rows += [r for r in found.beside if r["mode"] == mode]

        def over(baseline: str, r: Record) -> str:
            mine, base = (by_name.get((r["mode"], name)) for name in (r["variant"], baseline))
            return times(1) if base and mine is base else remarks.gain(mine, base)

        columns: Columns = {
            "variant": itemgetter("variant"), "mode": itemgetter("mode"), "ms": cell("p50_ms", 4),
            "p20 - p80": lambda r: f"{r['p20_ms']:.4f} - {r['p80_ms']:.4f}", "skew": cell("skew_ms", 4),
            **{f"vs\n{name}": partial(over, name) for name in self.baselines}, "over\nroofline": cell("roofline_ratio", 2),
            **self.columns, "CPU\nus": cell("host_us", 1), "first\nms": cell("first_call_ms", 1),
            "error": lambda r: "" if r.get("error") is None else f"{r['error']:.1e}",
        }  # fmt: skip
        notes = (*found.notes, *found.wrong)
        print_table(*table(found.title, rows, columns), notes, section=1, optional=self.narrow)

    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        """Print a summary of several configurations. written: their records."""
        for mode in options.modes:
            if rows := [r for r in written if r["mode"] == mode]:
                title = f"{options.op}, {mode}, {options.dtype}, {options.device}, milliseconds"
                print_table(title, *self.summary(rows), self.notes(rows), optional=self.optional)

    def lines(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of a table with a row for each configuration: times, speedups, and the operator's own
        columns.
        """
        variants = self.shown(rows)
        pairs = [(variant, over) for variant, overs in self.compared(rows).items() for over in overs]
        header = [*self.head, *map(self.time.format, variants), *(f"{v} vs {over}" for v, over in pairs), *self.tail]
        lines = []
        for by_variant in by_config(rows).values():
            cells = self.described(next(iter(by_variant.values())))
            cells += [milliseconds(by_variant.get(v, {}).get("p50_ms")) for v in variants]
            for v, over in pairs:
                mine = by_variant.get(v)
                cells.append(remarks.gain(mine, by_variant.get(over), mine is not None and self.twin(mine) == over))
            lines.append(cells + self.derived_cells(by_variant))
        return header, lines

    def summary(self, rows: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
        """Return (header, rows) of the table that `lines` makes. Subclasses add rows with means."""
        return self.lines(rows)

    def notes(self, rows: Sequence[Record]) -> list[str]:
        """Return sentences that explain cells of the table, to be printed below it."""
        header, lines = self.lines(rows)
        gains = [cell for line in lines for name, cell in zip(header, line, strict=True) if " vs " in name]
        named = {(r["config"], r["variant"]): r for r in rows}
        pairs = [(r, other) for r in rows if (other := named.get((r["config"], self.twin(r) or "")))]
        return remarks.unclear(gains) + remarks.twins(pairs)

    def table(self, rows: Sequence[Record]) -> str:
        """Return a Markdown table of records of one dtype and mode, with a row per configuration."""
        return "\n\n".join([markdown_table(*self.summary(rows)), *self.notes(rows)])
