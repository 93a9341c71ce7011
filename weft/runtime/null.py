"""The null executor: it visits the steps of any schedule, on any machine, and records their order, but executes none.

This executor is the simulator's engine on a machine where steps take no time. So it needs no processes, no torch and no
memory. It finds schedules that would hang. Its timeline shows the order that signals impose. The timelines of other
executors must agree with this order.
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
    """The part of a communicator's interface (`weft.symm`) that the null executor needs."""

    rank: int
    world_size: int


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class NullSchedule(Executor):
    """The executor `null` of a schedule on this rank. The constructor raises `ScheduleError` if the schedule would hang."""

    def __init__(self, schedule: Schedule, comm: Ranked) -> None:
        if schedule.world_size != comm.world_size:
            raise ValueError(
                f"schedule {schedule.name} is for {counted(schedule.world_size, 'rank')}, but the group has "
                f"{comm.world_size}: build it for {comm.world_size}"
            )
        self.schedule = schedule
        self._spans = [span for span in simulate(schedule, NULL, trusted=True).timeline if span.rank == comm.rank]
        buffers = schedule.buffers_of_rank(comm.rank)
        self._shapes = {b.name: (b.rows, b.cols) for b in buffers if b.role in ("input", "output")}
        self._runs = 0

    def run(
        self, tensors: Mapping[str, Shaped], *, deadline_s: float | None = None, timeline: Timeline | None = None,
        like_before: bool = False,
    ) -> dict[str, Shaped]:  # fmt: skip
        """Check the tensors' shapes, and append this rank's steps to `timeline`.

        tensors: every input and output buffer by name. Only their shapes are used.
        deadline_s: not used, but must be positive.
        timeline: receives the rank's steps in order. Step n, counted over all runs, lasts from time n to n + 1.
        """
        if deadline_s is not None and deadline_s <= 0:
            raise ValueError(f"deadline_s={deadline_s} must be positive")
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != self._shapes:
            raise ValueError(f"tensors have shapes {found}: pass {self._shapes}")
        first = self._runs * len(self._spans)
        self._runs += 1
        if timeline is not None:
            for tick, span in enumerate(self._spans, start=first):
                timeline.add(span.rank, span.lane, span.name, tick, tick + 1, span.bytes)
        return {}

    def check(self) -> None:
        """Do nothing: this executor reports no errors of earlier runs."""

    def close(self) -> None:
        """Do nothing: this executor has no memory."""
