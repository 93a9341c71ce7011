"""GEMM + reduce-scatter: the sum of all ranks' products, each rank's rows on that rank."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar

from weft.builders.candidate import Candidate
from weft.builders.problem import Problem, require_even
from weft.schedule.kernels import TrackedMatmul
from weft.schedule.regions import SUMMED
from weft.words import counted


@dataclass(frozen=True, slots=True)
class MatmulReduceScatter(Problem):
    """y = this rank's rows of the sum of all ranks' x @ w.

    Buffers: x [m, k] and w [k, n] in; y [m / ranks, n] out. Source: "T3: Transparent Tracking & Triggering for Fine-grained
    Overlap of Compute & Collectives", 4.

    Builders: `weft.builders.matmul_reduce_scatter`.
    """

    name: ClassVar[str] = "matmul_reduce_scatter"
    rounds_sums: ClassVar[bool] = True
    world_size: int
    m: int
    n: int
    k: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in SUMMED:
            raise ValueError(f"dtype={self.dtype!r} cannot be reduced: use one of {', '.join(SUMMED)}")
        require_even(self.m, self.n, self.k, self.world_size)

    @property
    def rows(self) -> int:
        """The number of rows of a rank's result."""
        return self.m // self.world_size

    @property
    def family(self) -> tuple[Hashable, float]:
        """The problem without M, and the rows of a rank's result."""
        return replace(self, m=self.world_size), float(self.rows)

    def resized(self, size: float) -> MatmulReduceScatter:
        return replace(self, m=max(1, round(size)) * self.world_size)

    @property
    def text(self) -> str:
        ranks = counted(self.world_size, "rank")
        return f"[{self.m}, {self.k}] @ [{self.k}, {self.n}] on each of {ranks}, reduced, {self.rows} rows to each, {self.dtype}"

    @property
    def has_work(self) -> bool:
        return self.m > 0 and self.n > 0 and self.k > 0

    def takes(self, candidate: Candidate) -> bool:
        """Refuse tracked GEMMs with a short K, and `pulled`: it accumulates into a peer's sums and was not timed on GPUs."""
        short = candidate.builder == "tracked" and self.k < TrackedMatmul.least_k
        return candidate.builder != "pulled" and not short

    def worth_running(self, candidate: Candidate) -> bool:
        return candidate.name in (
            "serial", "scatter", "direct[chunks=1,by=dma,add=reduce]", "direct[chunks=2,by=dma,add=gemm]"
        )  # fmt: skip
