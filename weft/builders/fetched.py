"""An all-gather by gets: each rank computes chunks in symmetric memory, and all ranks copy the chunks into their
results.

The result is ordinary memory, into which peers cannot write. With puts, chunks would arrive in symmetric memory and
need a second copy. With gets, the producer only signals that a chunk is ready, and each byte is copied once.

A rank copies its own chunks first, because they are ready first. Then it copies the chunks of the rank before it, and
so on around the ring. So no two ranks read from the same rank at the same time.

A rank that has copied all chunks signals this to all others. They wait for the signal before they overwrite their
chunks in the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeAlias

from weft.builders.operands import peer
from weft.schedule.expr import RANK, Index
from weft.schedule.schedule import Draft, LaneDraft
from weft.schedule.steps import Region, Set, Signals

ChunkRegion: TypeAlias = Callable[[Index, int], Region]
"""A function (rank, index of a chunk) -> region of the chunk."""


class Fetched:
    """The signals and the copies of an all-gather by gets.

    ranks: the number of ranks that take part. They form a ring.
    at: a function that returns the rank `distance` places after this rank in the ring (before it, if negative).
        Default: all ranks, in order.
    signals: the signals "chunk ready", one for each chunk of each source rank. The sources are in ring order: the rank
        before this rank is first, this rank is last.
    """

    def __init__(self, d: Draft, ranks: int, chunks: int, at: Callable[[int], Index] | None = None) -> None:
        self.d, self.chunks, at = d, chunks, at or partial(peer, ranks)
        self.peers = [at(distance) for distance in range(1, ranks)]
        self.sources = [at(-distance) for distance in range(1, ranks)]
        self.signals, self._credit = d.signals("ready", ranks * chunks), d.signals("credit", ranks - 1)

    def told(self, chunk: Index) -> list[Set]:
        """Return the `Set` steps that tell all ranks, including this rank, that this rank's chunk `chunk` is ready."""
        return [Set(self.signals.name, i * self.chunks + chunk, to) for i, to in enumerate((*self.peers, RANK))]

    def wait_for(self, lane: LaneDraft, number: int) -> None:
        """Append a wait until rank `peers[number]` has copied all chunks that this rank made ready in the previous run."""
        lane.wait(self._credit, number, previous=True)

    def tell(self, lane: LaneDraft, chunk: int) -> None:
        for step in self.told(chunk):
            lane.then(step)

    def fetch(
        self, source: ChunkRegion, target: ChunkRegion, by: Literal["dma", "kernel"], counts: Sequence[int] = (),
        complete: Signals | None = None, apart: bool = False, joins: bool = False,
    ) -> None:  # fmt: skip
        """Append a lane that copies all chunks of all ranks.

        Args:
            source, target: functions that return a chunk's region in the memory of the rank that computed the chunk,
                and in this rank's result.
            counts: for each chunk, how often its signal must be set until the chunk is ready. Default: once.
            complete: signals of this rank; `complete[c]` is set when chunk c of every rank has been copied.
            apart: True to copy this rank's own chunks on a second lane, concurrently. Cannot be combined with
                `complete`. On one lane, a slow copy of an own chunk delays the chunks of peers. Within an H100's
                memory, a copy of 16 MiB took 164 us during a GEMM, and 9 us alone.
            joins: with `apart`, True to signal the end of the copies to peers only after the own chunks have been copied.
        """
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
        if joins:
            assert own_rows is not None
            copied = self.d.signals("own rows copied", 1)
            own_rows.set(copied)
            lane.wait(copied)
        for i, owner in enumerate(self.sources):
            lane.set(self._credit, i, at=owner)
