"""Benchmark of GEMM + all-gather: shapes x variants.

Each rank computes [m, k] @ [k, n]. Every rank gets the products of all ranks, concatenated by rows, or with option
`gather_dim=-1` by columns. Variants in addition to weft's:

    serial    the baseline: torch.mm, all_gather_into_tensor; with `gather_dim=-1`, then a copy into columns

The benchmark also times, each alone: the GEMM and NCCL's all-gather.
"""

from __future__ import annotations

import torch

from weft.bench.core.harness import Call
from weft.bench.ops.any_operator import AnyOperator
from weft.bench.ops.by_hand import HandVariants
from weft.ops.matmul_all_gather import OPERATOR as SPEC
from weft.ops.matmul_all_gather import matmul_all_gather
from weft.runtime.collectives import all_gather_by_torch


class JoinVariants(HandVariants):
    def serial(self, which: int) -> torch.Tensor:
        return self._joined(torch.mm(self.calls[which].x, self.calls[which].w))

    def _joined(self, product: torch.Tensor) -> torch.Tensor:
        world, (m, n) = self.ranks.world_size, product.shape
        y = product.new_empty(world * m, n)
        all_gather_by_torch(y, product, group=self.ranks.group)
        return y.view(world, m, n).transpose(0, 1).reshape(m, world * n) if self.problem.columns else y

    def alone(self) -> tuple[Call, ...]:
        product = self.calls[0].x.new_empty(self.config.m, self.config.n)
        return lambda which: torch.mm(self.calls[which].x, self.calls[which].w), lambda which: self._joined(product)

    def public(self, which: int, schedule: str | None) -> torch.Tensor:
        x, w, columns, *_ = self.calls[which]
        return matmul_all_gather(x, w, -1 if columns else 0, self.ranks.group, schedule=schedule)


OPERATOR = AnyOperator(SPEC, JoinVariants)
