"""The interface of executors: a schedule is prepared for one rank of a group, run again and again, and closed once.

    weft.runtime.null   goes through the steps in an order that signals allow, but executes none
    weft.runtime.cpu    runs each lane on a thread, in memory that processes share
    weft.runtime.cuda   runs each lane on a stream, with copy engines

The constructor is collective: ranks compare schedules, every rank learns if a schedule does not fit a rank, and they allocate
memory. An executor refuses each kind of step that it does not implement, and names the step. `weft.runtime.unfused` is not
an executor: it runs the steps of the serial schedule as a list of torch calls, and keeps no memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from weft.schedule import Schedule
from weft.timeline import Timeline


class Executor(ABC):
    """The interface and the guarantees of every executor. The defaults are for executors that keep no memory on a
    device."""

    schedule: Schedule

    @abstractmethod
    def run(
        self,
        tensors: dict[str, Any],
        *,
        deadline_s: float | None = None,
        timeline: Timeline | None = None,
        like_before: bool = False,
    ) -> dict[str, Any]:
        """Run the schedule once; every rank does. Return the outputs that were passed as functions, by name.

        tensors: every input and output buffer by name. An output whose number of rows is known only at run time is a function
        from that number to a tensor. deadline_s: how long a wait for another rank may last. timeline: gets a span for every step
        of this rank. like_before: True if only the addresses of the tensors differ from an earlier run; then they need not be
        checked.

        Bad tensors are refused before anything is written.
        """

    def warm_up(self, tensors: dict[str, Any]) -> None:
        """Load the kernels for a run with such tensors, before a graph captures the run. Nothing runs, and other ranks take
        no part."""
        return

    @abstractmethod
    def check(self) -> None:
        """Raise the error that was found since the last run, if any. Do not wait."""

    @abstractmethod
    def close(self) -> None:
        """Release all memory. Idempotent, not collective; nothing may be running."""

    @property
    def was_captured(self) -> bool:
        """True if a graph that uses the executor's memory may be replayed."""
        return False

    @property
    def stale(self) -> bool:
        """True if the memory has been outgrown: a new executor would use the larger one."""
        return False

    @property
    def gone(self) -> bool:
        """True if the executor cannot run any more."""
        return False

    @property
    def shared(self) -> bool:
        """True if runs of other sizes use the same memory and threads, so that keeping the executor costs little."""
        return False

    @property
    def lent(self) -> int:
        """The number of results in the executor's memory that callers still hold."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory on a GPU that the executor holds."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
