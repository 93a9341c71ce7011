"""What is wrong with a schedule's declarations and single steps by themselves, without regard to order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from weft.schedule.expr import Index
from weft.schedule.order import Event, Lanes, meeting
from weft.schedule.schedule import Schedule
from weft.schedule.steps import (
    MATMULS,
    OPS,
    SCALED_MATMULS,
    Buffer,
    Collective,
    Compute,
    Copy,
    Read,
    Region,
    Set,
    Step,
    Tiles,
    Wait,
    totals_of,
    variables_of,
)
from weft.schedule.text import describe

Buffers = Sequence[dict[str, Buffer]]
"""For each rank, its buffers by name, with their sizes in numbers."""
Box = tuple[int, int, int, int]
"""(first row, end row, first column, end column)"""


class Access(NamedTuple):
    region: Region
    reads: bool
    writes: bool


def accesses(step: Step) -> tuple[Access, ...]:
    """The regions that a step reads and writes."""
    if isinstance(step, Copy | Collective):
        return Access(step.src, True, False), Access(step.dst, False, True)
    if isinstance(step, Compute):
        return *(Access(region, True, False) for region in step.inputs), Access(step.out, step.accumulate, True)
    if isinstance(step, Read):
        return (Access(step.region, True, False),)
    return ()


def box_of(region: Region) -> Box:
    row, rows, col, cols = (cast(int, n) for n in (region.row, region.rows, region.col, region.cols))
    return row, row + rows, col, col + cols


def overlap(a: Box, b: Box) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1]) and max(a[2], b[2]) < min(a[3], b[3])


def wrong_declarations(schedule: Schedule, buffers: Buffers) -> Iterator[str]:
    for what, items in (("buffers", schedule.buffers), ("signals", schedule.signals), ("lanes", schedule.lanes)):
        for name, times in Counter(item.name for item in items).items():
            if times > 1:
                yield f"{times} {what} are named {name!r}: give each its own name"
    for buffer in schedule.buffers:
        sizes = [(cast(int, of_rank[buffer.name].rows), buffer.cols) for of_rank in buffers]
        if min(map(min, sizes)) < 0:
            yield f"buffer {buffer.name}: its sizes on the ranks are {sizes}, and none can be negative"
        if buffer.role == "symmetric" and len(set(sizes)) > 1:
            yield f"buffer {buffer.name}: symmetric memory has one size on all ranks, and rows are {buffer.rows}"


def unread(schedule: Schedule, rank: int) -> Iterator[str]:
    """Steps of `rank` whose sizes depend on what their lane has not read, or, of copy engines, not with the host."""
    held = {contents.buffer for contents in schedule.contents}
    for lane in schedule.of_rank(rank, expected=False):
        known: dict[str, str] = {}
        for step in lane.steps:
            if isinstance(step, Read):
                known[step.region.buffer] = step.by
            for part in [] if isinstance(step, Tiles) else totals_of(step):
                buffer = schedule.buffer(part.buffer) if part.buffer in held else None
                size = buffer.rows * buffer.cols if buffer and isinstance(buffer.rows, int) else part.end
                if not 0 <= part.first <= part.end <= size:
                    text = f"elements {part.first} to {part.end} of {part.buffer}, which has {size}"
                    yield f"lane {lane.name}: {describe(step, rank)}: {text}"
            for name in sorted(variables_of(step)):
                where = f"lane {lane.name}: {describe(step, rank)}"
                if name not in held:
                    yield f"{where}: there is no value for {name}: say what that buffer holds (Draft.holds)"
                elif name not in known:
                    yield f"{where}: the lane has not read {name} before"
                elif isinstance(step, Copy) and step.by == "dma" and known[name] != "host":
                    yield f"{where}: a copy engine's size comes from the host, which has not read {name}"


def wrong_step(schedule: Schedule, buffers: Buffers, rank: int, step: Step) -> Iterator[str]:
    """The faults of a step of `rank`, in numbers; of tiles, one tile at a time (`weft.schedule.tiles.forked`)."""
    if isinstance(step, Set | Wait):
        yield from _wrong_signal(schedule, step)
        return
    misplaced = [fault for access in accesses(step) for fault in _misplaced(buffers, rank, access)]
    if isinstance(step, Read):
        buffer = buffers[rank].get(step.region.buffer)
        if step.region.buffer not in {contents.buffer for contents in schedule.contents}:
            misplaced.append(f"nothing says what {step.region.buffer} holds (Draft.holds)")
        elif buffer and (buffer.dtype != "int64" or box_of(step.region) != (0, buffer.rows, 0, buffer.cols)):
            misplaced.append(f"it reads numbers: all of a buffer of int64, and this is {buffer.dtype}")
    if isinstance(step, Collective) and (step.src.at, step.dst.at) != (rank, rank):
        misplaced.append("a collective is between buffers of the rank that calls it")
    yield from misplaced or _misshapen(rank, step, [buffers[rank][a.region.buffer].dtype for a in accesses(step)])


def wrong_collectives(schedule: Schedule, ranks: Sequence[Lanes]) -> Iterator[tuple[str, Event]]:
    """(fault, the collective on the first rank that comes to it)"""
    meetings: dict[tuple, dict[int, Event]] = {}
    for rank, lanes in enumerate(ranks):
        for i, lane in enumerate(lanes):
            for number, step in enumerate(lane.steps):
                if isinstance(step, Collective):
                    event = Event(1, rank, i, number)
                    meetings.setdefault(meeting(ranks, event), {})[rank] = event
    for events in meetings.values():
        first = next(iter(events.values()))
        steps = [cast(Collective, ranks[e.rank][e.lane].steps[e.step]) for e in events.values()]
        rows = [cast(int, step.src.rows) for step in steps]
        if len(events) < schedule.world_size:
            yield f"of {schedule.world_size} ranks only {list(events)} call this collective", first
            continue
        into = [(cast(int, step.dst.rows), cast(int, step.dst.cols)) for step in steps]
        if len({step.op for step in steps}) > 1:
            yield f"the ranks call different collectives: {', '.join(step.op for step in steps)}", first
        elif steps[0].op == "all_gather" and any(
            shape != (sum(rows), step.src.cols) for step, shape in zip(steps, into, strict=True)
        ):
            yield f"the ranks give rows {rows} of {steps[0].src.cols} columns, and gather into {into}", first
        elif steps[0].op == "all_to_all":
            cols = [cast(int, step.src.cols) for step in steps]
            if {sum(n for n, _ in into)} != set(rows) or {n for _, n in into} != {sum(cols)}:
                yield f"the ranks give rows {rows} of {cols} columns, and receive {into}", first
        elif steps[0].op == "exchange":
            cols = [cast(int, step.src.cols) for step in steps] + [n for _, n in into]
            sent = [tuple(map(int, step.sent)) for step in steps]
            received = [tuple(map(int, step.received)) for step in steps]
            if (
                len(set(cols)) > 1
                or [sum(r) for r in received] != [n for n, _ in into]
                or [sum(s) for s in sent] != rows
            ):
                yield f"the ranks exchange {sent} of rows {rows}, and receive {received} into {into}", first
            elif sent != list(zip(*received, strict=True)):
                yield f"the ranks send {sent}, and receive {received}", first


def _wrong_signal(schedule: Schedule, step: Set | Wait) -> Iterator[str]:
    count = next((s.count for s in schedule.signals if s.name == step.signal), None)
    if count is None:
        yield f"there are no signals {step.signal!r}"
    elif not 0 <= cast(int, step.index) < count:
        yield f"index {step.index} is outside {step.signal}, of {count} signals"
    if isinstance(step, Set) and not 0 <= cast(int, step.at) < schedule.world_size:
        yield f"there is no rank {step.at}"
    if isinstance(step, Wait) and cast(int, step.count) < 1:
        yield f"count={step.count} must be at least 1"


def _misplaced(buffers: Buffers, rank: int, access: Access) -> Iterator[str]:
    region, text = access.region, describe(access.region, rank)
    at = cast(int, region.at)
    if not 0 <= at < len(buffers):
        yield f"{text}: there is no rank {at}"
    elif region.buffer not in buffers[at]:
        yield f"there is no buffer {region.buffer!r}"
    else:
        buffer = buffers[at][region.buffer]
        row, end_row, col, end_col = box_of(region)
        if not (0 <= row <= end_row <= cast(int, buffer.rows) and 0 <= col <= end_col <= buffer.cols):
            yield f"{text} is outside its buffer of {buffer.rows} x {buffer.cols}"
        if at != rank and buffer.role != "symmetric":
            yield f"{text} is a peer's, and {region.buffer} is not symmetric but {buffer.role}"
        if access.writes and buffer.role == "input":
            yield f"{text} is written, and {region.buffer} is an input"


def _misshapen(rank: int, step: Step, dtypes: list[str]) -> Iterator[str]:
    op = step.op if isinstance(step, Compute) else ""
    if op not in SCALED_MATMULS and len(set(dtypes[1:] if op == "embedding_bag" else dtypes)) > 1:
        yield f"dtypes differ: {', '.join(dtypes)}"
    shapes = [(a.region.rows, a.region.cols) for a in accesses(step)]
    if isinstance(step, Compute):
        if step.op not in OPS or not OPS[step.op].takes(len(step.inputs)):
            yield f"{step.op} of {len(step.inputs)} inputs is not known; known are {', '.join(OPS)}"
        elif step.op in SCALED_MATMULS:
            yield from _wrong_scaling(step, shapes, dtypes)
        elif step.op == "matmul":
            (m, k), (k2, n), out = shapes
            if k != k2 or out != (m, n):
                yield f"[{m}, {k}] x [{k2}, {n}] does not fit into {list(out)}"
        elif step.op == "embedding_bag":
            (m, _), (_, n), out = shapes
            if out != (m, n):
                yield f"the bags of {m} rows and {n} columns of tables do not fit into {list(out)}"
        elif len(set(shapes)) > 1:
            yield f"shapes differ: {shapes}"
    elif isinstance(step, Copy) and shapes[0] != shapes[1]:
        yield f"a copy of {list(shapes[0])} does not fit into {list(shapes[1])}"
    *inputs, out_access = accesses(step)
    elementwise = isinstance(step, Compute) and step.op not in MATMULS
    for region in (access.region for access in inputs):
        same_place = (region.buffer, region.at) == (out_access.region.buffer, out_access.region.at)
        in_place = elementwise and region == out_access.region
        if same_place and not in_place and overlap(box_of(region), box_of(out_access.region)):
            yield f"{describe(out_access.region, rank)} is written while {describe(region, rank)} is read"


def _wrong_scaling(step: Compute, shapes: list[tuple[Index, Index]], dtypes: list[str]) -> Iterator[str]:
    (m, k), (k2, n), *scales, out = shapes
    bias, scales = scales[2:], scales[:2]
    if k != k2 or out != (m, n):
        yield f"[{m}, {k}] x [{k2}, {n}] does not fit into {list(out)}"
    if scales not in ([(1, 1), (1, 1)], [(m, 1), (1, n)]):
        yield f"scales of [{m}, {k}] x [{k2}, {n}] are {scales}: give [1, 1] and [1, 1], or [{m}, 1] and [1, {n}]"
    if bias not in ([], [(1, n)]):
        yield f"a bias of {list(bias[0])} does not fit to {list(out)}: give [1, {n}]"
    wanted = ["fp8", "fp8", "fp32", "fp32", *["bf16" if dtypes[-1] == "fp8" else dtypes[-1]] * len(bias)]
    if dtypes[:-1] != wanted or dtypes[-1] not in ("bf16", "fp16", "fp32", "fp8"):
        yield (
            f"dtypes are {', '.join(dtypes)}: fp8 operands with fp32 scales, and a bias as the output, in bf16, fp16 or fp32, or "
            "an output in fp8 and a bias in bf16"
        )
    if step.accumulate:
        yield "a scaled matmul does not accumulate"
