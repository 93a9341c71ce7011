"""Scarce resources, and the groups of lanes that can slow each other down.

A resource is scarce if all lanes together, each with its largest use, would use more than the whole resource. Other
resources never affect speeds, and are dropped. A part is a group of lanes that scarce resources connect, directly or
through other lanes. Lanes of different parts never slow each other down, so the speeds of each part are computed
separately. This makes the simulation of many ranks faster: usually each rank is a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from weft.sim.max_min import Load

Uses: TypeAlias = tuple[tuple[int, float], ...]


def scarce_only(loads: Sequence[Load], lanes: Sequence[set[int]]) -> list[Load]:
    """Return `loads` without the resources that all lanes together cannot use up, because these never slow a lane down.

    lanes: for each lane, the indices of its loads. A lane has one load at a time."""
    taken = [_taken(load) for load in loads]
    most: dict[int, float] = {}
    for of_lane in lanes:
        takes: dict[int, float] = {}
        for key in of_lane:
            for resource, amount in taken[key].items():
                if amount > takes.get(resource, 0.0):
                    takes[resource] = amount
        for resource, amount in takes.items():
            most[resource] = most.get(resource, 0.0) + amount
    scarce = {resource for resource, amount in most.items() if amount > 1}
    shared = {resource for load in loads for resource, _ in load.share}
    return [
        Load(
            _kept(load.share, scarce),
            _kept(load.hold, scarce),
            _kept(load.disturb, scarce & shared),  # "disturb" slows only steps with "share" uses
            _kept(load.whole, scarce),
        )
        for load in loads
    ]


def _kept(uses: Uses, resources: set[int]) -> Uses:
    kept = [use for use in uses if use[0] in resources]
    return uses if len(kept) == len(uses) else tuple(kept)


def parts_of(loads: Sequence[Load], lanes: Sequence[set[int]]) -> list[int]:
    """Return, for each lane, the number of its part: the group of lanes that can slow it down.

    Lanes that use a common resource are in the same part. lanes: for each lane, the indices of its loads.
    """
    above = list(range(len(lanes)))

    def part(lane: int) -> int:
        while above[lane] != lane:
            above[lane] = lane = above[above[lane]]
        return lane

    first: dict[int, int] = {}
    resources = [{resource for uses in (load.share, load.hold, load.disturb) for resource, _ in uses} for load in loads]
    for lane, of_lane in enumerate(lanes):
        for resource in set().union(*(resources[key] for key in of_lane)):
            above[part(lane)] = part(first.setdefault(resource, lane))
    numbers: dict[int, int] = {}
    return [numbers.setdefault(part(lane), len(numbers)) for lane in range(len(lanes))]


def _taken(load: Load) -> dict[int, float]:
    """Return {resource: amount that `load` takes, summed over all kinds of use}."""
    takes: dict[int, float] = {}
    for uses in (load.share, load.hold, load.disturb):
        for resource, amount in uses:
            takes[resource] = takes.get(resource, 0.0) + amount
    return takes
