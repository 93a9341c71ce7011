"""Benchmark of the fp8 GEMM, with scales, that feeds a reduce-scatter: shapes x variants.

As that of matmul_reduce_scatter (`weft.bench.ops.matmul_reduce_scatter`), with its shapes: x and w in fp8, a scale for each,
products, sums and results in bf16. The baseline calls torch._scaled_mm, and asynctp is
torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.bench.core.options import BenchOptions
from weft.bench.ops.any_operator import Arm
from weft.bench.ops.asynctp import TorchOperator
from weft.bench.ops.gemms import Shape, find_shapes, shapes_file
from weft.bench.ops.matmul_reduce_scatter import ScatterVariants
from weft.ops import scaled_matmul_reduce_scatter as op
from weft.runtime.scaled_matmul import scaled_matmul


class ScaledScatterVariants(ScatterVariants):
    def draw(self) -> None:
        self.dtype = torch.bfloat16
        super().draw()

    def gemm(self, which: int, out: torch.Tensor) -> None:
        call = self.calls[which]
        scaled_matmul(call.x, call.B, call.scale, call.B_scale, fast=call.fast, out=out)

    def torchs(self) -> Arm:
        name, shape = self.ranks.group.group_name, [self.config.m, self.config.n]

        def call(which: int) -> torch.Tensor:
            x, B, scale, B_scale, *_ = self.calls[which]
            return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
                x, B, scale[0], B_scale[0], "sum", 0, 0, name, shape, None, None, self.dtype, False
            )

        return call


class _ScaledMatmulReduceScatter(TorchOperator):
    fp8 = True
    variants = ScaledScatterVariants

    def default_dtype(self, device: str) -> str:
        return "fp8"

    def presets(self, options: BenchOptions) -> Sequence[Shape]:
        return find_shapes(self.shape, shapes_file("matmul_reduce_scatter"), options)

    def check_options(self, options: BenchOptions) -> None:
        if options.dtype != "fp8":
            raise ValueError(f"dtype={options.dtype!r}: the operands of {self.name} are fp8: leave it out")
        super().check_options(options)


OPERATOR = _ScaledMatmulReduceScatter(op.OPERATOR)
