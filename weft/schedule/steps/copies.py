"""Copy steps, within a rank and between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from weft.schedule.expr import Index
from weft.schedule.regions import SUMMED, Access, Declared, Region, read, written
from weft.schedule.steps.base import Step, differing_regions

CopyBy: TypeAlias = Literal["dma", "kernel"]
COPY_UNITS = 64
"""The largest number of compute units for a copy by kernel."""
DYNAMIC_COPY_UNITS = 16
"""The number of compute units for copies by kernel of dynamic size, for all copy lanes together. These copies run
concurrently with GEMMs. 16 units reach 80% of the bandwidth of a GPU's links, and a GEMM on all units soon frees 16 of them.
"""
SPARED_UNITS = DYNAMIC_COPY_UNITS // 2
"""The number of compute units that a grouped GEMM leaves free if such copies may run concurrently. On GPUs, two of their
programs fit on a compute unit.
"""


@dataclass(frozen=True, slots=True)
class Copy(Step):
    """dst = src, or dst += src with `accumulate`.

    src or dst may be in a peer's memory (a get or a put).

    by: "dma" for a copy engine, "kernel" for loads and stores on at most COPY_UNITS compute units. Consecutive copies
        by kernel that read one buffer must not write the same elements, because they may run concurrently, as one
        launch (`weft.schedule.launches`).
    """

    kind: ClassVar[str] = "copy"
    src: Region
    dst: Region
    by: CopyBy = "dma"
    accumulate: bool = False

    def accesses(self) -> tuple[Access, ...]:
        return read(self.src), written(self.dst, self.accumulate)

    def on(self, regions: Sequence[Region]) -> Copy:
        """Return a copy of the step with the operands `regions`: (src, dst)."""
        src, dst = regions
        return Copy(src, dst, self.by, self.accumulate)

    @property
    def decisive(self) -> tuple[int, ...]:
        return (0,)

    @property
    def copies_by(self) -> CopyBy:
        return self.by

    @property
    def needs_unit(self) -> bool:
        return self.by == "kernel"

    def faults(self, where: Declared) -> Iterator[str]:
        yield from differing_regions(self.src, self.dst, where)
        if self.accumulate and where.dtype(self.dst) not in SUMMED:
            yield f"{where.dtype(self.dst)} cannot be accumulated: use one of {', '.join(SUMMED)}"

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        sign = "+>" if self.accumulate else "->"
        return f"copy {self.src.buffer}{at(self.src.at)} {sign} {self.dst.buffer}{at(self.dst.at)}"

    def __str__(self) -> str:
        return f"copy    {self.src} {'+>' if self.accumulate else '->'} {self.dst} by {self.by}"
