"""The simulator's engine: a fluid simulation, in which concurrent steps share resources.

Each lane runs its steps in order. A step first takes its latency, without using resources. Then it works at a speed
that depends on the concurrent steps (`weft.sim.max_min`). The engine advances from event to event: beginnings and ends
of steps, and arrivals of signals. Speeds change only at these events, and only in lanes that can slow each other down
(`weft.sim.scarce`). C++ code (`csrc/fluid.cpp`) tracks the progress of all work and finds the next completion.

Copy kernels and collectives hold compute units, and begin when enough units are free. A running cuBLAS GEMM keeps its
units until it ends. A GEMM gets the units that running copies and collectives do not hold.

A grouped GEMM with short K divides its tiles in advance between its programs, one for each unit (`TileKernel.divides_tiles`).
If copies or collectives hold units when it begins, its last programs begin when enough of these units are free, but at the
latest when its first programs have ended. It then takes its full time from there on: each program has the same work.

Signals are counters that only grow. A `Set` step, or a tile with a `Set`, increments a counter by 1; this is called a
set. Each run has the same number of sets of a counter, `sets_per_run`. In run e = 1, 2, ..., a wait ends when its
counter has reached this value:

    a wait for n sets of the same run         (e - 1) sets_per_run + n
    a wait for n sets of the previous run     (e - 2) sets_per_run + n

A rank begins its next run when all its lanes have ended the previous run. Ranks are not synchronized otherwise.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from weft._core import Fluid
from weft.errors import ScheduleError, SimulationError
from weft.integers import integer
from weft.schedule import Schedule
from weft.schedule.verify import check_steps
from weft.sim.issue import issue_times
from weft.sim.lower import lower
from weft.sim.lowered import PULSES, Await, LaneProgram, LoweredSchedule, Raise, Task, Work
from weft.sim.machines import NULL
from weft.sim.memory import require_memory
from weft.sim.model import Model
from weft.sim.result import Simulated, TaskRun

Mode: TypeAlias = Literal["queued", "graph", "single"]


def check_mode(mode: object) -> None:
    """Raise `ValueError` unless `mode` is a `Mode`."""
    if not isinstance(mode, str) or mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} is unknown: use one of {', '.join(get_args(Mode))}")


def simulate(
    schedule: Schedule,
    model: Model,
    *,
    runs: int = 1,
    mode: Mode = "queued",
    late_us: Sequence[float] = (),
    trusted: bool = False,
    most_us: float = math.inf,
) -> Simulated:
    """Simulate `schedule` on `model`; return the times of all steps.

    Args:
        runs: the number of consecutive runs. A rank begins a run when its own previous run has ended.
        mode: "queued": the CPU is ahead of the device, so issuing steps takes no time. "graph": captured and replayed.
            Collectives and signals take longer; the time added at the end of a run (`model.graph_run_us`) is not
            included. "single": every run begins on idle devices, and the CPU needs `model.host_step_us` per step.
        late_us: the delay of each rank at the start of each run. Default: 0.
        trusted: True to skip the checks of steps (`weft.schedule.verify.check_steps`) and of memory. Use it only for
            verified schedules and schedules of weft's own builders.
        most_us: a limit for the time of the first run. If the run takes longer, the simulation stops, and the result says that
            all runs end at infinity.

    Raise `ScheduleError` if a step is invalid, buffers do not fit in a GPU's memory, lanes wait forever, or no step
    takes time (on a model other than NULL). Raise `SimulationError` if a collective ends before its links could have
    carried its bytes.
    """
    runs = integer("runs", runs, "pass the number of consecutive runs, an integer")
    if runs < 1:
        raise ValueError(f"runs={runs} must be at least 1")
    check_mode(mode)
    if model.world_size not in (0, schedule.world_size):
        raise ValueError(
            f"schedule {schedule.name} is for {schedule.world_size} ranks, but the model has {model.world_size}: "
            f"pass a model of {schedule.world_size} ranks"
        )
    late = tuple(late_us) or (0.0,) * schedule.world_size
    if len(late) != schedule.world_size or not all(0 <= one < math.inf for one in late):
        raise ValueError(f"late_us={late} must have {schedule.world_size} times of at least 0, one for each rank")
    if not trusted:
        check_steps(schedule)
        require_memory(schedule, model)
    program = lower(schedule, model, alike=len(set(late)) == 1, captured=mode == "graph")
    engine = _Engine(program, late, issue_times(program, model) if mode == "single" else None, runs)
    result = engine.run(most_us)
    works = (task for lane in program.lanes for task in lane.tasks if isinstance(task, Work))
    if model != NULL and not any(task.latency_us + task.work_us > 0 for task in works):
        raise ScheduleError(
            f"schedule {schedule.name} has no step that takes time on {model.name}: its copies, computations and collectives are "
            "all empty. Use sizes of at least 1, or add a step"
        )
    return result


def replayed(program: LoweredSchedule, runs: int = 1) -> Simulated:
    """Simulate consecutive runs of a lowered schedule, with the CPU ahead of the device."""
    return _Engine(program, (0.0,) * program.schedule.world_size, None, runs).run()


_ROUNDING = 1e-9  # sums of fractions of the compute units may be wrong by this much
_KNOWN_SPEEDS = 1 << 20
"""The capacity of the cache {concurrent steps: speeds}. A limit is needed because long runs of different ranks keep
adding entries.
"""


class _Meeting:
    """The state of a collective that is running: the number of ranks on which it has not ended yet (`open`), and a lower bound
    of its end.

    least_end: the earliest time in us at which the links can have carried all its bytes. If the collective ends earlier, the
        simulation raises an error.
    """

    __slots__ = ("least_end", "open")

    def __init__(self, ranks: int, least_end: float) -> None:
        self.open, self.least_end = ranks, least_end


class _Lane:
    __slots__ = (
        "issued",
        "joined",
        "meeting",
        "next",
        "number",
        "program",
        "pulses",
        "rank",
        "since",
        "stalls",
        "tasks",
    )

    def __init__(self, number: int, program: LaneProgram, rank: _Rank, issued: list[float] | None) -> None:
        self.number, self.program, self.rank, self.issued = number, program, rank, issued
        self.tasks: list[Task] = program.tasks
        self.next = self.joined = 0  # index of the next task; number of collectives begun
        self.since = 0.0  # start time of the current task
        self.pulses = 0  # pulses of the current task so far
        self.meeting: _Meeting | None = None  # the collective that it runs
        self.stalls = 0  # number of times that it began or ended to wait for units for the last programs of a GEMM


class _Rank:
    __slots__ = (
        "ends", "filled", "held", "lanes", "late", "number", "open", "run", "stalled", "start", "without_units",
    )  # fmt: skip

    def __init__(self, number: int, late: float) -> None:
        self.number, self.late = number, late
        self.lanes: list[_Lane] = []
        self.run, self.start, self.open = 0, 0.0, 0
        self.filled = 0.0  # the fraction of compute units that running GEMMs keep
        self.held = 0.0  # the fraction of compute units that copies by kernel and collectives hold
        self.stalled: list[_Lane] = []  # lanes with GEMMs whose last programs wait for compute units
        self.without_units: list[_Lane] = []  # lanes whose kernels wait for compute units, first come first served
        self.ends: list[float] = []


_Timed: TypeAlias = tuple[float, int, _Lane | None, bool, int, int]
"""An event: (time, sequence number, lane, works, counter, times). Events at the same time run in the order
of their sequence numbers.

