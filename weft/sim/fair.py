"""How fast steps go that run at once: max-min fair shares by progressive filling.

Each resource gives all who want it the same amount, but no one more than it asks for: of a link of 100, a copy that can take 10
gets 10, and one that can take 100 gets 90. So no step can use more of a full resource without another one, that uses no more of
it, using less. Amounts are equal where a step is stopped: a step that takes parts of several resources has the same speed on all.

Filling goes in rounds, as it depends on where steps are stopped what is equal. All grow by what they take of the resource that
is expected to stop them, each up to its speed when alone. When a resource is used up, the steps that use it stop; the others go
on. If steps were stopped elsewhere than expected, that is expected in the next round. With one amount for each step, however many
resources it takes it of, the first round is the last.

Source: Bertsekas and Gallager, "Data Networks", 6.5.2. Beside it, two things that hardware does not share fairly: a copying
kernel keeps its compute units to itself ("hold"), and copies slow down the kernels beside them by heat and cache misses,
without themselves becoming slower ("disturb"). Holders wait for each other where all units are held: together they get no more
than there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

LEAST = 1e-3
"""Of a resource whose units are all held: kernels that came first keep running on some."""
_ROUNDS = 8
_NONE = 1e-12

_Uses: TypeAlias = dict[int, tuple[tuple[int, float], ...]]
"""What steps take at full speed, by step: of a resource, and of the units of resource r that are held as ~r."""


class Load(NamedTuple):
    """What one step takes at full speed, by resource: see `weft.sim.costs.Use`. A resource that stands for several, as where one
    rank stands for all, may be there several times: each of these gives its own part."""

    share: tuple[tuple[int, float], ...]
    hold: tuple[tuple[int, float], ...] = ()
    disturb: tuple[tuple[int, float], ...] = ()


def speeds(loads: Mapping[int, Load], counts: Mapping[int, int]) -> dict[int, float]:
    """The speed, from 0 to 1, of each of `counts[key]` steps with the load `loads[key]`, for each key."""
    held: dict[int, float] = {}
    for key, n in counts.items():
        for resource, amount in loads[key].hold:
            held[resource] = held.get(resource, 0.0) + n * amount
    uses = {key: loads[key].share + tuple((~r, a) for r, a in loads[key].hold if held[r] > 1) for key in counts}
    uses = {
        key: tuple((resource, amount) for resource, amount in of_key if amount > _NONE) for key, of_key in uses.items()
    }
    capacity = {r: max(LEAST, 1.0 - held.get(r, 0.0)) for of_key in uses.values() for r, _ in of_key}
    result = _fair(uses, counts, capacity)
    _disturb(loads, counts, capacity, result)
    return result


def _fair(uses: _Uses, counts: Mapping[int, int], capacity: Mapping[int, float]) -> dict[int, float]:
    takers: dict[int, list[tuple[float, int]]] = {}
    for key, of_key in uses.items():
        for resource, amount in of_key:
            takers.setdefault(resource, []).append((amount, counts[key]))
    short = {r for r, some in takers.items() if sum(amount * n for amount, n in some) > capacity[r]}
    if not short:
        return dict.fromkeys(counts, 1.0)
    level = {r: _level(takers[r], capacity[r]) for r in short}
    weights = {}
    for key, of_key in uses.items():
        stops = [(level[r] / amount, amount) for r, amount in of_key if r in short]
        weights[key] = min(stops, default=(1.0, 1.0))[1]
    for _ in range(_ROUNDS):
        result, stopped = _fill(uses, counts, capacity, short, weights)
        if stopped.items() <= weights.items():
            break
        weights |= stopped
    return result


def _level(takers: list[tuple[float, int]], left: float) -> float:
    """The amount that each gets of `left`, or less if it asks for less, if none is stopped elsewhere."""
    waiting = sum(n for _, n in takers)
    for amount, n in sorted(takers):
        if amount * waiting > left:
            break
        left, waiting = left - amount * n, waiting - n
    return left / waiting


def _fill(
    uses: _Uses, counts: Mapping[int, int], capacity: Mapping[int, float], short: set[int], weights: Mapping[int, float]
) -> tuple[dict[int, float], dict[int, float]]:
    """(speeds, what those that were stopped take of what stopped them) if steps grow in inverse proportion to their weights."""
    left = {r: capacity[r] for r in short}
    result: dict[int, float] = {}
    stopped: dict[int, float] = {}
    growing = set(counts)
    while growing:
        level = min(weights[key] for key in growing)  # where the next one is at full speed
        slopes: dict[int, float] = {}
        for key in growing:
            for resource, amount in uses[key]:
                if resource in short:
                    slopes[resource] = slopes.get(resource, 0.0) + counts[key] * amount / weights[key]
        full_at = [(left[resource] / slope, resource) for resource, slope in slopes.items()]
        first = min(full_at, default=(level, 0))
        if first[0] < level:
            level = first[0]
            full = {resource for at, resource in full_at if at <= level * (1 + 1e-9)}
            by = {key: [amount for resource, amount in uses[key] if resource in full] for key in growing}
            ended = {key for key, amounts in by.items() if amounts}
            stopped |= {key: weights[key] if weights[key] in by[key] else max(by[key]) for key in ended}
        else:
            ended = {key for key in growing if weights[key] <= level}
        for key in ended:
            result[key] = min(1.0, level / weights[key])
            for resource, amount in uses[key]:
                if resource in short:
                    left[resource] = max(0.0, left[resource] - counts[key] * amount * result[key])
        growing -= ended
    return result, stopped


def _disturb(
    loads: Mapping[int, Load], counts: Mapping[int, int], capacity: dict[int, float], result: dict[int, float]
) -> None:
    """Slow down those who share a disturbed resource until it is enough for them."""
    lost: dict[int, float] = {}
    for key, n in counts.items():
        for resource, amount in loads[key].disturb:
            lost[resource] = lost.get(resource, 0.0) + n * amount * result[key]
    sharers: dict[int, dict[int, float]] = {resource: {} for resource in lost}
    for key in counts:
        for resource, amount in loads[key].share:
            if resource in lost:
                sharers[resource][key] = sharers[resource].get(key, 0.0) + amount
    for resource, amount in lost.items():
        used = sum(counts[key] * a * result[key] for key, a in sharers[resource].items())
        left = max(LEAST, capacity.get(resource, 1.0) - amount)
        if used > left:
            for key in sharers[resource]:
                result[key] *= left / used
