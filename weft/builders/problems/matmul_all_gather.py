"""GEMM + all-gather: all ranks get every rank's product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from weft.builders.problem import Candidate
from weft.builders.problems.gemm import GemmProblem
from weft.schedule.kernels import TrackedMatmul
from weft.words import counted


@dataclass(frozen=True, slots=True)
class MatmulAllGather(GemmProblem):
    """y = concatenation of all ranks' x @ w along rows, or with `columns` along columns.

    Buffers: x [m, k] and w [k, n] in; y [ranks * m, n], or [m, ranks * n], out. Source: "T3: Transparent Tracking & Triggering
    for Fine-grained Overlap of Compute & Collectives", 7.1 (all-gather after its producer).

    Builders: `weft.builders.matmul_all_gather`.
    """

    name: ClassVar[str] = "matmul_all_gather"
    supports: ClassVar[str] = "multiplied here"
    columns: bool = False

    @classmethod
    def sized(
        cls, m: int, n: int, k: int, ranks: int, dtype: str, *,
        gather_dim: Annotated[int, "0 concatenates the rows of the products, -1 their columns."] = 0,
    ) -> MatmulAllGather:  # fmt: skip
        """x [M, K] @ w [K, N] on each rank. Every rank gets the products of all ranks.

        weft plan matmul_all_gather --shape 4096,8192,4096

        weft plan matmul_all_gather --shape 8192,2048,8192 --option gather_dim=-1 --ranks 4 --all
        """
        if gather_dim not in (0, -1):
            raise ValueError(
                f"gather_dim={gather_dim} is not supported: use 0 to concatenate rows, or -1 to concatenate columns"
            )
        return cls(ranks, m, n, k, dtype, columns=gather_dim == -1)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of y."""
        return (self.m, self.world_size * self.n) if self.columns else (self.world_size * self.m, self.n)

    @property
    def parts(self) -> int:
        """The number of parts into which m is divided: 1, because m is the number of rows of each rank."""
        return 1

    @property
    def text(self) -> str:
        ranks, joined = counted(self.world_size, "rank"), "columns" if self.columns else "rows"
        return (
            f"[{self.m}, {self.k}] @ [{self.k}, {self.n}] on each of {ranks}, all {joined} to each rank, {self.dtype}"
        )

    def takes(self, candidate: Candidate) -> bool:
        """Return False for `tracked` if K is too short for a tracked GEMM (`TrackedMatmul.least_k`)."""
        return candidate.builder != "tracked" or self.k >= TrackedMatmul.least_k

    def worth_running(self, candidate: Candidate) -> bool:
        return candidate.name in (
            "serial", "direct[chunks=1,by=kernel]", "direct[chunks=2,by=dma]", "direct[chunks=4,by=dma]"
        )  # fmt: skip
