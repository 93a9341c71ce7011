"""What executors have in common: a schedule, made ready for one rank of a group, is run again and again and closed once.

    weft.runtime.null   does nothing, in an order that signals leave
    weft.runtime.cpu    threads on memory that processes share
    weft.runtime.cuda   streams and copy engines

Making one is collective: ranks compare schedules, each is told if another one's does not fit, and they allocate memory. An
executor that lacks an entry for a kind of step refuses it by name then. `weft.runtime.unfused` is none: it takes the steps of
the serial schedule as a list of the library's calls, and keeps nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from weft.schedule import Schedule
from weft.timeline import Timeline


class Executor(ABC):
    """What a caller of any executor may rely on. Of what has a default, this is what holds where nothing is kept on a device."""

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
        """One run, which every rank makes. tensors: every input and output buffer by name; an output whose rows only the run knows
        is a function from their number to a tensor. Returns those that were functions, by name.

        deadline_s: how long a wait for another rank may last. timeline: gets a span for every step of this rank. like_before: the
        caller knows that the tensors are as those of an earlier run but for where they lie, and they need not be looked at.

        Bad tensors are refused before anything is written.
        """

    def warm_up(self, tensors: dict[str, Any]) -> None:
        """Load what a run with such tensors needs, for one that a graph captures. Nothing runs, and other ranks take no part."""
        return

    @abstractmethod
    def check(self) -> None:
        """Raise what was found wrong since the last run. Does not wait."""

    @abstractmethod
    def close(self) -> None:
        """Give up what it holds. Idempotent, not collective; nothing may be running."""

    @property
    def was_captured(self) -> bool:
        """Whether a graph may be replayed that uses what it holds."""
        return False

    @property
    def stale(self) -> bool:
        """Whether its memory has been outgrown: a new one has room in the larger one."""
        return False

    @property
    def gone(self) -> bool:
        """Whether it cannot run any more."""
        return False

    @property
    def shared(self) -> bool:
        """True if its memory serves runs of other sizes too, and it has no threads: to keep it costs little."""
        return False

    @property
    def nbytes(self) -> int:
        """Of symmetric memory on a GPU that it holds."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
