"""Accesses to the elements of a buffer: races, reads of unwritten elements, and elements that no step writes.

Two accesses are compared only if their regions overlap (`weft.schedule.verify.boxes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from weft.schedule.regions import Box, Buffer, box_of
from weft.schedule.steps import Step
from weft.schedule.verify.boxes import hole, inside, overlapping
from weft.schedule.verify.happens_before import HappensBefore


class Instance(NamedTuple):
    """A buffer of one rank. Races are found between accesses to the same instance. An input or output is a different
    instance in each run, because the caller may pass another tensor.

    run: the number of the run for an input or output; 0 for a buffer that persists between runs.
    """

    rank: int
    buffer: str
    run: int


class Accesses(NamedTuple):
    """The accesses of all steps to one buffer, as arrays with an element for each access.

    events: the numbers of the events that make the accesses, ascending.
    runs: the number of the run of each event.
    boxes: the rows and columns of each access, int [n, 4] (`weft.schedule.verify.boxes`).
    reads, writes, updates: the kind of each access, as bools. An atomic update also writes.
    """

    events: np.ndarray
    runs: np.ndarray
    boxes: np.ndarray
    reads: np.ndarray
    writes: np.ndarray
    updates: np.ndarray


class _StepAccess(NamedTuple):
    at: int
    buffer: str
    box: Box
    how: tuple[bool, bool, bool]
    """Three bools: the access reads, writes, is an atomic update."""


def accesses(happened: HappensBefore, buffers: Sequence[Mapping[str, Buffer]]) -> dict[Instance, Accesses]:
    """Return {buffer: the accesses of all events to the buffer, in the order of events}.

    buffers: for each rank, its buffers by name.
    """
    found: dict[Instance, list[tuple[int, int, Box, tuple[bool, bool, bool]]]] = defaultdict(list)
    of_ranks = [[[_of_step(step) for step in lane.steps] for lane in lanes] for lanes in happened.ranks]
    for number, (run, rank, lane, step) in enumerate(happened.events):
        for at, name, box, how in of_ranks[rank][lane][step]:
            is_kept = buffers[at][name].role in ("symmetric", "scratch")
            found[Instance(at, name, 0 if is_kept else run)].append((number, run, box, how))
    arrays = {instance: [np.array(column) for column in zip(*rows, strict=True)] for instance, rows in found.items()}
    return {instance: Accesses(events, runs, boxes, *how.T) for instance, (events, runs, boxes, how) in arrays.items()}


def _of_step(step: Step) -> list[_StepAccess]:
    """Return the accesses of a step with numbers in place of expressions, except accesses to empty regions."""
    every = [
        _StepAccess(cast(int, region.at), region.buffer, box_of(region), (reads, writes, updates))
        for region, reads, writes, updates in step.accesses()
    ]
    return [one for one in every if one.box[0] < one.box[1] and one.box[2] < one.box[3]]


def races(found: Accesses, happened: HappensBefore) -> list[tuple[int, int]]:
    """Return the pairs of accesses that race: both access an element, at least one writes it, and no signal orders
    them.

    A pair is two indices of `found`, the smaller first; the pairs are sorted. Two updates may run in any order.
    """
    pairs: list[tuple[int, int]] = []
    stores = found.writes & ~found.updates
    for some, others in ((stores, found.reads | found.writes), (found.updates, ~found.writes)):
        for i, j in _overlapping(found.boxes, some, others):
            first, second = np.minimum(i, j), np.maximum(i, j)
            # The search finds each pair of stores twice. A step does not race with itself.
            counts = (~stores[j] | (i < j)) & (found.events[first] != found.events[second])
            first, second = first[counts], second[counts]
            unordered = ~happened.each_before(found.events[first], found.events[second])
            pairs += zip(first[unordered].tolist(), second[unordered].tolist(), strict=True)
    return sorted(pairs)


def unwritten(found: Accesses, happened: HappensBefore) -> Iterator[tuple[int, Box]]:
    """Yield (index of the access, a box of unwritten elements) for each access that reads elements that no step has
    written earlier in the same run.

    A write counts as earlier unless it certainly happens after the read. If the order of a write and a read is not
    determined, `races` reports the pair, and this function does not. An update also reads its elements. For an update,
    other updates count as earlier only if they certainly happen before it.
    """
    covered = np.zeros(len(found.events), bool)
    earlier = [np.zeros((2, 0), np.int64)]
    for writes in (found.writes & ~found.updates, found.updates):  # one write often covers the reads of many updates
        for i, j in _overlapping(found.boxes, found.reads & ~covered, writes):
            number, other = found.events[i], found.events[j]
            counts = (
                (other != number)
                & (found.runs[j] == found.runs[i])
                & ~happened.each_before(number, other)
                & (~(found.updates[i] & found.updates[j]) | happened.each_before(other, number))
            )
            i, j = i[counts], j[counts]
            covered[i[inside(found.boxes[i], found.boxes[j])]] = True
            earlier.append(np.stack([i, j])[:, ~covered[i]])
    reads = np.flatnonzero(found.reads & ~covered)
    i, j = np.concatenate(earlier, 1)
    order = np.argsort(i, kind="stable")
    i, j = i[order], j[order]
    ends = np.searchsorted(i, reads, "right").tolist()
    for read, begin, end in zip(reads.tolist(), np.searchsorted(i, reads).tolist(), ends, strict=True):
        if missing := hole(_box(found.boxes[read]), found.boxes[j[begin:end]]):
            yield read, missing


def hole_of_writes(whole: Box, found: Accesses | None) -> Box | None:
    """Return a rectangle of `whole` that no step writes; None if every element is written.

    found: the accesses to the buffer; None if there are none.
    """
    return hole(whole, np.zeros((0, 4), np.int64) if found is None else found.boxes[found.writes])


def _overlapping(boxes: np.ndarray, some: np.ndarray, others: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of arrays of indices (i, j): box i[k], which is in `some`, overlaps with box j[k], which is in
    `others`.

    some, others: which boxes to compare, as bools with an element for each box.
    """
    if some.any() and others.any():
        of_some, of_others = np.flatnonzero(some), np.flatnonzero(others)
        for i, j in overlapping(boxes[some], boxes[others]):
            yield of_some[i], of_others[j]


def _box(row: np.ndarray) -> Box:
    first, end, col, end_col = row.tolist()
    return first, end, col, end_col
