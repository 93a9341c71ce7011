"""Static checks of a schedule before it runs: hangs, races, and reads of unwritten memory.

`verify` checks the steps of all ranks in three consecutive runs. Several runs are needed because a rank may begin its next run
while a peer still reads a persistent buffer. It reports

    misfits              regions outside their buffer; wrong shapes, dtypes and indices; writes to inputs; accesses to private
                         memory of peers; sends of dynamic size
    hangs                waits for more sets than a run makes; waits for sets that are only made after the wait (`issue_order`);
                         kernels that poll on all compute units for a step that needs a unit (`occupancy`)
    races                two unordered accesses to an element, at least one of them a write (`happens_before`). Two updates
                         do not race with each other, but an update races with a read or another write. Copies by kernel that
                         may be one launch are unordered. A send writes when its message arrives (`weft.schedule.messages`)
    unwritten reads      reads of elements that no step has written in the same run
    incomplete outputs   elements of outputs that no step writes

Dynamic sizes are computed from the expected contents of buffers (`weft.schedule.regions.Contents`). If the size of a step
depends on a buffer, the lane must have a `Read` of the buffer before this step; otherwise `verify` reports a fault.

At most SAMPLE tiles of each `Tiles` step are checked: the first, the last, every k-th tile between them, and their
neighbours. Faults of other tiles are not found. If a step has unchecked tiles, unwritten reads and incomplete outputs
are not checked for the buffers that it writes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np

from weft.errors import ScheduleError
from weft.schedule.expr import Index
from weft.schedule.launches import crosses
from weft.schedule.messages import has_sends, with_messages, wrong_sends
from weft.schedule.printing import describe
from weft.schedule.regions import Box, box_of
from weft.schedule.schedule import Schedule
from weft.schedule.steps import Copy, Set, Step
from weft.schedule.verify.boxes import overlapping
from weft.schedule.verify.forked_tiles import forked, step_number
from weft.schedule.verify.happens_before import HappensBefore
from weft.schedule.verify.issue_order import Event, Lanes, Moves, explain, play, too_few_sets
from weft.schedule.verify.memory import Instance, accesses, hole_of_writes, races, unwritten
from weft.schedule.verify.occupancy import occupancy_deadlock
from weft.schedule.verify.well_formed import (
    Buffers,
    declared,
    unread,
    wrong_collectives,
    wrong_declarations,
    wrong_step,
)

RUNS = 3
SHOWN = 10
SAMPLE = 64


def verify(schedule: Schedule, *, compute_units: int = 132) -> None:
    """Raise `ScheduleError` if `schedule` has faults. The text gives rank, lane, step and region of the first ten.

    compute_units: the number of compute units of the smallest GPU that may run the schedule.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule is of type {type(schedule).__name__}, not Schedule: does the builder return its schedule?"
        )
    if schedule.world_size < 1:
        raise ScheduleError(f"schedule {schedule.name}: world_size={schedule.world_size} must be at least 1")
    original = schedule
    try:
        buffers = [{b.name: b for b in schedule.buffers_of_rank(rank)} for rank in range(schedule.world_size)]
        schedule, ranks, sampled = forked(schedule, SAMPLE)
    except ValueError as error:
        raise ScheduleError(f"schedule {schedule.name}: {error}") from error
    faults = _Faults(schedule.name, dict(enumerate(ranks)))
    for fault in (*wrong_declarations(schedule, buffers), *wrong_sends(original)):
        faults.add(fault, fault)
    for rank in range(schedule.world_size):
        for fault in unread(original, rank):
            faults.add(fault, fault)
    faults.raise_any()
    moves = Moves(ranks)
    _check_misfits(faults, schedule, buffers)
    _check_sets(faults, moves)
    _check_collectives(faults, schedule, ranks)
    faults.raise_any()
    if has_sends(original):
        ranks = with_messages(ranks)
        faults.ranks, moves = dict(enumerate(ranks)), Moves(ranks)
    _, stuck = play(ranks, moves=moves)
    if stuck:
        raise ScheduleError("\n  ".join([f"schedule {schedule.name} hangs:", *explain(ranks, stuck)[:SHOWN]]))
    happened = HappensBefore(ranks, RUNS, moves)
    _check_polling(faults, happened, buffers, compute_units)
    _check_memory(faults, happened, buffers, sampled)
    _check_parts(faults, ranks)
    faults.raise_any()


