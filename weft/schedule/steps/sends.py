"""The step that sends rows to another rank by a message of the process group.

A rank may send to any rank, also on another host (docs/hosts.md). Copies, stores and loads need memory that is mapped
into the rank's own process, so they stay within a host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from weft.schedule.expr import Index
from weft.schedule.regions import Access, Declared, Region, read, written
from weft.schedule.steps.base import Step, differing_regions


@dataclass(frozen=True, slots=True)
class Send(Step):
    """dst = src, where dst is in the memory of another rank.

    The step ends when src may be overwritten; the data may arrive later. The receiver sees the data after it has waited
    for a signal that the sender's lane sets after the send (`weft.schedule.messages`). Signals of other lanes do not
    order the data.
    """

    kind: ClassVar[str] = "send"
    src: Region
    dst: Region

    def accesses(self) -> tuple[Access, ...]:
        return read(self.src), written(self.dst)

    def on(self, regions: Sequence[Region]) -> Send:
        """Return a copy of the step with the operands `regions`: (src, dst)."""
        src, dst = regions
        return Send(src, dst)

    @property
    def decisive(self) -> tuple[int, ...]:
        return (0,)

    def faults(self, where: Declared) -> Iterator[str]:
        if self.src.at != where.rank:
            yield f"it reads memory of rank {self.src.at}, but a rank can only send its own: let rank {self.src.at} send"
        if self.dst.at == where.rank:
            yield "it sends to its own rank: use copy"
        yield from differing_regions(self.src, self.dst, where)

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return f"send {self.src.buffer} -> {self.dst.buffer}{at(self.dst.at)}"

    def __str__(self) -> str:
        return f"send    {self.src} -> {self.dst}"
