"""A schedule on GPUs: lanes are streams, copies are copy engines', and the host only issues.

Compiled once (`weft.runtime.cuda.compile`): copies, signals and the joints between streams are recorded in a
`_core.StreamProgram`, which issues a run of them in one call; between them come the library's GEMMs and small kernels. The
first compute lane is the caller's current stream; the others start when it has come to the call, and it goes on when all
have ended.

Signals between ranks are tokens in words of symmetric memory (`weft.runtime.cuda.tokens`): streams wait for them and write
them, and no compute unit is spent on it. What is issued is the same in every run, so that it may be captured in a CUDA graph
and replayed; graphs and single calls may alternate, also between ranks.

Order. A write by a stream comes after the copies before it on that stream and makes them visible; a wait keeps back all that
follows it on its stream. That is the release and acquire that `Set` and `Wait` promise.

Deadlines. A stream that waits has none: `weft.runtime.cuda.watch` looks whether runs get on. When the group has failed, this
rank's words are poisoned, so that its streams go on, and the next call raises.

No result that was made of what never came passes for a valid one: before the streams go on, all bytes of this rank's symmetric
buffers become 0xFF, which is NaN as a floating-point number of any type and -1 as a count. It costs a call nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from typing import Any

import torch

from weft import env
from weft.errors import DeadlineError
from weft.kernels.signals import POISONED, TOKEN
from weft.runtime.cuda.compile import compile_streams
from weft.runtime.cuda.context import Tensors, allocated
from weft.runtime.cuda.issue import StreamItems
from weft.runtime.cuda.runnable import require_runnable_on_gpus
from weft.runtime.cuda.tokens import missing
from weft.runtime.cuda.watch import watch
from weft.runtime.schedule_memory import TORCH_DTYPE, agree_on_schedule
from weft.schedule import Schedule
from weft.symm import Domain
from weft.symm.cuda_driver import fill
from weft.timeline import Timeline

_SPOIL_S = 2.0  # how long after a failure buffers are kept spoilt


class CudaSchedule:
    """`schedule` on this rank of `domain`. Making it is collective: ranks compare schedules and allocate memory.

    Memory: the schedule's symmetric and scratch buffers, and 8 bytes a wait. Raises `DisagreementError` if the ranks'
    schedules differ, `ScheduleError` if streams cannot run it, `OutOfSharedMemoryError`.
    """

    def __init__(self, schedule: Schedule, domain: Domain) -> None:
        agree_on_schedule(schedule, domain)
        require_runnable_on_gpus(schedule, domain.rank)
        self.schedule, self.domain = schedule, domain
        self.deadline_s = self._usual_deadline_s = env.deadline_s()
        self.rank, self.device = domain.rank, domain.device
        self.context = context = allocated(schedule, domain)
        self._n_words = context.standing_word
        with torch.cuda.device(self.device):
            # What the watchdog needs is made now: it may not load or allocate anything while streams wait.
            self._poison_stream = torch.cuda.Stream(self.device, priority=-1)
        self._word_view = context.words.tensor(self.rank, (self._n_words + 1,), torch.int64)
        self._poison = torch.full((self._n_words,), POISONED, dtype=torch.int64, pin_memory=True)
        self._found = torch.zeros(self._word_view.shape, dtype=torch.int64, pin_memory=True)
        self._begun = context.begun_word.numpy()
        self._reads_on_host = schedule.reads_on_host
        self._captured = False
        self._warm: set[tuple[Any, ...]] = set()
        self._programs: dict[bool, StreamItems] = {}
        self._put_first_tokens()
        self._take_back = domain.on_failure(self._release_waiters)
        domain._holders.add(self)
        watch.add(self)

    def run(
        self,
        tensors: Tensors,
        *,
        deadline_s: float | None = None,
        timeline: Timeline | None = None,
        like_before: bool = False,
    ) -> Tensors:
        """Enqueue one run on the current stream. `tensors`: every input and output buffer by name, as `buffers` says; weights
        that lie below each other may also come as [how many, rows, columns]. An output whose rows only the run knows is a
        function from that number to a tensor, or a tensor with at least as many rows. Returns those that were functions, by
        name; where the host reads meanwhile, the first rows of what such a function gave, of up to an eighth more.

        deadline_s: default: what `WEFT_DEADLINE_S` said when this was made. like_before: the caller knows that the tensors are as
        those of an earlier run but for where they lie, and they are not looked at.

        With `timeline` it waits for the device and appends what ran when. Raises what befell the group since the last run.
        """
        context = self.context
        context.check()
        if not like_before:
            self._look_at(tensors)
        self.deadline_s = deadline_s or self._usual_deadline_s
        capturing = torch.cuda.is_current_stream_capturing()
        if self.schedule.contents:
            if capturing and self._reads_on_host:
                raise ValueError(
                    f"schedule {self.schedule.name} reads sizes on the host, which a captured graph cannot: give max_rows"
                )
            run = context.run
            run.caller = torch.cuda.current_stream(self.device)
            tensors = dict(tensors)  # outputs are put in when their size is known
            run.known.clear()
            run.made = {}
        if not like_before:
            self._warm_up(tensors, capturing)
        self._captured = self._captured or capturing
        program = self._program(timeline is not None)
        try:
            program.issue(tensors, capturing)
        except BaseException as error:
            if (
                not capturing
            ):  # peers have got a part of this run, and would take what a second attempt sends for the next
                self.domain.poison(f"schedule {self.schedule.name} failed in the middle of a run: {error!r}")
            raise
        if timeline is not None:
            torch.cuda.synchronize(self.device)
            context.check()
            program.read(timeline, self.rank)
        elif not capturing:
            self.domain.check()  # what was enqueued after a failure is no result
        made, context.run.made = context.run.made, {}
        return made

    @property
    def was_captured(self) -> bool:
        """Whether a graph may be replayed that uses this memory."""
        return self._captured

    @property
    def nbytes(self) -> int:
        """Of symmetric memory."""
        return self.context.layout.buffer_bytes

    def check(self) -> None:
        """Raise what was found wrong since the last run. Does not wait."""
        self.context.check()

    def close(self) -> None:
        """Give memory up. Runs that were enqueued must be done."""
        watch.remove(self)
        self._take_back()
        self._programs.clear()
        self.context.own.clear()
        for region in (self.context.region, self.context.words):
            if self._captured:
                region.close()  # a graph may be replayed whenever
            else:
                region.give_back()

    # --- before a run ---

    def _look_at(self, tensors: Tensors) -> None:
        """Raise `ValueError` for a tensor that is not what the schedule was made for, before anything is enqueued."""
        for b in self.context.given:
            t = tensors.get(b.name)
            if t is None:
                raise ValueError(f"no tensor for buffer {b.name}: pass one of shape ({b.rows}, {b.cols}), {b.dtype}")
            if not isinstance(b.rows, int):
                if callable(t):
                    continue
                wanted = (t.shape[0], b.cols)
            else:
                wanted = (b.rows, b.cols)
            shape = t.shape if t.dim() != 3 else (t.shape[0] * t.shape[1], t.shape[2])
            if shape != wanted or t.dtype != TORCH_DTYPE[b.dtype] or t.device != self.device:
                raise ValueError(
                    f"buffer {b.name} is {tuple(t.shape)} {t.dtype} on {t.device} and the schedule was made for "
                    f"({b.rows}, {b.cols}) {TORCH_DTYPE[b.dtype]} on {self.device}"
                )

    def _warm_up(self, tensors: Tensors, capturing: bool) -> None:
        """Load every kernel that a run with such tensors needs: loading one while a stream waits can hang the device."""
        layout = tuple([t.stride() for b in self.context.given if not callable(t := tensors[b.name])])
        if layout in self._warm:
            return
        if capturing:
            raise ValueError("call the operator once with these shapes and layouts before capturing it in a CUDA graph")
        torch.cuda.synchronize(self.device)
        self._program(False).warm_up(tensors)
        torch.cuda.synchronize(self.device)
        self._warm.add(layout)

    def _program(self, timed: bool) -> StreamItems:
        program = self._programs.get(timed)
        if program is None:
            torch.cuda.synchronize(self.device)
            program = self._programs[timed] = compile_streams(self.context, timed)
        return program

    def _put_first_tokens(self) -> None:
        """For the waits of the first run for the run before it."""
        first = [token.word for token in self.context.tokens[self.rank].values() if token.previous]
        if first:
            self._word_view[first] = TOKEN
        torch.cuda.synchronize(self.device)
        self.domain.all_gather(None, what="first tokens of a schedule")  # peers put theirs from now on

    # --- when something goes wrong ---

    def has_begun(self) -> bool:
        begun = bool(self._begun[0])
        if begun:
            self._begun[0] = 0
        return begun

    def standing_still(self, seconds: float) -> None:
        """On the watching thread: if the run still waits for a peer, name what for, and end it."""
        _not_hindered_by_captures()
        with torch.cuda.device(self.device), torch.cuda.stream(self._poison_stream):
            self._found.copy_(self._word_view, non_blocking=True)
            self._poison_stream.synchronize()
        *words, standing = self._found.tolist()
        waits = missing(self.context.tokens[self.rank], words, standing)
        if not waits:
            return
        signals = [f"signal {t.key[0]}[{t.key[1]}] of rank {t.setter} on lane {lane!r}" for lane, t in waits]
        run = "the run before" if waits[0][1].previous else "this run"
        text = (
            f"rank {self.rank} waited {seconds:.3g} s for {' or '.join(signals)} of schedule {self.schedule.name}: it has not come "
            f"in {run}. Have all ranks made the same call?"
        )
        self.context.run.failure = DeadlineError(text)
        self.domain.poison(text)

    def _release_waiters(self) -> None:
        """On the watchdog thread: spoil what GEMMs read of peers, then end every wait of this rank's streams. Copies of peers that
        wait too may still come behind that, until their streams are done: so it is done again, for as long as this device is
        busy with what was enqueued."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._poison_stream):
            self._spoil()
            self._word_view[: self._n_words].copy_(self._poison, non_blocking=True)
        threading.Thread(target=self._keep_spoiling, name="weft-spoil", daemon=True).start()

    def _spoil(self) -> None:
        if self.nbytes:
            fill(self.context.region.address(self.rank), self.nbytes, 0xFF, self._poison_stream)

    def _keep_spoiling(self) -> None:
        until = time.monotonic() + _SPOIL_S
        with contextlib.suppress(Exception), torch.cuda.device(self.device):  # the region may be closed meanwhile
            while time.monotonic() < until:
                self._spoil()
                time.sleep(0.002)


def _not_hindered_by_captures() -> None:
    """Let this thread synchronize its own stream while another captures; it would spoil the capture otherwise."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2)))  # CU_STREAM_CAPTURE_MODE_RELAXED
