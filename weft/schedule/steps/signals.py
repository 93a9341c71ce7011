"""Steps that set signals and wait for signals. Only signals order steps of different lanes or ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

from weft.schedule.expr import RANK, Index
from weft.schedule.regions import Declared, Signals, at_text
from weft.schedule.steps.base import Awaited, CounterId, Step


@dataclass(frozen=True, slots=True)
class Set(Step):
    """Add one to a counter of rank `at`, with release semantics: a lane that waits for the counter sees all earlier
    writes of this lane.

    signal, index: the counter is element `index` of the array with the name `signal`. A `Signals` may be given instead
        of its name.
    """

    kind: ClassVar[str] = "set"
    is_signal: ClassVar[bool] = True
    signal: str
    index: Index = 0
    at: Index = RANK

    def __post_init__(self) -> None:
        _by_name(self)

    def sets(self) -> Mapping[CounterId, int]:
        return {(self.at, self.signal, self.index): 1}

    @property
    def occupies(self) -> bool:
        return False

    def faults(self, where: Declared) -> Iterator[str]:
        yield from _wrong_signal(self.signal, self.index, where)
        if not 0 <= cast(int, self.at) < len(where.buffers):
            yield f"rank {self.at} does not exist: use 0 to {len(where.buffers) - 1}"

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return f"set {self.signal}{at(self.at)}[{number(self.index)}]"

    def __str__(self) -> str:
        return f"set     {self.signal}{at_text(self.at)}[{self.index}]"


@dataclass(frozen=True, slots=True)
class Wait(Step):
    """Wait until this rank's counter has been set `count` times in this run, with acquire semantics.

    With `previous`, wait until the counter has been set `count` times in the previous run; the first run does not wait.
    A producer waits like this before it overwrites a buffer, and the reader sets the counter when it has finished with
    the buffer.
    """

    kind: ClassVar[str] = "wait"
    is_signal: ClassVar[bool] = True
    signal: str
    index: Index = 0
    count: Index = 1
    previous: bool = False

    def __post_init__(self) -> None:
        _by_name(self)

    @property
    def awaits(self) -> Awaited:
        return Awaited(self.signal, self.index, self.count, self.previous)

    @property
    def occupies(self) -> bool:
        return False

    def faults(self, where: Declared) -> Iterator[str]:
        yield from _wrong_signal(self.signal, self.index, where)
        if cast(int, self.count) < 1:
            yield (
                f"count={self.count} must be at least 1. To wait on some ranks only, put the wait into a loop with 0 iterations "
                "on the other ranks, such as an extent of lookup((0, 1), RANK)"
            )

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return f"wait {self.signal}[{number(self.index)}]{' of the previous run' * self.previous}"

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" x{self.count}"
        return f"wait    {self.signal}[{self.index}]{times}{' of the previous run' if self.previous else ''}"


def _by_name(step: Set | Wait) -> None:
    if isinstance(step.signal, Signals):
        object.__setattr__(step, "signal", step.signal.name)


def _wrong_signal(signal: str, index: Index, where: Declared) -> Iterator[str]:
    if (count := where.signals.get(signal)) is None:
        yield f"signal {signal!r} does not exist: declare it with Draft.signals"
    elif not 0 <= cast(int, index) < count:
        yield f"index {index} is out of range: {signal} has {count} signals, numbered from 0"
