"""The executor that does nothing, in the right order: runs any schedule anywhere and tells in which order its steps go.

It is the simulator's engine on a machine where everything takes no time. So it needs no processes, no torch and no memory,
finds the schedule that would hang, and its timeline is the order that the signals leave: what another executor's timeline
may not contradict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from weft.runtime.executor import Executor
from weft.schedule import Schedule
from weft.sim import NULL, simulate
from weft.timeline import Timeline
from weft.words import counted


class Ranked(Protocol):
    """What it needs of a domain (`weft.symm`)."""

    rank: int
    world_size: int


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class NullSchedule(Executor):
    """`schedule` on this rank of `domain`, without effect. `ScheduleError` if it would hang."""

    def __init__(self, schedule: Schedule, domain: Ranked) -> None:
        if schedule.world_size != domain.world_size:
            raise ValueError(
                f"schedule {schedule.name} is for {counted(schedule.world_size, 'rank')}, and there are {domain.world_size}"
            )
        self.schedule = schedule
        self._spans = [span for span in simulate(schedule, NULL).timeline if span.rank == domain.rank]
        buffers = schedule.buffers_of_rank(domain.rank)
        self._shapes = {b.name: (b.rows, b.cols) for b in buffers if b.role in ("input", "output")}
        self._runs = 0

    def run(
        self, tensors: Mapping[str, Shaped], *, deadline_s: float | None = None, timeline: Timeline | None = None,
        like_before: bool = False,
    ) -> dict[str, Shaped]:  # fmt: skip
        """tensors: of every input and output buffer, by name, of its shape; they are looked at and left alone.

        deadline_s: above 0; no run takes as long. timeline: gets the rank's steps, in order, each from one whole number to
        the next in place of times; runs go on where the last one stopped.
        """
        if deadline_s is not None and deadline_s <= 0:
            raise ValueError(f"deadline_s={deadline_s} must be above 0")
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != self._shapes:
            raise ValueError(f"tensors {found} must be {self._shapes}")
        first = self._runs * len(self._spans)
        self._runs += 1
        if timeline is not None:
            for tick, span in enumerate(self._spans, start=first):
                timeline.add(span.rank, span.lane, span.name, tick, tick + 1, span.bytes)
        return {}

    def check(self) -> None:
        """Nothing goes wrong."""

    def close(self) -> None:
        """Nothing is held."""
