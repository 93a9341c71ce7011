"""The modules for `training`, which differ in how their tables are split between ranks."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import torch

from weft.embedding import ColumnWise, DataParallel, RowWise
from weft.embedding.partition import TablePart
from weft.nn import ShardedEmbeddingCollection

from .bad import Form, put
from .pooled import LocalBatch
from .training import Training
from .work import Given, Results


class WholeTables(Training):
    """Training of a `ShardedEmbeddingBagCollection` with a rank for each table."""

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        drawn = super().drawn(rng, device)
        if "placement" not in drawn and drawn["prefetch"] is None and rng.random() < 0.5:
            drawn |= {"input": "global_batch", "max_ids": None}
        return drawn

    @classmethod
    def _other_settings(cls, options: Given) -> list[Given]:
        others = [{"transport": name} for name in ("direct", "put", "serial") if name != options["transport"]]
        order = {"order": "natural" if options["order"] == "remote_first" else "remote_first"}
        more = [*others, order, {"outputs": 5 - options["outputs"]}, {"slice_size": 3}, {"output_dtype": "bf16"}]
        if options.get("input") != "global_batch":  # otherwise no rank sends weights to another
            more.append({"is_weighted": not options["is_weighted"]})
        return [*super()._other_settings(options), *more]

    @classmethod
    def _other_placements(cls, world: int, options: Given) -> list[Given]:
        return [{"shift": 1}]

    def _placement(self) -> list[Any]:
        return [(i + self.options.get("shift", 0)) % self.world for i in range(len(self.tables))]

    def _parts(self) -> list[tuple[TablePart, torch.Tensor]]:
        own = self.module.sharding.local_tables(self.rank)
        weights = list(self.module.parameters())
        return [(self._whole(i), weight) for i, weight in zip(own, weights, strict=True)]

    def _whole(self, i: int) -> TablePart:
        return TablePart(i, self.rank, 0, self.ROWS, 0, self.dims[i])

    def _all_parts(self) -> list[TablePart]:
        return [self._whole(i) for i in range(len(self.tables))]


class CutTables(WholeTables):
    """Training of a `ShardedEmbeddingBagCollection` with column-wise, row-wise and data-parallel tables."""

    PLACEMENTS: ClassVar = ("columns", "rows", "replicated", "mixed", "mixed too")

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        drawn = {**Training.drawn.__func__(cls, rng, device), "placement": rng.choice(cls.PLACEMENTS)}  # type: ignore[attr-defined]
        if drawn["placement"] not in ("columns", "rows"):  # clip_norm does not support data-parallel tables
            drawn.pop("clip_norm", None)
        return drawn

    @classmethod
    def _other_settings(cls, options: Given) -> list[Given]:
        return [change for change in super()._other_settings(options) if "output_dtype" not in change]

    @classmethod
    def _other_placements(cls, world: int, options: Given) -> list[Given]:
        can = ("columns", "rows") if options.get("clip_norm") else ("columns", "rows", "mixed", "mixed too")
        return [{"placement": name} for name in can if name != options["placement"]]

    def _placement(self) -> list[Any]:
        ranks, last = tuple(range(self.world)), self.world - 1
        whole: dict[str, list[Any]] = {
            "columns": [ColumnWise(ranks), 0, ColumnWise((last, 0), (3, 5)), ColumnWise(ranks[::-1])],
            "rows": [RowWise(), RowWise((last,)), RowWise(ranks[::-1]), RowWise()],
            "replicated": [DataParallel()] * 4,
            "mixed": [RowWise(), ColumnWise((0, last)), DataParallel(), last],
            "mixed too": [DataParallel(), DataParallel(), RowWise(), 0],
        }
        return whole[self.options["placement"]]

    def _parts(self) -> list[tuple[TablePart, torch.Tensor]]:
        return Training._parts(self)

    def _all_parts(self) -> list[TablePart]:
        return Training._all_parts(self)


class Rows(CutTables):
    """Training of a `ShardedEmbeddingCollection`, which returns the row of every id."""

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        drawn = {**super().drawn(rng, device), "is_weighted": False, "prefetch": None, "dedup": rng.random() < 0.5}
        if drawn["optimizer"] is not None and not drawn["dedup"]:
            drawn["placement"] = rng.choice([*cls.PLACEMENTS, "whole"])
            if drawn["placement"] not in ("columns", "rows", "whole"):
                drawn.pop("clip_norm", None)
        return drawn

    @classmethod
    def _other_settings(cls, options: Given) -> list[Given]:
        return [*Training._other_settings.__func__(cls, options), {"dedup": not options["dedup"]}]  # type: ignore[attr-defined]

    @classmethod
    def bad_calls(cls) -> list[Form]:
        return [
            *LocalBatch.bad_calls()[:2],
            put("keys", ["f0"]), put("features", {"f0": 1}), put("features", None), put("stride", 10**9),
        ]  # fmt: skip

    def _dims(self) -> tuple[int, ...]:
        return (4 + 2 * self.other,) * 4

    def _placement(self) -> list[Any]:
        ranks, last = tuple(range(self.world)), self.world - 1
        name = self.options["placement"]
        if name == "whole":
            return [i % self.world for i in range(4)]
        if name == "columns":
            return [ColumnWise((0, last)), ColumnWise((last, 0)), ColumnWise((0, 0)), ColumnWise((last, last))]
        if name == "mixed":
            return [RowWise(), last, DataParallel(), RowWise(ranks[::-1])]
        return super()._placement()

    def _module(self, **options: Any) -> Any:
        return ShardedEmbeddingCollection(dedup=self.options["dedup"], **options)

    def _called(self, features: Any, given: Given) -> Any:
        return self.module(features)

    def _settings(self) -> Given:
        return {name: self.options[name] for name in ("bounds_check", "hash") if name in self.options}

    def _results(self, out: Any) -> Results:
        return [out[f"f{i}"].values() for i in range(4)]

    def expected(self, n: int) -> Results:
        return [self.model.weights[i][self._rows(i, self.rank, n)] for i in range(4)]

    def _upstream(self, rank: int, n: int) -> Results:
        return [self._of_ids(i, rank, n) for i in range(4)]

    def reaching(self, n: int) -> Results:
        return [torch.ones_like(grad, dtype=torch.bool) for grad in self._upstream(self.rank, n)]

    def _of_ids(self, i: int, rank: int, n: int) -> torch.Tensor:
        grad = self.numbers(5000 + i, rank, n, (len(self._bags(i, rank, n)[0]), self.dims[i]))
        return self._poisoned(grad, rank, n) if i == 3 else grad


class DistinctRows(CutTables):
    """Training of a `ShardedEmbeddingBagCollection` with `dedup=True`, which pools distinct rows on the samples' rank."""

    PLACEMENTS: ClassVar = ("rows", "whole")

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        given = Training.drawn.__func__(cls, rng, device)  # type: ignore[attr-defined]
        return {**given, "prefetch": None, "placement": rng.choice(cls.PLACEMENTS)}

    @classmethod
    def _other_settings(cls, options: Given) -> list[Given]:
        of = Training._other_settings.__func__(cls, options)  # type: ignore[attr-defined]
        return [*of, {"is_weighted": not options["is_weighted"]}]

    @classmethod
    def _other_placements(cls, world: int, options: Given) -> list[Given]:
        return [{"placement": name} for name in cls.PLACEMENTS if name != options["placement"]]

    def _dims(self) -> tuple[int, ...]:
        return (4 + 2 * self.other,) * 4

    def _pooling(self, i: int) -> Any:
        return "mean"

    def _placement(self) -> list[Any]:
        return [i % self.world for i in range(4)] if self.options["placement"] == "whole" else super()._placement()

    def _module(self, **options: Any) -> Any:
        return super()._module(dedup=True, **options)

    def _settings(self) -> Given:
        return {name: self.options[name] for name in ("bounds_check", "hash") if name in self.options}
