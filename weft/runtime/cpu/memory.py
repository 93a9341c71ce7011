"""Resources that all executors of a group on CPU share: shared memory, counters, scratch memory, and threads for lanes.

A group makes one call at a time. So all schedules use the same memory, as large as the largest schedule needs, and the same
threads. The communicator keeps these resources until it closes.

Order of runs. Ranks synchronise before each run (`weft.runtime.meeting`). A rank enters this rendezvous only after all of
its lanes have ended the previous run. So the following happen in this order:

    a lane in run e - 1, any rank    ends its job: releases a lock that the calling thread takes (`Worker.wait`)
    the calling thread, that rank    publishes that it begins run e (release)
    the calling thread, this rank    reads what every rank has published (acquire), then queues jobs for its lanes
    a lane in run e, this rank       takes its job from the queue

So all accesses in a run happen before all accesses in the next run, for any executors and any number of ranks. A wait for a
signal of the previous run (`Wait.previous`) is already satisfied when a run begins. No schedule reads values that an
earlier run has left in memory.

Counters only grow, and all schedules use the same array of counters. `Mapped.sets` has the value of each counter of this
rank at the end of the current run. If a counter is n above its value at the end of the previous run, it has been set n
times in the current run.

All ranks grow the memory together, because they make executors in the same order, and the schedules determine the size.
Every other executor gets the addresses of the new memory at its next run (`MemoryUser.map`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from weft import _core
from weft.runtime.cpu.run import Run
from weft.runtime.per_communicator import of_communicator
from weft.runtime.schedule_memory import ALIGNMENT, Layout
from weft.symm import Communicator

_SLACK = 1.25  # least growth factor, so that growth is rare and at most a quarter is wasted
_COUNTERS = 256  # initial number
BOUND = 64
"""The number of executors in a group that keep their views of memory between runs: the executors that ran last. Others
drop their views, and make them again when they run.

Thousands of views that were allocated between large tensors would fragment the heap.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """One version of the group's memory. When the memory grows, a new version replaces it. A run keeps its version mapped.

    version: 1 for the first version of the memory, and 1 more for each later version.
    owners: objects that keep the memory of this host's ranks mapped.
    addresses: the address of each rank's memory; 0 for ranks on other hosts. The memory begins with the counters.
    buffers_at: the offset of the buffers, which follow the counters, in bytes. nbytes: the size of all buffers of a rank.
    sets: for each counter of this rank, the value at the end of the current run. scratch: this rank's private memory.
    """

    version: int
    owners: tuple[Any, ...]
    addresses: tuple[int, ...]
    nbytes: int
    buffers_at: int
    sets: list[int]
    scratch: torch.Tensor


class MemoryUser(Protocol):
    """The interface of an object that uses the group's shared memory, such as an executor's `Program`. `Memory` calls its two
    methods when the addresses of the memory change.
    """

    def map(self, mapped: Mapped) -> None:
        """Use the addresses of `mapped`, the current version of the group's memory, from now on."""

    def unbind(self) -> None:
        """Drop all tensors that are views of the shared memory. The next `map` makes them again."""


