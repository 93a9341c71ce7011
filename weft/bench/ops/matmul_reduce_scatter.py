"""Benchmark of GEMM + reduce-scatter: shapes x variants.

Each rank computes [m, k] @ [k, n], as in a row-parallel layer whose K is divided over the ranks, and gets m / ranks
rows of the sum. With fp8 operands the operator is scaled_matmul_reduce_scatter, with one scale per tensor. Variants in
addition to weft's:

    serial    the baseline: torch.mm (fp8: torch._scaled_mm) into a preallocated buffer, then reduce_scatter_tensor
    asynctp   torch's operator fused_matmul_reduce_scatter (fp8: fused_scaled_matmul_reduce_scatter); GPUs only

The benchmark also times, each alone: the GEMM, the copies of the product's rows to the ranks that reduce them, and
NCCL's reduce-scatter. The ideal time is the longer of the GEMM and the copies.

A shape whose name ends in "-rowmajor" has a row-major weight, as in the GEMM for the gradient of a layer's input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch

from weft.bench.core.harness import Call
from weft.bench.core.options import BenchOptions
from weft.bench.ops.any_operator import Variant
from weft.bench.ops.asynctp import TorchOperator, TorchVariants
from weft.bench.ops.gemms import GemmShape
from weft.ops import matmul_reduce_scatter as plain
from weft.ops import scaled_matmul_reduce_scatter as scaled
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.ops.scaled_matmul_reduce_scatter import scaled_matmul_reduce_scatter
from weft.runtime.collectives import reduce_scatter_by_torch
from weft.runtime.scaled_matmul import scaled_matmul
from weft.runtime.unfused import STRAIGHT, reduce_scatter

_ROW_MAJOR = "-rowmajor"


@dataclass(frozen=True)
class ScatterShape(GemmShape):
    """A shape, A [m, k] @ B [k, n].

    row_major: True if B is row-major, as in the GEMM for the gradient of a layer's input. False if B is the transpose
    of a row-major weight, as in forward.
    """

    row_major: bool = False

    written: ClassVar[str] = f"{GemmShape.written}; append {_ROW_MAJOR} for row-major weights, as in backward"

    @property
    def name(self) -> str:
        return f"{super().name}{_ROW_MAJOR * self.row_major}"

    @classmethod
    def named(cls, name: str, groups: Mapping[str, Any]) -> list[Self]:
        plain = name.removesuffix(_ROW_MAJOR)
        return [replace(shape, row_major=plain != name) for shape in super().named(plain, groups)]


class ScatterVariants(TorchVariants):
    def draw(self) -> None:
        super().draw()
        if getattr(self.config, "row_major", False):
            self.calls = [call._replace(B=call.B.contiguous()) for call in self.calls]
        self.product = torch.empty(self.config.m, self.config.n, dtype=self.dtype, device=self.ranks.device)

    def cut_to(self, whole: Self) -> None:
        super().cut_to(whole)
        self.product = whole.product[: self.config.m]

    def public(self, which: int, schedule: str | None) -> torch.Tensor:
        call = self.calls[which]
        return matmul_reduce_scatter(call.x, call.B, "sum", 0, self.ranks.group, schedule=schedule)

    def moved(self) -> tuple[float, float, float]:
        m, n, k = self.config.m, self.config.n, self.config.k
        of_rank, others = self.problem.rows * n * self.dtype.itemsize, self.ranks.world_size - 1
        return (m + n) * k * self.operands.itemsize + of_rank, of_rank * others, 2.0 * m * n * k

    def gemm(self, which: int, out: torch.Tensor) -> None:
        """Compute the product of input set `which` into `out` by cuBLAS."""
        call = self.calls[which]
        torch.mm(call.x, call.B, out=out)

    def serial(self, which: int) -> torch.Tensor:
        self.gemm(which, self.product)
        return self.scattered()

    def scattered(self) -> torch.Tensor:
        rank, world, rows, group = self.ranks.rank, self.ranks.world_size, self.problem.rows, self.ranks.group
        if self.ranks.device.type != "cuda":  # gloo has no reduce-scatter, so use weft's replacement
            return reduce_scatter(self.product, [rows] * world, rank, group, STRAIGHT, "reduce_scatter")
        y = self.product.new_empty(rows, self.config.n)
        reduce_scatter_by_torch(y, self.product, group=group)
        return y

    def torchs(self) -> Variant:
        name, fused = self.ranks.group.group_name, torch.ops.symm_mem.fused_matmul_reduce_scatter
        return lambda which: fused(self.calls[which].x, self.calls[which].B, "sum", 0, name)

    def alone(self) -> tuple[Call, Call, Call]:
        return (
            lambda which: self.gemm(which, torch.empty_like(self.product)),
            lambda which: self.copy_to_peers(self._copies),
            lambda which: self.scattered(),
        )

    @cached_property
    def _copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The copies that are timed alone, each as (source, target). source: rows of the product. target: the memory
        for these rows at the peer that reduces them.
        """
        rank, world = self.ranks.rank, self.ranks.world_size
        parts = self.product.chunk(world)
        theirs = [parts[(rank + i) % world] for i in range(1, world)]
        return [*zip(theirs, self.places(self.problem.rows, self.config.n, self.dtype), strict=True)]


class ScaledScatterVariants(ScatterVariants):
    """Variants with fp8 operands, one scale per operand, and bf16 products, sums and results."""

    def draw(self) -> None:
        self.dtype = torch.bfloat16
        super().draw()

    def gemm(self, which: int, out: torch.Tensor) -> None:
        call = self.calls[which]
        scaled_matmul(call.x, call.B, call.scale, call.B_scale, fast=call.fast, out=out)

    def public(self, which: int, schedule: str | None) -> torch.Tensor:
        x, B, scale, B_scale, *_ = self.calls[which]
        return scaled_matmul_reduce_scatter(
            x, B, scale, B_scale, "sum", 0, 0, self.ranks.group, out_dtype=self.dtype, schedule=schedule
        )

    def torchs(self) -> Variant:
        name, shape = self.ranks.group.group_name, [self.config.m, self.config.n]

        def call(which: int) -> torch.Tensor:
            x, B, scale, B_scale, *_ = self.calls[which]
            return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
                x, B, scale[0], B_scale[0], "sum", 0, 0, name, shape, None, None, self.dtype, False
            )

        return call


class _ReduceScatterBenchmark(TorchOperator):
    shape = ScatterShape


class _ScaledReduceScatterBenchmark(TorchOperator):
    fp8, shapes_of = True, "matmul_reduce_scatter"

    def default_dtype(self, device: str) -> str:
        return "fp8"

    def check_options(self, options: BenchOptions) -> None:
        if options.dtype != "fp8":
            raise ValueError(f"dtype={options.dtype!r}: the operands of {self.name} are fp8: do not pass dtype")
        super().check_options(options)


OPERATOR = _ReduceScatterBenchmark(plain.OPERATOR, ScatterVariants)
SCALED = _ScaledReduceScatterBenchmark(scaled.OPERATOR, ScaledScatterVariants)
