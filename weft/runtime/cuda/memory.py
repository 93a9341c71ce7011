"""Memory of executors on GPUs: symmetric memory, flag words and streams, and their release when the group fails.

Executors of schedules that differ only in sizes share one `ScheduleMemory` (`shared`), sized for the largest schedule. They
also share its flags: a run waits for flags that the previous run has left, even if another executor made that run. So runs
and replays of captured graphs must have the same order on all ranks.

If sizes change between two runs, waits for flags of the previous run are not enough. Suppose that a rank R writes rows into the
memory of a reader. A flag tells R that the reader has read these rows, so that R may overwrite them. But if the rows of R have
other positions in the next run, R may overwrite rows of other ranks, which the reader still needs. With two ranks this cannot
happen, because a reader has rows of only one peer. With more ranks, `ScheduleMemory.enter` runs a barrier when sizes change:
every rank notifies all peers that its previous runs have ended, and waits for the same from all peers. Once a graph has
captured a run, the barrier precedes every run, because the CPU does not see replays. Schedules that wait for no flag of the
previous run need no barrier.

Large buffers are in an arena (`weft.runtime.cuda.arena`), which all schedules of a problem family share. If a schedule needs
more memory than its arena has, a larger arena is allocated, with a reserve. Executors in the smaller arena remain usable. At
their next call they are rebuilt in the larger arena, unless a graph has captured them. When the last executor has left the
smaller arena, it is closed. If all such outgrown arenas together hold more than `arena.SPARE_BYTES`, the oldest are
closed immediately, and their executors are rebuilt.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from weft import _core, env
from weft.errors import DeadlineError, DisagreementError
from weft.kernels.signals import FLAG, POISONED
from weft.runtime.cuda.arena import Arena, allocated, arena_for, close
from weft.runtime.cuda.context import Context, LastRun, RankSchedule, own_buffers, rank_schedule
from weft.runtime.cuda.flags import AWAITED, Flag, StepPlace, missing
from weft.runtime.cuda.runnable import require_runnable_on_gpus
from weft.runtime.cuda.watch import watch
from weft.runtime.own_nccl import own_nccl
from weft.runtime.schedule_memory import agree_on_schedule
from weft.schedule import Schedule
from weft.symm import Communicator
from weft.symm.cuda_driver import fill

_SPOIL_S = 2.0  # time for which buffers are overwritten after a failure


class ScheduleMemory:
    """Symmetric memory, flags and streams, shared by the executors of schedules that differ only in sizes. All ranks
    must construct this object. The constructor raises `OutOfSharedMemoryError` on every rank if there is not enough
    memory.

    mine: this rank's steps of a schedule. arena: the memory of its buffers; None to allocate it.
    """

    def __init__(self, mine: RankSchedule, comm: Communicator, arena: Arena | None = None) -> None:
        self.comm, self.rank, self.device = comm, comm.rank, comm.device
        self.name, self.flags, self.lanes = mine.schedule.name, mine.flags, mine.lanes
        self._n_words = mine.standing_word
        self.deadline_s = env.deadline_s()
        self.run = LastRun()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # executors
        self.captured = False
        self._last: object | None = None  # the executor of the last run
        self._closed = False
        self.own_group = None if comm.all_mapped else own_nccl(comm)
        self.arena = arena or Arena(comm, mine.layout.buffer_bytes, f"buffers of schedule {self.name}")
        self.region, self.nbytes = self.arena.region, self.arena.nbytes
        # The words: flags and the standing word; for changes of executors, another standing word and a word for each
        # peer.
        n_all = self._n_words + 2 + comm.world_size
        self.words = allocated(comm, 8 * n_all, f"signals of schedule {self.name}")
        with torch.cuda.device(self.device):
            self.side = [torch.cuda.Stream(self.device, priority=-1) for _ in self.lanes[1:]]
            self.monitor = torch.cuda.Stream(self.device)
            # Allocate what the watchdog needs now: it may not load or allocate anything while streams wait.
            self._poison_stream = torch.cuda.Stream(self.device, priority=-1)
        self._word_view = self.words.tensor(self.rank, (n_all,), torch.int64)
        self._poison = torch.full((n_all,), POISONED, dtype=torch.int64, pin_memory=True)
        self._found = torch.zeros(self._word_view.shape, dtype=torch.int64, pin_memory=True)
        self.begun_word = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        self._begun = self.begun_word.numpy()
        first = [flag.word for flag in self.flags[self.rank].values() if flag.previous]
        self._fences_sizes = bool(first) and comm.world_size > 2
        self._fence = self._fenced() if comm.world_size > 1 and comm.all_mapped else None
        if first:  # so that the first run passes its waits for the previous run
            self._word_view[first] = FLAG
        torch.cuda.synchronize(self.device)
        comm.all_gather(None, what="first flags of a schedule")  # peers set their flags only after this
        self._take_back = comm.on_failure(self._release_waiters)
        comm._holders.add(self)
        watch.add(self)
        self.arena.join(self)

    @property
    def outgrown(self) -> bool:
        """True if executors that no graph has captured must be rebuilt in larger memory."""
        return self.arena.outgrown

    def context(self, mine: RankSchedule) -> Context:
        own = own_buffers(mine, self.region, self.device)
        return Context(**vars(mine), comm=self.comm, device=self.device, region=self.region, words=self.words, own=own,
                       side=self.side, monitor=self.monitor, begun_word=self.begun_word, run=self.run,
                       own_group=self.own_group)  # fmt: skip

    def serves(self, mine: RankSchedule) -> bool:
        """True if a schedule may use this memory: it differs only in sizes from the schedules that use it.

        mine: this rank's steps of the schedule.
        """
        return not self._closed and self.flags == mine.flags and self.lanes == mine.lanes

    def enter(self, executor: object, schedule_name: str, deadline_s: float, capturing: bool) -> None:
        """Make a run of `executor` on the current stream wait for the previous run, which may be on another stream. Also
        enqueue a barrier of all ranks if sizes have changed and runs therefore need one (see the top of this file), and in a
        shared arena.
        """
        self.deadline_s, self.captured = deadline_s, self.captured or capturing
        shares = self.arena.enter(capturing)
        if self._fence is not None and (
            shares or (self._fences_sizes and (self.captured or self._last not in (None, executor)))
        ):
            program, bases = self._fence
            handle = torch._C._cuda_getCurrentRawStream(self.device.index)
            program.run(0, len(program), bases, [handle])
        self._last, self.name = executor, schedule_name

    def leave(self, executor: object) -> None:
        """Record that `executor` no longer uses this memory. If no other executor uses the memory, close it."""
        self.users.discard(executor)
        self._last = None if self._last is executor else self._last
        if not self.users:
            self.close()

    def close(self) -> None:
        """Close the memory. Executors that still use it drop their references to it, and cannot run any more."""
        if self._closed:
            return
        self._closed = True
        for executor in list(self.users):
            executor.let_go()
        kinds = _shared.get(self.comm, {})  # the registry may not keep the communicator alive
        for kind in [kind for kind, (memory, _) in kinds.items() if memory is self]:
            del kinds[kind]
        watch.remove(self)
        self._take_back()
        self.arena.leave(self)
        close(self.words, self.captured)

    def _fenced(self) -> tuple[_core.StreamProgram, list[int]]:
        """Return the program (a list of stream operations) of the barrier between runs, and the program's base addresses. The
        barrier notifies peers that this rank's runs have ended, and waits until the peers' runs have ended.
        """
        world, rank, first = self.comm.world_size, self.rank, self._n_words + 2
        bases = [*(self.words.address(r) for r in range(world)), self.begun_word.data_ptr()]
        program, others = _core.StreamProgram(world + 1, 1, 0), [r for r in range(world) if r != rank]
        standing = 8 * (self._n_words + 1)
        program.signal(
            0,
            [(False, rank, standing, 1), (False, world, 0, 1)] + [(False, r, 8 * (first + rank), FLAG) for r in others],
        )
        program.signal(0, [(True, rank, 8 * (first + r), AWAITED) for r in others])
        program.signal(0, [(False, rank, 8 * (first + r), 0) for r in others] + [(False, rank, standing, 0)])
        return program, bases

    @property
    def closed(self) -> bool:
        return self._closed

    # --- when something goes wrong ---

    def has_begun(self) -> bool:
        if self._begun[1]:
            self._say_who_differs()
        begun = bool(self._begun[0])
        if begun:
            self._begun[0] = 0
        return begun

    def _say_who_differs(self) -> None:
        sender, self._begun[1] = int(self._begun[1]) - 1, 0
        text = (
            f"rank {self.rank}: schedule {self.name}: rank {sender} sent another number of rows than rank {self.rank} expected, "
            "and its rows in the result are NaN: on all ranks pass `received` and `splits` of the same exchange; "
            "WEFT_CHECK_CALLS=1 finds the call"
        )
        self._end(DisagreementError(text))

    def standing_still(self, seconds: float) -> None:
        """Make the group fail if a run is blocked in a wait. The error names the peer and the signal. This method runs
        on the watching thread after a missed deadline.

        seconds: the deadline.
        """
        if self.own_group is not None:
            if self._begun[2]:
                self._fail(seconds, "collectives")
            return
        _not_hindered_by_captures()
        with torch.cuda.device(self.device), torch.cuda.stream(self._poison_stream):
            self._found.copy_(self._word_view, non_blocking=True)
            self._poison_stream.synchronize()
        found = self._found.tolist()
        words, standing, changing, fences = (
            found[: self._n_words],
            *found[self._n_words : self._n_words + 2],
            found[self._n_words + 2 :],
        )
        if changing:
            dynamic = [r for r, word in enumerate(fences) if r != self.rank and not word]
            waited, run = f"ranks {dynamic} to end their earlier runs", ""
        elif waits := missing(self.flags[self.rank], words, standing):
            waited = " or ".join(
                f"signal {t.key[0]}[{t.key[1]}] of rank {t.setter} on lane {lane!r}" for lane, t in waits
            )
            run = f", which has not arrived in {'the previous' if waits[0][1].previous else 'this'} run"
        else:
            return
        self._fail(seconds, waited, run)

    def _fail(self, seconds: float, waited: str, run: str = "") -> None:
        """Make the group fail, because this rank has waited too long.

        waited: the signal or event that this rank waited for, as text.
        run: further words about the run, for the error text.
        """
        text = (
            f"rank {self.rank} waited {seconds:.3g} s for {waited} of schedule {self.name}{run}. "
            "Check that all ranks made the same call"
        )
        self._end(DeadlineError(text))

    def _end(self, error: DeadlineError | DisagreementError) -> None:
        """Make the group fail with `error`, which the next call raises. Do nothing if the group has already failed: a failure
        overwrites the counts that ranks compare, and ends waits, so what the device reports afterwards is not the cause.
        """
        if not self.comm.failed:
            self.run.failure = error
            self.comm.poison(str(error))

    def _release_waiters(self) -> None:
        """Write NaN to all buffers that peers write, then end every wait of this rank's streams. This method runs on
        the watchdog thread when the group has failed.

        Copies of peers may still arrive until their streams are done, so the buffers are filled again and again for
        `_SPOIL_S`.
        """
        with torch.cuda.device(self.device), torch.cuda.stream(self._poison_stream):
            self._spoil()
            for part in (slice(self._n_words), slice(self._n_words + 2, None)):
                self._word_view[part].copy_(self._poison[part], non_blocking=True)
        threading.Thread(target=self._keep_spoiling, name="weft-spoil", daemon=True).start()

    def _spoil(self) -> None:
        if self.nbytes:
            fill(self.region.address(self.rank), self.nbytes, 0xFF, self._poison_stream)

    def _keep_spoiling(self) -> None:
        until = time.monotonic() + _SPOIL_S
        with contextlib.suppress(Exception), torch.cuda.device(self.device):  # the region may be closed meanwhile
            while time.monotonic() < until:
                self._spoil()
                time.sleep(0.002)


_shared: weakref.WeakKeyDictionary[Communicator, dict[Hashable, tuple[ScheduleMemory, RankSchedule]]] = (
    weakref.WeakKeyDictionary()
)


def shared(
    kind: tuple[Hashable, str], schedule: Schedule, comm: Communicator
) -> tuple[ScheduleMemory, RankSchedule] | None:
    """Return the memory that schedules of one `kind` share, and this rank's steps of `schedule`. Return None if `schedule`
    differs from the other schedules of its kind in more than sizes.

    kind: the problem family, and the name of the schedule. Problems of a family differ only in size.

    If memory must be allocated, ranks compare their schedules, so all ranks must make this call together.
    """
    kinds = _shared.setdefault(comm, {})
    known = kinds.get(kind)
    mine, before = rank_schedule(schedule, comm.rank, None if known is None else known[1]), None
    nbytes = mine.layout.buffer_bytes
    if known is not None and not known[0].closed:
        memory = known[0]
        if not memory.serves(mine):
            return None
        if nbytes <= memory.nbytes and not memory.outgrown:
            return memory, mine
        before = memory.arena
    agree_on_schedule(schedule, comm)
    require_runnable_on_gpus(schedule, comm.rank)
    shares = comm.all_mapped and all(map(_waits_for_all, mine.flags, [comm.world_size - 1] * comm.world_size))
    arena = arena_for(kind[0], nbytes, comm, f"buffers of schedule {schedule.name}", before=before, shares=shares)
    kinds[kind] = made = ScheduleMemory(mine, comm, arena), mine
    return made


def _waits_for_all(flags: Mapping[StepPlace, Flag], peers: int) -> bool:
    """True if a rank waits for each of its `peers` in every run, so that a peer cannot begin two barriers between runs while
    this rank is in one.
    """
    return len({flag.setter for flag in flags.values() if not flag.previous}) == peers


def _not_hindered_by_captures() -> None:
    """Set this thread's capture mode to relaxed. Otherwise its stream synchronisations would invalidate a graph that
    another thread captures.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2)))  # CU_STREAM_CAPTURE_MODE_RELAXED
