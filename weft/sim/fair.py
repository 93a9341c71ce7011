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

_Uses: TypeAlias = dict[int, list[tuple[int, float]]]
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
    capacity = {resource: max(LEAST, 1.0 - amount) for resource, amount in held.items()}  # of others it is 1
    uses: _Uses = {}
    for key in counts:
        share, hold, _ = loads[key]
        waits = [(~r, a) for r, a in hold if held[r] > 1] if hold else []
        uses[key] = [use for use in (*share, *waits) if use[1] > _NONE]
    result = _fair(uses, counts, capacity)
    if any(loads[key].disturb for key in counts):
        _disturb(loads, counts, capacity, result)
    return result


def _fair(uses: _Uses, counts: Mapping[int, int], capacity: Mapping[int, float]) -> dict[int, float]:
    wanted: dict[int, float] = {}
    for key, of_key in uses.items():
        n = counts[key]
        for resource, amount in of_key:
            wanted[resource] = wanted.get(resource, 0.0) + amount * n
    room = {r: left for r, amount in wanted.items() if amount > (left := capacity.get(r, 1.0))}
    if not room:
        return dict.fromkeys(counts, 1.0)
    uses = {key: [use for use in of_key if use[0] in room] for key, of_key in uses.items()}  # no other one stops a step
    takers: dict[int, list[tuple[float, int]]] = {r: [] for r in room}
    for key, of_key in uses.items():
        n = counts[key]
        for resource, amount in of_key:
            takers[resource].append((amount, n))
    level = {r: _level(takers[r], left) for r, left in room.items()}
    weights = {
        key: min([(level[r] / amount, amount) for r, amount in of_key])[1] if of_key else 1.0
        for key, of_key in uses.items()
    }
    for _ in range(_ROUNDS):
        result, stopped = _fill(uses, counts, room, weights)
        if stopped.items() <= weights.items():
            break
        weights |= stopped
    return result


def _level(takers: list[tuple[float, int]], left: float) -> float:
    """The amount that each gets of `left`, or less if it asks for less, if none is stopped elsewhere."""
    waiting = 0
    for _, n in takers:
        waiting += n
    takers.sort()
    for amount, n in takers:
        if amount * waiting > left:
            break
        left, waiting = left - amount * n, waiting - n
    return left / waiting


def _fill(
    uses: _Uses, counts: Mapping[int, int], room: Mapping[int, float], weights: Mapping[int, float]
) -> tuple[dict[int, float], dict[int, float]]:
    """(speeds, what those that were stopped take of what stopped them) if steps grow in inverse proportion to their weights.
    uses: of what has too little `room`."""
    left = dict(room)
    result: dict[int, float] = {}
    stopped: dict[int, float] = {}
    growing = set(counts)
    slope_of = {}
    for key in counts:
        n, weight = counts[key], weights[key]
        slope_of[key] = [(r, n * amount / weight) for r, amount in uses[key]]
    while growing:
        level = min([weights[key] for key in growing])  # where the next one is at full speed
        slopes: dict[int, float] = {}
        for key in growing:
            for resource, slope in slope_of[key]:
                slopes[resource] = slopes.get(resource, 0.0) + slope
        full_at = [(left[resource] / slope, resource) for resource, slope in slopes.items()]
        first = min(full_at, default=(level, 0))
        if first[0] < level:
            level = first[0]
            up_to = level * (1 + 1e-9)
            full = {resource for at, resource in full_at if at <= up_to}
            by = {key: [amount for resource, amount in uses[key] if resource in full] for key in growing}
            ended = {key for key, amounts in by.items() if amounts}
            for key in ended:
                stopped[key] = weights[key] if weights[key] in by[key] else max(by[key])
        else:
            ended = {key for key in growing if weights[key] <= level}
        growing -= ended
        for key in ended:
            result[key] = speed = min(1.0, level / weights[key])
            if growing:
                n = counts[key]
                for resource, amount in uses[key]:
                    left[resource] = max(0.0, left[resource] - n * amount * speed)
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
