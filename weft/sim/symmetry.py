"""Rotational symmetry: rank 0 may represent all ranks if rank r has the steps of rank 0 with all ranks shifted by r.

The sizes in a step must be equal on all ranks, but the counters of signals may have different indices. For each rank r there
must be a one-to-one map from the counters of rank 0 to the counters of rank r. With its counters renamed by this map,
rank 0 must make the same sets and waits as rank r. For example, every rank sets a signal of the rank at distance d in
the same step. Then rank -d increments a counter of rank 0, rank r - d increments a counter of rank r, and the map must
relate these two counters.

This module checks only steps and signals. The GPUs of a model (`weft.sim.model`) are always equal. `Topology.period`
tells if their links are equal too. Ranks that begin their runs at different times must not be represented by rank 0;
callers then pass `alike=False` to `weft.sim.lower.lower`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from weft.sim.vectorised import ByRank, NumberedStep


def turns_around(items: Sequence[NumberedStep], world: int) -> bool:
    """True if the steps of all ranks are rotationally symmetric: rank r has the steps of rank 0, with all ranks shifted
    by r (see the top of this file).

    items: all steps of the schedule, evaluated for all ranks.
    """
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
    """Yield (name of the signal, distance to the rank that has it, index of the counter) for each signal that `item`
    sets. The distance must be the same on all ranks.
    """
    if item.distance is not None:
        assert isinstance(item.distance, int)  # the same on all ranks
        yield item.signal, item.distance, item.place
    for of_ranks in zip(*(one.sets for one in item.tiled), strict=True):
        yield of_ranks[0].signal, of_ranks[0].distance, np.array([one.place for one in of_ranks])


def _identity(place: ByRank) -> int:
    """Return a dict key for `place`, the index of a signal's counter on each rank. For an array, the key is its id. For
    an int, the key is ~place, which is negative and so differs from all ids.
    """
    return ~place if isinstance(place, int) else id(place)


def _turn(sets: Collection[tuple[int, ByRank]], waits: Collection[ByRank], world: int) -> bool:
    """True if each rank sets and waits for the counters of one signal as rank 0 does, except for the indices of the counters.

    sets: for each step that sets the signal: (distance to the rank that has the signal, index of the counter for each
        executing rank).
    waits: for each step that waits for the signal: the index of the counter on each rank.
    """
    if not sets:
        return False  # a counter that is never set has no renaming
    of_distance: dict[int, list[ByRank]] = {}
    for distance, place in sets:
        of_distance.setdefault(distance, []).append(place)
    table = np.concatenate([np.roll(_table(places, world), d, axis=1) for d, places in of_distance.items()])
    counters, first, same = np.unique(table[:, 0], return_index=True, return_inverse=True)
    renamed = table[first]  # [counters of rank 0, ranks]
    if len(table) > len(renamed) and not np.array_equal(renamed[same], table):
        return False
    twice = np.sort(renamed.T)  # duplicates on a rank become adjacent
    if (twice[:, 1:] == twice[:, :-1]).any():
        return False
    if not waits:
        return True
    waited = _table(waits, world)
    which = np.searchsorted(counters, waited[:, 0]).clip(max=len(counters) - 1)
    return np.array_equal(renamed[which], waited)


def _table(places: Collection[ByRank], world: int) -> np.ndarray:
    """Return the indices `places` as an array `[len(places), world]`, with a column for each rank."""
    table = np.empty((len(places), world), np.int64)
    for row, place in zip(table, places, strict=True):
        row[:] = place
    return table
