"""What a benchmark needs to know about an operator (`Operator`), and what it makes of one configuration (`MeasuredArms`).

To add one: a file named like the operator in `weft.bench.ops` with its workload, its arms and an `Operator` called `OPERATOR`, and
a line in `weft.bench.core.operators`. Timing, checks, records, command line and documents are shared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from weft.bench.core import records
from weft.bench.core.ceilings import Ceilings
from weft.bench.core.console import print_table
from weft.bench.core.harness import Mode, Ranks
from weft.bench.core.measure import Results, Step
from weft.bench.core.options import BenchOptions
from weft.bench.core.tables import Record, number
from weft.words import counted


class Preset(Protocol):
    @property
    def name(self) -> str: ...


class Measured(Protocol):
    """One configuration's results."""

    @property
    def wrong(self) -> Sequence[str]:
        """What was not timed because its results differ from the reference."""

    def records(self, options: BenchOptions, run: str) -> list[Record]:
        """One JSON-ready object per (variant, mode)."""

    def show(self, options: BenchOptions) -> None:
        """Print a table."""


P = TypeVar("P", bound=Preset)


class Operator(ABC, Generic[P]):
    name: str
    matmul: bool = False  # whether the roofline needs the rate of a GEMM
    fp8: bool = False  # whether it can be measured with fp8 operands
    pictures: bool = False  # whether it draws its results

    def modes(self, device: str) -> tuple[Mode, ...]:
        """The ways of calling that are timed on this type of device."""
        return ("single", "queued", "graph") if device == "cuda" else ("single", "queued")

    def default_dtype(self, device: str) -> str:
        """What is measured if nobody says."""
        return "bf16" if device == "cuda" else "fp32"

    @abstractmethod
    def check_options(self, options: BenchOptions) -> None:
        """Raise ValueError, with the fix, for a preset, variant or scale that cannot be."""

    @abstractmethod
    def presets(self, options: BenchOptions) -> Sequence[P]:
        """The configurations that `options.preset` names."""

    @abstractmethod
    def measure(self, preset: P, ranks: Ranks, options: BenchOptions, ceilings: list[Ceilings], step: Step) -> Measured:
        """Build, check, time one configuration. Collective; the same result on every rank."""

    @abstractmethod
    def show_summary(self, written: Sequence[Record], options: BenchOptions) -> None:
        """Print what several configurations say together."""

    @abstractmethod
    def table(self, rows: Sequence[Record]) -> str:
        """Markdown of the records of one dtype and mode: a row per configuration."""


@dataclass(frozen=True)
class MeasuredArms(ABC):
    """One configuration's results, of variants with baselines. config: what has a `name`, and is `about` something."""

    config: Any
    world_size: int
    arms: tuple[str, ...]
    results: Results
    ceilings: list[Ceilings]
    notes: tuple[str, ...]

    baselines: ClassVar[tuple[str, ...]]
    columns: ClassVar[tuple[str, ...]] = ()
    """Of an arm, beside those that all operators have."""
    beside: ClassVar[tuple[str, ...]] = ()
    """What was timed beside the arms, and is shown below them."""
    optional: ClassVar[tuple[str, ...]] = ("p20 - p80", "skew", "first\nms", "error")
    """Columns that a narrow terminal leaves out, the last first."""

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
    def cells(self, mode: Mode, name: str) -> list[str]:
        """Of `columns`."""

    @abstractmethod
    def said(self) -> list[str]:
        """Notes below the table."""

    def baseline(self, mode: Mode) -> str:
        return self.baselines[0]

    def ordered(self, mode: Mode) -> Sequence[str]:
        """The arms as the table on the terminal has them."""
        return self.arms

    @property
    def wrong(self) -> tuple[str, ...]:
        return self.results.wrong

    def ms(self, mode: Mode, name: str) -> float | None:
        timing = self.results.timings.get((mode, name))
        return None if timing is None else timing.p50_ms

    def records(self, options: BenchOptions, run: str) -> list[Record]:
        rows, found = [], self.results
        for mode in options.modes:
            base, roofline_ms = self.baseline(mode), self.roofline_ms(mode)
            common = records.common_fields(
                options, self.config.name, self.world_size, base, roofline_ms, self.ceilings, run
            )
            common |= self.described(mode)
            for name in [name for name in self.arms if found.timed(mode, name)]:
                timing = found.timings[mode, name]
                over = {o: found.speedup(mode, name, o) for o in self.baselines if found.timed(mode, o)}
                mine = {
                    "variant": name, "mode": mode, **asdict(timing), "first_call_ms": found.first_call_ms[name],
                    "speedup": over.get(base), "speedup_over": over, "roofline_ratio": timing.p50_ms / roofline_ms,
                    "error": found.errors[name],
                }  # fmt: skip
                rows.append(common | mine | self.judged(mode, name))
        return rows

    def show(self, options: BenchOptions) -> None:
        overs = [name for name in self.baselines if name in self.arms]
        rows = [
            self._row(mode, name, overs)
            for mode in options.modes
            for name in (*self.ordered(mode), *self.beside)
            if self.results.timed(mode, name)
        ]
        print_table(
            f"{options.op} {self.config.name} ({self.config.about}), {options.dtype}, "
            f"{counted(self.world_size, 'rank')}, {options.device}",
            ("variant", "mode", "ms", "p20 - p80", "skew", *(f"vs\n{over}" for over in overs), "over\nroofline", *self.columns,
             "host\nus", "first\nms", "error"),
            rows,
            (
                *self.said(),
                *(f"{name} cannot be captured: {why}" for name, why in self.results.not_captured.items()),
                *self.notes,
                *self.wrong,
            ),
            section=1,
            optional=self.optional,
        )  # fmt: skip

    def _row(self, mode: Mode, name: str, overs: Sequence[str]) -> list[str]:
        found, timing = self.results, self.results.timings[mode, name]
        cells = [
            name,
            mode,
            f"{timing.p50_ms:.4f}",
            f"{timing.p20_ms:.4f} - {timing.p80_ms:.4f}",
            f"{timing.skew_ms:.4f}",
        ]
        host = number(timing.host_us, 1)
        if name not in self.arms:
            return [*cells, *[""] * (len(overs) + 1 + len(self.columns)), host, "", ""]
        cells += [found.gain(mode, name, over) for over in overs]
        cells += [f"{timing.p50_ms / self.roofline_ms(mode):.2f}", *self.cells(mode, name), host]
        return [*cells, f"{found.first_call_ms[name]:.1f}", f"{found.errors[name]:.1e}"]
