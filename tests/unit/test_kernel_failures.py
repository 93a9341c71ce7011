"""Failures that GPUs report: the first error is the error of the group, without a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.on_ranks import told

from weft.errors import DeadlineError, PoisonedGroupError, WeftError
from weft.kernels.signals import R_PEER, R_STATUS, RECORD_WORDS
from weft.runtime.cuda.context import LastRun
from weft.runtime.cuda.kernel_failures import KernelFailures
from weft.runtime.cuda.memory import ScheduleMemory
from weft.runtime.cuda.watch import watch


class FakeCommunicator:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def failed(self) -> bool:
        return bool(self.texts)

    def before_check(self, look: Callable[[], None]) -> None:
        pass

    def poison(self, text: str) -> None:
        self.texts.append(text)

    def check(self) -> None:
        if self.failed:
            raise PoisonedGroupError(self.texts[0])


class Exchange:
    """An object whose kernels report missed deadlines."""

    def __init__(self) -> None:
        self.comm: Any = FakeCommunicator()
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int64)
        self.failures = KernelFailures(self.comm, self.record, self.failure)

    def failure(self, status: int, epoch: int, peer: int, wanted: int, found: int) -> WeftError:
        return DeadlineError(f"status {status} of rank {peer}")

    def report(self, peer: int) -> None:
        self.record[R_PEER] = peer
        self.record[R_STATUS] = 2


@pytest.fixture
def exchange():
    made = Exchange()
    yield made
    made.failures.close()


def test_a_record_of_a_kernel_is_raised_once(exchange: Exchange) -> None:
    exchange.failures.check()
    exchange.report(peer=1)
    assert not exchange.failures.has_begun()  # the watching thread reads the record
    assert exchange.comm.texts == ["status 2 of rank 1"]
    with pytest.raises(DeadlineError, match="status 2 of rank 1"):
        exchange.failures.check()
    with pytest.raises(PoisonedGroupError):
        exchange.failures.check()


def test_a_record_after_the_group_has_failed_is_dropped(exchange: Exchange) -> None:
    exchange.comm.poison("rank 3 died")
    exchange.report(peer=1)
    assert told(exchange.failures.check) == "PoisonedGroupError: rank 3 died"
    assert exchange.comm.texts == ["rank 3 died"]


def test_the_watching_thread_does_not_keep_an_exchange_alive() -> None:
    made = Exchange()
    alive, failures = weakref.ref(made), made.failures
    assert failures in watch._seen
    del made
    assert alive() is None
    failures.record[R_STATUS] = 2
    failures.check()
    failures.close()
    assert failures not in watch._seen


def schedule_memory() -> Any:
    memory: Any = object.__new__(ScheduleMemory)
    memory.comm, memory.rank, memory.name = FakeCommunicator(), 0, "combine"
    memory.run, memory._begun = LastRun(), [0, 0, 0]
    return memory


def test_counts_that_a_failure_overwrote_do_not_replace_its_error() -> None:
    memory = schedule_memory()
    memory._fail(10.0, "signal done[1] of rank 1")
    memory._begun[1] = 2  # the kernel compares counts that the failure has overwritten
    memory.has_begun()
    assert isinstance(memory.run.failure, DeadlineError)
    assert len(memory.comm.texts) == 1


def test_ranks_that_sent_other_rows_are_named() -> None:
    memory = schedule_memory()
    memory._begun[1] = 2
    memory.has_begun()
    assert "rank 1 sent another number of rows than rank 0 expected" in str(memory.run.failure)
    assert memory._begun[1] == 0
