"""The ids of a batch, for lookups without pooling: for each id, the part of a table that has its row, and the row's number
in the part.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from weft.embedding.check import check_parts
from weft.embedding.hashing import hash_ids
from weft.embedding.jagged import as_jagged
from weft.embedding.options import BoundsCheck
from weft.embedding.partition import ColumnWise, DataParallel, Partition
from weft.nn.partitioned_input import ends_of_keys
from weft.nn.row_dist import RowDist, RowRoute, starts


class RowIds:
    """The ids of a batch, grouped by output feature. Raises `ValueError` for bad input.

    places, rows: for each id of the sharded tables, the part to read and the row number in that part, as for
        `RowDist.send`. An id of a column-wise table has an entry for each part.
    of_replicated: for each feature of data-parallel tables, the row numbers to read.
    spans: for each output feature, the range [begin, end) of its ids among the ids of all output features.
    offsets, weights: for each output feature, the offsets and weights of its bags.
    bad: for each id of all output features, True if it is out of range.
    route: the routing of the ids, after the ids have been sent; None before.
    finite_bags: with `dedup=True`, backward stores here whether the gradients of all bags are finite, as a tensor.
    """

    route: RowRoute | None = None

    def __init__(
        self, partition: Partition, distribution: RowDist | None, device: torch.device, bounds_check: BoundsCheck, features: Any
    ) -> None:  # fmt: skip
        """Check and group the ids of a batch.

        distribution: the exchange of ids and rows; None if all tables are data-parallel.
        """
        self._partition, self._place_of_part = partition, {} if distribution is None else distribution.place_of_part
        jagged = as_jagged(features)
        self.finite_bags: list[torch.Tensor] = []
        keys = jagged.keys
        if keys is None:
            raise ValueError("features have no names: pass a KeyedJaggedTensor, whose keys are the tables' features")
        check_parts(jagged, device)
        block = {key: number for number, key in enumerate(keys)}
        for slot in partition.slots:
            if slot.feature not in block:
                name = partition.tables[slot.table].name
                raise ValueError(
                    f"table {name!r} needs feature {slot.feature!r}, which the input lacks: its keys are {', '.join(keys)}"
                )
        ends = ends_of_keys(jagged, list(keys))
        batch = jagged.stride or 0
        places, rows, bad = [], [], []
        self.of_replicated: list[torch.Tensor] = []
        self.offsets, self.weights, sizes = [], [], []
        for slot in partition.slots:
            at, table = block[slot.feature], partition.tables[slot.table]
            begin, end = ends[at], ends[at + 1]
            given = jagged.values[begin:end]
            ids = hash_ids(given, table.num_embeddings) if partition.hash else given.to(torch.int64)
            if isinstance(partition.shardings[slot.table], DataParallel):
                self.of_replicated.append(ids)
            else:
                of_ids = self._places(slot.table, ids)
                places.append(of_ids[0])
                rows.append(of_ids[1])
            bad.append((ids < 0) | (ids >= table.num_embeddings))
            sizes.append(end - begin)
            self.offsets.append(jagged.offsets[at * batch : (at + 1) * batch + 1] - begin)
            self.weights.append(None if jagged.weights is None else jagged.weights[begin:end])
        edges = starts(sizes)
        self.spans = list(itertools.pairwise(edges))
        none = torch.empty(0, dtype=torch.int64, device=jagged.values.device)
        self.places, self.rows, self.bad = torch.cat([none, *places]), torch.cat([none, *rows]), torch.cat(bad)
        self._values = [jagged.values[ends[block[s.feature]] : ends[block[s.feature] + 1]] for s in partition.slots]
        if bounds_check == "fatal" and bool(self.bad.any()):
            raise ValueError(self.first_bad())

    def _places(self, table: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the part that has the row of each id in `ids`, and the row number in this part, as the fields `places` and
        `rows`. All ids read the sharded table number `table`.
        """
        partition = self._partition
        numbers = partition.parts_of(table)
        place_of = torch.tensor([self._place_of_part[n] for n in numbers], device=ids.device)
        if isinstance(partition.shardings[table], ColumnWise):
            return place_of.repeat(len(ids)), ids.repeat_interleave(len(numbers))
        size = partition.rows_of_part(table)
        part = (ids // size).clamp(0, len(numbers) - 1)
        return place_of[part], ids - part * size

    def split(self, rows: torch.Tensor | None, of_replicated: torch.Tensor | None) -> list[torch.Tensor]:
        """Split rows by output feature, and return them in the order of the features.

        rows: the rows for all ids of sharded tables. of_replicated: the rows for all ids of data-parallel tables.
        """
        partition = self._partition
        is_replicated = [isinstance(partition.shardings[slot.table], DataParallel) for slot in partition.slots]
        blocks = {}
        for wanted, values in ((False, rows), (True, of_replicated)):
            sizes = [
                end - begin for (begin, end), is_one in zip(self.spans, is_replicated, strict=True) if is_one == wanted
            ]
            blocks[wanted] = iter(() if values is None else values.split(sizes))
        return [next(blocks[is_one]) for is_one in is_replicated]

    def first_bad(self) -> str:
        """Return the error text for the first id out of range."""
        at = int(self.bad.nonzero()[0])
        number = next(n for n, (_, end) in enumerate(self.spans) if at < end)
        slot = self._partition.slots[number]
        table, place = self._partition.tables[slot.table], at - self.spans[number][0]
        return (
            f"table {table.name!r}, feature {slot.feature!r}, position {place}: id {int(self._values[number][place])} is not in "
            f"[0, {table.num_embeddings}): correct the ids, enlarge the table, or pass hash=True to map any id to a row"
        )
