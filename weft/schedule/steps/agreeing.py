"""The comparison of the sizes that both sides of an exchange expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from weft.schedule.expr import RANK, Index
from weft.schedule.regions import Access, Declared, Region, read, written
from weft.schedule.steps.base import Step, differing


@dataclass(frozen=True, slots=True)
class Agree(Step):
    """A step that fills the rows from ranks whose sent sizes differ from the expected sizes with NaN.

    expected [W, counts]: row r holds the counts that this rank expects from rank r. sent [W * W, counts]: W stacked tables of W
    rows; row `row` of rank r's table holds the counts that rank r sent to this rank. out: the received rows by source rank; the
    sum of a source's expected counts is its number of rows. If the two rows of counts differ, that source's rows become NaN.
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
