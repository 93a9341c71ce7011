"""The backward pass of all-gather + GEMM: all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.builders.problem import require_even
from weft.builders.problems.gemm import RowsProblem
from weft.integers import convert
from weft.words import counted


@dataclass(frozen=True, slots=True)
class AllGatherMatmulGradients(RowsProblem):
    """The gradients of all-gather + GEMM (`all_gather_matmul`), for x and every weight.

    x is the gathered input, g_i is the gradient of y_i, wt_i and gt_i are the transposed w_i and g_i.

        grad_x = this rank's rows of the sum over ranks of sum_i g_i @ wt_i
        grad_wt_i = gt_i @ x

    Input buffers: x_shard [m / ranks, k]; the gradients g0, g1, ... [m, n[i]], and their transposes gt0, gt1, ...
    [n[i], m]; the transposed weights wt0, wt1, ... [n[i], k]. Output buffers: grad_x [m / ranks, k], grad_wt0,
    grad_wt1, ... [n[i], k].

    Builders: `weft.builders.all_gather_matmul_gradients`.
    """

    name: ClassVar[str] = "all_gather_matmul_gradients"
    title: ClassVar[str] = "backward of all_gather_matmul"
    rounds_sums: ClassVar[bool] = True
    n: tuple[int, ...]
    k: int
    dtype: str

    def __post_init__(self) -> None:
        convert(self, "m", "n", "k", "world_size")
        for n in self.n:
            require_even(self.m, n, self.k, self.world_size)

    @classmethod
    def sized(cls, m: int, n: int, k: int, ranks: int, dtype: str) -> AllGatherMatmulGradients:
        """M, N, K: sizes of forward's x_shard [M / ranks, K] and w [K, N] on each rank.

        weft plan all_gather_matmul_gradients --shape 16384,8192,4096 --ranks 8
        """
        return cls(ranks, m, (n,), k, dtype)

    @property
    def text(self) -> str:
        n, ranks = "+".join(map(str, self.n)), counted(self.world_size, "rank")
        return f"gradients of [{self.m}, {self.k}] gathered from {ranks} @ [{self.k}, {n}] on each, {self.dtype}"

    @property
    def has_work(self) -> bool:
        return self.m > 0 and self.k > 0 and sum(self.n) > 0
