"""The `Work` of operators that communicate after their GEMM. Operators that communicate before it are in `work`."""

from __future__ import annotations

import random
from abc import abstractmethod
from typing import ClassVar

import torch

import weft
import weft.ops.matmul_all_gather
import weft.ops.matmul_all_reduce
import weft.ops.matmul_reduce_scatter
import weft.ops.scaled_matmul_reduce_scatter  # imported now, so that no interrupted call imports it

from .bad import DEADLINES, Form, each, put
from .work import FP8, Differentiable, Given, Results, folded


class Products(Differentiable):
    """Work whose ranks each compute one product x @ w, of the same shape on all ranks."""

    K, MOST = 16, 3  # elements are whole numbers from -MOST to MOST
    arguments = ("x", "w")  # the names of x and of w come first
    of_rows: ClassVar[tuple[str, ...]] = ("x",)  # the arguments whose rows may be given as two dimensions
    bad_settings: ClassVar[list[Form]]
    """Forms with wrong values of arguments that only this operator has."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors that a call gets."""
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
        """Return this rank's tensors, in the order of `names`."""
        return [self._x(self.rank, n), self._w(self.rank, n)]

    def settings(self) -> Given:
        return {}

    def inputs(self, n: int) -> Given:
        tensors = {name: self.here(x) for name, x in zip(self.names, self.tensors(n), strict=True)}
        tensors |= {name: folded(x, self.outer) for name, x in tensors.items() if name in self.of_rows}
        tensors = {name: x.requires_grad_(self.backward) for name, x in tensors.items()}
        return {**tensors, **self.settings(), **self.call_options()}

    def wanted(self, given: Given) -> Results:
        return [given[name] for name in self.names]

    @abstractmethod
    def weighing(self, rank: int, n: int) -> torch.Tensor:
        """Return the random gradient of the loss with respect to the result of `rank`."""

    @abstractmethod
    def of_product(self, n: int) -> torch.Tensor:
        """Return the expected gradient of the loss with respect to this rank's product x @ w."""

    def grads(self, n: int) -> tuple[Results, Results]:
        g = self.of_product(n)
        wanted = [g @ self._w(self.rank, n).t(), self._x(self.rank, n).t() @ g]
        return [self.here(self.weighing(self.rank, n))], wanted

    def weighing_like(self, rank: int, n: int, m: int, columns: int) -> torch.Tensor:
        return self.numbers(10, rank, n, (m, columns), 2)


