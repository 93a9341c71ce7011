"""Rotational symmetry: rank 0 may represent all ranks if rank r does what rank 0 does, with all ranks shifted by r.

Numbers of steps must be equal at all ranks. Counters may be numbered differently. For each r there must be a renaming from the
counters of rank 0 to those of rank r. Under it, the same steps wait for a counter, and the same steps of the ranks equally far
back set it. The sets of all ranks define the renaming, one row for each:

    counter of rank 0 that rank -d sets  ->  counter of rank r that rank r - d sets in the same step

It must be one-to-one, and all waits must follow it. GPUs of a model (`weft.sim.model`) are alike. The topology
(`Topology.period`) says if their links are. The caller of `lower` knows if ranks start their runs at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from weft.sim.vectorised import ByRank, NumberedStep


def turns_around(items: Sequence[NumberedStep], world: int) -> bool:
    """True if rank r does what rank 0 does, shifted by r, and waits for the same sets."""
    different = list({item.same: item for item in items}.values())
    if not all(map(_is_alike, different)):
        return False
    sets: dict[str, dict[tuple[int, int], tuple[int, ByRank]]] = {}
    waits: dict[str, dict[int, ByRank]] = {}
    for item in different:
        if item.awaited is not None:
            waits.setdefault(item.signal, {})[_identity(item.place)] = item.place
        for signal, distance, place in _sets(item):
            sets.setdefault(signal, {})[distance, _identity(place)] = (distance, place)
    return all(_turn(sets.get(s, {}).values(), waits.get(s, {}).values(), world) for s in {**sets, **waits})


def _is_alike(item: NumberedStep) -> bool:
    numbers = (item.present, *item.numbers, item.distance, item.awaited)
    if not all(number is None or isinstance(number, int) for number in numbers):
        return False
    different = {id(one): one for one in item.tiled}.values()
    return len({(one.parts, one.read_bytes, tuple(s._replace(place=0) for s in one.sets)) for one in different}) <= 1


def _sets(item: NumberedStep) -> Iterator[tuple[str, int, ByRank]]:
    """Yield (signal, distance, place) of the sets in a step that all ranks have."""
    if item.distance is not None:
        assert isinstance(item.distance, int)  # it is alike
        yield item.signal, item.distance, item.place
    for of_ranks in zip(*(one.sets for one in item.tiled), strict=True):
        yield of_ranks[0].signal, of_ranks[0].distance, np.array([one.place for one in of_ranks])


def _identity(place: ByRank) -> int:
    """Return a key: the id of an array, or ~place for a number. Places are not negative, so that the two never collide."""
    return ~place if isinstance(place, int) else id(place)


def _turn(sets: Collection[tuple[int, ByRank]], waits: Collection[ByRank], world: int) -> bool:
    """True if the sets of one signal define a renaming of its counters, and its waits follow it."""
    if not sets:
        return False  # a counter that is never set: no set defines the renaming
    of_distance: dict[int, list[ByRank]] = {}
    for distance, place in sets:
        of_distance.setdefault(distance, []).append(place)
    table = np.concatenate([np.roll(_table(places, world), d, axis=1) for d, places in of_distance.items()])
    counters, first, same = np.unique(table[:, 0], return_index=True, return_inverse=True)
    renamed = table[first]  # [counters of rank 0, ranks]
    if len(table) > len(renamed) and not np.array_equal(renamed[same], table):
        return False
    twice = np.sort(renamed.T)  # duplicates of a rank become neighbours
    if (twice[:, 1:] == twice[:, :-1]).any():
        return False
    if not waits:
        return True
    waited = _table(waits, world)
    which = np.searchsorted(counters, waited[:, 0]).clip(max=len(counters) - 1)
    return np.array_equal(renamed[which], waited)


def _table(places: Collection[ByRank], world: int) -> np.ndarray:
    """Return the places as an array [places, ranks]."""
    table = np.empty((len(places), world), np.int64)
    for row, place in zip(table, places, strict=True):
        row[:] = place
    return table