def check_steps(schedule: Schedule) -> None:
    """Raise `ScheduleError` with the first ten errors in the declarations, steps and collectives of `schedule`.

    This is the fast part of `verify`, which every simulation calls. It does not find hangs, races, or reads of
    unwritten memory. Collectives are checked on all ranks. Other steps are checked on at most 8 ranks: half of these are the first
    ranks, and half the last.
    """
    world = schedule.world_size
    if world < 1:
        raise ScheduleError(f"schedule {schedule.name}: world_size={world} must be at least 1")
    some = sorted({*range(min(world, 4)), *range(max(0, world - 4), world)})
    calls = schedule.map_steps(lambda step: step if step.meets else None)
    try:
        buffers = [{b.name: b for b in schedule.buffers_of_rank(rank)} for rank in range(world)]
        with_signals, lanes, _ = forked(schedule, SAMPLE, some)
        calling = [calls.of_rank(rank) for rank in range(world)] if any(lane.steps for lane in calls.lanes) else []
    except ValueError as error:
        raise ScheduleError(f"schedule {schedule.name}: {error}") from error
    faults = _Faults(schedule.name, dict(zip(some, lanes, strict=True)))
    of_calls = _Faults(schedule.name, dict(enumerate(calling)))
    for fault in (*wrong_declarations(schedule, buffers), *wrong_sends(schedule)):
        faults.add(fault, fault)
    for rank in some:
        for fault in unread(schedule, rank):
            faults.add(fault, fault)
    faults.raise_any()
    _check_misfits(faults, with_signals, buffers)
    faults.raise_any()
    _check_collectives(of_calls, calls, calling)
    of_calls.raise_any()


class _Faults:
    """The faults found so far, each listed once, with a count if it occurs on several ranks or in several runs."""

    def __init__(self, name: str, ranks: Mapping[int, Lanes]) -> None:
        self.name, self.ranks = name, ranks
        self._texts: dict[tuple, str] = {}
        self._times: Counter[tuple] = Counter()

    def add(self, kind: str, text: str, *events: Event) -> None:
        key = (kind, *((event.lane, event.step) for event in events))
        self._times[key] += 1
        if key not in self._texts:
            self._texts[key] = " | ".join([*(self._place(event) for event in events), text])

    def _place(self, event: Event) -> str:
        lane = self.ranks[event.rank][event.lane]
        run = "" if event.run == 1 else f" of run {event.run}"
        return (
            f"rank {event.rank}, lane {lane.name}, step {step_number(lane, event.step)}{run}: "
            f"{describe(lane.steps[event.step], event.rank)}"
        )

    def raise_any(self) -> None:
        if not self._texts:
            return
        again = {key: f" ({times - 1} more of this kind)" if times > 1 else "" for key, times in self._times.items()}
        lines = [text + again[key] for key, text in self._texts.items()]
        count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
        raise ScheduleError("\n  ".join([f"schedule {self.name} has {count}:", *lines[:SHOWN]]))


def _check_misfits(faults: _Faults, schedule: Schedule, buffers: Buffers) -> None:
    where = declared(schedule, buffers)
    for rank, lanes in faults.ranks.items():
        for i, lane in enumerate(lanes):
            for number, step in enumerate(lane.steps):
                for nth, fault in enumerate(wrong_step(where[rank], step)):
                    faults.add(f"misfit {nth}", fault, Event(1, rank, i, number))


def _check_sets(faults: _Faults, moves: Moves) -> None:
    for rank, of_rank in enumerate(moves.of_ranks):
        for i, of_lane in enumerate(of_rank):
            for number, move in enumerate(of_lane):
                if move.wait and move.counter and cast(int, move.wait.count) > (sets := moves.per_run[move.counter]):
                    text = too_few_sets(cast(int, move.wait.count), sets)
                    faults.add("missing set", text, Event(1, rank, i, number))


def _check_collectives(faults: _Faults, schedule: Schedule, ranks: Sequence[Lanes]) -> None:
    for fault, event in wrong_collectives(schedule, ranks):
        faults.add("collective", fault, event)


def _check_polling(faults: _Faults, happened: HappensBefore, buffers: Buffers, compute_units: int) -> None:
    for number, lanes in occupancy_deadlock(happened, buffers, compute_units).items():
        event = happened.events[number]
        names = ", ".join(happened.ranks[event.rank][lane].name for lane in lanes)
        text = (
            f"this step may never get a compute unit (SM): kernels of other lanes ({names}) may occupy all {compute_units} units, "
            "and wait for steps that need a unit"
        )
        faults.add(
            "polling", f"{text}. Use copy engines on these lanes, or let their copies wait for fewer signals", event
        )


