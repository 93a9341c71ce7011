"""Whether one rank may stand for all: whether at rank r everything happens as at rank 0, r ranks further on.

Numbers of steps must be the same at all ranks. Counters may be numbered differently: there must be, for each r, a way to rename
those of rank 0 as those of rank r with which rank r's are set by the steps of the ranks as far back, and waited for by the
same steps. The sets of all ranks give that renaming, one row for each:

    counter of rank 0 that rank -d sets  ->  counter of rank r that rank r - d sets in the same step

It must name no counter twice, on either side, and all waits must follow it. GPUs of a model (`weft.sim.model`) are alike. Whether
their links are is asked of the topology (`Topology.period`), and when ranks come to their runs the caller of `lower` knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from weft.schedule import Set, Wait
from weft.sim.numbers import ByRank, Item


def turns_around(items: Sequence[Item], world: int) -> bool:
    """Whether rank r does what rank 0 does, turned by r, and waits for the same sets."""
    different = list({item.same: item for item in items}.values())
    if not all(map(_is_alike, different)):
        return False
    sets: dict[str, dict[tuple[int, int], tuple[int, ByRank]]] = {}
    waits: dict[str, dict[int, ByRank]] = {}
    for item in different:
        if isinstance(item.origin.step, Wait):
            place = item.numbers[0]
            waits.setdefault(item.signal, {})[_identity(place)] = place
        for signal, distance, place in _sets(item):
            sets.setdefault(signal, {})[distance, _identity(place)] = (distance, place)
    return all(_turn(sets.get(s, {}).values(), waits.get(s, {}).values(), world) for s in {**sets, **waits})


def _is_alike(item: Item) -> bool:
    step = item.origin.step
    numbers = item.numbers[:1] if isinstance(step, Set) else item.numbers[isinstance(step, Wait) :]
    if not isinstance(item.present, int) or not all(isinstance(number, int) for number in numbers):
        return False
    different = {id(one): one for one in item.tiled}.values()
    return len({(one.parts, one.read_bytes, tuple(s._replace(place=0) for s in one.sets)) for one in different}) <= 1


def _sets(item: Item) -> Iterator[tuple[str, int, ByRank]]:
    """(signal, distance, place) of what all ranks set in a step that they have in common."""
    if isinstance(item.origin.step, Set):
        distance, place = item.numbers
        assert isinstance(distance, int)  # it is alike
        yield item.signal, distance, place
    for of_ranks in zip(*(one.sets for one in item.tiled), strict=True):
        yield of_ranks[0].signal, of_ranks[0].distance, np.array([one.place for one in of_ranks])


def _identity(place: ByRank) -> int:
    """Equal for what is the same array; numbers, which are no places below 0, apart from these."""
    return ~place if isinstance(place, int) else id(place)


def _turn(sets: Collection[tuple[int, ByRank]], waits: Collection[ByRank], world: int) -> bool:
    """Of one signal."""
    if not sets:
        return False  # what is waited for is never set, and nothing says which counters are the same
    of_distance: dict[int, list[ByRank]] = {}
    for distance, place in sets:
        of_distance.setdefault(distance, []).append(place)
    table = np.concatenate([np.roll(_table(places, world), d, axis=1) for d, places in of_distance.items()])
    counters, first, same = np.unique(table[:, 0], return_index=True, return_inverse=True)
    renamed = table[first]  # [counters of rank 0, ranks]
    if len(table) > len(renamed) and not np.array_equal(renamed[same], table):
        return False
    twice = np.sort(renamed.T)  # of a rank, next to each other
    if (twice[:, 1:] == twice[:, :-1]).any():
        return False
    if not waits:
        return True
    waited = _table(waits, world)
    which = np.searchsorted(counters, waited[:, 0]).clip(max=len(counters) - 1)
    return np.array_equal(renamed[which], waited)


def _table(places: Collection[ByRank], world: int) -> np.ndarray:
    """[places, ranks]"""
    table = np.empty((len(places), world), np.int64)
    for row, place in zip(table, places, strict=True):
        row[:] = place
    return table
