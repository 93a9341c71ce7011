"""The keys of machine and topology files, and plausible ranges of their values, for GPUs from 2017 to the near future.

Unknown keys and implausible values are refused, because a misspelt key would be ignored, and an implausible value would
give wrong predictions. The ranges are wide: they catch wrong units (395 TB/s for GB/s), not faulty measurements. In
keys, DTYPE and N mean any dtype and number.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from weft.hw.quantity import KINDS, UNITS, Quantity

_TERAFLOPS, _GIGABYTES_PER_S, _TERABYTES_PER_S = (0.1, 20_000, "TFLOP/s"), (0.05, 4000, "GB/s"), (0.02, 50, "TB/s")
_US, _PROGRAMS, _SHARE = (0.001, 10_000, "us"), (1, 4096, "1"), (0.02, 1.5, "1")
_KEYS: dict[str, tuple[float, float, str]] = {
    "compute.multiprocessors": (4, 2048, "1"),
    "compute.DTYPE_dense": _TERAFLOPS,
    "compute.DTYPE_matmul_8192": _TERAFLOPS,
    "compute.DTYPE_matmul_best": _TERAFLOPS,
    "compute.fp32_vector": (0.1, 2000, "TFLOP/s"),
    "compute.tile_rows": (16, 1024, "1"),
    "compute.tile_cols": (16, 1024, "1"),
    "compute.tile_half": (0.01, 1000, "1"),
    "compute.tile_step": (8, 1024, "1"),
    "compute.library_tile_half": (0.01, 1000, "1"),
    "compute.tile_ramp": (0.01, 10_000, "1"),
    "compute.fp8_tile_ramp": (0.01, 10_000, "1"),
    "compute.tile_part": _US,
    "compute.launch": _US,
    "compute.first_bag": _US,
    "compute.matmul_start": _US,
    "compute.sustained": (0.5, 4, "1"),
    "compute.grouped_matmul": _SHARE,
    "compute.library_grouped_matmul": _SHARE,
    "compute.matmul_keeps": (0.01, 1, "1"),
    "memory.capacity": (1, 4096, "GB"),
    "memory.bandwidth": _TERABYTES_PER_S,
    "memory.copy_bandwidth": _TERABYTES_PER_S,
    "memory.l2": (0.1, 4096, "MiB"),
    "memory.l2_copies": (1, 64, "1"),
    "memory.matmul": _SHARE,
    "memory.grouped_loads": (0.02, 200, "TB/s"),
    "memory.operand_loads": (0.02, 200, "TB/s"),
    "memory.library_grouped_matmul": _SHARE,
    "link.bandwidth": _GIGABYTES_PER_S,
    "link.port_usable": _GIGABYTES_PER_S,
    "link.pair_usable": _GIGABYTES_PER_S,
    "link.port_latency": _US,
    "link.pair_latency": _US,
    "link.stores_N_programs": _GIGABYTES_PER_S,
    "link.loads_N_programs": _GIGABYTES_PER_S,
    "link.copy_engine_NMB": _GIGABYTES_PER_S,
    "link.copy_engine_NGB": _GIGABYTES_PER_S,
    "link.stored_late": (0.0001, 1024, "MiB"),
    "link.stored_end": _US,
    "link.loaded_start": _US,
    "copy_engine.latency": _US,
    "copy_engine.bandwidth": _GIGABYTES_PER_S,
    "copy_engine.count": (1, 128, "1"),
    "copy_engine.row": _US,
    "copy_engine.gets": _SHARE,
    "kernel_copy.units": _PROGRAMS,
    "collective.all_gather": _GIGABYTES_PER_S,
    "collective.all_gather_latency": _US,
    "collective.all_reduce": (0.05, 20, "1"),
    "collective.all_to_all": _GIGABYTES_PER_S,
    "collective.all_to_all_large_latency": _US,
    "collective.large_latency": _US,
    "collective.reduce_scatter": _GIGABYTES_PER_S,
    "collective.reduce_scatter_large_latency": _US,
    "collective.small": _GIGABYTES_PER_S,
    "collective.units": _PROGRAMS,
    "contention.copy_engine_bandwidth": _GIGABYTES_PER_S,
    "contention.copy_engine_slowdown": (1, 20, "1"),
    "contention.kernel_copy_bandwidth": _GIGABYTES_PER_S,
    "contention.kernel_copy_slowdown": (1, 20, "1"),
    "contention.kernel_copy_units": _PROGRAMS,
    "signal.local": _US,
    "signal.remote": _US,
    "signal.kernel": _US,
    "signal.tile": (0.0001, 1000, "us"),
    "host.step": _US,
    "host.call": _US,
    "host.read": _US,
    "host.late": _US,
    "host.dynamic": (0.001, 100_000, "us"),
    "lanes.run": _US,
    "graph.run": _US,
    "graph.collective": _US,
    "graph.signal": _US,
    "graph.remote": _US,
    "heuristic.threshold": (0.1, 1000, "ms"),
    "nic.usable": _GIGABYTES_PER_S,
    "nic.latency": _US,
}
"""{key: (least value, largest value, unit)}"""
_DTYPES = r"(?:fp4|fp8|fp16|bf16|fp32|fp64|int8)"
_PATTERNS = [
    (re.compile(re.escape(key).replace("DTYPE", _DTYPES).replace("N", r"\d+")), limits) for key, limits in _KEYS.items()
]
_NOT_ABOVE = (
    ("memory.copy_bandwidth", "memory.bandwidth"), ("link.port_usable", "link.bandwidth"), ("link.pair_usable", "link.bandwidth"),
    ("copy_engine.bandwidth", "link.bandwidth"), ("compute.bf16_matmul_8192", "compute.bf16_dense"),
    ("compute.bf16_matmul_best", "compute.bf16_dense"),
)  # fmt: skip
"""(key of a measured number, key of the datasheet's number that is its upper limit)"""


@lru_cache(maxsize=1024)
def limits_of(key: str) -> tuple[float, float, str] | None:
    """Return (smallest plausible value, largest plausible value, unit) of `key`; None for an unknown key."""
    return _KEYS.get(key) or next((limits for pattern, limits in _PATTERNS if pattern.fullmatch(key)), None)


def add_count(key: str) -> None:
    """Make `key` a legal key for an integer, such as a topology's size. Do nothing if the key is legal already."""
    if limits_of(key) is None:
        _KEYS[key] = (1, 4096, "1")
        limits_of.cache_clear()


def unknown(key: str) -> str:
    """Return the error text for an unknown key, with the most similar known key."""
    near = difflib.get_close_matches(key, _KEYS, 1)
    return f"{key} is not a known key" + (f": do you mean {near[0]}?" if near else "; weft/hw/keys.py lists them all")


def implausible(quantities: Mapping[str, Quantity]) -> Iterator[str]:
    """Yield an error text for each value that has a wrong unit, is outside of its range, or exceeds the datasheet's value."""
    for key, quantity in quantities.items():
        least, most, unit = limits_of(key) or (0.0, math.inf, quantity.unit)
        units = next(kind for kind in KINDS if unit in kind)
        if quantity.unit not in units:
            yield f"{key} is in {quantity.unit}: give it in {' or '.join(units)}"
        elif not least * UNITS[unit] <= quantity.si <= most * UNITS[unit]:
            ends = "" if unit == "1" else f" {unit}"
            yield f"{key} = {_text(quantity)} is implausible: give {least:g} to {most:g}{ends}"
    for key, limit in _NOT_ABOVE:
        if key in quantities and limit in quantities and quantities[key].si > quantities[limit].si:
            reached, promised = quantities[key], quantities[limit]
            yield f"{key} = {_text(reached)} is implausible: it exceeds {limit} = {_text(promised)}"


def _text(quantity: Quantity) -> str:
    """Return the value and its unit, which a pure number lacks."""
    return f"{quantity.value:g}" if quantity.unit == "1" else f"{quantity.value:g} {quantity.unit}"
