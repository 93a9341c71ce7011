"""The executor of schedules on GPUs: lanes are streams, copy engines copy, and the CPU only issues operations.

A schedule is compiled once (`weft.runtime.cuda.compile`). Copies, signals and joins of streams are recorded in a
`_core.StreamProgram`, which issues a sequence of them in one call. cuBLAS GEMMs and small kernels are issued between them.
The first compute lane is the caller's current stream. The other lanes start when this stream reaches the call, and the
stream continues when all lanes have ended.

Signals between ranks are flags in symmetric memory (`weft.runtime.cuda.flags`). Streams wait for them and write them,
without a compute unit. Every run issues the same operations, so a CUDA graph can capture and replay them. Replays and
single calls may alternate, and one rank may replay a run for which another rank makes a single call.

Memory order. A stream writes a flag after its earlier copies, and the write makes these copies visible: this is the
release that `Set` promises. A wait for a flag blocks all later work on its stream: this is the acquire that `Wait`
promises.

Deadlines. A stream that waits has no deadline, so `weft.runtime.cuda.watch` checks that runs make progress. When the group
has failed, this rank's words are poisoned (`weft.runtime.cuda.memory`), so that its streams continue, and the next call
raises.

Missing data. Results of a failed group are recognisable: before its streams continue, all bytes of this rank's symmetric
buffers are set to 0xFF. This is NaN in any floating-point type, and -1 as a count. Calls that succeed need no extra work
for this.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from weft import _core, env
from weft.runtime.cuda.compile import compile_streams
from weft.runtime.cuda.context import RankSchedule, Tensors, rank_schedule
from weft.runtime.cuda.issue import StreamItems
from weft.runtime.cuda.memory import ScheduleMemory
from weft.runtime.cuda.runnable import require_runnable_on_gpus
from weft.runtime.cuda.streams import current_stream
from weft.runtime.executor import Executor
from weft.runtime.schedule_memory import TORCH_DTYPE, agree_on_schedule
from weft.schedule import Schedule
from weft.symm import Communicator
from weft.timeline import Timeline


class CudaSchedule(Executor):
    """The executor of `schedule` on this rank of `communicator`.

    memory: memory that executors share (`weft.runtime.cuda.memory`). Without it, ranks compare schedules and allocate
        memory, so all ranks must construct the executor together.
    mine: the result of `rank_schedule` for `schedule`; None to compute it.

    The executor uses memory for the schedule's symmetric and scratch buffers, and 8 bytes per wait. Raises `DisagreementError`
    if the ranks' schedules differ, `ScheduleError` if streams cannot run the schedule, and `OutOfSharedMemoryError`.
    """

    def __init__(
        self,
        schedule: Schedule,
        comm: Communicator,
        memory: ScheduleMemory | None = None,
        mine: RankSchedule | None = None,
    ) -> None:
        self._shared = memory is not None
        if memory is None:
            agree_on_schedule(schedule, comm)
            require_runnable_on_gpus(schedule, comm.rank)
        mine = mine or rank_schedule(schedule, comm.rank)
        self.memory = memory = memory or ScheduleMemory(mine, comm)
        memory.users.add(self)
        self.schedule, self.comm, self.rank, self.device = schedule, comm, comm.rank, comm.device
        self.context = memory.context(mine)
        self._usual_deadline_s = env.deadline_s()
        self._reads_on_host = schedule.reads_on_host
        self._captured = False
        self._warm: set[tuple[Any, ...]] = set()
        # Tile kernels are recorded for the strides of the caller's tensors. All other operations serve tensors of any strides.
        self._has_tiles = any(step.tile_kernel for _, step in mine.order)
        self._programs: dict[tuple[Any, ...], StreamItems] = {}
        self._known_runs: weakref.WeakSet[_core.KnownRun] = weakref.WeakSet()
        comm._holders.add(self)

    def run(
        self,
        tensors: Tensors,
        *,
        deadline_s: float | None = None,
        timeline: Timeline | None = None,
        like_before: bool = False,
    ) -> Tensors:
        """Enqueue one run on the current stream. Return the outputs that this run has allocated, by name (see `tensors`).

        tensors: every input and output buffer by name, with the sizes in the schedule. The weights of experts may also be one
            tensor [experts, rows, columns]. For an output with a dynamic number of rows, pass a tensor with enough rows, or a
            function that gets the number of rows and returns a tensor. With a `Read` step of by="meanwhile", the CPU
            calls the function with an estimate of the rows plus a margin, and the run returns a slice of the tensor.
        deadline_s: the longest wait for another rank, in seconds. Default: the value that `WEFT_DEADLINE_S` had when
            this executor was made.
        like_before: True if the tensors differ from the tensors of an earlier run only in their addresses. Then they
            are not checked.
        timeline: receives the times of each step. The call then waits for the device. None for no timeline.

        Raises errors of the group since the last run.
        """
        context = self.context
        context.check()
        if not like_before:
            self._look_at(tensors)
        capturing = torch._C._cuda_isCurrentStreamCapturing()
        if self.schedule.contents:
            if capturing and self._reads_on_host:
                raise ValueError(
                    f"schedule {self.schedule.name} reads sizes on the CPU, which a captured graph cannot do: pass max_rows"
                )
            run = context.run
            run.caller = current_stream(self.device)
            tensors = dict(tensors)  # copied, because outputs are added when their size is known
            run.known.clear()
            run.made = {}
        if not like_before:
            self.warm_up(tensors, capturing)
        self._captured = self._captured or capturing
        program = self._program(tensors, timeline is not None)
        try:
            self.memory.enter(self, self.schedule.name, deadline_s or self._usual_deadline_s, capturing)
            program.issue(tensors, capturing)
        except BaseException as error:
            self._broke(error, capturing)
        if timeline is not None:
            torch.cuda.synchronize(self.device)
            context.check()
            program.read(timeline, self.rank)
        elif not capturing and self.comm.failed:
            self.comm.check()  # after a failure, enqueued work gives no valid result
        made, context.run.made = context.run.made, {}
        return made

    def _broke(self, error: BaseException, capturing: bool = False) -> NoReturn:
        """Raise `error`, which has ended a run, and make the group fail."""
        if isinstance(error, dist.DistBackendError):
            self.context.check()  # weft aborts its own NCCL communicator if the group fails
        if not capturing:  # peers may have begun this run, and would pair a second attempt with their next run
            self.comm.poison(f"schedule {self.schedule.name} failed in the middle of a run: {error!r}")
        raise error

    def known_run(
        self, inputs: Tensors, outputs: Tensors, results: Sequence[str], deadline_s: float | None
    ) -> _core.KnownRun | None:
        if self.schedule.contents:
            return None
        program = self._programs.get(self._key({**inputs, **outputs}, False))
        if program is None:
            return None
        name, deadline_s = self.schedule.name, deadline_s or self._usual_deadline_s
        enter = functools.partial(self.memory.enter, self, name, deadline_s, False)
        run = program.known_run(list(inputs), outputs, results, enter, self._broke)
        if run is not None:
            self._known_runs.add(run)
        return run

    @property
    def read(self) -> Mapping[str, Sequence[int]]:
        return self.context.run.known

    @property
    def was_captured(self) -> bool:
        return self._captured

    @property
    def stale(self) -> bool:
        return self.memory.outgrown and not self._captured

    @property
    def gone(self) -> bool:
        return self.memory.closed

    @property
    def shared(self) -> bool:
        return self._shared

    @property
    def nbytes(self) -> int:
        """The executor's symmetric memory in bytes. If n executors share memory, each counts 1 / n of its size."""
        return self.memory.arena.bytes_of_each

    def check(self) -> None:
        self.context.check()

    def close(self) -> None:
        """Release the executor's memory. All enqueued runs must have ended."""
        self.let_go()
        self.memory.leave(self)

    def let_go(self) -> None:
        """Drop all references to the executor's memory. The executor cannot run any more."""
        self._programs.clear()
        self.context.own.clear()
        for run in self._known_runs:
            run.let_go()

    # --- before a run ---

    def _look_at(self, tensors: Tensors) -> None:
        """Raise `ValueError` if a tensor of the caller does not match the schedule. This check comes before anything is
        enqueued.
        """
        for b in self.context.given:
            t = tensors.get(b.name)
            if t is None:
                raise ValueError(
                    f"buffer {b.name} has no tensor: pass a {b.dtype} tensor of shape ({b.rows}, {b.cols})"
                )
            if not isinstance(b.rows, int):
                if callable(t):
                    continue
                wanted = (t.shape[0], b.cols)
            else:
                wanted = (b.rows, b.cols)
            shape = t.shape if t.dim() != 3 else (t.shape[0] * t.shape[1], t.shape[2])
            if shape != wanted or t.dtype != TORCH_DTYPE[b.dtype] or t.device != self.device:
                raise ValueError(
                    f"buffer {b.name} is {tuple(t.shape)} {t.dtype} on {t.device}: pass ({b.rows}, {b.cols}) "
                    f"{TORCH_DTYPE[b.dtype]} on {self.device}"
                )

    def warm_up(self, tensors: Tensors, capturing: bool = False) -> None:
        """Load every kernel that a run with such tensors needs. A kernel that is loaded while a stream waits can hang the
        device.
        """
        layout = self._layout(tensors)
        if layout in self._warm:
            return
        if capturing:
            raise ValueError("call the operator once with these shapes and layouts before capturing it in a CUDA graph")
        torch.cuda.synchronize(self.device)
        self._program(tensors, False).warm_up(tensors, first=not self._warm)
        torch.cuda.synchronize(self.device)
        self._warm.add(layout)

    def _layout(self, tensors: Tensors) -> tuple[Any, ...]:
        return tuple([t.stride() for b in self.context.given if not callable(t := tensors[b.name])])

    def _key(self, tensors: Tensors, timed: bool) -> tuple[Any, ...]:
        return (timed, *self._layout(tensors)) if self._has_tiles else (timed,)

    def _program(self, tensors: Tensors, timed: bool) -> StreamItems:
        key = self._key(tensors, timed)
        program = self._programs.get(key)
        if program is None:
            torch.cuda.synchronize(self.device)
            with torch.inference_mode(False):  # the tensors are kept, also for calls outside of inference mode
                program = self._programs[key] = compile_streams(self.context, timed, tensors)
        return program
