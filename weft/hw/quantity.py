"""A number of a machine, with its unit and source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UNITS = {
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "GB": 1e9,
    "B/s": 1.0, "GB/s": 1e9, "TB/s": 1e12,
    "FLOP/s": 1.0, "TFLOP/s": 1e12,
    "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9,
    "Hz": 1.0, "GHz": 1e9, "1": 1.0,
}  # fmt: skip
"""{unit: its value in bytes, seconds, hertz, bytes/s or FLOP/s}"""
TIMES, BYTES = ("ns", "us", "ms", "s"), ("B", "KiB", "MiB", "GiB", "GB")
BANDWIDTHS, RATES = ("B/s", "GB/s", "TB/s"), ("FLOP/s", "TFLOP/s")
KINDS = (TIMES, BYTES, BANDWIDTHS, RATES, ("Hz", "GHz"), ("1",))
"""Groups of units that can be converted into each other."""
SOURCES = ("measured", "datasheet", "paper", "derived", "assumed")
"""The allowed sources. derived: from another machine's number (`weft.hw.derived`). assumed: a guess; the note has the reason."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of a machine, with its unit and its source, such as "datasheet" or "assumed"."""

    value: float
    unit: str
    source: str
    note: str = ""

    @property
    def si(self) -> float:
        """The value in bytes, seconds, hertz, bytes/s or FLOP/s."""
        return self.value * UNITS[self.unit]

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit} ({self.source})" if self.unit != "1" else f"{self.value:g} ({self.source})"


@dataclass(frozen=True)
class Quantities:
    """Quantities by key. `numbers[key]` is a number in bytes, seconds, hertz, bytes/s or FLOP/s."""

    name: str
    quantities: Mapping[str, Quantity]

    def __getitem__(self, key: str) -> float:
        if key not in self.quantities:
            raise KeyError(f"{self.name} has no number {key}: use one of {', '.join(self.quantities)}")
        return self.quantities[key].si

    def count(self, key: str) -> int:
        return int(self[key])
