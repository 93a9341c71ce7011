"""Races and unwritten reads that `verify` finds, compared with checks of every two accesses, element by element.

The schedules are random: rectangles of buffers, copies and updates on several lanes and ranks, some of them ordered by
signals. `test_schedule_order.py` compares the order of steps with its definition.
"""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.schedule import RANK, Draft, Region, Schedule
from weft.schedule.regions import Buffer, overlap
from weft.schedule.verify import boxes, memory
from weft.schedule.verify.happens_before import HappensBefore
from weft.schedule.verify.memory import Instance

SHAPES = [(6, 6), (12, 2), (1, 9)]


def random_schedule(rng: random.Random) -> Schedule:
    world, (rows, cols) = rng.choice([1, 2, 3]), rng.choice(SHAPES)
    d = Draft("random", world)
    x = d.buffer("x", rows, cols, "fp32", "input")
    y, box, kept = (
        d.buffer(name, rows, cols, "fp32", role)
        for name, role in (("y", "output"), ("box", "symmetric"), ("kept", "scratch"))
    )
    signals, made = d.signals("s", 3), [0] * 3
    lanes = [d.lane(f"lane {i}") for i in range(rng.randint(1, 3))]
    for _ in range(rng.randint(3, 16)):
        lane, kind, i = rng.choice(lanes), rng.randrange(5), rng.randrange(3)
        at = (RANK + rng.randrange(world)) % world
        if kind == 0:
            lane.set(signals, i, at=at)
            made[i] += 1
        elif kind == 1 and made[i]:
            lane.wait(signals, i, rng.randint(1, made[i]), previous=rng.random() < 0.3)
        else:
            height, width = rng.randint(1, rows), rng.randint(1, cols)

            def part(buffer: Buffer) -> Region:
                begins = rng.randint(0, rows - height), rng.randint(0, cols - width)  # noqa: B023
                where = at if buffer is box else RANK  # noqa: B023
                return buffer.part(rows=(begins[0], height), cols=(begins[1], width), at=where)  # noqa: B023

            lane.copy(part(rng.choice([x, box, kept])), part(rng.choice([box, kept, y])), accumulate=rng.random() < 0.3)
    return d.schedule()


class Access(NamedTuple):
    event: int
    run: int
    elements: frozenset[tuple[int, int]]
    reads: bool
    writes: bool
    updates: bool


def accesses_of(happened: HappensBefore, schedule: Schedule) -> dict[Instance, list[Access]]:
    found: dict[Instance, list[Access]] = defaultdict(list)
    roles = {buffer.name: buffer.role for buffer in schedule.buffers}
    for number, event in enumerate(happened.events):
        for region, *how in happened.step(event).accesses():
            rows, cols = (
                range(begin, begin + count) for begin, count in ((region.row, region.rows), (region.col, region.cols))
            )
            run = event.run if roles[region.buffer] in ("input", "output") else 0
            elements = frozenset((row, col) for row in rows for col in cols)
            found[Instance(region.at, region.buffer, run)].append(Access(number, event.run, elements, *how))
    return found


def races_of_every_two(found: list[Access], happened: HappensBefore) -> set[tuple[int, int]]:
    return {
        (i, j)
        for (i, a), (j, b) in combinations(enumerate(found), 2)
        if a.event != b.event
        and a.elements & b.elements
        and (a.writes or b.writes)
        and not (a.updates and b.updates)
        and not happened.before(a.event, b.event)
        and not happened.before(b.event, a.event)
    }


def unwritten_elements(one: Access, found: list[Access], happened: HappensBefore) -> set[tuple[int, int]]:
    """Return the elements that `one` reads and that no access has written earlier in its run."""
    left = set(one.elements) if one.reads else set()
    for other in found:
        may_supply = other.event != one.event and other.run == one.run and not happened.before(one.event, other.event)
        if one.updates and other.updates:
            may_supply = may_supply and happened.before(other.event, one.event)
        if other.writes and may_supply:
            left -= other.elements
    return left


@settings(max_examples=150)
@given(st.randoms(use_true_random=False), st.sampled_from([3, 1 << 20]))
def test_memory_checks_find_what_a_check_of_every_two_accesses_finds(rng: random.Random, pairs: int) -> None:
    schedule = random_schedule(rng)
    ranks = [schedule.of_rank(rank) for rank in range(schedule.world_size)]
    try:
        happened = HappensBefore(ranks, 3)
    except ValueError:  # it hangs
        assume(False)
    wanted = accesses_of(happened, schedule)
    buffers = [{b.name: b for b in schedule.buffers_of_rank(rank)} for rank in range(schedule.world_size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "_PAIRS", pairs)
        found = memory.accesses(happened, buffers)
        assert {place: one.events.tolist() for place, one in found.items()} == {
            place: [access.event for access in every] for place, every in wanted.items()
        }
        for place, every in wanted.items():
            races = memory.races(found[place], happened)
            assert races == sorted(races_of_every_two(every, happened)), place
            holes = dict(memory.unwritten(found[place], happened))
            missing = [unwritten_elements(one, every, happened) for one in every]
            assert [i for i, elements in enumerate(missing) if elements] == list(holes), place
            for i, (row, end_row, col, end_col) in holes.items():
                assert {(r, c) for r in range(row, end_row) for c in range(col, end_col)} <= missing[i]


def random_boxes(rng: random.Random, n: int) -> np.ndarray:
    spans = [[sorted(rng.sample(range(12), 2)) for _ in range(2)] for _ in range(n)]
    return np.array([[*rows, *cols] for rows, cols in spans], np.int64).reshape(n, 4)


@given(st.randoms(use_true_random=False), st.integers(0, 12), st.integers(0, 12), st.sampled_from([1, 5, 1 << 20]))
def test_overlapping_boxes_are_found_once(rng: random.Random, n: int, m: int, pairs: int) -> None:
    a, b = random_boxes(rng, n), random_boxes(rng, m)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "_PAIRS", pairs)
        found = [pair for i, j in boxes.overlapping(a, b) for pair in zip(i.tolist(), j.tolist(), strict=True)]
    assert sorted(found) == [
        (i, j) for i in range(n) for j in range(m) if overlap(tuple(a[i].tolist()), tuple(b[j].tolist()))
    ]


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_few_boxes_are_compared_if_few_overlap(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n, compared = 1000, []
    slices = np.array([[2 * i, 2 * i + 3, 0, 8] for i in range(n)])[:, [0, 1, 2, 3] if axis == "rows" else [2, 3, 0, 1]]
    plain = boxes._overlap
    monkeypatch.setattr(boxes, "_overlap", lambda a, b: compared.append(len(a)) or plain(a, b))
    assert sum(len(i) for i, _ in boxes.overlapping(slices, slices)) == 3 * n - 2
    assert sum(compared) == 3 * n - 2
