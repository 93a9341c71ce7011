"""The input of sharded tables: a rank's own samples, with the ids of row-wise tables sorted by the owners of the rows.

    given        all features of this rank's samples
    parts        the features to send to the ranks of the parts. Whole tables and column-wise parts read the given features.
                 Each part of a row-wise table reads a separate feature: the ids of its rows, counted from its first row
    replicated   the features of data-parallel tables, which this rank pools itself

An id out of range is sent to the nearest part, which handles it as out of range. Within each part, the ids of a bag
keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from weft.embedding import JaggedInput, KeyedJaggedTensor, as_jagged, hash_ids
from weft.embedding.check import check_parts
from weft.embedding.jagged import offsets_of, wrong_range
from weft.embedding.partition import DataParallel, Partition, RowWise
from weft.embedding.tables import EmbeddingBagConfig


@dataclass(frozen=True)
class Arranged:
    """The input of a call, separated by kind of table.

    parts: the features for the parts of sharded tables, on all ranks; None if all tables are data-parallel.
    replicated: the features for data-parallel tables; None if there are no such tables.
    lengths: for row-wise tables with mean pooling, the number of ids in each bag, by which the sum of the parts' vectors is
        divided. A dict {(table, feature): [samples] float32}. An empty bag has 1, to avoid 0 / 0.
    """

    parts: KeyedJaggedTensor | None
    replicated: JaggedInput | None
    lengths: dict[tuple[int, str], torch.Tensor]
    samples: int


class PartitionedInput:
    """The conversion of a rank's features into the features that the parts of `partition` read. Ranks do not
    communicate.
    """

    def __init__(self, partition: Partition, is_weighted: bool, refuses_bad_ids: bool) -> None:
        """Store the options, which apply to all batches.

        refuses_bad_ids: True to raise for out-of-range ids of row-wise tables, with the row number in the whole table.
        """
        self.partition, self._is_weighted, self.refuses_bad_ids = partition, is_weighted, refuses_bad_ids
        row_wise = [n for n, sharding in enumerate(partition.shardings) if isinstance(sharding, RowWise)]
        self.row_wise = [(n, feature) for n in row_wise for feature in partition.tables[n].feature_names]
        whole = [n for n, s in enumerate(partition.shardings) if not isinstance(s, RowWise | DataParallel)]
        self.features_of_parts = {
            (n, feature): [partition.feature_of_part(partition.parts[p], feature) for p in partition.parts_of(n)]
            for n, feature in self.row_wise
        }
        """{(number of a row-wise table, feature): the name under which each part of the table reads its ids of this
        feature}.
        """
        self.passed: dict[str, tuple[str, int | None]] = {}
        """The features of table-wise and column-wise tables, whose ids need not be divided. A dict {name under which the
        table's first part reads the feature: (name of the feature in the input, number of rows to which ids are hashed,
        or None)}.
        """
        for number in whole:
            part, table = partition.parts[partition.parts_of(number)[0]], partition.tables[number]
            rows = table.num_embeddings if partition.hashes_input else None
            for feature in table.feature_names:
                self.passed[partition.feature_of_part(part, feature)] = feature, rows
        of_tables = [partition.tables[number].feature_names for number in partition.replicated_tables]
        self.replicated = tuple(dict.fromkeys(feature for features in of_tables for feature in features))
        self._complete: tuple[str, ...] = ()
        """The keys of the last input that contained the features of all tables. An input with the same keys need not be
        checked again.
        """

    @property
    def is_needed(self) -> bool:
        """True if any table is row-wise or data-parallel. If False, features need no conversion."""
        return bool(self.row_wise or self.replicated)

    def __call__(self, features: Any, device: torch.device) -> Arranged:
        """Return the features for parts of sharded tables and for data-parallel tables. Raise `ValueError` for bad
        input. The CPU waits for the device, unless all tables are data-parallel and read all features in the given
        order.
        """
        jagged = as_jagged(features)
        keys = jagged.keys
        if keys is None:
            raise ValueError("features have no names: pass a KeyedJaggedTensor, whose keys are the tables' features")
        if keys != self._complete:
            self._require_features(keys)
            self._complete = keys
        if not self._is_weighted:
            jagged = jagged._replace(weights=None)
        elif jagged.weights is None:
            raise ValueError("is_weighted=True but the features have no weights: pass one float32 weight per value")
        check_parts(jagged, device)
        if self.partition.sharding is None and tuple(keys) == self.replicated:
            return Arranged(None, jagged, {}, jagged.stride or 0)
        return _Arranging(self, jagged, {key: number for number, key in enumerate(keys)}).done()

    def _require_features(self, keys: Sequence[str]) -> None:
        """Raise `ValueError` unless `keys` contain the features of all tables."""
        for table in self.partition.tables:
            for feature in table.feature_names:
                if feature not in keys:
                    raise ValueError(
                        f"table {table.name!r} needs feature {feature!r}, which the input lacks: its keys are {', '.join(keys)}"
                    )


class _Arranging:
    """The conversion of one batch by `PartitionedInput`, with intermediate results.

    ends: where the ids of each key begin in `jagged.values`, and where the last key's ids end: keys + 1 indices.
    """

    def __init__(self, of: PartitionedInput, jagged: JaggedInput, block: dict[str, int]) -> None:
        self.of, self.jagged, self.block = of, jagged, block
        self.batch = jagged.stride or 0
        self.lengths = jagged.offsets.diff().to(torch.int64).view(len(block), self.batch)
        self.ends = ends_of_keys(jagged, list(block))
        sizes = [end - begin for begin, end in pairwise(self.ends)]
        inside = slice(self.ends[0], self.ends[-1])
        self.ids = jagged.values[inside].split(sizes)
        self.weights = None if jagged.weights is None else jagged.weights[inside].split(sizes)

    def done(self) -> Arranged:
        of, partition = self.of, self.of.partition
        parts = replicated = None
        if of.replicated:
            blocks = [self.block[feature] for feature in of.replicated]
            offsets = offsets_of(self.lengths[blocks].flatten())
            ids = torch.cat([self.ids[block] for block in blocks])
            weights = None if self.weights is None else torch.cat([self.weights[block] for block in blocks])
            replicated = JaggedInput(of.replicated, ids, offsets, weights, self.batch)
        if partition.sharding is not None:
            parts = self._of_parts()
        lengths = {
            (table, feature): self.lengths[self.block[feature]].clamp(min=1).to(torch.float32)
            for table, feature in of.row_wise
            if partition.tables[table].pooling == "mean"
        }
        return Arranged(parts, replicated, lengths, self.batch)

    def _of_parts(self) -> KeyedJaggedTensor:
        of = self.of
        names, blocks = list(of.passed), [self.block[feature] for feature, _ in of.passed.values()]
        ids, lengths = [self.ids[block] for block in blocks], [self.lengths[block] for block in blocks]
        if of.partition.hashes_input:
            ids = [hash_ids(one, rows or 1) for one, (_, rows) in zip(ids, of.passed.values(), strict=True)]
        weights = None if self.weights is None else [self.weights[block] for block in blocks]
        if of.row_wise:
            more, split, counts, of_ids = self._split()
            names += more
            ids.append(split)
            lengths.append(counts)
            if weights is not None:
                weights.append(of_ids)
        of_values = None if weights is None else torch.cat(weights)
        bags = torch.cat([one.flatten() for one in lengths])
        return KeyedJaggedTensor(names, torch.cat(ids), of_values, lengths=bags, stride=self.batch)

    @cached_property
    def _rows(self) -> list[torch.Tensor]:
        """The row of the whole table that each id reads, as a tensor for each (row-wise table, feature)."""
        found = []
        for table, feature in self.of.row_wise:
            ids = self.ids[self.block[feature]]
            found.append(
                hash_ids(ids, self._table(table).num_embeddings)
                if self.of.partition.hashes_input
                else ids.to(torch.int64)
            )
        return found

    def _table(self, number: int) -> EmbeddingBagConfig:
        return self.of.partition.tables[number]

    def _split(self) -> tuple[list[str], torch.Tensor, torch.Tensor, Any]:
        """Split the ids of row-wise tables by part. Return the features that the parts read: (feature names, ids, lengths of
        bags, weights or None).
        """
        partition, batch = self.of.partition, self.batch
        names: list[str] = []
        owners, local, samples, sources = [], [], [], []
        for (table, feature), rows in zip(self.of.row_wise, self._rows, strict=True):
            if self.of.refuses_bad_ids:
                self._check(table, feature, rows)
            size, of_parts = partition.rows_of_part(table), self.of.features_of_parts[table, feature]
            owner = (rows // size).clamp(0, len(of_parts) - 1)
            owners.append(owner + len(names))
            local.append(rows - owner * size)
            block = self.block[feature]
            each = torch.arange(batch, device=rows.device)
            samples.append(each.repeat_interleave(self.lengths[block], output_size=rows.numel()))
            if self.weights is not None:
                sources.append(self.weights[block])
            names += of_parts
        owner, at = torch.cat(owners), torch.cat(samples)
        order = owner.argsort(stable=True)  # stable: ids of a part stay in the order of samples and bags
        counts = occurrences(owner * batch + at, len(names) * batch)
        ids = torch.cat(local)[order]
        if not partition.hashes_input:  # hashes may need 64 bits, so they stay int64
            ids = ids.to(self.jagged.values.dtype)
        return names, ids, counts, torch.cat(sources).index_select(0, order) if sources else None

    def _check(self, table: int, feature: str, rows: torch.Tensor) -> None:
        """Raise `ValueError` for a row number that the table does not have. The CPU waits for the device."""
        config, lengths = self._table(table), self.lengths[self.block[feature]]
        bad = ((rows < 0) | (rows >= config.num_embeddings)).nonzero()
        if bad.numel():
            at, ends = int(bad[0]), lengths.cumsum(0)
            sample = int((ends <= at).sum())
            position = at - (int(ends[sample - 1]) if sample else 0)
            raise ValueError(
                f"table {config.name!r}, feature {feature!r}, sample {sample} of this rank, position {position}: index "
                f"{int(rows[at])} is not in [0, {config.num_embeddings}): correct the ids, enlarge the table, or pass "
                "hash=True to map any id to a row"
            )


def occurrences(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Count the occurrences of each number from 0 to `count` - 1. Unlike `torch.bincount`, this function does not wait
    for a GPU.
    """
    return torch.zeros(count, dtype=torch.int64, device=numbers.device).scatter_add_(
        0, numbers, torch.ones_like(numbers)
    )


