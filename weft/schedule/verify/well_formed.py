"""Checks of a schedule's declarations and of each step by itself, independent of the order of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

from weft.schedule.printing import describe
from weft.schedule.regions import ITEM_BYTES, Access, Buffer, Declared, box_of, overlap, undeclared
from weft.schedule.schedule import Schedule
from weft.schedule.steps import Collective, Read, Step, totals_of, variables_of
from weft.schedule.steps.collectives import disagreement
from weft.schedule.verify.issue_order import Event, Lanes

Buffers = Sequence[dict[str, Buffer]]
"""For each rank, its buffers by name, with numbers as sizes."""


def wrong_declarations(schedule: Schedule, buffers: Buffers) -> Iterator[str]:
    for what, items in (("buffers", schedule.buffers), ("signals", schedule.signals), ("lanes", schedule.lanes)):
        for name, times in Counter(item.name for item in items).items():
            if times > 1:
                yield f"{times} {what} are named {name!r}: give each its own name"
    names = {buffer.name for buffer in schedule.buffers}
    for held in schedule.contents:
        if held.buffer not in names:
            yield undeclared(held.buffer)
    for buffer in schedule.buffers:
        sizes = [(cast(int, of_rank[buffer.name].rows), buffer.cols) for of_rank in buffers]
        if min(map(min, sizes)) < 0:
            yield f"buffer {buffer.name} has shapes {sizes} on the ranks: sizes must not be negative"
        elif max(rows * columns for rows, columns in sizes) * ITEM_BYTES[buffer.dtype] >= 2**63:
            yield f"buffer {buffer.name} has shapes {sizes} on the ranks: a buffer must have less than 2**63 bytes"
        if buffer.role == "symmetric" and len(set(sizes)) > 1:
            yield (
                f"buffer {buffer.name}: symmetric memory must have the same size on all ranks, but rows={buffer.rows} differs "
                "between ranks"
            )


def unread(schedule: Schedule, rank: int) -> Iterator[str]:
    """Yield an error for each step of `rank` whose sizes depend on the contents of a buffer, if no earlier step of the lane
    reads this buffer (`Read`).

    For a copy by copy engine, the CPU must read the buffer.
    """
    held = {contents.buffer for contents in schedule.contents}
    if not held and not schedule.has_tiles:  # `of_rank` has substituted all variables
        return
    for lane in schedule.of_rank(rank, expected=False):
        known: dict[str, str] = {}
        for step in lane.steps:
            if isinstance(step, Read):
                known[step.region.buffer] = step.by
            for part in [] if step.tile_kernel else totals_of(step):
                buffer = schedule.buffer(part.buffer) if part.buffer in held else None
                size = buffer.rows * buffer.cols if buffer and isinstance(buffer.rows, int) else part.end
                if not 0 <= part.first <= part.end <= size:
                    text = (
                        f"elements [{part.first}:{part.end}] of {part.buffer} are out of range: it has {size} elements"
                    )
                    yield f"lane {lane.name}: {describe(step, rank)}: {text}"
            for name in sorted(variables_of(step)):
                where = f"lane {lane.name}: {describe(step, rank)}"
                if name not in held:
                    yield f"{where}: {name} has no value: if it is a buffer, declare its contents with Draft.holds"
                elif name not in known:
                    yield f"{where}: a size depends on {name}, which the lane has not read: add read({name}) before this step"
                elif step.copies_by == "dma" and known[name] != "host":
                    yield (
                        f"{where}: a copy engine gets its size from the CPU, but the CPU has not read {name}: use "
                        f'read({name}, by="host") before this step, or copy by="kernel"'
                    )


def declared(schedule: Schedule, buffers: Buffers) -> list[Declared]:
    """Return for each rank the buffers and signals to which its steps may refer."""
    signals, held = {s.name: s.count for s in schedule.signals}, {c.buffer for c in schedule.contents}
    return [Declared(rank, buffers, signals, held) for rank in range(schedule.world_size)]


def wrong_step(where: Declared, step: Step) -> Iterator[str]:
    """Yield an error text for each fault of a step, which must have numbers in place of expressions, and must not be a
    `Tiles` step.
    """
    accesses = step.accesses()
    misplaced = [fault for access in accesses for fault in _misplaced(where, access)]
    if misplaced:
        yield from misplaced
        return
    yield from step.faults(where)
    written = [access.region for access in accesses if access.writes]
    for region in [access.region for access in accesses if not access.writes]:
        for out in written:
            same_place = region.buffer == out.buffer and region.at == out.at
            in_place = step.in_place and region == out
            if same_place and not in_place and overlap(box_of(region), box_of(out)):
                yield (
                    f"{describe(out, where.rank)} is written while the same step reads {describe(region, where.rank)}: "
                    "write to elements that the step does not read"
                )


def wrong_collectives(schedule: Schedule, ranks: Sequence[Lanes]) -> Iterator[tuple[str, Event]]:
    """Yield (text, event) for each collective that the ranks call differently. The event is the call of the first rank."""
    meetings: dict[tuple, dict[int, Event]] = {}
    for rank, lanes in enumerate(ranks):
        for i, lane in enumerate(lanes):
            nth = 0
            for number, step in enumerate(lane.steps):
                if isinstance(step, Collective):
                    meetings.setdefault((i, nth), {})[rank] = Event(1, rank, i, number)
                nth += step.meets
    for events in meetings.values():
        first = next(iter(events.values()))
        if len(events) < schedule.world_size:
            yield (
                f"only ranks {list(events)} of {schedule.world_size} call this collective: all ranks must call it",
                first,
            )
        elif fault := disagreement([cast(Collective, ranks[e.rank][e.lane].steps[e.step]) for e in events.values()]):
            yield fault, first


def _misplaced(where: Declared, access: Access) -> Iterator[str]:
    region, buffers = access.region, where.buffers
    at = cast(int, region.at)
    if not 0 <= at < len(buffers):
        yield f"{describe(region, where.rank)}: rank {at} does not exist: use 0 to {len(buffers) - 1}"
    elif region.buffer not in buffers[at]:
        yield undeclared(region.buffer)
    else:
        buffer = buffers[at][region.buffer]
        row, end_row, col, end_col = box_of(region)
        if not (0 <= row <= end_row <= cast(int, buffer.rows) and 0 <= col <= end_col <= buffer.cols):
            yield f"{describe(region, where.rank)} is outside its buffer of {buffer.rows} x {buffer.cols} elements"
        if at != where.rank and buffer.role != "symmetric":
            yield (
                f"{describe(region, where.rank)} belongs to a peer, so {region.buffer} must be symmetric, but "
                f"it is {buffer.role}"
            )
        if access.writes and buffer.role == "input":
            yield f"{describe(region, where.rank)} is written, but {region.buffer} is an input: write to a buffer with another role"
