"""What a simulation found: when ranks ended, how long their lanes computed and communicated, and the timeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from weft.sim.costs import What
from weft.sim.lower import LaneProgram, Program, Work
from weft.timeline import Span, Timeline

Event: TypeAlias = tuple[LaneProgram, int, int, float, float]
"""(lane, task, run, start, end) of a task of a lane, done once; a plain tuple, as there are very many."""


@dataclass(frozen=True)
class Simulated:
    """Where ranks do the same, only the first of them were simulated, and stand for the others in what follows."""

    program: Program = field(repr=False)
    runs: int
    simulated_ends_us: dict[int, tuple[float, ...]]
    events: list[Event] = field(repr=False)

    @property
    def end_us(self) -> float:
        """When the slowest rank ended its last run."""
        return max(ends[-1] for ends in self.simulated_ends_us.values())

    @property
    def ends_us(self) -> tuple[tuple[float, ...], ...]:
        """By rank, when each of its runs ended."""
        return self._of_all_ranks(self.simulated_ends_us)

    @property
    def per_run_us(self) -> float:
        """How long a run takes when runs follow each other; with several runs, without the first."""
        first = max(ends[0] for ends in self.simulated_ends_us.values())
        return (self.end_us - first) / (self.runs - 1) if self.runs > 1 else self.end_us

    @cached_property
    def compute_us(self) -> tuple[float, ...]:
        """By rank, for how long its compute units had something to do: compute steps, gathers, scatters."""
        return self._of_all_ranks(self._busy("matmul", "compute"))

    @cached_property
    def communication_us(self) -> tuple[float, ...]:
        """By rank, for how long it was copying to or from peers, or in a collective."""
        return self._of_all_ranks(self._busy("peer"))

    @property
    def exposed_us(self) -> float:
        """For how long the rank with the most of it had nothing to compute: communication that nothing hides."""
        busy = self._busy("matmul", "compute")
        return max(0.0, *(ends[-1] - busy[rank] for rank, ends in self.simulated_ends_us.items()))

    @cached_property
    def timeline(self) -> Timeline:
        """All steps of all ranks but sets, by their beginnings."""
        spans: list[Span] = []
        for lane, number, _, start, end in sorted(self.events, key=lambda event: event[3:]):
            task = lane.tasks[number]
            sent = task.sent_bytes if isinstance(task, Work) else 0
            for rank in range(lane.rank, self.program.schedule.world_size, len(self.program.ranks)):
                spans.append(Span(rank, lane.name, self.program.name_of(lane, number, rank), start, end, sent))
        return Timeline(spans)

    def intervals_us(self, *what: What) -> dict[int, list[tuple[float, float]]]:
        """By rank that was simulated, (start, end) of each of its steps of these kinds."""
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
