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
    """Compare the numbers of rows that peers sent with the numbers that this rank expected. If the numbers of a peer
    differ, fill all rows from that peer with NaN.

    W is the world size. For each pair of ranks, C numbers of rows are compared, one for each expert.

    expected: the numbers of rows that this rank expects, `[W, C]`. Row r is for the rows from rank r.
    sent: the numbers of rows that all ranks sent, `[W * W, C]`: a table `[W, C]` from each rank, in rank order. Row q of
        the table of rank r is for the rows that rank r sent to rank q.
    out: the received rows, grouped by source rank. The group of rank r has as many rows as the sum of row r of
        `expected`.
    row: this rank's number, which selects its row in each table of `sent`.
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
