"""Scaled fp8 GEMM + reduce-scatter: each rank gets its rows of the sum of all ranks' products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from weft.builders.problem import Candidate
from weft.builders.problems.all_gather_matmul import Scaled, require_multiple
from weft.builders.problems.gemm import chunks_between_hosts
from weft.builders.problems.matmul_reduce_scatter import MatmulReduceScatter
from weft.words import counted


@dataclass(frozen=True, slots=True)
class ScaledMatmulReduceScatter(MatmulReduceScatter):
    """y = this rank's rows of the sum of all ranks' (x * its scales) @ (w * its scales) + bias.

    x and w are fp8. The products are sent and reduced in `dtype`.

    by: "tensor": one scale for x and one for w. "row": a scale for each row of x and each column of w.
    biased: True if each rank's product has a bias.
    fast: True for cuBLAS's fast accumulation, which is less accurate.

    Input buffers: x [m, k], w [k, n]; x_scale [1, 1] or [m, 1] and w_scale [1, 1] or [1, n], in fp32; with `biased`
    bias [1, n] in `dtype`. Output buffer: y [m / ranks, n]. Source: as for `MatmulReduceScatter`; scales are not in the
    paper.

    Builders: `weft.builders.matmul_reduce_scatter` and `weft.builders.two_levels`.
    """

    name: ClassVar[str] = "scaled_matmul_reduce_scatter"
    by: Literal["tensor", "row"]
    biased: bool
    fast: bool

    def __post_init__(self) -> None:
        MatmulReduceScatter.__post_init__(self)  # super() fails in a dataclass with slots
        if self.dtype == "fp64":
            raise ValueError("dtype='fp64' is not supported: results of scaled GEMMs are bf16, fp16 or fp32")
        require_multiple("K", self.k)
        require_multiple("N", self.n)

    @classmethod
    def sized(cls, m: int, n: int, k: int, ranks: int, dtype: str) -> ScaledMatmulReduceScatter:
        """matmul_reduce_scatter with fp8 operands, and one scale for x and one for w.

        dtype: the dtype of the result. An fp8 result is not supported, so "fp8" stands for bf16 results.

            weft plan scaled_matmul_reduce_scatter --shape 8192,8192,4096 --all
        """
        return cls(ranks, m, n, k, "bf16" if dtype == "fp8" else dtype, "tensor", False, False)

    @property
    def scaled(self) -> Scaled:
        """The scales, biases and dtypes of the GEMM."""
        return Scaled(self.by, (self.dtype,), (self.biased,), (self.fast,))

    @property
    def text(self) -> str:
        product = f"[{self.m}, {self.k}] @ [{self.k}, {self.n}] on each of {counted(self.world_size, 'rank')}"
        return f"{product}, fp8 scaled by {self.by}, reduced in {self.dtype}, {self.rows} rows of the sum to each rank"

    def between_hosts(self, rails: int) -> tuple[str, ...]:
        return chunks_between_hosts(rails) if rails else ()

    def worth_running(self, candidate: Candidate) -> bool:
        return candidate.name in (
            "serial", "scatter", "direct[chunks=1,by=dma,add=reduce]", "direct[chunks=2,by=dma,add=reduce]"
        )  # fmt: skip
