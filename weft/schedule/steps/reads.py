"""Reads of sizes that are known only during a run (dynamic sizes)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from weft.schedule.expr import Index
from weft.schedule.regions import Access, Declared, Region, box_of, read
from weft.schedule.steps.base import Step

ReadBy: TypeAlias = Literal["device", "meanwhile", "host"]


@dataclass(frozen=True, slots=True)
class Read(Step):
    """Read the numbers in `region`, a whole buffer: steps after it on this lane may have sizes and places that depend on them.

    `weft.schedule.expr.total` writes such sizes. They keep the values at the time of the read, even if the buffer changes
    later.

        device     kernels know the numbers
        host       the host knows them too, and waits for them; an output whose size depends on them is allocated then. Copy engines
                   need this: they take sizes from the host only
        meanwhile  kernels know them at once, and the host learns them while the lane goes on; an output whose size depends on
                   them is allocated with room for more rows, and cut
    """

    kind: ClassVar[str] = "read"
    region: Region
    by: ReadBy = "device"

    def accesses(self) -> tuple[Access, ...]:
        return (read(self.region),)

    @property
    def occupies(self) -> bool:
        return self.by == "host"

    def faults(self, where: Declared) -> Iterator[str]:
        buffer = where.buffers[where.rank][self.region.buffer]
        if self.region.buffer not in where.held:
            yield f"the contents of {self.region.buffer} are not declared: call Draft.holds"
        elif buffer.dtype != "int64" or box_of(self.region) != (0, buffer.rows, 0, buffer.cols):
            yield f"read needs a whole buffer of int64, but {self.region} is {buffer.dtype}"

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return f"read {self.region.buffer}"

    def __str__(self) -> str:
        return f"read    {self.region} by {self.by}"
