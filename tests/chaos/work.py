"""What ranks compute while faults are injected: every operator, on whole numbers that no other step has.

A fault may pair step n of one rank with step n + 1 of another, and such a result looks like any other one. So the data of a step
are random whole numbers, a function of (seed, rank, step); sums of their products are exact in fp32; and a result is right if it
has the same bits as torch's operators on the data of all ranks for that step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import weft
import weft.ops.all_gather_matmul
import weft.ops.all_gather_scaled_matmul
import weft.ops.all_to_all_matmul
import weft.ops.embedding_all_to_all  # now, and not in a call that is interrupted
from weft.nn import ShardedEmbeddingBagCollection

Given = dict[str, Any]
Results = list[torch.Tensor]
FP8 = torch.float8_e4m3fn
UNUSED = 9  # a feature that no table has


class Work:
    """Calls of one operator. turn: from this step on another shape is called. options: of every call."""

    backward = False  # whether steps differentiate
    padded = False  # whether results may have rows behind those that are expected

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, seed: int, size: int, turn: int, options: Given
    ) -> None:
        self.group, self.device, self.seed, self.size, self.turn = group, device, seed, size, turn
        self.rank, self.world = group.rank(), group.size()
        self.options = dict(options)
        self.other = self.options.pop("other_size", False)  # another shape in everything that tells calls apart
        self.backward = self.options.pop("backward", False)
        self.dtype = getattr(torch, self.options.pop("dtype", "float32"))

    def make(self) -> None:
        """Collective: what has to be there before the first call."""

    def inputs(self, n: int) -> Given:
        """This rank's of step n, by argument."""
        raise NotImplementedError

    def forward(self, given: Given) -> Results:
        """weft's call."""
        raise NotImplementedError

    def expected(self, n: int) -> Results:
        raise NotImplementedError

    def grads(self, n: int) -> tuple[Results, Results]:
        """(of this rank's results, what the gradients of its inputs must be)"""
        raise NotImplementedError

    def wanted(self, given: Given) -> Results:
        """The inputs whose gradients are taken."""
        raise NotImplementedError

    def numbers(self, what: int, rank: int, n: int, shape: tuple[int, ...], most: int = 3) -> torch.Tensor:
        """Whole numbers from -most to most."""
        generator = torch.Generator().manual_seed(hash((self.seed, what, rank, n)) % 2**63)
        return torch.randint(-most, most + 1, shape, generator=generator).to(torch.float32)

    def counts(self, what: int, rank: int, n: int, shape: tuple[int, ...], most: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, what, rank, n)) % 2**63)
        return torch.randint(0, most + 1, shape, generator=generator)

    def here(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device, self.dtype)

    def call_options(self) -> Given:
        return {"deadline_s": self.options["deadline_s"], "schedule": self.options.get("schedule")}


