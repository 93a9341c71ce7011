"""The executor of schedules on CPU processes: shared memory, a thread per lane, torch's kernels.

Lanes. The first compute lane runs on the thread that calls `run`. The other lanes run on threads that all schedules of the
group share. Copies, matmuls and waits release the GIL, so lanes overlap.

Memory order in a run. A copy ends with a release fence, a set adds to a counter with release order, and a wait reads the
counter with acquire order (csrc/signal.hpp). So a lane that has waited sees all writes that precede the set. For the order
of different runs, see `weft.runtime.cpu.memory`.

Ranks synchronise before a run, and each rank may refuse it (`weft.runtime.meeting`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

import torch

from weft.errors import ScheduleError
from weft.runtime.collectives import leave
from weft.runtime.cpu.checked import Checked
from weft.runtime.cpu.memory import Worker, memory_of
from weft.runtime.cpu.messages import channels_of
from weft.runtime.cpu.program import Bound, Program
from weft.runtime.cpu.run import Run, Tensors
from weft.runtime.executor import Executor
from weft.runtime.schedule_memory import agree_on_schedule
from weft.schedule import Schedule, Set
from weft.symm import Communicator
from weft.timeline import Span, Timeline


class CpuSchedule(Executor):
    """The executor of `schedule` on this rank of `comm`, until `close()` or until the communicator closes.

    All ranks must construct this object together: the constructor compares schedules, and may grow the group's memory.
    The constructor raises on every rank: `DisagreementError` if the schedules differ, `ScheduleError` if the schedule
    cannot run on these ranks, or `OutOfSharedMemoryError`.

    what: the user's call, for error texts if ranks make different calls.
    kind: identifies schedules that differ only in sizes; any hashable value. Ranks compare and check only the first schedule
        of each kind. None: compare and check this schedule.
    """

    def __init__(self, schedule: Schedule, comm: Communicator, what: str = "", kind: Hashable = None) -> None:
        if comm.device.type != "cpu":
            raise ValueError(
                f"a CpuSchedule needs a communicator on CPU, not on {comm.device}: pass communicator(group, 'cpu')"
            )
        self.schedule, self.comm, self._memory = schedule, comm, memory_of(comm)
        if kind is not None and kind in self._memory.kinds:
            checked = _checked(schedule, comm, known=True)
        else:
            checked = _agreed(schedule, comm)
            self._memory.kinds.add(kind)
        if checked.channels:
            channels_of(comm).connect(checked.channels)
        run = Run(schedule.name, what, comm)
        self._program: Program | None = Program(schedule, checked, run)
        self._receiving = checked.receiving
        self._inputs = {b.name: (b.rows, b.cols) for b in schedule.buffers_of_rank(comm.rank) if b.role == "input"}
        places, n_workers = self._program.places, len(self._program.lanes) - 1
        what = f"buffers of schedule {schedule.name}"
        self._program.map(self._memory.reserve(places.layout, places.scratch_bytes, n_workers, what))

    def run(
        self,
        tensors: Tensors,
        *,
        deadline_s: float | None = None,
        timeline: Timeline | None = None,
        like_before: bool = False,
    ) -> Tensors:
        """Run the schedule once. All ranks must make this call. This rank's outputs are complete on return. Return
        the outputs with a dynamic number of rows, by name.

        tensors: every input and output buffer by name, with the shape in `schedule.buffers_of_rank(rank)` and any row
            stride. A tensor that only matmuls use may also be column-major. The weights of experts may also be one tensor
            [experts, rows, columns], which is copied if it is not contiguous. Nothing else is copied. For an output with a
            dynamic number of rows, pass a function that gets the number of rows and returns a tensor.
        deadline_s: the longest wait for another rank, in seconds (default `WEFT_DEADLINE_S`).
        timeline: gets a span for every step of this rank, in microseconds of the monotonic clock, which all processes
            share. Steps that set signals have no duration.

        Raises `RefusedError` on every rank if a tensor on any rank does not match its buffer. Then no step has run, and the
        group stays usable. Any other error makes the group fail on all ranks. It is a `DisagreementError` if ranks make
        different calls, a `DeadlineError` with the signal that was not set in time, a `PeerLostError`, or the error of a
        step.
        """
        # Keep these references until the end of the run, so that a concurrent close does not unmap memory that lanes use.
        program, mapped, workers = self._program, self._memory.mapped, self._memory.workers
        if program is None or mapped is None:
            self.comm.check()
            raise ValueError(f"this CpuSchedule ({self.schedule.name}) is closed: make a new one")
        run = program.run
        tensors = self._with_rows_of_experts(tensors)
        with run.meeting.lock:
            self.comm.check()
            deadline_s = self.comm.deadline_s if deadline_s is None else deadline_s
            # Views are kept after the call, and later calls outside of inference mode may use them.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
                self._memory.bind(program, mapped)
                refusal = program.bind(tensors)
            if refusal:
                run.refuse(refusal, deadline_s)
            lanes = program.lanes
            spans: list[list[Span] | None] = [None if timeline is None else [] for _ in lanes]
            first, *others = [partial(_play, *lane, run, spans_) for lane, spans_ in zip(lanes, spans, strict=True)]
            begun: list[Worker] = []
            run.begin(tensors, mapped.sets, program.sets, deadline_s)
            try:
                program.expect()
                for worker, job in zip(workers[: len(others)], others, strict=True):
                    worker.begin(job)
                    begun.append(worker)
                first()
            except BaseException as error:
                run.fail(error, "start of a run")
            for number, worker in enumerate(begun):
                if number == len(others) - self._receiving:
                    run.lanes_ended()
                worker.wait(run)
            if run.errors:
                program.abandon()
            if run.is_sending:
                leave(mapped)  # gloo may still read the rows
            if timeline is not None:
                for recorded in spans:
                    timeline.extend(recorded or ())
            run.end()
            return program.made()

    def _with_rows_of_experts(self, tensors: Tensors) -> Tensors:
        """Return `tensors`, with each input [experts, rows, columns] of a buffer [experts * rows, columns] as two dimensions."""
        if not isinstance(tensors, Mapping):
            return tensors  # `bind` refuses it on all ranks
        rows = {
            name: t.contiguous().flatten(0, 1)
            for name, t in tensors.items()
            if isinstance(t, torch.Tensor) and t.ndim == 3
            if self._inputs.get(name) == (t.shape[0] * t.shape[1], t.shape[2])
        }
        return {**tensors, **rows} if rows else tensors

    @property
    def read(self) -> Mapping[str, Sequence[int]]:
        return {} if self._program is None else self._program.read

    def close(self) -> None:
        """Free the executor's steps. The group keeps its memory and threads. Ranks need not close together. Repeated calls
        have no effect.
        """
        program, self._program = self._program, None
        # Garbage collection during a run may call `close`. Then skip this.
        if program is not None and program.run.meeting.lock.acquire(blocking=False):
            program.close()
            program.run.meeting.lock.release()

    @property
    def shared(self) -> bool:
        return True


def _checked(schedule: Schedule, comm: Communicator, known: bool = False) -> Checked:
    return Checked(schedule, comm.rank, comm.world_size, known, () if comm.all_mapped else comm.hosts)


def _agreed(schedule: Schedule, comm: Communicator) -> Checked:
    """Compare `schedule` between ranks, and check it. Return this rank's checked steps. All ranks must make this call. If the
    check fails on any rank, all raise.
    """
    agree_on_schedule(schedule, comm)
    checked, error = None, ""
    try:
        checked = _checked(schedule, comm)
    except ValueError as trouble:
        error = str(trouble)
    errors = [text for text in comm.all_gather(error, what=f"checks of schedule {schedule.name}") if text]
    if checked is None or errors:
        raise ScheduleError(errors[0])
    return checked


def _play(lane: str, steps: list[Bound], run: Run, spans: list[Span] | None) -> None:
    """Run the steps of a lane in order. Stop if a step of any lane of this rank has failed.

    run: the state that the lanes share.
    spans: a list to which to append the time span of each step; None for no timeline.
    """
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
                spans.append(Span(run.comm.rank, lane, bound.name, start / 1e3, end / 1e3, bound.sent_bytes))
    except BaseException as error:
        run.fail(error, f"lane {lane}")
