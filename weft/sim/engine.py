"""A schedule on modelled hardware: what every rank's lanes do when, as a fluid that flows through shared resources.

Each lane does its steps in order. A step waits out its latency, which takes nothing from anybody, and then has work to do,
at a speed that depends on what else runs (`weft.sim.fair`). Speeds change only when a step begins or ends, and only those of
lanes that can slow each other down (`weft.sim.scarce`), so the engine goes from one such moment to the next, and on each of
them to the signals that arrive.

Signals are counters that only grow. In run e (from 1) a wait for `count` sets ends when its counter has reached
(e - 1) sets_per_run + count, one for the previous run when it has reached (e - 2) sets_per_run + count. A rank begins its
next run when all its lanes have ended the one before; nothing else holds ranks together.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

from weft.errors import ScheduleError
from weft.schedule import Schedule
from weft.sim.fair import speeds
from weft.sim.issue import issue_times
from weft.sim.lower import Await, LaneProgram, Program, Raise, Task, Work, lower
from weft.sim.machines import NULL
from weft.sim.model import Model
from weft.sim.result import Event, Simulated
from weft.sim.scarce import parts_of, scarce_only

_PULSES = 16
"""Signals that a kernel sets as it goes on are raised after each such part of its work, as many as are due."""
_DONE_US = 1e-7
"""Work that is left and counts as none: below what sums of floating-point times are good for."""


def simulate(
    schedule: Schedule,
    model: Model,
    *,
    runs: int = 1,
    mode: Literal["queued", "graph", "single"] = "queued",
    late_us: Sequence[float] = (),
) -> Simulated:
    """What `schedule` does on `model`.

    runs: how many in a row; each rank begins a run when its own last one has ended.
    mode: "queued": the host is ahead, its launches cost nothing. "graph": captured and replayed, in which collectives take
    longer; what a graph adds to the end of a run (`model.graph_run_us`) is not in it. "single": every run begins
    with idle devices, and the host needs `model.host_step_us` for each step.
    late_us: by how much each rank comes late to each of its runs; nothing: not at all.

    `ScheduleError` if a lane waits for ever, with all lanes that do, or if a schedule takes no time though its model does.
    """
    if runs < 1:
        raise ValueError(f"runs={runs}: simulate one run at least")
    if model.world_size not in (0, schedule.world_size):
        raise ValueError(
            f"schedule {schedule.name} is for {schedule.world_size} ranks, and the model for {model.world_size}"
        )
    late = tuple(late_us) or (0.0,) * schedule.world_size
    if len(late) != schedule.world_size or min(late) < 0:
        raise ValueError(f"late_us={late} must be {schedule.world_size} times, none of them negative")
    program = lower(schedule, model, alike=len(set(late)) == 1, captured=mode == "graph")
    engine = _Engine(program, late, issue_times(program, model) if mode == "single" else None, runs)
    result = engine.run()
    works = (task for lane in program.lanes for task in lane.tasks if isinstance(task, Work))
    if model != NULL and not any(task.latency_us + task.work_us > 0 for task in works):
        raise ScheduleError(f"schedule {schedule.name} takes no time on {model.name}: there is no work in it")
    return result


_KNOWN_SPEEDS = 1 << 20
"""Speeds that are remembered, of all sets of steps at once together: long runs of ranks that differ have ever new ones."""


class _Lane:
    __slots__ = (
        "issued",
        "joined",
        "load",
        "mark",
        "next",
        "part",
        "program",
        "pulses",
        "rank",
        "rest",
        "since",
        "speed",
        "tasks",
    )

    def __init__(self, program: LaneProgram, rank: _Rank, part: _Part, issued: list[float] | None) -> None:
        self.program, self.rank, self.part, self.issued = program, rank, part, issued
        self.tasks: list[Task] = program.tasks
        self.next = self.joined = 0  # tasks, and collectives among them
        self.since = 0.0  # the beginning of the task that is under way
        self.load, self.rest, self.speed = 0, 0.0, 0.0  # of its work
        self.pulses, self.mark = 0, 0.0  # raised so far, and what is left of the work at the next one


class _Rank:
    __slots__ = ("ends", "lanes", "late", "number", "open", "run", "start")

    def __init__(self, number: int, late: float) -> None:
        self.number, self.late = number, late
        self.lanes: list[_Lane] = []
        self.run, self.start, self.open = 0, 0.0, 0
        self.ends: list[float] = []


class _Part:
    """Lanes that can slow each other down; those of them that work, and until when nothing changes there."""

    __slots__ = ("at_us", "changed", "ends", "working")

    def __init__(self) -> None:
        self.working: list[_Lane] = []
        self.at_us = 0.0  # what is left of the work is of then
        self.ends = 0  # which of the ends that were planned counts
        self.changed = False

    def to(self, at_us: float) -> tuple[list[_Lane], list[_Lane]]:
        """Work until then: (lanes that are due to raise signals, lanes that are done)."""
        passed, self.at_us = at_us - self.at_us, at_us
        nearly = max(_DONE_US, 1e-12 * at_us)  # late in a long run the clock itself is no finer
        if len(self.working) == 1:  # mostly
            (lane,) = self.working
            lane.rest = rest = lane.rest - passed * lane.speed
            if rest <= nearly:
                self.working = []
                return ([lane] if lane.mark else []), [lane]
            return ([lane] if lane.mark and rest - lane.mark <= nearly else []), []
        still: list[_Lane] = []
        done: list[_Lane] = []
        marked: list[_Lane] = []
        for lane in self.working:
            lane.rest = rest = lane.rest - passed * lane.speed
            (still if rest > nearly else done).append(lane)
            if lane.mark and rest - lane.mark <= nearly:
                marked.append(lane)
        self.working = still
        return marked, done

    def next_us(self) -> float:
        """When a lane is next done or due."""
        working = self.working
        if len(working) == 1:
            left = (working[0].rest - working[0].mark) / working[0].speed
        else:
            left = min([(lane.rest - lane.mark) / lane.speed for lane in working])
        return self.at_us + (left if left > 0.0 else 0.0)


_Timed: TypeAlias = tuple[float, int, _Lane | None, bool, int, int]
"""(when, order, lane, works, counter, times). Of two events at one time, the one planned first comes first. A lane goes on, with
its work if that is what it waited for; where there is none the counter is raised so many times."""


class _Engine:
    def __init__(
        self, program: Program, late: Sequence[float], issued: dict[tuple[int, int], list[float]] | None, runs: int
    ) -> None:
        self.program, self.runs = program, runs
        self.ranks = {rank: _Rank(rank, late[rank]) for rank in program.ranks}
        of_lanes = [{task.load for task in lane.tasks if isinstance(task, Work)} for lane in program.lanes]
        self.loads = scarce_only(program.loads, of_lanes)
        numbers = parts_of(self.loads, of_lanes)
        self.parts = [_Part() for _ in range(max(numbers, default=-1) + 1)]
        for lane, part in zip(program.lanes, numbers, strict=True):
            rank, when = self.ranks[lane.rank], issued[lane.rank, lane.number] if issued and lane.tasks else None
            rank.lanes.append(_Lane(lane, rank, self.parts[part], when))
        self.now = 0.0
        self.timed: list[_Timed] = []
        self.planned = 0
        self.counters = [0] * program.counters
        self.waiting: dict[int, list[tuple[int, _Lane]]] = {}
        self.ends: list[tuple[float, int, _Part, int]] = []  # (when, order, part, which of its ends) of work
        self.changed: list[_Part] = []  # since the last step
        self.known_speeds: dict[tuple[int, ...], dict[int, float]] = {}
        self.known = 0  # speeds in there
        self.alone: dict[int, float] = {}  # the speed of a load with nothing beside it
        self.meeting: dict[tuple[int, int, int], list[_Lane]] = {}
        self.events: list[Event] = []

    def run(self) -> Simulated:
        for rank in self.ranks.values():
            self._begin_run(rank)
        while self.timed or self.ends:
            self._step()
        stuck = [lane for rank in self.ranks.values() for lane in rank.lanes if lane.next < len(lane.tasks)]
        if stuck:
            raise ScheduleError(
                f"schedule {self.program.schedule.name} never ends:\n" + "\n".join(map(self._stuck, stuck))
            )
        return Simulated(self.program, self.runs, {r.number: tuple(r.ends) for r in self.ranks.values()}, self.events)

    def _step(self) -> None:
        """To the next moment at which something begins or ends."""
        ends, timed, pop = self.ends, self.timed, heapq.heappop
        while ends and ends[0][3] != ends[0][2].ends:
            pop(ends)  # the part's speeds are others by now
        if not ends and not timed:
            return
        first = ends if not timed or (ends and ends[0][0] <= timed[0][0]) else timed
        self.now = now = first[0][0]
        while ends and ends[0][0] <= now:
            _, _, part, number = pop(ends)
            if number != part.ends:
                continue
            self._change(part)
            marked, done = part.to(now)
            if marked:
                for lane in marked:
                    self._pulse(lane)
            for lane in done:
                self._finish(lane)
        while timed and timed[0][0] <= now:
            _, _, waiting, works, counter, times = pop(timed)
            if waiting is None:
                self._raise(counter, times)
            elif works:
                self._work(waiting)
            else:
                self._advance(waiting)
        if self.changed:
            for part in self.changed:
                part.changed = False
                part.ends += 1
                if part.working:
                    self._set_speeds(part.working)
                    self.planned += 1
                    heapq.heappush(ends, (part.next_us(), self.planned, part, part.ends))
            self.changed.clear()

    def _change(self, part: _Part) -> None:
        if not part.changed:
            part.changed = True
            self.changed.append(part)

    def _set_speeds(self, working: list[_Lane]) -> None:
        if len(working) == 1:  # mostly
            (lane,) = working
            speed = self.alone.get(lane.load)
            if speed is None:
                speed = self.alone[lane.load] = speeds(self.loads, {lane.load: 1})[lane.load]
            lane.speed = speed
            return
        key = tuple(sorted([lane.load for lane in working]))
        found = self.known_speeds.get(key)
        if found is None:
            found = self.known_speeds[key] = speeds(self.loads, Counter(key))
            self.known += len(found)
            while self.known > _KNOWN_SPEEDS:
                self.known -= len(self.known_speeds.pop(next(iter(self.known_speeds))))
        for lane in working:
            lane.speed = found[lane.load]

    def _plan(
        self, at_us: float, lane: _Lane | None = None, works: bool = False, counter: int = -1, times: int = 0
    ) -> None:
        self.planned += 1
        heapq.heappush(self.timed, (at_us, self.planned, lane, works, counter, times))

    # -- lanes

    def _begin_run(self, rank: _Rank) -> None:
        rank.run += 1
        rank.start = self.now + rank.late
        rank.open = len(rank.lanes)
        for lane in rank.lanes:
            lane.next = lane.joined = 0
            self._plan(rank.start, lane)

    def _advance(self, lane: _Lane) -> None:
        """Do what takes no time, until something does or the lane has to wait."""
        while lane.next < len(lane.tasks):
            task = lane.tasks[lane.next]
            if lane.issued and lane.rank.start + lane.issued[lane.next] > self.now:
                return self._plan(lane.rank.start + lane.issued[lane.next], lane)
            lane.since = self.now
            if isinstance(task, Work):
                return self._begin(lane, task)
            if isinstance(task, Raise):
                lane.next += 1
                self._raise_after(task.delay_us, task.counter, 1)
                continue
            wanted = (lane.rank.run - 1 - task.previous) * task.sets_per_run + task.sets
            if self.counters[task.counter] < wanted and not (task.previous and lane.rank.run == 1):
                return self.waiting.setdefault(task.counter, []).append((wanted, lane))
            self._note(lane)
        lane.rank.open -= 1
        if not lane.rank.open:
            lane.rank.ends.append(self.now)
            if lane.rank.run < self.runs:
                self._begin_run(lane.rank)
        return None

    def _begin(self, lane: _Lane, task: Work) -> None:
        lane.load, lane.rest = task.load, task.work_us
        lane.pulses, lane.mark = 0, task.work_us * (1 - 1 / _PULSES) if task.raises else 0.0
        if task.joins and len(self.ranks) > 1:
            # Which collective of the lane it is: what is before it may differ from rank to rank.
            place = (lane.rank.run, lane.program.number, lane.joined)
            lane.joined += 1
            there = self.meeting.setdefault(place, [])
            there.append(lane)
            if len(there) < len(self.ranks):
                return
            for other in self.meeting.pop(place):
                other.since = self.now
                self._plan(self.now + task.latency_us, other, works=True)
        else:
            self.planned += 1  # as `_plan` does, which most steps would call
            heapq.heappush(self.timed, (self.now + task.latency_us, self.planned, lane, True, -1, 0))

    def _work(self, lane: _Lane) -> None:
        if lane.rest > _DONE_US:
            part = lane.part
            due = part.to(self.now) if part.working and part.at_us < self.now else None
            part.at_us = self.now
            part.working.append(lane)
            if not part.changed:
                part.changed = True
                self.changed.append(part)
            if due:
                for other in due[0]:
                    self._pulse(other)
                for other in due[1]:
                    self._finish(other)
        else:
            self._finish(lane)

    def _pulse(self, lane: _Lane) -> None:
        task = lane.tasks[lane.next]
        assert isinstance(task, Work)
        lane.pulses += 1
        lane.mark = task.work_us * (1 - (lane.pulses + 1) / _PULSES) if lane.pulses < _PULSES else 0.0
        for one in task.raises:
            if due := one.due(lane.pulses / _PULSES) - one.due((lane.pulses - 1) / _PULSES):
                self._raise_after(one.delay_us, one.counter, due)

    def _finish(self, lane: _Lane) -> None:
        task = lane.tasks[lane.next]
        assert isinstance(task, Work)
        if task.raises:
            while lane.pulses < _PULSES:
                self._pulse(lane)
        self._note(lane)
        self._advance(lane)

    def _note(self, lane: _Lane) -> None:
        self.events.append((lane.program, lane.next, lane.rank.run, lane.since, self.now))
        lane.next += 1

    def _raise_after(self, delay_us: float, counter: int, times: int) -> None:
        if delay_us:
            self._plan(self.now + delay_us, counter=counter, times=times)
        else:
            self._raise(counter, times)

    def _raise(self, counter: int, times: int) -> None:
        self.counters[counter] += times
        if counter not in self.waiting:
            return
        have = self.counters[counter]
        waiting = self.waiting.pop(counter)
        if still := [(wanted, lane) for wanted, lane in waiting if wanted > have]:
            self.waiting[counter] = still
        for wanted, lane in waiting:
            if wanted <= have:
                self._note(lane)
                self._plan(self.now, lane)

    def _stuck(self, lane: _Lane) -> str:
        task = lane.tasks[lane.next]
        name = self.program.name_of(lane.program, lane.next)
        where = f"  rank {lane.rank.number} lane {lane.program.name!r} in run {lane.rank.run}"
        if isinstance(task, Await):
            run = lane.rank.run - 1 - task.previous
            have = self.counters[task.counter] - run * task.sets_per_run
            return f"{where}: {name} has {max(0, have)} of {task.sets} sets"
        return f"{where}: {name}, which not all ranks have come to"
