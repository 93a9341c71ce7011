"""Shared by all executors of a group on CPU ranks: memory between processes, counters, scratch memory, and threads for lanes.

A group makes one call at a time, so its schedules work in the same memory, as large as the largest of them needs. Mappings and
threads do not grow with the number of shapes. They stay until the domain closes.

Order of runs. Ranks meet before each run (`weft.runtime.meeting`), and a rank meets the others only when all of its lanes have
ended the run before:

    a lane in run e - 1, any rank    ends its job: releases a lock that the calling thread takes (`Worker.wait`)
    the calling thread, that rank    publishes that it begins run e (release)
    the calling thread, this rank    reads what every rank has published (acquire), then queues jobs for its lanes
    a lane in run e, this rank       takes its job from the queue

So all accesses in a run happen before all accesses in the next run, whichever executors make them, for any number of ranks. No
schedule reads what a run before it has left, and a wait for a set of the run before (`Wait.previous`) is over when a run begins.

Counters only grow, and all schedules use the same ones from the first on. `Mapped.sets` says how many sets each counter of this
rank has had when the present run ends. All sets of earlier runs have been made when a run begins. So a counter that is n above its
value at the end of the run before has had n sets of the present run.

Growth is collective: ranks make executors in one order, and what these need decides. Other executors are bound to the new memory at
their next run (`Program.map`).
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
from weft.runtime.meeting import drop_closed
from weft.runtime.schedule_memory import ALIGNMENT, Layout
from weft.symm import Domain

_SLACK = 1.25  # times what was there, at least, when memory grows: growth is rare, and a quarter is wasted at most
_COUNTERS = 256  # at first
BOUND = 64
"""Programs of a group that stay bound to memory, those that ran last; the others are bound anew when they run. Steps that are bound
keep views of tensors. Thousands of these, made while the large tensors of calls come and go, would leave holes of their size in the
heap."""


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """Memory as it is until it grows. Programs keep addresses in it; a run keeps it mapped.

    version: from 1. owners: of the mappings. addresses: by rank, of the first counter; buffers begin `buffers_at` bytes behind it.
    sets: by counter of this rank, how many sets it has had when the present run ends. scratch: of this rank alone.
    """

    version: int
    owners: tuple[Any, ...]
    addresses: tuple[int, ...]
    nbytes: int
    buffers_at: int
    sets: list[int]
    scratch: torch.Tensor


class Program(Protocol):
    """What uses memory of the group."""

    def map(self, mapped: Mapped) -> None:
        """Point the steps to `mapped`, unless they are."""

    def unbind(self) -> None:
        """Keep no view of memory until `map`."""


class Memory:
    """What executors on `domain`, which is on CPU, share."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.mapped: Mapped | None = None
        self.workers: list[Worker] = []
        self.kinds: set[Hashable] = set()
        """Names for schedules that differ in sizes only. Ranks have compared and checked the first schedule of each."""
        self._bound: dict[Program, None] = {}  # the one that ran last at the end
        domain._holders.add(self)

    def reserve(self, layout: Layout, scratch_bytes: int, n_workers: int, what: str) -> Mapped:
        """Make room for one more executor. Collective if memory between ranks has to grow. `OutOfSharedMemoryError`."""
        now = self.mapped
        if now is None or layout.buffer_bytes > now.nbytes or layout.n_counters > len(now.sets):
            now = self._grown(layout, now, what)
        if scratch_bytes > now.scratch.nbytes:
            scratch = torch.empty(_grown(now.scratch.nbytes, scratch_bytes), dtype=torch.uint8)
            now = replace(now, version=now.version + 1, scratch=scratch)
        self.mapped = now
        while len(self.workers) < n_workers:
            worker = Worker(f"weft rank {self.domain.rank}, lane {len(self.workers) + 1}")
            worker.start()
            self.workers.append(worker)
        return now

    def _grown(self, layout: Layout, now: Mapped | None, what: str) -> Mapped:
        known = (0, _COUNTERS, 0) if now is None else (now.nbytes, len(now.sets), now.version)
        nbytes, n_counters = _grown(known[0], layout.buffer_bytes), _grown(known[1], layout.n_counters)
        buffers_at = -(-_core.COUNTER_BYTES * n_counters // ALIGNMENT) * ALIGNMENT
        region, ranks = self.domain.allocate(buffers_at + nbytes, what=what), range(self.domain.world_size)
        owners, addresses = tuple(map(region.owner, ranks)), tuple(map(region.address, ranks))
        scratch = torch.empty(0, dtype=torch.uint8) if now is None else now.scratch
        return Mapped(known[2] + 1, owners, addresses, nbytes, buffers_at, [0] * n_counters, scratch)

    def bind(self, program: Program, mapped: Mapped) -> None:
        """Point the steps of `program`, which runs next, to `mapped`."""
        self._bound.pop(program, None)
        if len(self._bound) >= BOUND:
            oldest = next(iter(self._bound))
            del self._bound[oldest]
            oldest.unbind()
        self._bound[program] = None
        program.map(mapped)

    def close(self) -> None:
        """Let go of all, as the domain ends. A run that is under way keeps what it uses mapped."""
        _memories.pop(self.domain, None)
        self.mapped = None
        self._bound.clear()
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.end()


def _grown(known: int, needed: int) -> int:
    return known if needed <= known else max(needed, int(_SLACK * known))


_memories: dict[Domain, Memory] = {}


def memory_of(domain: Domain) -> Memory:
    memory = _memories.get(domain)
    if memory is None:
        drop_closed(_memories)
        memory = _memories[domain] = Memory(domain)
    return memory


class Worker(threading.Thread):
    """A thread that does one job at a time, of any executor."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._done, self._ending = threading.Lock(), threading.Lock()
        self._ended = self._busy = False

    def begin(self, job: Callable[[], None]) -> None:
        with self._ending:
            if self._ended:
                raise ValueError("this group was closed during a run")
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
