"""GEMM + reduce-scatter: each rank gets its rows of the sum of all ranks' products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.builders.problem import Candidate, require_even
from weft.builders.problems.gemm import GemmProblem, chunks_between_hosts
from weft.schedule.kernels import TrackedMatmul
from weft.words import counted


@dataclass(frozen=True, slots=True)
class MatmulReduceScatter(GemmProblem):
    """y = this rank's rows of the sum of all ranks' x @ w.

    x [M, K] @ w [K, N] on each rank. Each rank gets M / ranks rows of the sum of all products.

    Buffers: x [m, k] and w [k, n] in; y [m / ranks, n] out. Source: "T3: Transparent Tracking & Triggering for Fine-grained
    Overlap of Compute & Collectives", 4.

    Builders: `weft.builders.matmul_reduce_scatter` and `weft.builders.two_levels`.
    """

    name: ClassVar[str] = "matmul_reduce_scatter"
    rounds_sums: ClassVar[bool] = True

    def __post_init__(self) -> None:
        GemmProblem.__post_init__(self)  # super() fails in a dataclass with slots
        require_even(self.m, self.n, self.k, self.world_size)

    @property
    def text(self) -> str:
        ranks = counted(self.world_size, "rank")
        product = f"[{self.m}, {self.k}] @ [{self.k}, {self.n}] on each of {ranks}"
        return f"{product}, reduced, {self.rows} rows of the sum to each rank, {self.dtype}"

    def takes(self, candidate: Candidate) -> bool:
        """Return False for `pulled`, which was not timed on GPUs, and for `collective`, which is for ranks on several
        hosts.

        Also return False for `tracked` if K is too short for a tracked GEMM (`TrackedMatmul.least_k`).
        """
        short = candidate.builder == "tracked" and self.k < TrackedMatmul.least_k
        return candidate.builder not in ("pulled", "collective") and not short

    def between_hosts(self, rails: int) -> tuple[str, ...]:
        return chunks_between_hosts(rails)

    def worth_running(self, candidate: Candidate) -> bool:
        return candidate.name in (
            "serial", "scatter", "direct[chunks=1,by=dma,add=reduce]", "direct[chunks=2,by=dma,add=gemm]"
        )  # fmt: skip
