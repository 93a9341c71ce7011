"""What ranks compute while faults are injected, continued: GEMMs in front of a collective, as `work` has those behind one."""

from __future__ import annotations

import random
from abc import abstractmethod
from typing import ClassVar

import torch

import weft
import weft.ops.matmul_all_gather
import weft.ops.matmul_all_reduce
import weft.ops.matmul_all_to_all
import weft.ops.matmul_reduce_scatter
import weft.ops.scaled_matmul_reduce_scatter  # now, and not in a call that is interrupted

from .bad import DEADLINES, Form, each, put
from .work import FP8, AllToAllMatmul, Differentiable, Given, Results


class Products(Differentiable):
    """x @ w of every rank, of one shape."""

    K, MOST = 16, 3  # numbers are whole, from -MOST to MOST
    arguments = ("x", "w")  # x and w first
    bad_settings: ClassVar[list[Form]]
    """Wrong values of what only this operator has."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors of its calls."""
        return self.arguments

    @classmethod
    def bad_values(cls, options: Given) -> list[Form]:
        return [
            *cls.bad_settings,
            put(cls.arguments[1], None),
            put("schedule", "dierct"),
            put("schedule", 5),
            *DEADLINES,
        ]

    @classmethod
    def bad_sizes(cls, options: Given) -> list[Form]:
        x, w, *_ = cls.arguments
        return [
            each(x, lambda x: x[0]), each(x, lambda x: x[:, :-1]), each(x, lambda x: x.flatten()[0]), each(w, lambda w: w[:-1]),
            each(w, lambda w: w[None]),
        ]  # fmt: skip

    @classmethod
    def bad_dtypes(cls, options: Given) -> list[Form]:
        x, w, *_ = cls.arguments
        return [
            each(x, lambda x: x.to(torch.float64)), each(x, lambda x: x.to(torch.int32)), each(w, lambda w: w.double()),
            each(w, lambda w: w.bool()),
        ]  # fmt: skip

    def _m(self, n: int) -> int:
        return self.world * ((4, 24)[self.size] + 4 * (n >= self.turn))

    def _n(self) -> int:
        return (8, 48)[self.size] + 4 * self.other

    def _x(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(1, rank, n, (self._m(n), self.K), self.MOST)

    def _w(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(2, rank, n, (self.K, self._n()), self.MOST)

    def _product(self, rank: int, n: int) -> torch.Tensor:
        return self._x(rank, n) @ self._w(rank, n)

    def _sum(self, n: int) -> torch.Tensor:
        return torch.stack([self._product(rank, n) for rank in range(self.world)]).sum(0)

    def tensors(self, n: int) -> list[torch.Tensor]:
        """This rank's, by `names`."""
        return [self._x(self.rank, n), self._w(self.rank, n)]

    def settings(self) -> Given:
        return {}

    def inputs(self, n: int) -> Given:
        tensors = [self.here(x).requires_grad_(self.backward) for x in self.tensors(n)]
        return {**dict(zip(self.names, tensors, strict=True)), **self.settings(), **self.call_options()}

    def wanted(self, given: Given) -> Results:
        return [given[name] for name in self.names]

    @abstractmethod
    def weighing(self, rank: int, n: int) -> torch.Tensor:
        """Of the result of `rank`."""

    @abstractmethod
    def of_product(self, n: int) -> torch.Tensor:
        """The gradient of this rank's product."""

    def grads(self, n: int) -> tuple[Results, Results]:
        g = self.of_product(n)
        wanted = [g @ self._w(self.rank, n).t(), self._x(self.rank, n).t() @ g]
        return [self.here(self.weighing(self.rank, n))], wanted

    def weighing_like(self, rank: int, n: int, m: int, columns: int) -> torch.Tensor:
        return self.numbers(10, rank, n, (m, columns), 2)


class MatmulReduceScatter(Products):
    arguments = ("A", "B")
    bad_settings: ClassVar[list[Form]] = [put("scatter_dim", "0"), put("scatter_dim", 7), put("reduce_op", "mean")]

    @classmethod
    def schedules(cls, world: int, options: Given) -> list[str]:
        ways = ("chunks=1,by=dma,add=reduce", "chunks=2,by=kernel,add=gemm", "chunks=2,by=store,add=reduce")
        pulled = ["pulled[chunks=2,by=gemm]", "pulled[chunks=1,by=tracked]"]
        return ["scatter", *(f"direct[{way}]" for way in ways), *pulled, *["ring[chunks=2,by=dma]"] * (world > 2)]

    @classmethod
    def bad_sizes(cls, options: Given) -> list[Form]:
        return [each(cls.arguments[0], lambda x: x[:-1]), *super().bad_sizes(options)]

    def settings(self) -> Given:
        return {"reduce_op": "sum", "scatter_dim": 0}

    def forward(self, given: Given) -> Results:
        return [weft.matmul_reduce_scatter(group=self.group, **given)]

    def expected(self, n: int) -> Results:
        return [self._sum(n).chunk(self.world)[self.rank]]

    def weighing(self, rank: int, n: int) -> torch.Tensor:
        return self.weighing_like(rank, n, self._m(n) // self.world, self._n())

    def of_product(self, n: int) -> torch.Tensor:
        return torch.cat([self.weighing(rank, n) for rank in range(self.world)])


class ScaledMatmulReduceScatter(MatmulReduceScatter):
    """fp8: these numbers are exact in it, scales are powers of two, and products and their sums exact in 16 bits. by_row: whether
    each row has a scale. bias: whether each rank adds one."""

    MOST = 1
    differentiable, other_dtype = False, "float16"
    arguments = ("A", "B", "A_scale", "B_scale", "bias")
    bad_settings: ClassVar[list[Form]] = [
        put("orig_scatter_dim", "0"), put("orig_scatter_dim", 1), put("scatter_dim_after_maybe_reshape", 7),
        put("reduce_op", "max"), put("A_scale", 0.5), put("B_scale", None), put("bias", 1), put("result_scale", torch.ones(1)),
        put("out_dtype", None), put("out_dtype", FP8), put("use_fast_accum", 1), put("output_shape", [3, 5]),
        put("output_shape", "x"), each("A_scale", lambda s: s.clone().requires_grad_()),
    ]  # fmt: skip

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        return {"by_row": rng.random() < 0.5, "bias": rng.random() < 0.5, "dtype": "bfloat16"}

    @classmethod
    def schedules(cls, world: int, options: Given) -> list[str]:
        ways = ("chunks=1,by=dma", "chunks=2,by=kernel", "chunks=2,by=store")
        return ["scatter", *(f"direct[{way},add=reduce]" for way in ways)]

    @classmethod
    def bad_sizes(cls, options: Given) -> list[Form]:
        return [
            each("A_scale", lambda s: s.new_ones(3, 1)), each("B_scale", lambda s: s.new_ones(3, 1)),
            each("B", lambda w: w[:, :8]), put("bias", torch.ones(3).bfloat16()), *super().bad_sizes(options),
        ]  # fmt: skip

    @classmethod
    def bad_dtypes(cls, options: Given) -> list[Form]:
        return [*super().bad_dtypes(options), *(each(scale, lambda s: s.half()) for scale in ("A_scale", "B_scale"))]

    def _n(self) -> int:
        return (16, 48)[self.size] + 16 * self.other

    def _scales(self, rank: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of A and of B, 1 or 2."""
        shapes = ((self._m(n), 1), (1, self._n())) if self.options["by_row"] else ((), (1,))
        of_A, of_B = (2.0 ** self.counts(3 + i, rank, n, shape, 1) for i, shape in enumerate(shapes))
        return of_A, of_B

    def _bias(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(5, rank, n, (self._n(),))

    def _product(self, rank: int, n: int) -> torch.Tensor:
        of_A, of_B = self._scales(rank, n)
        product = (self._x(rank, n) * of_A) @ (self._w(rank, n) * of_B)
        return product + self._bias(rank, n) if self.options["bias"] else product

    def inputs(self, n: int) -> Given:
        x, w = (x.to(self.device, FP8) for x in (self._x(self.rank, n), self._w(self.rank, n).t().contiguous()))
        of_A, of_B = (scale.to(self.device) for scale in self._scales(self.rank, n))
        return {
            "A": x, "B": w.t(), "A_scale": of_A, "B_scale": of_B, "reduce_op": "sum", "orig_scatter_dim": 0,
            "scatter_dim_after_maybe_reshape": 0, "bias": self.here(self._bias(self.rank, n)) if self.options["bias"] else None,
            "out_dtype": self.dtype, **self.call_options(),
        }  # fmt: skip

    def forward(self, given: Given) -> Results:
        return [weft.scaled_matmul_reduce_scatter(group=self.group, **given)]


class MatmulAllReduce(Products):
    """bias, residual, norm: whether they follow the sum.

    Before a norm the residual makes of every sum 1 or -1, and EPS adds up to 4 with the mean of their squares: so the norm halves,
    and all of it and of its gradients is exact, in as many columns as a power of two.
    """

    EPS = 3.0
    arguments = ("x", "w", "bias", "residual", "norm")
    bad_settings: ClassVar[list[Form]] = [
        put("op", "mean"), put("op", 5), put("bias", 1), put("residual", "x"), put("norm", 1), put("norm", torch.ones(3)),
        put("eps", -1.0), put("eps", "small"),
    ]  # fmt: skip

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        norm = rng.random() < 0.5
        return {"bias": rng.random() < 0.5, "residual": norm or rng.random() < 0.5, "norm": norm}

    @classmethod
    def schedules(cls, world: int, options: Given) -> list[str]:
        two_shot = ["two_shot[chunks=1,by=dma,add=reduce]", "two_shot[chunks=2,by=kernel,add=gemm]"]
        return ["one_shot[by=kernel]", "one_shot[by=load]", *two_shot, "chunked[chunks=2,by=dma]"]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in self.arguments if self.options.get(name, True))

    def _n(self) -> int:
        return (8, 64)[self.size] * (1 + self.other) if self.options["norm"] else super()._n()

    def settings(self) -> Given:
        return {"eps": self.EPS} if self.options["norm"] else {}

    def _following(self, n: int) -> dict[str, torch.Tensor]:
        """The same on all ranks, but for the norm's weight."""
        m, columns = self._m(n), self._n()
        bias, residual = self.numbers(5, 0, n, (columns,)), self.numbers(6, 0, n, (m, columns))
        if self.options["norm"]:
            signs = 2.0 * self.counts(6, 0, n, (m, columns), 1) - 1
            residual = signs - self._sum(n) - (bias if self.options["bias"] else 0)
        return {"bias": bias, "residual": residual, "norm": self._norm(self.rank, n)}

    def _norm(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(7, rank, n, (self._n(),))

    def _total(self, n: int) -> torch.Tensor:
        following = self._following(n)
        return self._sum(n) + sum(following[name] for name in self.names[2:] if name != "norm")

    def tensors(self, n: int) -> list[torch.Tensor]:
        following = self._following(n)
        return [*super().tensors(n), *(following[name] for name in self.names[2:])]

    def forward(self, given: Given) -> Results:
        made = weft.matmul_all_reduce(group=self.group, **given)
        return list(made) if self.options["norm"] else [made]

    def expected(self, n: int) -> Results:
        total = self._total(n)
        return [total / 2 * self._norm(self.rank, n), total] if self.options["norm"] else [total]

    def weighing(self, rank: int, n: int) -> torch.Tensor:
        """Of the sum."""
        return self.weighing_like(rank, n, self._m(n), self._n())

    def _of_normed(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(11, rank, n, (self._m(n), self._n()), 2)

    def _of_total(self, rank: int, n: int) -> torch.Tensor:
        """The gradient of the sum on `rank`, that through its norm too."""
        if not self.options["norm"]:
            return self.weighing(rank, n)
        total, g = self._total(n), self._of_normed(rank, n) * self._norm(rank, n)
        return self.weighing(rank, n) + g / 2 - total * (g * total).mean(1, keepdim=True) / 8

    def of_product(self, n: int) -> torch.Tensor:
        return torch.stack([self._of_total(rank, n) for rank in range(self.world)]).sum(0)

    def grads(self, n: int) -> tuple[Results, Results]:
        given, wanted = super().grads(n)
        mine, normed = self._of_total(self.rank, n), self._of_normed(self.rank, n)
        own = {"bias": mine.sum(0), "residual": mine, "norm": (normed * self._total(n) / 2).sum(0)}
        given = [self.here(normed), *given] if self.options["norm"] else given
        return given, [*wanted, *(own[name] for name in self.names[2:])]


class MatmulAllGather(Products):
    """columns: whether they are joined, and not rows."""

    bad_settings: ClassVar[list[Form]] = [put("gather_dim", "0"), put("gather_dim", 7)]

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        return {"columns": rng.random() < 0.5}

    @classmethod
    def schedules(cls, world: int, options: Given) -> list[str]:
        return ["direct[chunks=1,by=kernel]", "direct[chunks=2,by=dma]"]

    @property
    def _dim(self) -> int:
        return int(self.options["columns"])

    def settings(self) -> Given:
        return {"gather_dim": self._dim}

    def forward(self, given: Given) -> Results:
        return [weft.matmul_all_gather(group=self.group, **given)]

    def expected(self, n: int) -> Results:
        return [torch.cat([self._product(rank, n) for rank in range(self.world)], dim=self._dim)]

    def weighing(self, rank: int, n: int) -> torch.Tensor:
        factors = (1, self.world) if self._dim else (self.world, 1)
        return self.weighing_like(rank, n, self._m(n) * factors[0], self._n() * factors[1])

    def of_product(self, n: int) -> torch.Tensor:
        whole = torch.stack([self.weighing(rank, n) for rank in range(self.world)]).sum(0)
        return whole.chunk(self.world, dim=self._dim)[self.rank]


class MatmulAllToAll(AllToAllMatmul):
    """With the traffic of `AllToAllMatmul`. rows: whether the host is told how many tokens there are."""

    padded = False
    arguments = ("h", "w_experts", "received", "splits")

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        return {"rows": device == "cuda" or rng.random() < 0.3}

    @classmethod
    def schedules(cls, world: int, options: Given) -> list[str]:
        by = "kernel" if options["rows"] else "dma"
        return [f"combine[chunks=2,by={by}]", "combine[chunks=1,by=store]", f"combine_by_expert[chunks=2,by={by}]"]

    @classmethod
    def bad_values(cls, options: Given) -> list[Form]:
        return [
            each("splits", lambda s: s + 1), each("splits", lambda s: s - 100), each("received", lambda r: r + 1),
            each("received", lambda r: r - 100), put("rows", -1), put("rows", "all"), put("capacity", 0),
            put("schedule", "combin"), *DEADLINES,
        ]  # fmt: skip

    @classmethod
    def bad_sizes(cls, options: Given) -> list[Form]:
        return [
            each("splits", lambda s: s[:-1]), each("received", lambda r: r[:-1]), each("received", lambda r: r.flatten()),
            each("w_experts", lambda w: w[:, :-1]), each("w_experts", lambda w: w[0]), each("h", lambda h: h.flatten()),
            each("h", lambda h: h[:, :-1]), each("h", lambda h: h[None]),
        ]  # fmt: skip

    @classmethod
    def bad_dtypes(cls, options: Given) -> list[Form]:
        return [
            each("splits", lambda s: s.float()), each("received", lambda r: r.bool()), each("w_experts", lambda w: w.double()),
            each("h", lambda h: h.to(torch.complex64)), each("h", lambda h: h.long()),
        ]  # fmt: skip

    def _received(self, rank: int, n: int) -> torch.Tensor:
        mine = slice(rank * self.EXPERTS, (rank + 1) * self.EXPERTS)
        return torch.stack([self._splits(source, n)[mine] for source in range(self.world)])

    def _h(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(2, rank, n, (int(self._received(rank, n).sum()), self._k(n)))

    def _segments(self, rows: torch.Tensor, rank: int, n: int) -> dict[tuple[int, int], torch.Tensor]:
        """Of rows in the order of the h of `rank`, by (source, local expert)."""
        parts = iter(rows.split(self._received(rank, n).t().flatten().tolist()))
        return {(source, e): next(parts) for e in range(self.EXPERTS) for source in range(self.world)}

    def inputs(self, n: int) -> Given:
        splits = self._splits(self.rank, n)
        return {
            "h": self.here(self._h(self.rank, n)).requires_grad_(self.backward),
            "w_experts": self.here(self._weights(self.rank, n)).requires_grad_(self.backward),
            "received": self._received(self.rank, n).to(self.device), "splits": splits.to(self.device),
            "rows": int(splits.sum()) if self.options["rows"] else None,
            "capacity": 2 * (3, 12)[self.size] * self.EXPERTS * self.world, **self.call_options(),
        }  # fmt: skip

    def forward(self, given: Given) -> Results:
        return [weft.matmul_all_to_all(group=self.group, **given)]

    def expected(self, n: int) -> Results:
        parts = []
        for rank in range(self.world):
            segments, weights = self._segments(self._h(rank, n), rank, n), self._weights(rank, n)
            parts += [segments[self.rank, e] @ w for e, w in enumerate(weights)]
        return [torch.cat(parts)]

    def wanted(self, given: Given) -> Results:
        return [given["h"], given["w_experts"]]

    def grads(self, n: int) -> tuple[Results, Results]:
        weighing = [self.numbers(4, r, n, (int(self._splits(r, n).sum()), self.N), 2) for r in range(self.world)]
        came = [g.split(self._splits(r, n).tolist()) for r, g in enumerate(weighing)]
        h, experts = self._segments(self._h(self.rank, n), self.rank, n), range(self.EXPERTS)
        g = {(source, e): came[source][self.rank * self.EXPERTS + e] for source, e in h}
        weights, sources = self._weights(self.rank, n), range(self.world)
        of_h = torch.cat([g[source, e] @ weights[e].t() for e in experts for source in sources])
        of_w = [torch.stack([h[source, e].t() @ g[source, e] for source in sources]).sum(0) for e in experts]
        return [self.here(weighing[self.rank])], [of_h, torch.stack(of_w)]
