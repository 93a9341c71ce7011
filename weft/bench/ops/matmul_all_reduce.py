"""Benchmark of GEMM + all-reduce: shapes x variants.

Each rank computes [m, k] @ [k, n], as in a row-parallel layer whose K is divided over the ranks. Options `residual` and
`norm` add the operators that follow in a transformer. Variants in addition to weft's:

    serial    the baseline: torch.mm, all_reduce, and with these options add_ and torch.nn.functional.rms_norm

The benchmark also times, each alone: the GEMM and NCCL's all-reduce.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.distributed as dist

from weft.bench.core.harness import Call
from weft.bench.ops.any_operator import AnyOperator
from weft.bench.ops.by_hand import HandVariants
from weft.ops.matmul_all_reduce import OPERATOR as SPEC
from weft.ops.matmul_all_reduce import matmul_all_reduce


class SumVariants(HandVariants):
    def cut_to(self, whole: Self) -> None:
        super().cut_to(whole)
        rows = self.config.m
        self.calls = [c if c.residual is None else c._replace(residual=c.residual[:rows]) for c in self.calls]

    def serial(self, which: int) -> torch.Tensor:
        call = self.calls[which]
        y = torch.mm(call.x, call.w)
        dist.all_reduce(y, group=self.ranks.group)
        if call.residual is not None:
            y.add_(call.residual)
        return y if call.norm is None else torch.nn.functional.rms_norm(y, y.shape[1:], call.norm[0], call.eps)

    def alone(self) -> tuple[Call, ...]:
        product = self.calls[0].x.new_zeros(self.config.m, self.config.n)  # zeros: repeated sums stay finite
        return (
            lambda which: torch.mm(self.calls[which].x, self.calls[which].w),
            lambda which: dist.all_reduce(product, group=self.ranks.group),
        )

    def public(self, which: int, schedule: str | None) -> torch.Tensor:
        x, w, _, residual, norm, *_ = self.calls[which]
        group = self.ranks.group
        if norm is None:
            return matmul_all_reduce(x, w, group, residual=residual, schedule=schedule)
        return matmul_all_reduce(x, w, group, residual=residual, norm=norm[0], schedule=schedule)[0]


OPERATOR = AnyOperator(SPEC, SumVariants)
