"""All-gather + GEMM: the gathered rows of all ranks times each rank's own weights. fp8 operands have scales."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from weft.builders.problem import Candidate, Problem, require_even
from weft.integers import convert, integer
from weft.schedule.steps import ITEM_BYTES
from weft.words import counted

SCALED_MULTIPLE = 16
"""fp8 GEMMs of cuBLAS and torch need k and n to be multiples of this number."""


def require_multiple(name: str, size: int) -> None:
    """Raise `ValueError` if `size` is not a positive multiple of 16, which fp8 GEMMs require.

    name: the name of the size, for the error text.
    """
    if size < 1 or size % SCALED_MULTIPLE:
        below = size - size % SCALED_MULTIPLE
        nearest = f"{below} or {below + SCALED_MULTIPLE}" if below else f"{SCALED_MULTIPLE}"
        raise ValueError(f"{name}={size} must be a positive multiple of {SCALED_MULTIPLE} for fp8 GEMMs: use {nearest}")


@dataclass(frozen=True, slots=True)
class Scaled:
    """fp8 operands with fp32 scales: ys[i] = (x * x_scale) @ (ws[i] * w_scale[i]) + bias[i].

    by: "tensor": one scale for each matrix. The scales of x are not gathered: each rank multiplies all of x by its own
        x_scale. "row": a scale for each row of x and each column of a weight.
    out: the dtype of each y.
    biased: for each y, True if it has a bias.
    fast: for each y, True for cuBLAS's fast accumulation, which is less accurate.

    The operator has these input buffers in addition: x_scale [1, 1] or [rows[rank], 1]; w_scale0, w_scale1, ... [1, 1]
    or [1, n[i]]; and bias0, bias1, ... [1, n[i]] for the biased y. A bias has the dtype of its y, or bf16 if y is fp8.
    """

    by: Literal["tensor", "row"]
    out: tuple[str, ...]
    biased: tuple[bool, ...]
    fast: tuple[bool, ...]

    @staticmethod
    def bias_dtype(out: str) -> str:
        return "bf16" if out == "fp8" else out

    def check(self, n: tuple[int, ...], k: int, dtype: str) -> None:
        """Raise `ValueError` for sizes and dtypes that fp8 GEMMs do not support, and if `out`, `biased` or `fast` does not
        have one entry for each weight.
        """
        if dtype != "fp8":
            raise ValueError(f"dtype={dtype!r}: scaled GEMMs need fp8 operands: use dtype='fp8'")
        if {len(self.out), len(self.biased), len(self.fast)} != {len(n)}:
            raise ValueError(
                f"{self}: `out`, `biased` and `fast` must have one entry for each of the {len(n)} weights (n={n})"
            )
        require_multiple("K", k)
        for i, columns in enumerate(n):
            require_multiple(f"N of Bs[{i}]", columns)
        for dtype in self.out:
            if dtype not in ("bf16", "fp16", "fp32") and (dtype, self.by) != ("fp8", "tensor"):
                raise ValueError(
                    f"out={self.out} is not supported: use bf16, fp16 or fp32, or, if there is one scale per tensor, fp8"
                )


@dataclass(frozen=True, slots=True)
class AllGatherMatmul(Problem):
    """ys[i] = x @ ws[i], where x is the concatenation of all ranks' x_shard along the rows.

    Buffers: x_shard [rows[rank], k], w0, w1, ... [k, n[i]] in; y0, y1, ... [sum(rows), n[i]] out, and with
        `return_gathered` also x [sum(rows), k]. `scaled` adds buffers (see `Scaled`). Source: "Design Space Exploration
        of DMA based Finer-Grain Compute Communication Overlap", II-B.

    Builders: `weft.builders.all_gather_matmul`, `weft.builders.ficco` and `weft.builders.two_levels`.
    """

    name: ClassVar[str] = "all_gather_matmul"
    world_size: int
    rows: tuple[int, ...]
    n: tuple[int, ...]
    k: int
    dtype: str
    return_gathered: bool = False
    scaled: Scaled | None = None

    def __post_init__(self) -> None:
        convert(self, "rows", "n", "k", "world_size")
        if len(self.rows) != self.world_size:
            raise ValueError(f"rows={self.rows}: give one number for each of {self.world_size} ranks")
        if min(self.rows) < 0 or self.k < 0 or min(self.n, default=0) < 0 or not self.n:
            raise ValueError(
                f"rows={self.rows}, n={self.n}, k={self.k}: sizes must not be negative, and n must not be empty"
            )
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype={self.dtype!r} is not known; use one of {', '.join(ITEM_BYTES)}")
        if self.scaled is not None:
            self.scaled.check(self.n, self.k, self.dtype)

    @staticmethod
    def even(m: int, n: int, k: int, world_size: int, dtype: str = "bf16") -> AllGatherMatmul:
        """Return the problem with equal shards and one weight: a gathered [m, k] times a [k, n] on every rank."""
        m, world_size = (
            integer(name, size, "pass a size, an integer") for name, size in (("m", m), ("world_size", world_size))
        )
        require_even(m, n, k, world_size)
        return AllGatherMatmul(world_size, (m // world_size,) * world_size, (n,), k, dtype)

    @classmethod
    def sized(cls, m: int, n: int, k: int, ranks: int, dtype: str) -> AllGatherMatmul:
        """y = all_gather(x_shard) @ w, with x_shard [M / ranks, K] and w [K, N] on each rank.

        weft plan all_gather_matmul --shape 16384,8192,4096

        weft plan all_gather_matmul --shape 131072,2048,16384 --hw mi300x --ranks 8 --all

        weft plan all_gather_matmul --shape 131072,2048,16384 --hw mi300x --ranks 8 --topology ring

        weft plan all_gather_matmul --shape g5 --hw mi300x --ranks 8

        weft plan all_gather_matmul --shape 512,4096,8192 --mode single --json plan.json
        """
        p = cls.even(m, n, k, ranks, dtype)
        return replace(p, scaled=Scaled("tensor", ("bf16",), (False,), (False,))) if dtype == "fp8" else p

    @property
    def operator(self) -> str:
        return self.name if self.scaled is None else "all_gather_scaled_matmul"

    def takes(self, candidate: Candidate) -> bool:
        """Return False for schedules that take too long to plan for more than 32 ranks.

        Some of these schedules cut each shard into as many pieces as there are ranks. In the others, ranks compute
        different parts, so every rank has to be simulated.
        """
        given = dict(candidate.parameters)
        differ = candidate.builder == "ficco_1d_collective" and (given["start"], given["gemms"]) == ("hetero", "fused")
        return self.world_size <= 32 or not (candidate.pieces_grow or differ)

    @property
    def m(self) -> int:
        return sum(self.rows)

    @property
    def family(self) -> tuple[Hashable, float]:
        """Two values: a key that is equal for problems that differ only in M, and the number of rows of a shard.

        A problem with uneven shards is its own family.
        """
        if len(set(self.rows)) > 1:
            return self, 0.0
        return replace(self, rows=(1,) * self.world_size), float(self.rows[0])

    @property
    def measured_family(self) -> tuple[Hashable, float]:
        """Two values: a key, and the number of rows of the largest shard. Problems have equal keys if they differ only in the
        rows of their shards, and all have even shards or all have uneven shards.
        """
        return (replace(self, rows=(1,) * self.world_size), len(set(self.rows)) > 1), float(max(self.rows))

    def resized(self, size: float) -> AllGatherMatmul:
        return self if len(set(self.rows)) > 1 else replace(self, rows=(max(1, round(size)),) * self.world_size)

    @property
    def flops(self) -> float:
        return 2.0 * self.m * sum(self.n) * self.k

    @property
    def largest_shard_bytes(self) -> int:
        return max(self.rows) * self.k * ITEM_BYTES[self.dtype]

    @property
    def text(self) -> str:
        n = "+".join(map(str, self.n))
        scaled = "" if self.scaled is None else f" scaled by {self.scaled.by}"
        ranks = counted(self.world_size, "rank")
        ranks += "" if len(set(self.rows)) == 1 else f" ({', '.join(map(str, self.rows))} rows)"
        return f"[{self.m}, {self.k}] gathered from {ranks} @ [{self.k}, {n}] on each, {self.dtype}{scaled}"

    @property
    def has_work(self) -> bool:
        return self.m > 0 and self.k > 0 and sum(self.n) > 0

    def between_hosts(self, rails: int) -> tuple[str, ...]:
        if self.return_gathered:
            return ()
        if rails:
            return tuple(f"two_levels[hosts={rails},chunks={chunks}]" for chunks in (1, 2, 4))
        if len(set(self.rows)) > 1 or self.scaled is not None:
            return ()
        return tuple(f"ficco_1d_collective[start=hetero,gemms=unfused,steps={steps}]" for steps in (1, 2, 4))

    def worth_running(self, candidate: Candidate) -> bool:
        return candidate.name in (
            "serial", "gather[by=kernel]", "shard[chunks=1,send=in_turn,by=dma]", "shard[chunks=2,send=in_turn,by=dma]"
        )  # fmt: skip
