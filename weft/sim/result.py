"""The result of a simulation: when runs end, how long ranks compute and communicate, and the timeline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from weft.sim.lowered import LaneProgram, LoweredSchedule, Work
from weft.sim.uses import What
from weft.timeline import Span, Timeline

TaskRun: TypeAlias = tuple[LaneProgram, int, int, float, float]
"""One execution of a task: (lane, task, run, start in us, end in us). A plain tuple, for speed."""


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation. Times are in microseconds.

    If ranks behave identically, only the first ranks are simulated. With p simulated ranks, rank r has the result of rank r % p.
    """

    program: LoweredSchedule = field(repr=False)
    runs: int
    simulated_ends_us: dict[int, tuple[float, ...]]
    events: list[TaskRun] = field(repr=False)

    @property
    def end_us(self) -> float:
        """The time at which the last run ends on the slowest rank."""
        return max(ends[-1] for ends in self.simulated_ends_us.values())

    @property
    def ends_us(self) -> tuple[tuple[float, ...], ...]:
        """For each rank, the times at which its runs end."""
        return self._of_all_ranks(self.simulated_ends_us)

    @property
    def per_run_us(self) -> float:
        """The mean time of a run. If there are several runs, the first run is not counted."""
        first = max(ends[0] for ends in self.simulated_ends_us.values())
        return (self.end_us - first) / (self.runs - 1) if self.runs > 1 and first < math.inf else self.end_us

    @cached_property
    def compute_us(self) -> tuple[float, ...]:
        """For each rank, the time in which compute units were busy: compute steps, and kernels that copy within the rank."""
        return self._of_all_ranks(self._busy("matmul", "compute"))

    @cached_property
    def communication_us(self) -> tuple[float, ...]:
        """For each rank, the time in which it copied to or from peers, or ran a collective."""
        return self._of_all_ranks(self._busy("peer"))

    @property
    def exposed_us(self) -> float:
        """The exposed communication: the longest time, over all ranks, in which a rank does not compute."""
        busy = self._busy("matmul", "compute")
        return max(0.0, *(ends[-1] - busy[rank] for rank, ends in self.simulated_ends_us.items()))

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of all steps of all ranks, without `Set` steps, sorted by start time."""
        spans: list[Span] = []
        for lane, number, _, start, end in sorted(self.events, key=lambda event: event[3:]):
            task = lane.tasks[number]
            sent = task.sent_bytes if isinstance(task, Work) else 0
            for rank in range(lane.rank, self.program.schedule.world_size, len(self.program.ranks)):
                spans.append(Span(rank, lane.name, self.program.name_of(lane, number, rank), start, end, sent))
        return Timeline(spans)

    def intervals_us(self, *what: What) -> dict[int, list[tuple[float, float]]]:
        """Return {simulated rank: (start, end) of each of its steps of the kinds `what`}."""
        found: dict[int, list[tuple[float, float]]] = {rank: [] for rank in self.program.ranks}
        for lane, task, _, start, end in self.events:
            work = lane.tasks[task]
            if isinstance(work, Work) and work.what in what:
                found[lane.rank].append((start, end))
        return found

    def _busy(self, *what: What) -> dict[int, float]:
        return {rank: _union(intervals) for rank, intervals in self.intervals_us(*what).items()}

    def _of_all_ranks(self, by_rank: dict) -> tuple:
        stand_for_all = self.program.ranks
        return tuple(by_rank[rank % len(stand_for_all)] for rank in range(self.program.schedule.world_size))


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
