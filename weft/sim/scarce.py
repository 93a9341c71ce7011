"""Which resources can run short at all, and which lanes can slow each other down.

A resource that has enough even if each lane takes as much as it ever does is left out: speeds are the same without it. Lanes
that have no scarce resource in common, nor by way of others, never slow each other down: each such part of a program has its
own speeds, and a step of one need not look at the others. For ranks that differ, where all have to be simulated, that is mostly
a part for each rank; else the moments at which anything begins or ends, times all lanes, grow with the ranks' square.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.sim.fair import Load


def scarce_only(loads: Sequence[Load], lanes: Sequence[set[int]]) -> list[Load]:
    """`loads` without what there is enough of, where each of `lanes` has one of some loads at a time."""
    most: dict[int, float] = {}
    for of_lane in lanes:
        takes: dict[int, float] = {}
        for key in of_lane:
            for resource, amount in _taken(loads[key]).items():
                takes[resource] = max(amount, takes.get(resource, 0.0))
        for resource, amount in takes.items():
            most[resource] = most.get(resource, 0.0) + amount
    scarce = {resource for resource, amount in most.items() if amount > 1}
    return [
        Load(*(tuple((resource, amount) for resource, amount in uses if resource in scarce) for uses in load))
        for load in loads
    ]


def parts_of(loads: Sequence[Load], lanes: Sequence[set[int]]) -> list[int]:
    """The number of each lane's part; lanes that have a resource in common are in one."""
    above = list(range(len(lanes)))

    def part(lane: int) -> int:
        while above[lane] != lane:
            above[lane] = lane = above[above[lane]]
        return lane

    first: dict[int, int] = {}
    for lane, of_lane in enumerate(lanes):
        for key in of_lane:
            for resource in _taken(loads[key]):
                above[part(lane)] = part(first.setdefault(resource, lane))
    numbers: dict[int, int] = {}
    return [numbers.setdefault(part(lane), len(numbers)) for lane in range(len(lanes))]


def _taken(load: Load) -> dict[int, float]:
    """Of each resource, in all ways together."""
    takes: dict[int, float] = {}
    for uses in load:
        for resource, amount in uses:
            takes[resource] = takes.get(resource, 0.0) + amount
    return takes
