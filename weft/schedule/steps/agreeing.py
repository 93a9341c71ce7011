"""The comparison of the sizes that both sides of one exchange expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from weft.schedule.expr import RANK, Index
from weft.schedule.regions import Access, Declared, Region, read, written
from weft.schedule.steps.base import Step, differing


@dataclass(frozen=True, slots=True)
class Agree(Step):
    """Fill with NaN the rows from ranks that sent other sizes than this rank expects.

    expected [W, counts]: row r is what this rank expects from rank r. sent [W * W, counts]: W tables of W rows, one below the
    other; row `row` of rank r's table is what rank r says that it sent here. out: the rows that came, by source rank, as many
    from each as its expected counts add up to. If the two rows of a rank differ, its rows in `out` become NaN.
    """

    kind: ClassVar[str] = "agree"
    expected: Region
    sent: Region
    out: Region
    row: Index = RANK

    def accesses(self) -> tuple[Access, ...]:
        return read(self.expected), read(self.sent), written(self.out)

    @property
    def needs_unit(self) -> bool:
        return True

    def faults(self, where: Declared) -> Iterator[str]:
        yield from differing([where.dtype(self.expected), where.dtype(self.sent), "int64"])
        (ranks, counts), told = (self.expected.rows, self.expected.cols), (self.sent.rows, self.sent.cols)
        if told != (ranks * ranks, counts):
            yield f"sent is {list(told)}: for expected {[ranks, counts]} give {[ranks * ranks, counts]}, a table of each rank"

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return f"compare {self.sent.buffer}"

    def __str__(self) -> str:
        return f"agree   {self.out}: {self.expected} as row {self.row} of each of {self.sent}"