class AllGatherMatmul(Work):
    K = 16

    def _shape(self, n: int) -> tuple[int, int]:
        rows = (4, 24)[self.size] + 4 * (n >= self.turn)
        return rows, (8, 48)[self.size] + 4 * self.other

    def _shard(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(1, rank, n, (self._shape(n)[0], self.K))

    def _weights(self, rank: int, n: int) -> list[torch.Tensor]:
        width = self._shape(n)[1]
        return [self.numbers(2 + i, rank, n, (self.K, width + 4 * i)) for i in range(2)]

    def inputs(self, n: int) -> Given:
        x, Bs = self.here(self._shard(self.rank, n)), [self.here(B) for B in self._weights(self.rank, n)]
        if self.backward:
            x.requires_grad_()
            Bs = [B.requires_grad_() for B in Bs]
        return {"A_shard": x, "Bs": Bs, "gather_dim": 0, "rows": None, **self.call_options()}

    def forward(self, given: Given) -> Results:
        A, ys = weft.all_gather_matmul(group=self.group, return_A=self.options["return_A"], **given)
        return ys if A is None else [A, *ys]

    def expected(self, n: int) -> Results:
        whole = torch.cat([self._shard(r, n) for r in range(self.world)])
        ys = [whole @ B for B in self._weights(self.rank, n)]
        return [whole, *ys] if self.options["return_A"] else ys

    def wanted(self, given: Given) -> Results:
        return [given["A_shard"], *given["Bs"]]

    def _weighing(self, rank: int, n: int) -> Results:
        m, width = self._shape(n)
        shapes = [
            (self.world * m, size) for size in ([self.K] if self.options["return_A"] else []) + [width, width + 4]
        ]
        return [self.numbers(10 + i, rank, n, shape, 2) for i, shape in enumerate(shapes)]

    def grads(self, n: int) -> tuple[Results, Results]:
        m, whole = self._shape(n)[0], torch.cat([self._shard(r, n) for r in range(self.world)])
        of_whole = torch.zeros_like(whole)
        for rank in range(self.world):
            weighing = self._weighing(rank, n)
            if self.options["return_A"]:
                of_whole += weighing[0]
            for g, B in zip(weighing[-2:], self._weights(rank, n), strict=True):
                of_whole += g @ B.t()
        mine = self._weighing(self.rank, n)
        of_Bs = [whole.t() @ g for g in mine[-2:]]
        return [self.here(g) for g in mine], [of_whole[self.rank * m : (self.rank + 1) * m], *of_Bs]


class AllGatherScaledMatmul(AllGatherMatmul):
    """fp8: small whole numbers are exact in it, and so are scales that are powers of two."""

    K = 32

    def _shape(self, n: int) -> tuple[int, int]:
        return (16, 32)[self.size] + 16 * (n >= self.turn), (16, 48)[self.size] + 16 * self.other

    def _shard(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(1, rank, n, (self._shape(n)[0], self.K), 1)

    def _weights(self, rank: int, n: int) -> list[torch.Tensor]:
        width = self._shape(n)[1]
        return [self.numbers(2 + i, rank, n, (width + 16 * i, self.K), 1).t() for i in range(2)]

    def inputs(self, n: int) -> Given:
        x, Bs = self._shard(self.rank, n), self._weights(self.rank, n)
        rows = len(x)
        by_row = self.options["by_row"]
        scale = torch.full((rows, 1), 0.5) if by_row else torch.tensor(0.5)
        of_Bs = [torch.full((1, B.shape[1]), 2.0) if by_row else torch.tensor([2.0]) for B in Bs]
        return {
            "A_shard": x.to(self.device, FP8), "Bs": [B.t().contiguous().to(self.device, FP8).t() for B in Bs],
            "A_scale": scale.to(self.device), "B_scales": [scale.to(self.device) for scale in of_Bs], "gather_dim": 0,
            "out_dtypes": [torch.bfloat16] * 2, "rows": None, **self.call_options(),
        }  # fmt: skip

    def forward(self, given: Given) -> Results:
        A, ys = weft.all_gather_scaled_matmul(group=self.group, return_A=self.options["return_A"], **given)
        return ys if A is None else [A.float(), *ys]


class AllToAllMatmul(Work):
    EXPERTS, K, N = 2, 8, 12

    def _splits(self, rank: int, n: int) -> torch.Tensor:
        most = (3, 12)[self.size]
        return self.counts(1, rank, n, (self.world * self.EXPERTS,), most)

    def _tokens(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(2, rank, n, (int(self._splits(rank, n).sum()), self._k(n)))

    def _weights(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(3, rank, n, (self.EXPERTS, self._k(n), self.N))

    def _k(self, n: int) -> int:
        return self.K + 4 * (n >= self.turn) + 8 * self.other

    @property
    def padded(self) -> bool:  # type: ignore[override]
        return self._room() is not None

    def _room(self) -> int | None:
        most = (3, 12)[self.size] * self.EXPERTS * self.world
        return most if self.options.get("max_rows") else None

    def inputs(self, n: int) -> Given:
        tokens, w = self.here(self._tokens(self.rank, n)), self.here(self._weights(self.rank, n))
        if self.backward:
            tokens.requires_grad_()
            w.requires_grad_()
        capacity = self._room() or (3, 12)[self.size] * self.EXPERTS * self.world
        return {
            "tokens": tokens, "w_experts": w, "splits": self._splits(self.rank, n).to(self.device), "max_rows": self._room(),
            "capacity": capacity * 2, **self.call_options(),
        }  # fmt: skip

    def forward(self, given: Given) -> Results:
        y, received = weft.all_to_all_matmul(group=self.group, return_received=True, **given)
        return [y, received]

    def _routed(self, rank: int, n: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(the rows of each of `rank`'s experts, received [ranks, experts])"""
        parts = [self._tokens(r, n).split(self._splits(r, n).tolist()) for r in range(self.world)]
        mine = range(rank * self.EXPERTS, (rank + 1) * self.EXPERTS)
        rows = [torch.cat([parts[source][expert] for source in range(self.world)]) for expert in mine]
        return rows, torch.stack([self._splits(r, n)[mine.start : mine.stop] for r in range(self.world)])

    def expected(self, n: int) -> Results:
        rows, received = self._routed(self.rank, n)
        y = torch.cat([x @ w for x, w in zip(rows, self._weights(self.rank, n), strict=True)])
        return [y, received]

    def wanted(self, given: Given) -> Results:
        return [given["tokens"], given["w_experts"]]

    def _weighing(self, rank: int, n: int) -> torch.Tensor:
        """Of the rows that come to `rank`."""
        rows = sum(len(x) for x in self._routed(rank, n)[0])
        return self.numbers(4, rank, n, (rows, self.N), 2)

    def grads(self, n: int) -> tuple[Results, Results]:
        of_parts: dict[tuple[int, int], torch.Tensor] = {}  # by (source, expert of all)
        for rank in range(self.world):
            g = self._weighing(rank, n)
            for e, w in enumerate(self._weights(rank, n)):
                for source in range(self.world):
                    expert = rank * self.EXPERTS + e
                    count = int(self._splits(source, n)[expert])
                    of_parts[source, expert], g = g[:count] @ w.t(), g[count:]
        of_tokens = torch.cat([of_parts[self.rank, expert] for expert in range(self.world * self.EXPERTS)])
        rows, _ = self._routed(self.rank, n)
        g = self._weighing(self.rank, n)
        of_w = torch.stack([x.t() @ part for x, part in zip(rows, g.split([len(x) for x in rows]), strict=True)])
        room = self._room()
        padded = g if room is None else torch.cat([g, g.new_zeros(room - len(g), self.N)])
        return [self.here(padded)], [of_tokens, of_w]


class Embedding(Work):
    """The function; the modules differ in what they are given. Bags of 0, 1, 2 or 4 ids, so that means are exact too."""

    ROWS = 30
    last_dim = (
        5  # of another size for each operator: a module's call is one of the function, and with equal tables the same
    )
    weighted = False

    def make(self) -> None:
        self.dims = (4, 3, 8, self.last_dim + self.other)
        tables = [
            weft.EmbeddingBagConfig(self.ROWS, dim, f"t{i}", (f"f{i}",), "mean" if i % 2 else "sum", self.dtype)
            for i, dim in enumerate(self.dims)
        ]
        self.tables = tables
        self.sharding = weft.place_tables(tables, self.world, placement=[i % self.world for i in range(len(tables))])
        self.local = [self.here(self._table(i)) for i in self.sharding.local_tables(self.rank)]

    def _table(self, i: int) -> torch.Tensor:
        return self.numbers(100 + i, 0, 0, (self.ROWS, self.dims[i]), 30)

    def _batch(self, rank: int, n: int) -> int:
        """Samples of `rank`; results of another shape grow the buffers."""
        return (2, 9)[self.size] + 2 * (n >= self.turn) + rank % 2

    def _bags(self, feature: int, rank: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids, lengths, weights) of the samples of `rank`."""
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
        return {"values": values, "offsets": offsets, "batch_sizes": sizes, "deadline_s": self.options["deadline_s"]}

    def _settings(self) -> Given:
        names = ("transport", "order", "bounds_check", "outputs")
        return {name: self.options[name] for name in names}

    @torch.no_grad()
    def forward(self, given: Given) -> Results:
        features = (given["values"], given["offsets"])
        return [
            weft.embedding_all_to_all(
                self.local, features, self.sharding, group=self.group, batch_sizes=given["batch_sizes"],
                deadline_s=given["deadline_s"], **self._settings(),
            )
        ]  # fmt: skip

    def expected(self, n: int) -> Results:
        columns = []
        for i, table in enumerate(self.tables):
            ids, lengths, weights = self._bags(i, self.rank, n)
            rows = self._table(i)[ids] * (weights[:, None] if self.weighted else 1)
            sums = torch.stack([part.sum(0) for part in rows.split(lengths.tolist())])
            columns.append(sums / lengths.clamp(min=1)[:, None] if table.pooling == "mean" else sums)
        return [torch.cat(columns, dim=1)]


class Features:
    """The methods of a KeyedJaggedTensor that every object must have, with whatever tensors."""

    def __init__(self, keys: list[str], values: Any, lengths: Any, offsets: Any, weights: Any, stride: int) -> None:
        self.fields = {"keys": keys, "values": values, "lengths": lengths, "offsets": offsets}
        self.fields |= {"weights_or_none": weights, "stride": stride}

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name == "fields" or name not in self.fields:
            raise AttributeError(name)
        return lambda: self.fields[name]


class Collection(Embedding):
    """The module. A local batch is distributed first; of a global batch every rank has its own features."""

    def make(self) -> None:
        self.local_batch = self.options["input"] == "local_batch"
        self.last_dim = 7 if self.local_batch else 9
        super().make()
        self.weighted = self.options["is_weighted"]
        module = ShardedEmbeddingBagCollection(
            self.tables, group=self.group, device=self.device, placement=list(self.sharding.rank_of_table),
            input=self.options["input"], is_weighted=self.weighted, deadline_s=self.options["deadline_s"],
            **self._settings(),
        )  # fmt: skip
        module.load_full_weights({f"t{i}": self._table(i) for i in range(len(self.dims))})
        self.module = module

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
