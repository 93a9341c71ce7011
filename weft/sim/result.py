"""Results of a simulation: the end of each run, time spent in computation and communication, and the timeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from weft.sim.costs import What
from weft.sim.lower import LaneProgram, LoweredSchedule, Work
from weft.timeline import Span, Timeline

TaskRun: TypeAlias = tuple[LaneProgram, int, int, float, float]
"""One execution of a task: (lane, task, run, start, end). A plain tuple, since there are very many."""


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation.

    If ranks behave identically, only the first ones are simulated. Rank r has the result of rank r % (number of simulated ranks).
    """

    program: LoweredSchedule = field(repr=False)
    runs: int
    simulated_ends_us: dict[int, tuple[float, ...]]
    events: list[TaskRun] = field(repr=False)

    @property
    def end_us(self) -> float:
        """End of the slowest rank's last run."""
        return max(ends[-1] for ends in self.simulated_ends_us.values())

    @property
    def ends_us(self) -> tuple[tuple[float, ...], ...]:
        """Ends of each rank's runs."""
        return self._of_all_ranks(self.simulated_ends_us)

    @property
    def per_run_us(self) -> float:
        """Mean time of consecutive runs. The first run does not count if there are several."""
        first = max(ends[0] for ends in self.simulated_ends_us.values())
        return (self.end_us - first) / (self.runs - 1) if self.runs > 1 else self.end_us

    @cached_property
    def compute_us(self) -> tuple[float, ...]:
        """Time in which each rank's compute units were busy: compute steps, gathers, scatters."""
        return self._of_all_ranks(self._busy("matmul", "compute"))

    @cached_property
    def communication_us(self) -> tuple[float, ...]:
        """Time in which each rank was copying to or from peers, or in a collective."""
        return self._of_all_ranks(self._busy("peer"))

    @property
    def exposed_us(self) -> float:
        """Communication that no computation hides: time without computation, on the rank with the most of it."""
        busy = self._busy("matmul", "compute")
        return max(0.0, *(ends[-1] - busy[rank] for rank, ends in self.simulated_ends_us.items()))

    @cached_property
    def timeline(self) -> Timeline:
        """All steps of all ranks except sets, by start time."""
        spans: list[Span] = []
        for lane, number, _, start, end in sorted(self.events, key=lambda event: event[3:]):
            task = lane.tasks[number]
            sent = task.sent_bytes if isinstance(task, Work) else 0
            for rank in range(lane.rank, self.program.schedule.world_size, len(self.program.ranks)):
                spans.append(Span(rank, lane.name, self.program.name_of(lane, number, rank), start, end, sent))
        return Timeline(spans)

    def intervals_us(self, *what: What) -> dict[int, list[tuple[float, float]]]:
        """Return (start, end) of each step of these kinds, by simulated rank."""
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
