"""The backward pass of GEMM + all-gather: both gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.builders.problem import Candidate
from weft.builders.problems.matmul_all_gather import MatmulAllGather
from weft.words import counted


@dataclass(frozen=True, slots=True)
class MatmulAllGatherGradients(MatmulAllGather):
    """The gradients of GEMM + all-gather (`matmul_all_gather`), for x and w.

        grad_x = own @ wt
        grad_w = xt @ own

    g is the gradient of the result on each rank, and `own` is this rank's block of the sum of g over all ranks.

    Input buffers: g [ranks * m, n], or with `columns` [m, ranks * n]; the transposed x and w: xt [k, m] and wt [n, k].
    Output buffers: grad_x [m, k] and grad_w [k, n].

    Builders: `weft.builders.matmul_all_gather_gradients`.
    """

    name: ClassVar[str] = "matmul_all_gather_gradients"
    title: ClassVar[str] = "backward of matmul_all_gather"
    rounds_sums: ClassVar[bool] = True

    @property
    def text(self) -> str:
        products = f"[{self.m}, {self.k}] @ [{self.k}, {self.n}] on each of {counted(self.world_size, 'rank')}"
        return f"gradients of {products}, all {'columns' if self.columns else 'rows'} to each rank, {self.dtype}"

    def worth_running(self, candidate: Candidate) -> bool:
        return candidate.name in ("serial", "direct[chunks=2]", "direct[chunks=4]")
