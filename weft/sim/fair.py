"""How fast steps go that run at once: max-min fair shares by progressive filling.

All steps' speeds grow together from 0, each up to 1, its speed when alone. When a resource is used up, the steps that use
it stop growing; the others go on. So no step can go faster without another one that is no faster going slower. Speeds are
relative: of two copies on a link each gets half, and a matmul and a copy that want too much of the memory lose the same part.

Source: Bertsekas and Gallager, "Data Networks", 6.5.2. Beside it, two things that hardware does not share fairly: a copying
kernel keeps its compute units to itself ("hold"), and copies slow down the kernels beside them by heat and cache misses,
without themselves becoming slower ("disturb").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LEAST = 1e-3
"""Of a resource whose units are all held: kernels that came first keep running on some."""


class Load(NamedTuple):
    """What one step takes at full speed, by resource: see `weft.sim.costs.Use`."""

    share: tuple[tuple[int, float], ...]
    hold: tuple[tuple[int, float], ...] = ()
    disturb: tuple[tuple[int, float], ...] = ()


def speeds(loads: Mapping[int, Load], counts: Mapping[int, int]) -> dict[int, float]:
    """The speed, from 0 to 1, of each of `counts[key]` steps with the load `loads[key]`, for each key."""
    left: dict[int, float] = {}
    asked: dict[int, float] = {}
    for key, n in counts.items():
        for resource, amount in loads[key].hold:
            left[resource] = left.get(resource, 1.0) - n * amount
        for resource, amount in loads[key].share:
            asked[resource] = asked.get(resource, 0.0) + n * amount
    capacity = {resource: max(LEAST, left.get(resource, 1.0)) for resource in asked}
    result = _fill(loads, counts, dict(capacity), asked)
    _disturb(loads, counts, capacity, result)
    return result


def _fill(
    loads: Mapping[int, Load], counts: Mapping[int, int], left: dict[int, float], asked: dict[int, float]
) -> dict[int, float]:
    result: dict[int, float] = {}
    growing = set(counts)
    while growing:
        level, full = 1.0, -1
        for resource, amount in asked.items():
            if amount > 1e-12 and left[resource] < level * amount:
                level, full = left[resource] / amount, resource
        stopped = growing if full < 0 else {key for key in growing if any(r == full for r, _ in loads[key].share)}
        for key in stopped:
            result[key] = level
            for resource, amount in loads[key].share:
                left[resource] = max(0.0, left[resource] - counts[key] * amount * level)
                asked[resource] -= counts[key] * amount
        if full >= 0:
            asked[full] = 0.0
        growing = growing - stopped
    return result


def _disturb(
    loads: Mapping[int, Load], counts: Mapping[int, int], capacity: dict[int, float], result: dict[int, float]
) -> None:
    """Slow down those who share a disturbed resource until it is enough for them."""
    lost: dict[int, float] = {}
    for key, n in counts.items():
        for resource, amount in loads[key].disturb:
            lost[resource] = lost.get(resource, 0.0) + n * amount * result[key]
    sharers: dict[int, list[tuple[int, float]]] = {resource: [] for resource in lost}
    for key in counts:
        for resource, amount in loads[key].share:
            if resource in lost:
                sharers[resource].append((key, amount))
    for resource, amount in lost.items():
        used = sum(counts[key] * a * result[key] for key, a in sharers[resource])
        left = max(LEAST, capacity.get(resource, 1.0) - amount)
        if used > left:
            for key, _ in sharers[resource]:
                result[key] *= left / used