class Memory:
    """The memory, counters and threads that all executors on `comm`, a communicator of CPU ranks, share."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.mapped: Mapped | None = None
        self.workers: list[Worker] = []
        self.kinds: set[Hashable] = set()
        """The kinds (`kind` of `CpuSchedule`) of schedules that ranks have already compared and checked. Schedules of one
        kind differ only in sizes, so only the first is checked.
        """
        self._bound: dict[MemoryUser, None] = {}  # in the order of their last runs
        comm._holders.add(self)

    def reserve(self, layout: Layout, scratch_bytes: int, n_workers: int, what: str) -> Mapped:
        """Make the memory, the scratch memory and the number of threads large enough for one more executor. Return the
        current version of the memory. All ranks must make this call.

        Raises `OutOfSharedMemoryError` on every rank. what: the purpose of the memory, for error texts.
        """
        now = self.mapped
        if now is None or layout.buffer_bytes > now.nbytes or layout.n_counters > len(now.sets):
            now = self._grown(layout, now, what)
        if scratch_bytes > now.scratch.nbytes:
            scratch = torch.empty(_grown(now.scratch.nbytes, scratch_bytes), dtype=torch.uint8, device="cpu")
            now = replace(now, version=now.version + 1, scratch=scratch)
        self.mapped = now
        while len(self.workers) < n_workers:
            worker = Worker(f"weft rank {self.comm.rank}, lane {len(self.workers) + 1}")
            worker.start()
            self.workers.append(worker)
        return now

    def _grown(self, layout: Layout, now: Mapped | None, what: str) -> Mapped:
        known = (0, _COUNTERS, 0) if now is None else (now.nbytes, len(now.sets), now.version)
        nbytes, n_counters = _grown(known[0], layout.buffer_bytes), _grown(known[1], layout.n_counters)
        buffers_at = -(-_core.COUNTER_BYTES * n_counters // ALIGNMENT) * ALIGNMENT
        region, ranks = self.comm.allocate(buffers_at + nbytes, what=what), range(self.comm.world_size)
        near = [rank for rank in ranks if self.comm.mapped[rank]]
        owners = tuple(map(region.owner, near))
        addresses = tuple(region.address(rank) if rank in near else 0 for rank in ranks)
        scratch = torch.empty(0, dtype=torch.uint8, device="cpu") if now is None else now.scratch
        return Mapped(known[2] + 1, owners, addresses, nbytes, buffers_at, [0] * n_counters, scratch)

    def bind(self, program: MemoryUser, mapped: Mapped) -> None:
        """Give an executor's `program`, which runs next, the addresses of the memory `mapped`. At most `BOUND` programs keep
        tensors that are views of the memory. If there are more, drop the views of the least recently run program.
        """
        self._bound.pop(program, None)
        if len(self._bound) >= BOUND:
            oldest = next(iter(self._bound))
            del self._bound[oldest]
            oldest.unbind()
        self._bound[program] = None
        program.map(mapped)

    def close(self) -> None:
        """Release everything. The communicator calls this method when it closes. A run in progress keeps its memory mapped."""
        _memories.pop(self.comm, None)
        self.mapped = None
        self._bound.clear()
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.end()


def _grown(known: int, needed: int) -> int:
    return known if needed <= known else max(needed, int(_SLACK * known))


_memories: dict[Communicator, Memory] = {}


def memory_of(comm: Communicator) -> Memory:
    return of_communicator(_memories, comm, Memory)


class Worker(threading.Thread):
    """A thread that runs lanes, one job at a time, for all executors of a group."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._done, self._ending = threading.Lock(), threading.Lock()
        self._ended = self._busy = False

    def begin(self, job: Callable[[], None]) -> None:
        with self._ending:
            if self._ended:
                raise ValueError("this group was closed during a run: close it only after all calls have returned")
            self._done.acquire(blocking=False)  # an interrupted wait may have left the lock released
            self._busy = True
            self._jobs.put((job, torch.get_num_threads()))

    def wait(self, run: Run) -> None:
        """Wait until the worker has done its job. After Ctrl-C the run fails, but the wait continues, because the job uses the
        caller's tensors.
        """
        # Ctrl-C may arrive just after this thread has taken the lock, so `_busy` says if the job is done.
        while self._busy:
            try:
                self._done.acquire()
            except BaseException as error:  # Ctrl-C
                run.fail(error, "waiting for the other lanes")

    def end(self) -> None:
        """End the thread after its queued jobs, and wait for its end. If the thread itself calls this method, do not wait. The
        thread calls it if a garbage collection on the thread closes the communicator.
        """
        with self._ending:
            self._ended = True
            self._jobs.put(None)
        if threading.current_thread() is not self and self.is_alive():
            self.join()

    def run(self) -> None:
        threads = 0
        while (item := self._jobs.get()) is not None:
            job, wanted = item
            if threads != wanted:  # torch's number of threads is set per thread, and is initially the number of cores
                threads = wanted
                torch.set_num_threads(threads)
            job()
            del item, job
            self._busy = False
            self._done.release()