class MatmulReduceScatter(Products):
    arguments = ("A", "B")
    of_rows = ("A",)
    scatters_columns = True
    bad_settings: ClassVar[list[Form]] = [put("scatter_dim", "0"), put("scatter_dim", 7), put("reduce_op", "mean")]

    @classmethod
    def schedules(cls, world: int, options: Given) -> list[str]:
        ways = ("chunks=1,by=dma,add=reduce", "chunks=2,by=kernel,add=gemm", "chunks=2,by=store,add=reduce")
        pulled = ["pulled[chunks=2,by=gemm]", "pulled[chunks=1,by=tracked]"]
        return ["scatter", *(f"direct[{way}]" for way in ways), *pulled, *["ring[chunks=2,by=dma]"] * (world > 2)]

    @classmethod
    def bad_sizes(cls, options: Given) -> list[Form]:
        return [each(cls.arguments[0], lambda x: x[:-1]), *super().bad_sizes(options)]

    @classmethod
    def other_options(cls, world: int, options: Given) -> list[Given]:
        columns = [{"columns": True}] * (cls.scatters_columns and world in (2, 4))  # there are 8 or 48 columns
        return [*averages(world), *columns]

    def settings(self) -> Given:
        dim = -1 if "columns" in self.options else self.outer or 0
        return {"reduce_op": self.options.get("reduce_op", "sum"), "scatter_dim": dim}

    def forward(self, given: Given) -> Results:
        return [weft.matmul_reduce_scatter(group=self.group, **given)]

    def expected(self, n: int) -> Results:
        mine = self._sum(n).chunk(self.world, dim=int("columns" in self.options))[self.rank]
        return [folded(mine / self.world if "reduce_op" in self.options else mine, self.outer)]

    def weighing(self, rank: int, n: int) -> torch.Tensor:
        return self.weighing_like(rank, n, self._m(n) // self.world, self._n())

    def of_product(self, n: int) -> torch.Tensor:
        return torch.cat([self.weighing(rank, n) for rank in range(self.world)])


class ScaledMatmulReduceScatter(MatmulReduceScatter):
    """Work of scaled_matmul_reduce_scatter.

    The elements are exact in fp8. Scales are powers of two, so products and their sums are exact in 16 bits. by_row:
    whether each row has a scale. bias: whether each rank adds a bias.
    """

    MOST = 1
    differentiable, other_dtype, scatters_columns = False, "float16", False
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

    @classmethod
    def other_options(cls, world: int, options: Given) -> list[Given]:
        own = [{name: not options[name]} for name in ("by_row", "bias")]
        others = [{"output_shape": True}, {"use_fast_accum": True}, {"dtype": "float16"}]
        return [*super().other_options(world, options), *own, *others]

    def _n(self) -> int:
        return (16, 48)[self.size] + 16 * self.other

    def _scales(self, rank: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales of A and of B. Each scale is 1 or 2."""
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
        dim, reshapes = self.outer or 0, self.options.get("output_shape")
        return {
            "A": folded(x, self.outer), "B": w.t(), "A_scale": folded(of_A, self.outer) if self.options["by_row"] else of_A,
            "B_scale": of_B, "reduce_op": self.options.get("reduce_op", "sum"), "orig_scatter_dim": dim,
            "scatter_dim_after_maybe_reshape": dim, "output_shape": [self._m(n) // 2, 2, self._n()] if reshapes else None,
            "bias": self.here(self._bias(self.rank, n)) if self.options["bias"] else None, "out_dtype": self.dtype,
            "use_fast_accum": "use_fast_accum" in self.options, **self.call_options(),
        }  # fmt: skip

    def forward(self, given: Given) -> Results:
        return [weft.scaled_matmul_reduce_scatter(group=self.group, **given)]

    def expected(self, n: int) -> Results:
        return [folded(y, 0) if self.options.get("output_shape") else y for y in super().expected(n)]


class MatmulAllReduce(Products):
    """Work of matmul_all_reduce. bias, residual, norm: whether the operation follows the sum.

    Before a norm, the residual turns every sum into 1 or -1, so the mean of squares is 1. With eps added it is 4 or 16,
    so the norm divides by 2 or 4. So the norm and its gradients are exact if the number of columns is a power of two.
    """

    arguments = ("x", "w", "bias", "residual", "norm")
    plain: ClassVar[Given] = {"bias": False, "residual": False, "norm": False}
    of_rows = ("x", "residual")
    bad_settings: ClassVar[list[Form]] = [
        put("reduce_op", "mean"), put("reduce_op", 5), put("bias", 1), put("residual", "x"), put("norm", 1),
        put("norm", torch.ones(3)), put("eps", -1.0), put("eps", "small"),
    ]  # fmt: skip

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        norm = rng.random() < 0.5
        return {"bias": rng.random() < 0.5, "residual": norm or rng.random() < 0.5, "norm": norm}

    @classmethod
    def schedules(cls, world: int, options: Given) -> list[str]:
        two_shot = ["two_shot[chunks=1,by=dma,add=reduce]", "two_shot[chunks=2,by=kernel,add=gemm]"]
        return ["one_shot[by=kernel]", "one_shot[by=load]", *two_shot, "chunked[chunks=2,by=dma]"]

    @classmethod
    def other_options(cls, world: int, options: Given) -> list[Given]:
        following = [name for name in ("bias", "residual", "norm") if options[name]]
        changes = [{"bias": not options["bias"]}, *({name: False} for name in following if name != "residual")]
        if not options["norm"]:
            means = [] if following else averages(world)
            return [*changes, {"residual": not options["residual"]}, *means]
        return [*changes, {"eps": 15.0}]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in self.arguments if self.options.get(name, True))

    @property
    def _divisor(self) -> float:
        """Return the number by which the norm divides."""
        return float((1 + self.options.get("eps", 3.0)) ** 0.5)

    def _n(self) -> int:
        return (8, 64)[self.size] * (1 + self.other) if self.options["norm"] else super()._n()

    def settings(self) -> Given:
        op = {"reduce_op": "avg"} if "reduce_op" in self.options else {}
        return {**op, **({"eps": self.options.get("eps", 3.0)} if self.options["norm"] else {})}

    def _following(self, n: int) -> dict[str, torch.Tensor]:
        """Return the arguments of the operations after the sum. All ranks have the same, except for the norm's weight."""
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
        if "reduce_op" in self.options:
            total = total / self.world
        made = [total / self._divisor * self._norm(self.rank, n), total] if self.options["norm"] else [total]
        return [folded(y, self.outer) for y in made]

    def weighing(self, rank: int, n: int) -> torch.Tensor:
        """Return the random gradient of the loss with respect to the sum."""
        return self.weighing_like(rank, n, self._m(n), self._n())

    def _of_normed(self, rank: int, n: int) -> torch.Tensor:
        return self.numbers(11, rank, n, (self._m(n), self._n()), 2)

    def _of_total(self, rank: int, n: int) -> torch.Tensor:
        """Return the gradient of the loss of `rank` with respect to the sum, including the gradient through the norm."""
        if not self.options["norm"]:
            return self.weighing(rank, n)
        total, g = self._total(n), self._of_normed(rank, n) * self._norm(rank, n)
        return self.weighing(rank, n) + g / self._divisor - total * (g * total).mean(1, keepdim=True) / self._divisor**3

    def of_product(self, n: int) -> torch.Tensor:
        return torch.stack([self._of_total(rank, n) for rank in range(self.world)]).sum(0)

    def grads(self, n: int) -> tuple[Results, Results]:
        given, wanted = super().grads(n)
        mine, normed = self._of_total(self.rank, n), self._of_normed(self.rank, n)
        own = {"bias": mine.sum(0), "residual": mine, "norm": (normed * self._total(n) / self._divisor).sum(0)}
        given = [self.here(normed), *given] if self.options["norm"] else given
        return given, [*wanted, *(own[name] for name in self.names[2:])]


class MatmulAllGather(Products):
    """Work of matmul_all_gather. columns: whether the ranks' columns are concatenated, instead of their rows."""

    bad_settings: ClassVar[list[Form]] = [put("gather_dim", "0"), put("gather_dim", 7)]

    @classmethod
    def drawn(cls, rng: random.Random, device: str) -> Given:
        return {"columns": rng.random() < 0.5}

    @classmethod
    def schedules(cls, world: int, options: Given) -> list[str]:
        return ["direct[chunks=1,by=kernel]", "direct[chunks=2,by=dma]"]

    @classmethod
    def other_options(cls, world: int, options: Given) -> list[Given]:
        return [{"columns": not options["columns"]}]

    @property
    def _dim(self) -> int:
        return int(self.options["columns"])

    def settings(self) -> Given:
        return {"gather_dim": -1 if self._dim else self.outer or 0}

    def forward(self, given: Given) -> Results:
        return [weft.matmul_all_gather(group=self.group, **given)]

    def expected(self, n: int) -> Results:
        return [folded(torch.cat([self._product(rank, n) for rank in range(self.world)], dim=self._dim), self.outer)]

    def weighing(self, rank: int, n: int) -> torch.Tensor:
        factors = (1, self.world) if self._dim else (self.world, 1)
        return self.weighing_like(rank, n, self._m(n) * factors[0], self._n() * factors[1])

    def of_product(self, n: int) -> torch.Tensor:
        whole = torch.stack([self.weighing(rank, n) for rank in range(self.world)]).sum(0)
        return whole.chunk(self.world, dim=self._dim)[self.rank]


def averages(world: int) -> list[Given]:
    """Return the option that computes a mean instead of a sum, if means are exact with this number of ranks."""
    return [{"reduce_op": "avg"}] * (world in (2, 4))
