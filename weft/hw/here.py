"""The machine of a GPU, found by the GPU's name: from a machine file, or derived from the driver's numbers."""

from __future__ import annotations

from functools import lru_cache

from weft.hw.derived import CAPACITY, derived
from weft.hw.machine import Machine, file_of, load_machine
from weft.hw.nvml import DriverFacts, facts_of
from weft.hw.quantity import Quantity

_BASE = "h200"
_OF_BASE = DriverFacts(
    name="NVIDIA H200", multiprocessors=132, flops_per_s=132 * 1.98e9 * 4096, memory_bytes=150_754_820_096,
    memory_bytes_per_s=2 * 3.201e9 * 6144 / 8, link_bytes_per_s=18 * 25e9, nvlinks=18,
)  # fmt: skip
"""The driver's numbers for an H200, the base machine. For a GPU without a machine file, weft scales the H200's numbers by
the ratio of the GPU's driver numbers to these numbers. The datasheet's numbers cannot be used for this, because they differ
from the driver's.
"""
_MOST = 30.0
"""The largest plausible ratio between a number of the GPU and of the base machine. Driver numbers beyond this ratio are
ignored.
"""
_SCALED = {
    "compute.multiprocessors": "multiprocessors",
    "compute.bf16_dense": "flops_per_s",
    "memory.bandwidth": "memory_bytes_per_s",
    "memory.capacity": "memory_bytes",
    "link.bandwidth": "link_bytes_per_s",
}


@lru_cache(maxsize=16)
def machine_of(name: str) -> Machine | None:
    """Return the machine of NVIDIA GPUs of this name, from a machine file or derived from the driver's numbers. Return
    None if no machine file has the name, and this host has no such GPU.

    name: the GPU's name as the driver or torch spells it.
    """
    if file := file_of(name):
        return load_machine(file)
    facts = facts_of(name)
    if facts is None and not name.startswith(("NVIDIA", "Tesla", "Quadro", "GeForce")):
        return None
    return _from_driver(name, facts)


def _from_driver(name: str, facts: DriverFacts | None) -> Machine:
    base, given, unknown = load_machine(_BASE), dict[str, Quantity](), list[str]()
    for key, fact in _SCALED.items():
        ratio = getattr(facts, fact) / getattr(_OF_BASE, fact) if facts else 0.0
        if not 1 / _MOST < ratio < _MOST:
            unknown.append(key)
            ratio = 1.0
        if key == CAPACITY and key in unknown:  # another GPU's capacity could refuse schedules that fit
            continue
        of_base = base[key]
        value = round(of_base.value * ratio) if key == "compute.multiprocessors" else of_base.value * ratio
        given[key] = Quantity(
            float(f"{value:.4g}"), of_base.unit, "derived", "from the driver" if ratio != 1 else f"{_BASE}'s"
        )
    about = f"no machine file has {name!r}: its numbers are derived from the driver's, and from {base.name}'s"
    if replaced := [key for key in unknown if key != CAPACITY]:
        about += f"; the driver has no usable {', '.join(replaced)}, so {base.name}'s are used"
    if CAPACITY in unknown:
        about += f"; the driver has no usable {CAPACITY}, so no schedule is refused for its memory"
    return Machine(name, derived(name, given, _BASE, base.quantities), base.topology, about)
