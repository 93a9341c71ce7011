"""What a benchmark needs to know about an operator.

To add one: a file named like the operator with its workload, its arms and an `Operator` called `OPERATOR`, and a line in
`weft.bench.core.operators`. Timing, checks, records, command line and documents are shared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from weft.bench.core.ceilings import Ceilings
from weft.bench.core.harness import Mode, Ranks
from weft.bench.core.measure import Step
from weft.bench.core.options import BenchOptions

Record = dict[str, Any]


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

    @abstractmethod
    def modes(self, device: str) -> tuple[Mode, ...]:
        """The ways of calling that are timed on this type of device."""

    @abstractmethod
    def default_dtype(self, device: str) -> str:
        """What is measured if nobody says."""

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
