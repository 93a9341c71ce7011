"""Chunks in symmetric memory that all ranks fetch into their results: an all-gather after any producer.

Results are ordinary memory, into which peers cannot write. If a producer sent its chunks, they would arrive in symmetric
memory and need a second copy. So the producer only signals that a chunk is ready, and every rank copies it into its result:
each byte is copied once. A rank's own chunks are ready first and are copied first. Then it copies the chunks of the rank
before it, and so on, so that no two ranks fetch from the same rank. A copy of own rows takes a quarter of the time of the same
rows over NVLink. With `apart`, another copy engine copies them, concurrently with the other copies.

A rank that has fetched everything signals all others that it no longer reads this run's symmetric memory. They wait for
this signal before they write there in the next run, even if other signals would order these accesses. A run of other
sizes may place its chunks differently in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from weft.builders.operands import peer
from weft.schedule.expr import RANK, Index
from weft.schedule.schedule import Draft, LaneDraft
from weft.schedule.steps import Region, Set, Signals

ChunkRegion: TypeAlias = Callable[[Index, int], Region]
"""The region of a chunk, from (rank, number of the chunk)."""


class Fetched:
    """The fetching side of an all-gather.

    signals: one for each chunk of each source. Sources are the ranks before this one, the nearest first, then this rank.
    """

    def __init__(self, d: Draft, world_size: int, chunks: int) -> None:
        self.d, self.chunks = d, chunks
        self.peers = [peer(world_size, distance) for distance in range(1, world_size)]
        self.sources = [peer(world_size, -distance) for distance in range(1, world_size)]
        self.signals, self._credit = d.signals("ready", world_size * chunks), d.signals("credit", world_size - 1)

    def told(self, chunk: Index) -> list[Set]:
        """Return the steps that signal to all ranks that this rank's chunk is ready."""
        return [Set(self.signals.name, i * self.chunks + chunk, to) for i, to in enumerate((*self.peers, RANK))]

    def wait_for(self, lane: LaneDraft, number: int) -> None:
        """Wait until the `number`-th peer has finished the previous run."""
        lane.wait(self._credit, number, previous=True)

    def tell(self, lane: LaneDraft, chunk: int) -> None:
        for step in self.told(chunk):
            lane.then(step)

    def fetch(
        self, source: ChunkRegion, target: ChunkRegion, by: Literal["dma", "kernel"], counts: Sequence[int] = (),
        complete: Signals | None = None, apart: bool = False,
    ) -> None:  # fmt: skip
        """Fetch all chunks on a lane of its own.

        counts: the number of sets that each chunk waits for; default: 1. complete: set when all ranks' chunks of a number
            have been fetched.
        apart: copy this rank's own chunks on a second lane; not with `complete`."""
        assert not (apart and complete)
        own_rows = self.d.lane("own rows", "copy") if apart else None
        lane, own = self.d.lane("from peers", "copy"), len(self.sources)
        for c in range(self.chunks):
            for i, owner in [(own, RANK), *enumerate(self.sources)]:
                to = own_rows if own_rows is not None and i == own else lane
                to.wait(self.signals, i * self.chunks + c, counts[c] if counts else 1)
                to.copy(source(owner, c), target(owner, c), by)
            if complete is not None:
                lane.set(complete, c)
        for i, owner in enumerate(self.sources):
            lane.set(self._credit, i, at=owner)
