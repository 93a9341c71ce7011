"""A step that reads dynamic sizes: sizes that are known only during a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from weft.schedule.expr import Index
from weft.schedule.regions import Access, Declared, Region, box_of, read
from weft.schedule.steps.base import Step

ReadBy: TypeAlias = Literal["device", "meanwhile", "host", "known"]


@dataclass(frozen=True, slots=True)
class Read(Step):
    """Read the numbers in a buffer, so that sizes and offsets of later steps of this lane may depend on them.

    `weft.schedule.expr.total` makes the expressions for such sizes. The expressions use the numbers that were read,
    even if the buffer changes later.

    region: the buffer to read, as a whole; int64.
    by: who reads the numbers:

        device     kernels only. The CPU never reads the numbers
        host       kernels and the CPU, which waits for the numbers. It then allocates outputs of these sizes, and passes the
                   sizes to copy engines
        meanwhile  kernels and the CPU, which does not wait. Outputs of these sizes are allocated with rows to spare, and narrowed
                   when the CPU has the numbers
        known      in a run, the same as `host`. The planner assumes neither a read nor a wait, because an earlier call has read the
                   numbers
    """

    kind: ClassVar[str] = "read"
    region: Region
    by: ReadBy = "device"

    def accesses(self) -> tuple[Access, ...]:
        return (read(self.region),)

    @property
    def occupies(self) -> bool:
        return self.by in ("host", "known")

    def faults(self, where: Declared) -> Iterator[str]:
        buffer = where.buffers[where.rank][self.region.buffer]
        if self.region.buffer not in where.held:
            yield f"the contents of {self.region.buffer} are not declared: call Draft.holds"
        elif buffer.dtype != "int64" or box_of(self.region) != (0, buffer.rows, 0, buffer.cols):
            yield f"read takes a whole int64 buffer, but got {self.region} of a buffer of {buffer.dtype}"

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return f"read {self.region.buffer}"

    def __str__(self) -> str:
        return f"read    {self.region} by {self.by}"
