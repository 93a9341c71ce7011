"""Embedding pooling + all-to-all: each rank pools its own tables, and sends the vectors to the ranks that own the samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from weft.builders.problem import NEARLY, Candidate, Problem
from weft.builders.row_reuse import found_in_cache
from weft.schedule.steps import ITEM_BYTES
from weft.words import counted

_MOST_SAMPLES = 1024  # larger batches use the schedule that is selected for this many samples per rank

_MOST_SKEW = 3.0  # the largest exponent of Zipf's law: beyond it, nearly all reads are of one row


@dataclass(frozen=True, slots=True)
class EmbeddingAllToAll(Problem):
    """Pool the embeddings of all tables, and send each vector to the rank that owns the sample. Each table is on one
    rank.

    slots: the columns of each table's vectors in `out`: for each rank and each of its tables, a pair (first column,
        number of columns), in ascending order of columns.
    rows_read: for each rank and each of its tables, the average number of rows that a bag reads, in the order of
        `slots`. (): one row per bag.
    ids: for each rank and each of its tables, a pair (number of rows, exponent of Zipf's law for the ids). From these
        pairs the simulator predicts cache hits. (): unknown; no cache hits are predicted.

    Buffers:

        bags     in, [sum(batch_sizes), tables]: an element represents all ids of one bag; a rank has the bags of its own tables
        tables   in, [most rows read, columns]: the columns of all tables side by side; a rank has its own tables. The rows that
                 a bag will read are not known. So the step of a bag reads the first rows, as many as a bag reads on average
        out      symmetric, [max(batch_sizes), columns]: the first batch_sizes[rank] rows are the result

    Source: "Accelerating Multi-GPU Embedding Retrieval with PGAS-Style Communication for Deep Learning Recommendation
        Systems", III.

    Builders: `weft.builders.embedding_all_to_all`.
    """

    name: ClassVar[str] = "embedding_all_to_all"
    world_size: int
    batch_sizes: tuple[int, ...]
    slots: tuple[tuple[tuple[int, int], ...], ...]
    rows_read: tuple[tuple[float, ...], ...] = ()
    dtype: str = "fp32"
    ids: tuple[tuple[tuple[float, float], ...], ...] = ()

    def __post_init__(self) -> None:
        if len(self.batch_sizes) != self.world_size or len(self.slots) != self.world_size or self.world_size < 1:
            raise ValueError(
                f"batch_sizes has {len(self.batch_sizes)} entries and slots has {len(self.slots)}: give each of them one entry "
                f"for each of {self.world_size} ranks"
            )
        if min(self.batch_sizes) < 0:
            raise ValueError(f"batch_sizes={self.batch_sizes} must not be negative")
        if self.rows_read and [len(rows) for rows in self.rows_read] != [len(slots) for slots in self.slots]:
            raise ValueError(
                f"rows_read has {[len(rows) for rows in self.rows_read]} entries on the ranks, but slots has "
                f"{[len(slots) for slots in self.slots]}: give one number for each slot (feature), or leave rows_read empty"
            )
        if min((rows for of_rank in self.rows_read for rows in of_rank), default=0) < 0:
            raise ValueError(f"rows_read={self.rows_read} must not be negative")
        if self.ids and [len(ids) for ids in self.ids] != [len(slots) for slots in self.slots]:
            raise ValueError(
                f"ids has {[len(ids) for ids in self.ids]} entries on the ranks, but slots has "
                f"{[len(slots) for slots in self.slots]}: give a pair (rows, exponent) for each slot (feature), or leave ids empty"
            )
        for rows, exponent in (pair for of_rank in self.ids for pair in of_rank):
            if not (1 <= rows < math.inf and 0 <= exponent <= _MOST_SKEW):
                raise ValueError(
                    f"ids of a table with rows={rows:g} and zipf={exponent:g}: rows must be at least 1, and zipf, the exponent "
                    f"of Zipf's law, 0 (uniform) to {_MOST_SKEW}"
                )
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype={self.dtype!r} is not known; use one of {', '.join(ITEM_BYTES)}")
        end = 0
        for column, dim in sorted(slot for of_rank in self.slots for slot in of_rank):
            if column != end or dim < 1:
                raise ValueError(
                    f"a slot of {dim} columns begins at column {column}: it must begin at {end}, because slots must cover all "
                    "columns exactly once"
                )
            end = column + dim
        if not end or any(list(of_rank) != sorted(of_rank) for of_rank in self.slots):
            raise ValueError(
                f"slots={self.slots}: give at least one slot, and sort each rank's slots (first column, number of columns) by "
                "first column"
            )

    @property
    def columns(self) -> int:
        return sum(dim for of_rank in self.slots for _, dim in of_rank)

    @classmethod
    def sized(
        cls, m: int, n: int, k: int, ranks: int, dtype: str = "fp32", *,
        tables: Annotated[int | None, "Required: number of tables of all ranks together, spread evenly."] = None,
        rows: Annotated[float | None, "Rows of each table. Default: unknown; then no cache hits are predicted."] = None,
        zipf: Annotated[float | None, "Exponent of Zipf's law for ids, with rows. Default: 0, which is uniform."] = None,
    ) -> EmbeddingAllToAll:  # fmt: skip
        """M: samples of all ranks. N: columns of each table. K: rows that a bag reads. The plan predicts the choice of
        `transport="auto"`. `serial` pools, then calls NCCL's all-to-all, then permutes the columns.

            weft plan embedding_all_to_all --shape 16384,64,64 --option tables=128

            weft plan embedding_all_to_all --shape 65536,128,20 --option tables=856 --ranks 8 --dtype fp16
        """
        if tables is None or tables < 1:
            raise ValueError(
                f"tables={tables}: {cls.name} needs the number of tables of all ranks together, at least 1 (--option tables=NUMBER)"
            )
        if rows is None and zipf is not None:
            raise ValueError(f"zipf={zipf:g} needs the number of rows of each table (--option rows=NUMBER)")
        each = [tables // ranks + (rank < tables % ranks) for rank in range(ranks)]
        first = itertools.accumulate(each[:-1], initial=0)
        slots = tuple(tuple(((f + i) * n, n) for i in range(e)) for f, e in zip(first, each, strict=True))
        batch_sizes = tuple(m // ranks + (rank < m % ranks) for rank in range(ranks))
        ids = () if rows is None else tuple(((float(rows), zipf or 0.0),) * e for e in each)
        return cls(ranks, batch_sizes, slots, tuple((float(k),) * e for e in each), dtype, ids)

    @property
    def found_in_cache(self) -> tuple[float, ...]:
        """Cache hit rates of reads of table rows, one for each cache size in `weft.builders.row_reuse.CACHES`; () if ids are
        unknown.

        All ranks get the same rate, with which the simulator predicts the time of the slowest rank:

            1 - (most bytes that any rank reads from memory) / (most bytes that any rank reads)
        """
        if not self.ids:
            return ()
        size, missed = ITEM_BYTES[self.dtype], list[tuple[float, ...]]()
        most = 0.0
        bags_of_ranks = self.rows_read or tuple((1.0,) * len(slots) for slots in self.slots)
        for slots, bags, ids in zip(self.slots, bags_of_ranks, self.ids, strict=True):
            tables = [(*pair, bag, dim * size) for (_, dim), bag, pair in zip(slots, bags, ids, strict=True)]
            passing = sum(bags) * 8 + len(slots) * 8 + self.columns * size / self.world_size
            read = sum(bag * row_bytes for *_, bag, row_bytes in tables)
            most = max(most, read)
            missed.append(tuple(read * (1 - found) for found in found_in_cache(tables, passing)))
        return tuple(round(1 - max(of_size) / most, 4) if most else 0.0 for of_size in zip(*missed, strict=True))

    @property
    def text(self) -> str:
        tables = sum(map(len, self.slots))
        bags = [rows for of_rank in self.rows_read for rows in of_rank] or [1.0]
        return (
            f"{counted(sum(self.batch_sizes), 'sample')}, {counted(tables, 'feature')} with {self.columns} columns and "
            f"{sum(bags) / len(bags):.3g} rows a bag, {self.dtype}, {counted(self.world_size, 'rank')}"
        )

    @property
    def uneven(self) -> str:
        if len(set(self.batch_sizes)) > 1:
            return f"M={sum(self.batch_sizes)} samples are not divisible by {self.world_size} ranks"
        rows, ids = (of or ((),) * self.world_size for of in (self.rows_read, self.ids))
        of_ranks = {
            (tuple(dim for _, dim in slots), read, pairs)
            for slots, read, pairs in zip(self.slots, rows, ids, strict=True)
        }
        return "ranks have different tables" if len(of_ranks) > 1 else ""

    @property
    def evened(self) -> tuple[EmbeddingAllToAll, float] | None:
        most = max(self.batch_sizes)
        times = most * self.world_size / max(1, sum(self.batch_sizes))
        if times > NEARLY or len(set(self.batch_sizes)) == 1:
            return None
        return replace(self, batch_sizes=(most,) * self.world_size), times

    @property
    def has_work(self) -> bool:
        return sum(self.batch_sizes) > 0

    @property
    def family(self) -> tuple[Hashable, float]:
        return replace(self, batch_sizes=(1,) * self.world_size), self.size_of(self.batch_sizes)

    @staticmethod
    def size_of(batch_sizes: tuple[int, ...]) -> float:
        """Return the size in which problems of a family differ (`family`): the largest number of samples of a rank, but at most
        1024. So all larger batches get the schedule that is chosen for 1024 samples.
        """
        return float(min(max(batch_sizes), _MOST_SAMPLES))

    def resized(self, size: float) -> EmbeddingAllToAll:
        return replace(self, batch_sizes=(max(1, round(size)),) * self.world_size)

    def takes(self, candidate: Candidate) -> bool:
        """Return True for candidates without parameters: the planner chooses only the transport. Order and slice size
        are arguments of the call.
        """
        return not candidate.parameters
