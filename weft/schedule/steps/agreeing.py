"""A step that compares the sizes that the sender and the receiver of an exchange expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from weft.schedule.expr import RANK, Index
from weft.schedule.regions import Access, Declared, Region, read, written
from weft.schedule.steps.base import Step, differing


@dataclass(frozen=True, slots=True)
class Agree(Step):
    """Compare the sizes that the ranks sent with the sizes that this rank expected. Fill rows with wrong sizes with
    NaN.

    If the counts from rank r differ, all rows received from rank r become NaN. W is the world size.

    expected: `[W, counts]`. Row r has the counts that this rank expects from rank r.
    sent: `[W * W, counts]`: a table of W rows from each rank. In the table from rank r, row number `row` has the counts
        that rank r sent to this rank.
    out: the received rows, grouped by source rank. Rank r's group has as many rows as the sum of its expected counts.
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
            yield (
                f"sent has shape {list(told)}, but with expected of shape {[ranks, counts]} it must have "
                f"{[ranks * ranks, counts]}: a table for each rank"
            )

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return f"compare {self.sent.buffer}"

    def __str__(self) -> str:
        return f"agree   {self.out}: {self.expected} as row {self.row} of each of {self.sent}"