With a lane: the lane begins the work of its step if `works`, otherwise it goes to its next step. If the step has waited for
compute units for its last programs, `counter` is the lane's `stalls` at the time. Without a lane: `counter` is incremented by
`times`."""


class _Engine:
    def __init__(
        self,
        program: LoweredSchedule,
        late: Sequence[float],
        issued: dict[tuple[int, int], list[float]] | None,
        runs: int,
    ) -> None:
        self.program, self.runs = program, runs
        self.ranks = {rank: _Rank(rank, late[rank]) for rank in program.ranks}
        self.fluid = Fluid(*program.scarce, PULSES, _KNOWN_SPEEDS)
        self.links = program.links
        self.holds = [sum(amount for _, amount in load.hold) for load in program.loads]
        self.lanes: list[_Lane] = []
        for number, lane in enumerate(program.lanes):
            rank, when = self.ranks[lane.rank], issued[lane.rank, lane.number] if issued and lane.tasks else None
            self.lanes.append(_Lane(number, lane, rank, when))
            rank.lanes.append(self.lanes[-1])
        for rank in (
            self.ranks.values()
        ):  # copy lanes first, as in `weft.schedule.verify.issue_order`: they get compute units first
            rank.lanes.sort(key=lambda lane: program.schedule.lanes[lane.program.number].resource != "copy")
        self.now = 0.0
        self.timed: list[_Timed] = []
        self.planned = 0
        self.counters = [0] * program.counters
        self.waiting: dict[int, list[tuple[int, _Lane]]] = {}
        self.meeting: dict[tuple[int, int, int], list[_Lane]] = {}
        self.events: list[TaskRun] = []

    def run(self, most_us: float = math.inf) -> Simulated:
        for rank in self.ranks.values():
            self._begin_run(rank)
        timed, fluid, inf = self.timed, self.fluid, math.inf
        while True:
            now = fluid.next_us()
            if timed and timed[0][0] < now:
                now = timed[0][0]
            if now == inf:
                break
            if now > most_us and not all(rank.ends for rank in self.ranks.values()):
                ends = dict.fromkeys(self.ranks, (inf,) * self.runs)
                return Simulated(self.program, self.runs, ends, self.events)
            self._step(now)
        stuck = [lane for lane in self.lanes if lane.next < len(lane.tasks)]
        if stuck:
            raise ScheduleError(
                f"schedule {self.program.schedule.name} deadlocks. These lanes wait forever. Add or correct the steps that "
                "set their signals:\n" + "\n".join(map(self._stuck, stuck))
            )
        return Simulated(self.program, self.runs, {r.number: tuple(r.ends) for r in self.ranks.values()}, self.events)

    def _step(self, now: float) -> None:
        """Advance to `now`, the time of the next event, and handle all events of this time."""
        self.now, timed = now, self.timed
        if due := self.fluid.to(now):
            self._handle_progress(due)
        while timed and timed[0][0] <= now:
            _, _, waiting, works, counter, times = heapq.heappop(timed)
            if waiting is None:
                self._raise(counter, times)
            elif not works:
                self._advance(waiting)
            elif (
                counter < 0 or counter == waiting.stalls
            ):  # otherwise the wait for units has ended before its latest end
                self._work(waiting, counter)

    def _handle_progress(self, due: list[tuple[int, bool]]) -> None:
        """Handle lanes whose step has ended or has reached a pulse: a point in a kernel's work after which its tiles
        set signals (`weft.sim.lowered.pulses`).

        due: these lanes, as (number of the lane, True if its step has ended).
        """
        for number, done in due:
            if done:
                self._finish(self.lanes[number])
            else:
                self._pulse(self.lanes[number])

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
        """Execute the lane's tasks until one takes time or waits."""
        tasks, rank, now = lane.tasks, lane.rank, self.now
        while lane.next < len(tasks):  # most tasks are sets and waits, so they call no methods here
            task = tasks[lane.next]
            if lane.issued and rank.start + lane.issued[lane.next] > now:
                return self._plan(rank.start + lane.issued[lane.next], lane)
            lane.since = now
            if type(task) is Raise:
                lane.next += 1
                if task.delay_us:
                    self.planned += 1
                    heapq.heappush(self.timed, (now + task.delay_us, self.planned, None, False, task.counter, 1))
                else:
                    self._raise(task.counter, 1)
                continue
            if type(task) is Work:
                return self._begin(lane, task)
            assert type(task) is Await
            wanted = (rank.run - 1 - task.previous) * task.sets_per_run + task.sets
            if self.counters[task.counter] < wanted and not (task.previous and rank.run == 1):
                return self.waiting.setdefault(task.counter, []).append((wanted, lane))
            self.events.append((lane.program, lane.next, rank.run, now, now))
            lane.next += 1
        lane.rank.open -= 1
        if not lane.rank.open:
            lane.rank.ends.append(self.now)
            if lane.rank.run < self.runs:
                self._begin_run(lane.rank)
        return None

    def _begin(self, lane: _Lane, task: Work) -> None:
        lane.pulses = 0
        lane.rank.held += self.holds[task.load]
        if task.joins:
            # Match collectives of different ranks by their index among the lane's collectives, because the number of
            # tasks before a collective may differ between ranks.
            place = (lane.rank.run, lane.program.number, lane.joined)
            lane.joined += 1
            there = self.meeting.setdefault(place, [])
            there.append(lane)
            if len(there) < len(self.ranks):
                return
            del self.meeting[place]
            meeting = _Meeting(len(there), self.now + task.latency_us + self._least_us(there))
            for other in there:
                other.since, other.meeting = self.now, meeting
                self._plan(self.now + task.latency_us, other, works=True)
        else:
            self.planned += 1  # `_plan` is inlined here for speed
            heapq.heappush(self.timed, (self.now + task.latency_us, self.planned, lane, True, -1, 0))

    def _least_us(self, lanes: list[_Lane]) -> float:
        """Return a lower bound on the time of a collective in us: the time that its busiest link needs.

        lanes: the lanes of all ranks, each at its call of the collective.
        """
        busy_us: dict[int, float] = {}
        least_us = 0.0
        for lane in lanes:
            task = lane.tasks[lane.next]
            assert isinstance(task, Work)
            least_us = max(least_us, task.least_us)
            for place, share in self.program.loads[task.load].share:
                if place in self.links:
                    busy_us[place] = busy_us.get(place, 0.0) + share * task.work_us
        return max(least_us, *busy_us.values(), 0.0)

    def _leave(self, lane: _Lane, meeting: _Meeting) -> None:
        lane.meeting = None
        meeting.open -= 1
        if not meeting.open and self.now < meeting.least_end * (1 - 1e-9) - 1e-6:
            raise SimulationError(
                f"{self.program.schedule.name}: {self.program.name_of(lane.program, lane.next)} ends at {self.now:.3f} us, but its "
                f"links carry its bytes until {meeting.least_end:.3f} us. Its cost is too low for the topology: correct the cost "
                "of the collective, or the bandwidth of the links"
            )

    def _work(self, lane: _Lane, stall: int = -1) -> None:
        """Begin the work of the lane's step as soon as it has its compute units.

        stall: the lane's `stalls` if its last programs have waited for units, otherwise -1.
        """
        task, rank = lane.tasks[lane.next], lane.rank
        assert isinstance(task, Work)
        if task.holds and rank.filled and rank.filled + task.holds > 1:
            rank.without_units.append(lane)
            return
        if task.programs and stall < 0 and not self._fits(rank, task):
            lane.stalls += 1
            rank.stalled.append(lane)
            self._plan(self.now + task.work_us, lane, works=True, counter=lane.stalls)
            return
        if stall >= 0 and lane in rank.stalled:
            rank.stalled.remove(lane)
        rank.filled += task.fills
        self._handle_progress(
            self.fluid.begin(self.now, lane.number, task.load, task.work_us, sum(1 << part - 1 for part in task.pulses))
        )

    def _pulse(self, lane: _Lane) -> None:
        task = lane.tasks[lane.next]
        assert isinstance(task, Work)
        share, before = (task.pulses[i] / PULSES if i >= 0 else 0.0 for i in (lane.pulses, lane.pulses - 1))
        lane.pulses += 1
        for one in task.raises:
            if due := one.due(share) - (one.due(before) if before else 0):
                self._raise_after(one.delay_us, one.counter, due)

    def _finish(self, lane: _Lane) -> None:
        task = lane.tasks[lane.next]
        assert isinstance(task, Work)
        while lane.pulses < len(task.pulses):
            self._pulse(lane)
        if task.fills:
            self._free(lane.rank, task.fills)
        if held := self.holds[task.load]:
            self._release(lane.rank, held)
        if lane.meeting:
            self._leave(lane, lane.meeting)
        self._note(lane)
        self._advance(lane)

    def _free(self, rank: _Rank, units: float) -> None:
        """Release the compute units of a finished GEMM. Waiting kernels get them first.

        units: the compute units to release, as a fraction of the rank's units.
        """
        rank.filled = max(0.0, rank.filled - units)
        waiting, rank.without_units = rank.without_units, []
        for lane in waiting:
            self._plan(self.now, lane, works=True)

    def _fits(self, rank: _Rank, task: Work) -> bool:
        """Return True if all programs of a GEMM have compute units, although copies and collectives hold some."""
        return rank.held <= _ROUNDING or rank.held + task.programs <= 1 + _ROUNDING

    def _release(self, rank: _Rank, units: float) -> None:
        """Release compute units that a copy or collective held, as a fraction of the rank's units. GEMMs whose last programs now
        have units begin.
        """
        rank.held -= units
        for lane in list(rank.stalled):
            task = lane.tasks[lane.next]
            assert isinstance(task, Work)
            if self._fits(rank, task):
                rank.stalled.remove(lane)
                lane.stalls += 1
                self._plan(self.now, lane, works=True, counter=lane.stalls)

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
        return f"{where}: {name}, which not all ranks have reached"
