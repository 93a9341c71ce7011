"""What ranks tell each other about one exchange, compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from weft.schedule.expr import RANK, Index
from weft.schedule.regions import Access, Declared, Region, read, written
from weft.schedule.steps.base import Step, differing


@dataclass(frozen=True, slots=True)
class Agree(Step):
    """Spoil what came from ranks that sent something else than this rank takes it for.

    expected: a row for each of W ranks, the counts of what comes from there. sent: W tables of W rows, one below the other; row
    `row` of the table of a rank is what that one says that it sent here. out: what came, the rows of each rank below those of
    the ranks before it, as many as its expected counts add up to. Where a rank's two rows differ, its rows in `out` become NaN.
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
            yield f"tables of all ranks are {[ranks * ranks, counts]} for {[ranks, counts]} expected, and not {list(told)}"

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return f"compare {self.sent.buffer}"

    def __str__(self) -> str:
        return f"agree   {self.out}: {self.expected} as row {self.row} of each of {self.sent}"
