"""Symmetric memory for the buffers of schedules that run one after the other, such as all schedules of one problem family.

A family may have a schedule for few rows and another for many. Each has its own flags (`weft.runtime.cuda.memory`), but large
buffers are in one arena, which is as large as the largest schedule needs. Flags order only the runs of one schedule. So in
an arena that schedules share, a barrier of all ranks precedes every run: it tells each rank that the previous runs of its
peers have ended. Otherwise a rank might overwrite rows that a peer still reads. The barrier does not depend on the previous
run, because the CPU does not see replays of graphs.

Small buffers are not shared, because the barrier takes a few microseconds. Other schedules never join an arena if a graph has
captured a run in it without a barrier.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable
from typing import Any, Protocol

import torch

from weft.errors import OutOfSharedMemoryError
from weft.symm import Communicator, Region
from weft.symm.cuda import allocate_own

LEAST_SHARED_BYTES = 128 << 20
"""The smallest buffers that schedules of a family share."""
SPARE_BYTES = 64 << 20
"""The largest number of bytes of a group's outgrown arenas, without arenas that a graph has captured. An arena is outgrown if a
larger one has replaced it.

The limit is enough for all batch sizes of a decoder, which are called first and captured later.
"""
_GROWTH = 1.125
"""The size of an arena that replaces an outgrown one, as a multiple of what its first schedule needs.

Without this reserve, sizes that vary at random would outgrow the arena often. Each time, weft would rebuild all executors.
"""


class _Memory(Protocol):
    """The parts of `weft.runtime.cuda.memory.ScheduleMemory` that an arena uses. users: executors."""

    @property
    def users(self) -> Collection[Any]: ...

    def close(self) -> None: ...


class Arena:
    """`nbytes` of symmetric memory. All ranks must construct this object."""

    def __init__(self, comm: Communicator, nbytes: int, what: str) -> None:
        self.comm, self.nbytes = comm, nbytes
        self.region = allocated(comm, nbytes, what)
        self.memories: weakref.WeakSet[_Memory] = weakref.WeakSet()
        self.is_shared = False  # True once two schedules have used it
        self.captured = self.outgrown = False
        self._stream: torch.cuda.Stream | None = None  # the stream on which the last run was issued
        self._handle = -1

    @property
    def is_known(self) -> bool:
        """True if schedules use this arena and no larger one has replaced it. All ranks agree on this. They may not agree on
        whether a closed arena still exists, because that depends on garbage collection.
        """
        return len(self.memories) > 0 and not self.outgrown

    @property
    def is_open(self) -> bool:
        """True if another schedule may use this arena, as far as this rank knows."""
        return self.is_shared or not self.captured

    @property
    def bytes_of_each(self) -> int:
        """The size of the arena, divided by the number of executors that use it."""
        return self.nbytes // max(1, sum(len(memory.users) for memory in self.memories))

    def join(self, memory: _Memory) -> None:
        self.is_shared = self.is_shared or len(self.memories) > 0
        self.memories.add(memory)

    def leave(self, memory: _Memory) -> None:
        """Record that a schedule no longer uses the arena. After the last one, the arena is closed."""
        self.memories.discard(memory)
        if not len(self.memories):
            close(self.region, self.captured)

    def enter(self, capturing: bool) -> bool:
        """Order a run on the current stream after the previous run, which may be on another stream. Return True if a barrier of
        all ranks must precede the run.

        During the capture of a graph, do not wait: a capture cannot depend on work outside of the graph.
        """
        device = self.comm.device
        handle = torch._C._cuda_getCurrentRawStream(device.index)
        if handle != self._handle and not capturing:
            stream = torch.cuda.current_stream(device)
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream, self._handle = stream, handle
        self.captured = self.captured or capturing
        return self.is_shared


def allocated(comm: Communicator, nbytes: int, what: str) -> Region:
    """Allocate symmetric memory. If the ranks are on several hosts, allocate ordinary memory of this rank instead. The only
    steps between such ranks are collectives, which need no symmetric memory.

    what: the purpose of the memory, for error texts.
    """
    return comm.allocate(nbytes, what=what) if comm.all_mapped else allocate_own(comm, nbytes)


def close(region: Region, captured: bool) -> None:
    """Close a region, and let later allocations reuse its memory. The memory is not reused if `captured`: a captured
    graph that uses the region may be replayed at any time.
    """
    if captured:
        region.close()
    else:
        region.give_back()


class _OfGroup:
    """The arenas of a group: of, the newest arena of each problem family; outgrown, arenas that larger ones have replaced."""

    def __init__(self) -> None:
        self.of: dict[Hashable, weakref.ref[Arena]] = {}
        self.outgrown: list[weakref.ref[Arena]] = []


_arenas: weakref.WeakKeyDictionary[Communicator, _OfGroup] = weakref.WeakKeyDictionary()


def arena_for(
    family: Hashable, nbytes: int, comm: Communicator, what: str, *, before: Arena | None = None, shares: bool = True
) -> Arena:
    """Return an arena for the buffers of a schedule. All ranks must make this call.

    family: the schedule's problem family. nbytes: the size of the buffers. before: the arena that the schedule has used so far.
    shares: True if other schedules of the family may use the arena too.
    """
    group = _arenas.setdefault(comm, _OfGroup())
    if before is not None:
        _outgrow(group, before)
    shares = shares and nbytes >= LEAST_SHARED_BYTES
    known = group.of[family]() if shares and family in group.of else None
    # Ranks may have captured different calls.
    if known is not None and known.is_known and all(comm.all_gather(known.is_open, what=f"{what}, shared")):
        if nbytes <= known.nbytes:
            return known
        before = known
        _outgrow(group, known)
    try:
        made = Arena(comm, nbytes if before is None else int(_GROWTH * nbytes), what)
    except OutOfSharedMemoryError:  # every rank raises it
        if before is None:
            raise
        made = Arena(comm, nbytes, what)
    if shares:
        group.of[family] = weakref.ref(made)
    return made


def _outgrow(group: _OfGroup, arena: Arena) -> None:
    """Record that `arena` has become too small. Close the oldest of such arenas until the others hold at most `SPARE_BYTES`
    bytes. All ranks must make this call.
    """
    if arena.outgrown or not len(arena.memories):
        return
    arena.outgrown = True
    group.outgrown.append(weakref.ref(arena))
    known = [one for ref in group.outgrown if (one := ref()) is not None and len(one.memories)]
    group.outgrown[:] = [weakref.ref(one) for one in known]
    if sum(one.nbytes for one in known) <= SPARE_BYTES:
        return
    torch.cuda.synchronize(arena.comm.device)
    # Ranks may have captured different calls. After this exchange no rank uses the arenas that no rank has captured.
    captured = arena.comm.all_gather([one.captured for one in known], what="memory that was outgrown")
    left = [one for one, *by_rank in zip(known, *captured, strict=True) if not any(by_rank)]
    group.outgrown[:] = [weakref.ref(one) for one in left]
    while sum(one.nbytes for one in left) > SPARE_BYTES:
        for memory in list(left.pop(0).memories):
            memory.close()
