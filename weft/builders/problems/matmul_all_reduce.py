"""GEMM + all-reduce: the sum of all ranks' products on each rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from weft.builders.problem import NEARLY, Candidate
from weft.builders.problems.gemm import GemmProblem, chunks_between_hosts
from weft.schedule.regions import checked_eps
from weft.words import counted


@dataclass(frozen=True, slots=True)
class MatmulAllReduce(GemmProblem):
    """y = sum of all ranks' x @ w, on every rank. Options add a bias and a residual, and return the RMSNorm of y too.

        normed = y / sqrt(mean(y^2 over a row) + eps) * norm

    bias, residual: True to add a bias, or a residual, to the sum.
    eps: the norm's epsilon; None for no norm.

    Buffers: x [m, k], w [k, n], bias [1, n], residual [m, n] and norm [1, n] in; normed [m, n] and y [m, n] out.

    Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 2.3 (all-reduce
        as reduce-scatter and all-gather), 7.3 (small M: generative inference), 7.6 (following operators).

    Builders: `weft.builders.matmul_all_reduce` and `weft.builders.two_levels`.
    """

    name: ClassVar[str] = "matmul_all_reduce"
    rounds_sums: ClassVar[bool] = True
    bias: bool = False
    residual: bool = False
    eps: float | None = None

    def __post_init__(self) -> None:
        if self.eps is not None:
            checked_eps(self.eps)
        GemmProblem.__post_init__(self)  # super() fails in a dataclass with slots

    @classmethod
    def sized(
        cls, m: int, n: int, k: int, ranks: int, dtype: str, *,
        residual: Annotated[bool, "Add a residual to the sum."] = False,
        norm: Annotated[bool, "Return the RMSNorm of the sum too."] = False,
    ) -> MatmulAllReduce:  # fmt: skip
        """x [M, K] @ w [K, N] on each rank. Every rank gets the sum of all products.

        weft plan matmul_all_reduce --shape 8192,8192,4096

        weft plan matmul_all_reduce --shape 16,8192,4096 --option residual=true --option norm=true --ranks 8 --mode graph --all
        """
        return cls(ranks, m, n, k, dtype, residual=residual, eps=1e-6 if norm else None)

    @property
    def text(self) -> str:
        ranks = counted(self.world_size, "rank")
        more = "".join(f" + {name}" for name in ("bias", "residual") if getattr(self, name))
        more += "" if self.eps is None else f" and normed (eps {self.eps:g})"
        product = f"[{self.m}, {self.k}] @ [{self.k}, {self.n}]"
        return f"{product} on each of {ranks}, reduced{more}, the whole sum to each rank, {self.dtype}"

    @property
    def uneven(self) -> str:
        above = -(-self.m // self.world_size) * self.world_size
        return f"M={self.m} is not divisible by {self.world_size} ranks (M={above} is)" if above > self.m else ""

    @property
    def evened(self) -> tuple[MatmulAllReduce, float] | None:
        for chunks in (8, 4, 2, 1):  # each chunk of rows is cut by ranks
            unit = chunks * self.world_size
            above = -(-self.m // unit) * unit
            if 0 < above <= NEARLY * self.m:
                return replace(self, m=above), above / self.m
        return None

    def takes(self, candidate: Candidate) -> bool:
        """Return False for `collective`, which is for ranks on several hosts."""
        return candidate.builder != "collective"

    def between_hosts(self, rails: int) -> tuple[str, ...]:
        return chunks_between_hosts(rails)

    def worth_running(self, candidate: Candidate) -> bool:
        return candidate.name in (
            "serial", "one_shot[by=load]", "two_shot[chunks=2,by=dma,add=gemm]", "chunked[chunks=4,by=dma]"
        )  # fmt: skip
