"""What ranks compute while faults are injected, continued: GEMMs in front of a collective, as `work` has those behind one."""

from __future__ import annotations

import torch

import weft
import weft.ops.matmul_all_gather
import weft.ops.matmul_all_reduce
import weft.ops.matmul_all_to_all
import weft.ops.matmul_reduce_scatter
import weft.ops.scaled_matmul_reduce_scatter  # now, and not in a call that is interrupted

from .work import FP8, AllToAllMatmul, Given, Results, Work


class Products(Work):
    """x @ w of every rank, of one shape."""

    K, MOST = 16, 3  # numbers are whole, from -MOST to MOST
    names = ("x", "w")  # of the arguments

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

    def weighing(self, rank: int, n: int) -> torch.Tensor:
        """Of the result of `rank`."""
        raise NotImplementedError

    def of_product(self, n: int) -> torch.Tensor:
        """The gradient of this rank's product."""
        raise NotImplementedError

    def grads(self, n: int) -> tuple[Results, Results]:
        g = self.of_product(n)
        wanted = [g @ self._w(self.rank, n).t(), self._x(self.rank, n).t() @ g]
        return [self.here(self.weighing(self.rank, n))], wanted

    def weighing_like(self, rank: int, n: int, m: int, columns: int) -> torch.Tensor:
        return self.numbers(10, rank, n, (m, columns), 2)


class MatmulReduceScatter(Products):
    names = ("A", "B")

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
    """bias, residual: whether they follow the sum."""

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("x", "w", *(name for name in ("bias", "residual") if self.options[name]))

    def _following(self, n: int) -> dict[str, torch.Tensor]:
        """The same on all ranks."""
        m, columns = self._m(n), self._n()
        return {"bias": self.numbers(5, 0, n, (columns,)), "residual": self.numbers(6, 0, n, (m, columns))}

    def tensors(self, n: int) -> list[torch.Tensor]:
        following = self._following(n)
        return [*super().tensors(n), *(following[name] for name in self.names[2:])]

    def forward(self, given: Given) -> Results:
        return [weft.matmul_all_reduce(group=self.group, **given)]

    def expected(self, n: int) -> Results:
        following = self._following(n)
        return [self._sum(n) + sum(following[name] for name in self.names[2:])]

    def weighing(self, rank: int, n: int) -> torch.Tensor:
        return self.weighing_like(rank, n, self._m(n), self._n())

    def of_product(self, n: int) -> torch.Tensor:
        return torch.stack([self.weighing(rank, n) for rank in range(self.world)]).sum(0)

    def grads(self, n: int) -> tuple[Results, Results]:
        (mine,), wanted = super().grads(n)
        own = {"bias": mine.sum(0), "residual": mine}
        return [mine], [*wanted, *(own[name] for name in self.names[2:])]


class MatmulAllGather(Products):
    """columns: whether they are joined, and not rows."""

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