def _check_memory(faults: _Faults, happened: HappensBefore, buffers: Buffers, sampled: set[str]) -> None:
    """Add races, unwritten reads and incomplete outputs to `faults`.

    happened: the order of all steps that signals enforce.
    sampled: the buffers that unchecked tiles also write. They are checked only for races.
    """
    instances = accesses(happened, buffers)
    for (rank, name, _), found in instances.items():
        where, role = f"{name}@{rank}", buffers[rank][name].role
        for pair in races(found, happened):
            a, b = (happened.events[found.events[n]] for n in pair)
            does = ["writes" if found.writes[n] else "reads" for n in pair]
            early = ", in different runs" if a.run != b.run else ""
            text = (
                f"race on {where}: the first step {does[0]} and the second {does[1]} the same elements{early}, and no signal "
                "orders them: set a signal after one of them, and wait for it before the other"
            )
            faults.add("race", text, a, b)
        if role != "input" and name not in sampled:
            for read, box in unwritten(found, happened):
                text = f"it reads {_text(where, box)}, which no step has written before in this run: write it in an earlier step"
                faults.add("nothing", text, happened.events[found.events[read]])
    for rank, of_rank in enumerate(buffers):
        for buffer in of_rank.values():
            if buffer.role == "output" and buffer.name not in sampled:
                whole = (0, cast(int, buffer.rows), 0, buffer.cols)
                if hole := hole_of_writes(whole, instances.get(Instance(rank, buffer.name, 1))):
                    text = f"output {_text(f'{buffer.name}@{rank}', hole)} is never written: add a step that writes it"
                    faults.add(f"hole in {buffer.name}", text)


def _text(name: str, box: Box) -> str:
    return f"{name}[{box[0]}:+{box[1] - box[0]}, {box[2]}:+{box[3] - box[2]}]"


def _check_parts(faults: _Faults, ranks: Sequence[Lanes]) -> None:
    """Add races between copies by kernel that may run concurrently in one launch."""
    for rank, lanes in enumerate(ranks):
        for i, lane in enumerate(lanes):
            for parts in _parts(lane.steps, rank):
                _check_targets(faults, Event(1, rank, i, 0), parts)


def _parts(steps: Sequence[Step], rank: int) -> Iterator[dict[int, Copy]]:
    """Yield {position: copy} for each group of consecutive copies by kernel that may be one launch.

    The copies of a group read the same buffer. If all copies of a group have the same source region, sets at other ranks may be
    between them.
    """
    found: dict[int, Copy] = {}
    alike, signaled = True, False
    for number, step in enumerate(steps):
        if found and isinstance(step, Set) and crosses(step, rank, ()):
            signaled = True
            continue
        source, first = _source(step), next(iter(found.values()), None)
        if first and source == _source(first):
            alike = alike and cast(Copy, step).src == first.src
            if alike or not signaled:
                found[number] = cast(Copy, step)
                continue
        if len(found) > 1:
            yield found
        found, alike, signaled = ({number: cast(Copy, step)} if source else {}), True, False
    if len(found) > 1:
        yield found


def _source(step: Step) -> tuple[str, Index] | None:
    """Return the source of `step`, a copy by kernel: (name of the buffer, rank whose buffer it is). Return None for other
    steps, and for a copy that accumulates.
    """
    if not isinstance(step, Copy) or step.by != "kernel" or step.accumulate:
        return None
    return step.src.buffer, step.src.at


def _check_targets(faults: _Faults, lane: Event, parts: Mapping[int, Copy]) -> None:
    of_buffers: dict[tuple[Index, str], list[int]] = defaultdict(list)
    for number, copy in parts.items():
        if copy.dst.rows and copy.dst.cols:
            of_buffers[copy.dst.at, copy.dst.buffer].append(number)
    for (at, name), numbers in of_buffers.items():
        boxes = np.array([box_of(parts[number].dst) for number in numbers])
        pairs = [pair for i, j in overlapping(boxes, boxes) for pair in np.stack([i, j], 1)[i < j].tolist()]
        for a, b in sorted(pairs)[:1]:
            events = [lane._replace(step=numbers[one]) for one in (a, b)]
            text = (
                f"race on {name}@{at}: consecutive copies by kernel write the same elements, and may run concurrently"
            )
            faults.add(f"parts {name}", text, *events)
