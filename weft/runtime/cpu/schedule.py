"""A schedule on CPU processes: memory that they share, a thread for each lane, torch's kernels.

Lanes. The first compute lane runs on the thread that calls `run`; each other lane has a thread of its own that stays.
Copies, matmuls and waits let go of the interpreter while they last, so that lanes overlap.

Order. A copy ends with a release fence, a set adds with release order, a wait reads with acquire order (csrc/signal.hpp):
who has waited sees all that the setter's lane did before. Counters are never reset: run number e, from 1, starts where run
e - 1 ended, at (e - 1) times the sets of a run.

Before a run ranks meet, and one may refuse it: `weft.runtime.meeting`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import torch

from weft import env
from weft.errors import ScheduleError
from weft.runtime.cpu.checked import Checked
from weft.runtime.cpu.program import Bound, Program
from weft.runtime.cpu.run import Run, Tensors
from weft.runtime.executor import Executor
from weft.runtime.schedule_memory import agree_on_schedule
from weft.schedule import Schedule, Set
from weft.symm import Domain
from weft.timeline import Span, Timeline


class CpuSchedule(Executor):
    """`schedule` on this rank of `domain`. Making it is collective: the ranks compare schedules and allocate memory.

    Raises `DisagreementError` if the ranks' schedules differ, `ScheduleError` if one does not fit its memory or these
    ranks, `OutOfSharedMemoryError`; each on every rank. It ends with `close()` or with the domain. what: what it is for, which
    ranks that make different calls are told.
    """

    def __init__(self, schedule: Schedule, domain: Domain, what: str = "") -> None:
        if domain.device.type != "cpu":
            raise ValueError(f"a CpuSchedule needs a domain on CPU, not on {domain.device}: domain(group, 'cpu')")
        agree_on_schedule(schedule, domain)
        checked, error = None, ""
        try:
            checked = Checked(schedule, domain.rank, domain.world_size)
        except ValueError as trouble:
            error = str(trouble)
        errors = [text for text in domain.all_gather(error, what=f"checks of schedule {schedule.name}") if text]
        if checked is None or errors:
            raise ScheduleError(errors[0])
        self.schedule, self.domain = schedule, domain
        self._program: Program | None = Program(schedule, checked, Run(schedule.name, what, domain))
        self._workers: list[_Worker] = []
        # Before there is a thread: whatever strikes while they start, all are known to what ends them.
        self._end = weakref.finalize(self, _end_all, self._workers, self._program)
        self._end.atexit = False  # the domain ends it then, after it has told lanes that wait
        try:
            for name, _ in self._program.lanes[1:]:
                self._workers.append(_Worker(f"weft {schedule.name}, {name}"))
                self._workers[-1].start()
        except BaseException:  # no thread is left, say: those that there are do not stay
            self._end()
            raise
        domain._holders.add(self)

    def run(
        self,
        tensors: Tensors,
        *,
        deadline_s: float | None = None,
        timeline: Timeline | None = None,
        like_before: bool = False,
    ) -> Tensors:
        """One run; every rank calls it. When it returns this rank's outputs are complete; those that were given as functions of
        their number of rows are returned by name.

        Args:
            tensors: every input and output buffer by name, shaped as `schedule.buffers_of_rank(rank)` says, at any distance
                between rows. What only matmuls read may also be the transpose of such a tensor. Nothing is copied.
            deadline_s: how long each wait for another rank may last, in seconds (default `WEFT_DEADLINE_S`).
            timeline: gets a span for every step of this rank, in microseconds of the monotonic clock, which is the same
                for all processes. Sets are points.

        Raises `RefusedError` on every rank if one has a tensor that will not do, before any rank does anything; the group stays
        usable. What else it raises ends the group, and all ranks hear of it: `DeadlineError` (rank, signal, wanted, found),
        `PeerLostError`, `DisagreementError` (ranks make different calls), or the error of a step.
        """
        program = self._program  # held to the end: what lanes use is not unmapped under them, whoever closes what
        if program is None:
            self.domain.check()
            raise ValueError(f"this CpuSchedule ({self.schedule.name}) is closed: make a new one")
        run = program.run
        with run.meeting.lock:
            self.domain.check()
            deadline_s = env.deadline_s() if deadline_s is None else deadline_s
            # Views of tensors stay, and may be of use in calls outside of inference mode.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
                refusal = program.bind(tensors)
            if refusal:
                run.refuse(refusal, deadline_s)
            lanes = program.lanes
            spans: list[list[Span] | None] = [None if timeline is None else [] for _ in lanes]
            first, *others = [partial(_play, *lane, run, spans_) for lane, spans_ in zip(lanes, spans, strict=True)]
            begun: list[_Worker] = []
            run.begin(tensors, deadline_s)
            try:
                for worker, job in zip(self._workers, others, strict=True):
                    worker.begin(job)
                    begun.append(worker)
                first()
            except BaseException as error:
                run.fail(error, "start of a run")
            for worker in begun:
                worker.wait(run)
            if timeline is not None:
                for recorded in spans:
                    timeline.extend(recorded or ())
            run.end()
            return program.made()

    def check(self) -> None:
        self.domain.check()

    def close(self) -> None:
        """End the threads of this rank and give its memory up. Idempotent, not collective."""
        self._end()
        self._program = None


def _play(lane: str, steps: list[Bound], run: Run, spans: list[Span] | None) -> None:
    """The steps of a lane in order, until one fails, here or on another lane of this rank."""
    errors = run.errors
    try:
        for bound in steps:
            if errors:
                return
            if spans is None:
                bound.call()
            else:
                start = time.monotonic_ns()
                bound.call()
                end = start if isinstance(bound.step, Set) else time.monotonic_ns()
                spans.append(Span(run.domain.rank, lane, bound.name, start / 1e3, end / 1e3, bound.sent_bytes))
    except BaseException as error:
        run.fail(error, f"lane {lane}")


class _Worker(threading.Thread):
    """Does one job at a time. It does not know who made it, and so does not keep it alive."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._done, self._ending = threading.Lock(), threading.Lock()
        self._ended = self._busy = False

    def begin(self, job: Callable[[], None]) -> None:
        with self._ending:
            if self._ended:
                raise ValueError("this CpuSchedule was closed during a run")
            self._done.acquire(blocking=False)  # whatever an interrupted wait has left
            self._busy = True
            self._jobs.put((job, torch.get_num_threads()))

    def wait(self, run: Run) -> None:
        """Until the job is done, come what may: it uses the caller's tensors. An interrupt may strike when it has the lock."""
        while self._busy:
            try:
                self._done.acquire()
            except BaseException as error:  # Ctrl-C
                run.fail(error, "waiting for the other lanes")

    def end(self) -> None:
        """After what was begun. Whoever calls may be this very thread, if collecting garbage closes the domain there."""
        with self._ending:
            self._ended = True
            self._jobs.put(None)
        if threading.current_thread() is not self and self.is_alive():
            self.join()

    def run(self) -> None:
        threads = 0
        while (item := self._jobs.get()) is not None:
            job, wanted = item
            if threads != wanted:  # each thread has its own number, at first as many as there are cores
                threads = wanted
                torch.set_num_threads(threads)
            job()
            del item, job
            self._busy = False
            self._done.release()


def _end_all(workers: list[_Worker], program: Program) -> None:
    for worker in workers:
        worker.end()
    # Not during a run, which may be what collects the garbage that brings us here.
    if program.run.meeting.lock.acquire(blocking=False):
        program.close()
        program.run.meeting.lock.release()
