"""A float64 reference of the embedding operators, and the problems of their tests.

A `Problem` describes the tables, their owners, and the sparse input of the global batch. Every process makes the same tensors
from the seed, so that none is sent. `reference` is the sum of each bag in float64.

Tolerances. `assert_close` bounds every element. In a bag of n ids, each product is rounded to fp32, and then in at most n - 1
additions. Each rounding is off by at most u = 2**-24 of the sum of magnitudes, so a sum is off by at most n u. A mean is
also divided, which is off by up to 4 u on GPUs (Triton's `/`: 2 ulp). The bound has 2 u more, because errors multiply. Then
the result is rounded to the tables' dtype.

`assert_as_exact_as_torch` compares whole outputs. The error against float64 may be twice that of torch's embedding_bag in
the same dtype: both add in fp32, and only the order of additions may differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from weft.embedding import EmbeddingBagConfig, EmbeddingSharding, KeyedJaggedTensor, hash_ids
from weft.embedding.jagged import offsets_of


@dataclass(frozen=True)
class Bags:
    """One feature of the global batch: values [N], lengths [batch], per-sample weights [N]."""

    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def none() -> Bags:
        return Bags(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0))


@dataclass(frozen=True)
class Problem:
    """Tables, their ranks, and an input with `batch_sizes[r]` samples for rank r.

    Bags have 0 to `longest` ids. The first bag of a feature is empty, and the last bag has `longest` ids.
    """

    tables: tuple[EmbeddingBagConfig, ...]
    rank_of_table: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    longest: int = 6
    weighted: bool = False
    hash: bool = False
    index_dtype: torch.dtype = torch.int64
    offset_dtype: torch.dtype = torch.int64
    seed: int = 0

    @cached_property
    def sharding(self) -> EmbeddingSharding:
        return EmbeddingSharding(self.tables, self.rank_of_table, len(self.batch_sizes))

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        """All tables, each [num_embeddings, embedding_dim]."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(t.num_embeddings, t.embedding_dim, generator=generator).to(t.dtype) for t in self.tables]

    @cached_property
    def bags(self) -> dict[str, Bags]:
        """The input of every feature. Ids are valid for the smallest table of the feature; hashed ids may be any
        numbers.
        """
        rows: dict[str, int] = {}
        for table in self.tables:
            for feature in table.feature_names:
                rows[feature] = min(table.num_embeddings, rows.get(feature, table.num_embeddings))
        bags, batch = {}, sum(self.batch_sizes)
        limits = torch.iinfo(self.index_dtype)
        for number, (feature, count) in enumerate(rows.items()):
            rng = np.random.default_rng([self.seed, number])
            lengths = rng.integers(0, self.longest + 1, batch)
            lengths[-1:] = self.longest
            lengths[:1] = 0
            low, high = (limits.min, limits.max) if self.hash else (0, count - 1)
            values = rng.integers(low, high, int(lengths.sum()), endpoint=True)
            psw = rng.standard_normal(len(values)).astype(np.float32)
            bags[feature] = Bags(*map(torch.from_numpy, (values, lengths, psw)))
        return bags

    def local_weights(self, rank: int) -> list[torch.Tensor]:
        return [self.weights[table] for table in self.sharding.local_tables(rank)]

    def tupled(self, rank: int) -> tuple[torch.Tensor, ...]:
        """Return `rank`'s input as (values, offsets[, per_sample_weights]). The offsets have a block for each (table,
        feature) pair of the rank.
        """
        values, offsets, weights = self._joined([self.bags[s.feature] for s in self.sharding.local_slots(rank)])
        return (values, offsets, weights) if self.weighted else (values, offsets)

    def keyed(self, rank: int, keys: Sequence[str] | None = None) -> KeyedJaggedTensor:
        """Return `rank`'s input with `keys` (default: its own features)."""
        if keys is None:
            keys = list(dict.fromkeys(slot.feature for slot in self.sharding.local_slots(rank)))
        values, offsets, weights = self._joined([self.bags[key] for key in keys])
        weights = weights if self.weighted else None
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets, stride=sum(self.batch_sizes))

    def whole(self) -> tuple[torch.Tensor, ...]:
        """Return the input of all (table, feature) pairs, for one process that owns every table."""
        values, offsets, weights = self._joined([self.bags[slot.feature] for slot in self.sharding.slots])
        return (values, offsets, weights) if self.weighted else (values, offsets)

    def _joined(self, bags: list[Bags]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bags = bags or [Bags.none()]
        values, lengths, weights = (torch.cat([getattr(b, n) for b in bags]) for n in ("values", "lengths", "weights"))
        return values.to(self.index_dtype), offsets_of(lengths).to(self.offset_dtype), weights

    def rows_of(self, rank: int) -> slice:
        """Return the rows of the global batch that belong to `rank`."""
        begin = sum(self.batch_sizes[:rank])
        return slice(begin, begin + self.batch_sizes[rank])


def even(batch: int, world_size: int) -> tuple[int, ...]:
    return tuple(batch // world_size + (rank < batch % world_size) for rank in range(world_size))


def tables_of(
    dims: Sequence[int], rows: int = 30, dtype: torch.dtype = torch.float32
) -> tuple[EmbeddingBagConfig, ...]:
    """Return a table with its own feature for each of `dims`. Every other table has mean pooling."""
    return tuple(
        EmbeddingBagConfig(rows + i, dim, f"t{i}", (f"f{i}",), "mean" if i % 2 else "sum", dtype)
        for i, dim in enumerate(dims)
    )


def problem(world_size: int, dims: Sequence[int] = (8, 3, 16, 1, 70), batch: int = 13, **other: Any) -> Problem:
    """Return a problem with an evenly divided batch. Tables of `dims` columns are assigned to the ranks round robin.

    other: `dtype` and `rows` of the tables, and fields of `Problem`.
    """
    tables = tables_of(dims, **{name: other.pop(name) for name in ("rows", "dtype") if name in other})
    return Problem(tables, tuple(i % world_size for i in range(len(dims))), even(batch, world_size), **other)


def _pooled(p: Problem, weights: list[torch.Tensor], magnitudes: bool = False) -> torch.Tensor:
    """Return [global batch, total_dim] by torch's embedding_bag, in the dtype of `weights`. magnitudes: True to add
    absolute values.
    """
    columns = []
    for slot in p.sharding.slots:
        table, bags, weight = p.tables[slot.table], p.bags[slot.feature], weights[slot.table]
        ids = hash_ids(bags.values.to(p.index_dtype), table.num_embeddings) if p.hash else bags.values
        psw = bags.weights.to(weight.dtype) if p.weighted else torch.ones(len(ids), dtype=weight.dtype)
        if magnitudes:
            weight, psw = weight.abs(), psw.abs()
        mean = table.pooling == "mean"
        if mean and not p.weighted:
            out = torch.nn.functional.embedding_bag(
                ids, weight, offsets_of(bags.lengths), mode="mean", include_last_offset=True
            )
        else:
            out = torch.nn.functional.embedding_bag(
                ids, weight, offsets_of(bags.lengths), mode="sum", include_last_offset=True, per_sample_weights=psw
            )
            if mean:  # with weights, the sum is divided by the number of ids, not by the sum of the weights
                out = out / bags.lengths.clamp(min=1)[:, None].to(out.dtype)
        columns.append(out)
    return torch.cat(columns, dim=1)


def reference(p: Problem) -> torch.Tensor:
    """Return the exact output, float64 [global batch, total_dim]."""
    return _pooled(p, [weight.double() for weight in p.weights])


def assert_close(
    output: torch.Tensor, p: Problem, rows: slice = slice(None), *, to_nearest: bool = True, dtype: torch.dtype | None = None
) -> None:  # fmt: skip
    """Check every element against the bound at the top of this file. `output` holds `rows` of the global batch.

    `to_nearest=False`: the last rounding may truncate, which doubles its error. dtype: the dtype of the output, if it
    differs from the dtype of the tables.
    """
    dtype = dtype or p.sharding.dtype
    wanted = reference(p)[rows]
    magnitude = _pooled(p, [weight.double() for weight in p.weights], magnitudes=True)[rows]
    lengths = torch.stack([p.bags[s.feature].lengths for s in p.sharding.slots], dim=1)[rows]
    roundings = lengths + torch.tensor([6 if p.tables[s.table].pooling == "mean" else 2 for s in p.sharding.slots])
    roundings = roundings.repeat_interleave(torch.tensor([slot.dim for slot in p.sharding.slots]), dim=1)
    limits = torch.finfo(dtype)
    last = limits.eps / 2 if to_nearest else limits.eps
    bound = roundings * 2.0**-24 * magnitude + last * wanted.abs() + limits.smallest_normal * limits.eps
    error = (output.double() - wanted).abs()
    assert output.dtype == dtype
    assert output.shape == wanted.shape
    wrong = ~(error <= bound)  # a NaN must fail too
    if wrong.any():
        sample, column = (int(i) for i in wrong.nonzero()[0])
        slot = next(s for s in reversed(p.sharding.slots) if s.column <= column)
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; the first, row {sample} column {column} "
            f"({slot}): {float(output[sample, column])} and not {float(wanted[sample, column])}, which is off by "
            f"{float(error[sample, column]):.3g} where {float(bound[sample, column]):.3g} is allowed"
        )


def assert_as_exact_as_torch(output: torch.Tensor, p: Problem) -> None:
    """Check that the output's error (Euclidean, against float64) is at most twice torch's."""
    wanted = reference(p)
    error = float((output.double() - wanted).norm())
    torchs = float((_pooled(p, p.weights).double() - wanted).norm())
    assert math.isfinite(error)
    assert error <= 2 * torchs, (
        f"off by {error:.3g} where torch's embedding_bag in {p.sharding.dtype} is off by {torchs:.3g}"
    )
