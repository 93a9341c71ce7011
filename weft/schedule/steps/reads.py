"""Sizes that only a run knows."""

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
    """Take the numbers in `region`, all of a buffer: steps after it on this lane may have sizes and places that depend on them
    (`weft.schedule.expr.total`), with the values of now, whatever is in the buffer later.

    by "device": kernels know them. by "host": the host does too, for which it waits; copy engines take sizes from the host
    only, and an output whose size depends on them is made then. by "meanwhile": kernels know them at once, and the host learns
    them while the lane goes on; an output whose size depends on them is made with room for more, and cut.
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
            yield f"nothing says what {self.region.buffer} holds (Draft.holds)"
        elif buffer.dtype != "int64" or box_of(self.region) != (0, buffer.rows, 0, buffer.cols):
            yield f"it reads numbers: all of a buffer of int64, and this is {buffer.dtype}"

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return f"read {self.region.buffer}"

    def __str__(self) -> str:
        return f"read    {self.region} by {self.by}"
