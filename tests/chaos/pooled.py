"""The `Work` of pooled embeddings, by embedding_all_to_all and by the modules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch

import weft
import weft.ops.embedding_all_to_all  # imported now, so that no interrupted call imports it
from weft.embedding import hash_ids
from weft.nn import ShardedEmbeddingBagCollection

from .bad import DEADLINES, Form, each, put
from .work import Differentiable, Given, Results

UNUSED = 9  # the index of a feature that no table uses
_SHARDINGS = {1: (1, "t", 1), 2: (0, "other t", 1), 3: (0, "t", 0)}
"""Other placements, by number: (the offset of tables between ranks, the prefix of their names, 0 or 1 if even or odd
tables use mean pooling)."""
BATCH_SIZES = [put("batch_sizes", [1]), put("batch_sizes", "even"), put("batch_sizes", [-1, 10**6])]


class Embedding(Differentiable):
    """The work of embedding_all_to_all. The modules have other arguments.

    Bags have 0, 1, 2 or 4 ids, so that means are exact.
    """

    arguments = ("values", "offsets")
    ROWS = 30
    # Differs between the classes, because a module calls the function, and calls with equal tables would be the same
    # call.
    last_dim = 5
    weighted = False
    told_sizes = True  # whether each rank is given all ranks' numbers of samples

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        return {
            "transport": rng.choice(["direct", "put"]),
            "order": rng.choice(["remote_first", "natural"]),
            "bounds_check": rng.choice(["warning", "fatal"]),
            "outputs": rng.choice([2, 3]),
        }

    @classmethod
    def bad_values(cls, options: Given) -> list[Form]:
        forms = [each("offsets", lambda o: o + 1), each("offsets", lambda o: o.flip(0) + 1), *cls.bad_calls()]
        if options.get("bounds_check") == "fatal":  # otherwise a bad index is a row of zeros, with a warning
            forms += [each("values", lambda v: torch.full_like(v, 10**6)), each("values", lambda v: v - 10**6)]
        return forms

    @classmethod
    def bad_calls(cls) -> list[Form]:
        return [*BATCH_SIZES, *DEADLINES]

    @classmethod
    def bad_sizes(cls, options: Given) -> list[Form]:
        forms = [
            each("offsets", lambda o: o[:-1]),
            each("offsets", lambda o: o[None]),
            each("values", lambda v: v[None]),
        ]
        lengths = [each("lengths", lambda n: n[:-1]), each("lengths", lambda n: n[:0])]
        return forms + lengths * ("lengths" in cls.arguments)

    @classmethod
    def bad_dtypes(cls, options: Given) -> list[Form]:
        forms = [each("values", lambda v: v.float() + 0.5), each("values", lambda v: v.bool())]
        forms += [each("offsets", lambda o: o + 0.5), each("offsets", lambda o: o.bool())]
        lengths = [each("lengths", lambda n: n + 0.25), each("lengths", lambda n: n.bool())]
        return forms + lengths * ("lengths" in cls.arguments)

    @classmethod
    def other_options(cls, world: int, options: Given) -> list[Given]:
        others = [transport for transport in ("direct", "put", "serial") if transport != options["transport"]]
        return [
            *({"transport": transport} for transport in others), *({"sharding": i} for i in _SHARDINGS),
            {"order": "natural" if options["order"] == "remote_first" else "remote_first"},
            {"bounds_check": "fatal" if options["bounds_check"] == "warning" else "warning"},
            {"outputs": 5 - options["outputs"]}, {"slice_size": 3}, {"hash": True}, {"output_dtype": "bf16"},
            *[{"batch_sizes": 1}] * cls.told_sizes,
        ]  # fmt: skip

    def make(self) -> None:
        self.dims = (4, 3, 8, self.last_dim + self.other)
        shift, prefix, means = _SHARDINGS.get(self.options.get("sharding", 0), (0, "t", 1))
        tables = [
            weft.EmbeddingBagConfig(
                self.ROWS, dim, f"{prefix}{i}", (f"f{i}",), "mean" if i % 2 == means else "sum", self.dtype
            )
            for i, dim in enumerate(self.dims)
        ]
        self.tables = tables
        placement = [(i + shift) % self.world for i in range(len(tables))]
        self.sharding = weft.place_tables(tables, self.world, placement=placement)
        self.local = [self.here(self._table(i)) for i in self.sharding.local_tables(self.rank)]

    def _table(self, i: int) -> torch.Tensor:
        return self.numbers(100 + i, 0, 0, (self.ROWS, self.dims[i]), 30)

    def _batch(self, rank: int, n: int) -> int:
        """Return the number of samples of `rank` in step n. It grows at step `turn`, so that buffers of results grow. With
        the option "any_size" it is random in each step, and may be 0.
        """
        if "any_size" in self.options:
            return int(self.counts(5, rank, n, (), 12))
        return (2, 9)[self.size] + 2 * (n >= self.turn) + (rank + self.options.get("batch_sizes", 0)) % 2

    def _bags(self, feature: int, rank: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (ids, lengths, weights) of the feature for the samples of `rank` in step n."""
        lengths = torch.tensor([0, 1, 2, 4])[self.counts(1000 + feature, rank, n, (self._batch(rank, n),), 3)]
        count = int(lengths.sum())
        ids = self.counts(2000 + feature, rank, n, (count,), self.ROWS - 1)
        return ids, lengths, self.numbers(3000 + feature, rank, n, (count,))

    def _joined(self, features: list[int], ranks: list[int], n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bags = [self._bags(f, r, n) for f in features for r in ranks]
        ids, lengths, weights = (torch.cat(parts) for parts in zip(*bags, strict=True)) if bags else (
            torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0),
        )  # fmt: skip
        return ids.to(self.device), lengths.to(self.device), weights.to(self.device)

    def inputs(self, n: int) -> Given:
        own = [slot.table for slot in self.sharding.local_slots(self.rank)]
        values, lengths, _ = self._joined(own, list(range(self.world)), n)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        sizes = [self._batch(r, n) for r in range(self.world)]
        tables = [table.clone().requires_grad_() for table in self.local] if self.backward else self.local
        given = {"values": values, "offsets": offsets, "batch_sizes": sizes, "deadline_s": self.options["deadline_s"]}
        return {**given, "tables": tables}

    def _settings(self) -> Given:
        names = ("transport", "order", "bounds_check", "outputs", "slice_size", "hash", "output_dtype")
        return {name: self.options[name] for name in names if name in self.options}

    def forward(self, given: Given) -> Results:
        features = (given["values"], given["offsets"])
        with torch.set_grad_enabled(self.backward):
            return [
                weft.embedding_all_to_all(
                    given["tables"], features, self.sharding, group=self.group, batch_sizes=given["batch_sizes"],
                    deadline_s=given["deadline_s"], requires_grad=self.backward, **self._settings(),
                )
            ]  # fmt: skip

    def wanted(self, given: Given) -> Results:
        tables: Results = given["tables"]
        return tables

    def _weighing(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(4000, rank, n, (self._batch(rank, n), sum(self.dims)))

    def grads(self, n: int) -> tuple[Results, Results]:
        of_tables = []
        for i in self.sharding.local_tables(self.rank):
            total, column = torch.zeros(self.ROWS, self.dims[i]), sum(self.dims[:i])
            for rank in range(self.world):
                ids, lengths, _ = self._bags(i, rank, n)
                of_bags = self._weighing(rank, n)[:, column : column + self.dims[i]]
                if self.tables[i].pooling == "mean":
                    of_bags = of_bags / lengths.clamp(min=1)[:, None]
                rows = hash_ids(ids, self.ROWS) if self.options.get("hash") else ids
                total.index_add_(0, rows, of_bags.repeat_interleave(lengths, 0))
            of_tables.append(total)
        return [self.here(self._weighing(self.rank, n))], of_tables

    def expected(self, n: int) -> Results:
        columns = []
        for i, table in enumerate(self.tables):
            ids, lengths, weights = self._bags(i, self.rank, n)
            rows = self._table(i)[hash_ids(ids, self.ROWS) if self.options.get("hash") else ids] * (
                weights[:, None] if self.weighted else 1
            )
            columns.append(pooled(rows, lengths, table.pooling))
        return [torch.cat(columns, dim=1)]


def pooled(rows: torch.Tensor, lengths: torch.Tensor, pooling: str) -> torch.Tensor:
    """Return the sum or the mean of the rows of each bag."""
    bags = torch.arange(len(lengths)).repeat_interleave(lengths)
    sums = rows.new_zeros(len(lengths), rows.shape[1]).index_add_(0, bags, rows)
    return sums / lengths.clamp(min=1)[:, None] if pooling == "mean" else sums


class Features:
    """An object with only the methods of a KeyedJaggedTensor that weft requires. They return any given values."""

    def __init__(self, keys: list[str], values: Any, lengths: Any, offsets: Any, weights: Any, stride: int) -> None:
        self.fields = {"keys": keys, "values": values, "lengths": lengths, "offsets": offsets}
        self.fields |= {"weights_or_none": weights, "stride": stride}

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name == "fields" or name not in self.fields:
            raise AttributeError(name)
        return lambda: self.fields[name]


class Collection(Embedding):
    """The work of a module. A module for local batches distributes them first; for global batches, each rank has its
    own features.
    """

    is_module, differentiable = True, False
    local_batch: ClassVar[bool]

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        return {**super().drawn(rng, device), "is_weighted": rng.random() < 0.5}

    @classmethod
    def other_options(cls, world: int, options: Given) -> list[Given]:
        """Return other options. For local batches, this includes whether ids have weights, because weights are then
        sent.
        """
        weighted = [{"is_weighted": not options["is_weighted"]}] * cls.local_batch
        return [*super().other_options(world, options), *weighted]

    @classmethod
    def other_makings(cls, world: int, options: Given) -> list[Given]:
        called = [change for change in super().other_options(world, options) if "batch_sizes" not in change]
        return [*called, {"is_weighted": not options["is_weighted"]}]

    @classmethod
    def bad_calls(cls) -> list[Form]:
        return [
            *BATCH_SIZES,
            put("keys", ["f0"]),
            put("features", {"f0": 1}),
            put("features", None),
            put("stride", 10**9),
        ]

    def make(self) -> None:
        super().make()
        self.weighted = self.options["is_weighted"]
        module = ShardedEmbeddingBagCollection(
            self.tables, group=self.group, device=self.device, placement=list(self.sharding.rank_of_table),
            input="local_batch" if self.local_batch else "global_batch", is_weighted=self.weighted,
            deadline_s=self.options["deadline_s"], **self._settings(),
        )  # fmt: skip
        module.load_full_weights({table.name: self._table(i) for i, table in enumerate(self.tables)})
        self.module = module.requires_grad_(False)

    def inputs(self, n: int) -> Given:
        ranks = [self.rank] if self.local_batch else list(range(self.world))
        order = [2, 0, 3, 1] if self.local_batch else sorted({s.table for s in self.sharding.local_slots(self.rank)})
        order += [UNUSED] * self.size
        values, lengths, weights = self._joined(order, ranks, n)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        given = {"keys": [f"f{i}" for i in order], "values": values, "lengths": lengths, "offsets": offsets}
        sizes = None if self.local_batch else [self._batch(r, n) for r in range(self.world)]
        stride = sum(self._batch(r, n) for r in ranks)
        return {**given, "weights": weights if self.weighted else None, "stride": stride, "batch_sizes": sizes}

    @torch.no_grad()
    def forward(self, given: Given) -> Results:
        fields = {name: given[name] for name in ("keys", "values", "lengths", "offsets", "weights", "stride")}
        features = given.get("features", Features(**fields))
        return [self.module(features, batch_sizes=given["batch_sizes"]).values()]


class LocalBatch(Collection):
    devices = ("cpu",)
    local_batch, last_dim = True, 7
    told_sizes = False
    arguments = ("values", "lengths", "offsets")

    @classmethod
    def bad_calls(cls) -> list[Form]:
        lengths = [each("lengths", lambda n: n + 1), each("lengths", lambda n: n - 9), put("batch_sizes", [1, 1])]
        return [*lengths, *super().bad_calls()[len(BATCH_SIZES) :]]


class GlobalBatch(Collection):
    local_batch, last_dim = False, 9
