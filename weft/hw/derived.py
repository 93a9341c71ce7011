"""Derivation of a machine's missing numbers from a measured machine, scaled by ratios of datasheet or driver numbers.

    number                                  scaled in proportion to
    rates of GEMMs                          the datasheet's bf16 rate
    fp32 elementwise kernels                compute.fp32_vector if given, otherwise the bf16 rate
    copies within memory                    the datasheet's memory bandwidth
    links, collectives, copies to peers     the bandwidth of a GPU's links
    L2, link.stored_late                    the number of compute units
    latencies, fractions, all others        not scaled
    memory.capacity                         not derived, because GPUs with equal chips have different capacities. If it is
                                            missing, no schedule is refused for lack of memory

Accuracy: an H100's numbers were derived from an H200's, and the planner's predictions compared with recorded calls on two
H100s (`tests/unit/test_hw_derived.py`). The mean error is 4% for calls above 100 us, and 12% for shorter calls. A
calibration (`weft plan calibrate`) replaces most of these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.hw.quantity import Quantity

GIVEN = ("compute.multiprocessors", "compute.bf16_dense", "memory.bandwidth", "link.bandwidth")
"""The keys that must be present in `given`."""
_BF16, _VECTOR, _MEMORY, _LINK, _UNITS = (
    "compute.bf16_dense",
    "compute.fp32_vector",
    "memory.bandwidth",
    "link.bandwidth",
    "compute.multiprocessors",
)
_AS: tuple[tuple[str, str], ...] = (
    ("compute.fp32_vector", _VECTOR),
    ("compute.", _BF16),
    ("memory.grouped_loads", _BF16),
    ("memory.operand_loads", _BF16),
    ("memory.copy_bandwidth", _MEMORY),
    ("memory.", _UNITS),
    ("link.stored_late", _UNITS),
    ("link.", _LINK),
    ("collective.", _LINK),
    ("copy_engine.bandwidth", _LINK),
    ("contention.", _LINK),
)
"""(prefix of a key, key of the number to which it is proportional). The first match applies."""
_RATES = ("B/s", "GB/s", "TB/s", "FLOP/s", "TFLOP/s", "MiB")
"""The units of the numbers that are scaled. Times, fractions and counts are not scaled."""
CAPACITY = "memory.capacity"
"""The key of a number that only a datasheet or the driver gives."""


def derived(
    name: str, given: Mapping[str, Quantity], base: str, of_base: Mapping[str, Quantity], lacks: Sequence[str] = ()
) -> dict[str, Quantity]:
    """Return all numbers of a machine, except the memory's capacity. Numbers that are not in `given` are derived from a
    measured machine.

    name: the machine's name, for errors.
    given: the numbers that the machine's file or driver provides, by key.
    base, of_base: the name and the numbers of the measured machine from which missing numbers are derived.
    lacks: dtypes for which the machine has no GEMMs.

    Raise `ValueError` if `given` lacks one of the keys in `GIVEN`.
    """
    if missing := [key for key in GIVEN if key not in given]:
        raise ValueError(
            f"{name}: add {', '.join(missing)}: the other numbers are derived from these numbers and from {base}'s numbers"
        )
    ratios = {key: given[key].si / of_base[key].si for key in (_BF16, _MEMORY, _LINK, _UNITS)}
    ratios[_VECTOR] = given[_VECTOR].si / of_base[_VECTOR].si if _VECTOR in given else ratios[_BF16]
    found = dict(given)
    for key, quantity in of_base.items():
        if key in given or key == CAPACITY or key.startswith(tuple(f"compute.{dtype}_" for dtype in lacks)):
            continue
        like = next((like for begin, like in _AS if key.startswith(begin)), None)
        if like is None or quantity.unit not in _RATES or ratios[like] == 1:
            found[key] = Quantity(quantity.value, quantity.unit, "derived", f"{base}'s")
        else:
            value = float(f"{quantity.value * ratios[like]:.4g}")
            found[key] = Quantity(value, quantity.unit, "derived", f"{base}'s {quantity.value:g}, scaled as {like}")
    return found
