"""The parameters of T3's GPU, each with its unit and source."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from weft.hw.quantity import UNITS, Quantities, Quantity

SOURCES = ("paper", "simulator", "datasheet", "derived", "assumed")
"""The allowed sources. simulator: Accel-Sim's V100 configuration, which the paper uses for parameters that table 1 lacks."""

_COUNTS = (
    "gpu.units", "gemm.tile_tokens", "gemm.tile_features", "gemm.slab", "gemm.ahead", "gemm.per_unit", "gemm.raster_columns",
    "memory.channels", "memory.queue", "memory.stores", "tracker.ways", "tracker.wavefronts", "copies.block",
)  # fmt: skip
"""The parameters that are counts, of at least 1."""
_MAY_BE_ZERO = ("tracker.sets", "memory.latency", "link.latency", "memory.stores_low", "gemm.raster_turns")


@dataclass(frozen=True)
class TrackingGpu(Quantities):
    """A GPU with T3's hardware: a tracker, triggered copies, memory that adds stored values to its contents, and arbitration
    between the memory accesses of the GEMM and of communication.

        gpu = t3_gpu()
        gpu["memory.effective"]              0.46e12 (bytes/s)
        gpu.with_values({"gpu.units": 160})  the paper's GPU-2X-CU

    Values read by key are in bytes, seconds, hertz, bytes/s or FLOP/s. `tracker.sets = 0` means a tracker without limits.
    """

    def __post_init__(self) -> None:
        for key, quantity in self.quantities.items():
            if not 0 <= quantity.si < float("inf"):
                raise ValueError(f"{key} = {quantity.value:g} {quantity.unit}: give a number of at least 0")
            if quantity.si == 0 and key not in _MAY_BE_ZERO:
                raise ValueError(f"{key} = 0: give a positive number")
        for key in _COUNTS:
            if self[key] != int(self[key]) or self[key] < 1:
                raise ValueError(f"{key} = {self[key]:g}: give an integer of at least 1")
        low, high, most = (self[key] for key in ("memory.stores_low", "memory.stores_high", "memory.stores"))
        if not low < high <= most:
            raise ValueError(
                f"memory.stores_low = {low:g}, memory.stores_high = {high:g}, memory.stores = {most:g}: a queue of this "
                "length never drains between these marks. Use stores_low < stores_high <= stores"
            )
        ways, waves = self.count("tracker.ways"), self.count("tracker.wavefronts")
        if self["tracker.sets"] and ways < waves:
            raise ValueError(
                f"tracker.ways = {ways} cannot hold a work-group's {waves} wavefronts: its first stores would wait forever. "
                f"Use at least {waves} ways, or fewer wavefronts"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self.quantities)

    def with_values(self, values: Mapping[str, float]) -> TrackingGpu:
        """Return this GPU with some values replaced. values: the new values, in the units of the current values."""
        for key in values:
            self[key]
        changed = {
            key: replace(quantity, value=values.get(key, quantity.value)) for key, quantity in self.quantities.items()
        }
        return replace(self, quantities=changed)

    def scaled(self, key: str, factor: float) -> TrackingGpu:
        """Return this GPU with the value of `key` multiplied by `factor`, and rounded if it is a count."""
        value = self.quantities[key].value * factor
        return self.with_values(
            {key: max(1, round(value)) if self.quantities[key].unit == "1" and value >= 4 else value}
        )

    @property
    def peak(self) -> float:
        """The peak rate of the whole GPU in FLOP/s."""
        return self["gpu.units"] * self["gpu.clock"] * self["gpu.flop_per_clock"]


@cache
def t3_gpu() -> TrackingGpu:
    """Return the paper's GPU. Its link bandwidth of 150 GB/s is interpreted as 75 GB/s in each direction."""
    data = tomllib.loads(files(__package__).joinpath("t3.toml").read_text())
    quantities = {
        f"{group}.{key}": Quantity(**fields) for group, entries in data.items() for key, fields in entries.items()
    }
    for key, one in quantities.items():
        if one.unit not in UNITS or one.source not in SOURCES:
            raise ValueError(
                f"{key}: unit {one.unit!r}, source {one.source!r}: use as unit one of {', '.join(UNITS)}, and as source one of "
                f"{', '.join(SOURCES)}"
            )
    return TrackingGpu("T3's GPU", quantities)


def other_reading() -> TrackingGpu:
    """Return the paper's GPU with links of 150 GB/s in each direction.

    The memory bandwidth is twice that of `t3_gpu`, because the memory bandwidth is derived from the link bandwidth, with
    percentages from section 6.1.1.
    """
    gpu = t3_gpu()
    return gpu.with_values({"link.bandwidth": 150, "memory.effective": 2 * gpu["memory.effective"] / 1e12})