def ends_of_keys(jagged: JaggedInput, keys: Sequence[str]) -> list[int]:
    """Return the index at which each key's ids begin, and the index at which the last key's ids end. Raise `ValueError`
    for invalid bags. The CPU waits for the device.
    """
    offsets, count, batch = jagged.offsets, jagged.values.numel(), jagged.stride or 0
    if not batch or not keys:
        if count:
            raise ValueError(wrong_range(0, 0, count, jagged.from_lengths))
        return [0] * (len(keys) + 1)
    lengths = offsets.diff()
    *ends, least, most = torch.cat([offsets[::batch], *(one.view(1) for one in lengths.aminmax())]).tolist()
    if least < 0:
        key, sample = divmod(int((lengths < 0).nonzero()[0]), batch)
        raise ValueError(
            f"feature {keys[key]!r}, sample {sample}: length {int(lengths[key * batch + sample])} is negative: a bag has 0 or "
            "more ids, so offsets must ascend"
        )
    if most > count:  # the sum of such lengths may overflow, and then equal the number of values
        key, sample = divmod(int(lengths.argmax()), batch)
        raise ValueError(
            f"feature {keys[key]!r}, sample {sample}: length {most} exceeds the size of values, {count}: correct the lengths"
        )
    if (ends[0], ends[-1]) != (0, count):
        raise ValueError(wrong_range(ends[0], ends[-1], count, jagged.from_lengths))
    return ends
