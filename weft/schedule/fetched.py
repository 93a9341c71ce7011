"""Chunks that every rank makes in symmetric memory, and that all ranks fetch from there into their results: an all-gather behind
whatever makes them.

Results are ordinary memory, into which peers cannot write. Where a producer would send its chunks, they would land in symmetric
memory, and be copied once more. So it says that they are there, and everybody copies them to where they belong: each byte once.
The own ones are the first to be there, and are copied first; then those of the rank behind, so that no two fetch from one.

Who has fetched everything tells all others that it is through with the run's symmetric memory. They wait for that before they write
there in the next run, even where its own signals would keep what they write and what is read apart: a run of other sizes may have
its chunks elsewhere in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from weft.schedule.expr import RANK, Index
from weft.schedule.operands import peer
from weft.schedule.schedule import Draft, LaneDraft
from weft.schedule.steps import Region, Set, Signals

Place: TypeAlias = Callable[[Index, int], Region]
"""Of a rank's chunk of that number."""


class Fetched:
    """signals: of each source's chunks, the ranks behind this one and last this one itself."""

    def __init__(self, d: Draft, world_size: int, chunks: int) -> None:
        self.d, self.chunks = d, chunks
        self.peers = [peer(world_size, distance) for distance in range(1, world_size)]
        self.sources = [peer(world_size, -distance) for distance in range(1, world_size)]
        self.signals, self._free = d.signals("ready", world_size * chunks), d.signals("free", world_size - 1)

    def told(self, chunk: Index) -> list[Set]:
        """To everybody, that this rank's chunk is there."""
        return [Set(self.signals.name, i * self.chunks + chunk, to) for i, to in enumerate((*self.peers, RANK))]

    def wait_for(self, lane: LaneDraft, number: int) -> None:
        """Until the `number`-th peer has ended the run before."""
        lane.wait(self._free, number, previous=True)

    def tell(self, lane: LaneDraft, chunk: int) -> None:
        for step in self.told(chunk):
            lane.then(step)

    def fetch(
        self, source: Place, target: Place, by: Literal["dma", "kernel"], counts: Sequence[int] = (),
        complete: Signals | None = None,
    ) -> None:  # fmt: skip
        """On a lane of its own. counts: how often it is told of each chunk, if not once. complete: set when all ranks' chunks of a
        number have been fetched."""
        lane, own = self.d.lane("from peers", "copy"), len(self.sources)
        for c in range(self.chunks):
            for i, owner in [(own, RANK), *enumerate(self.sources)]:
                lane.wait(self.signals, i * self.chunks + c, counts[c] if counts else 1)
                lane.copy(source(owner, c), target(owner, c), by)
            if complete is not None:
                lane.set(complete, c)
        for i, owner in enumerate(self.sources):
            lane.set(self._free, i, at=owner)
