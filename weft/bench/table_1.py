"""The GEMMs of FiCCO's studies, from `table_1.toml`: the sixteen of the paper's table I (g1 to g16), and sixteen random
ones (s1 to s16).

A GEMM is A [m, k] @ B [k, n] on W ranks, where A is all-gathered or exchanged by an all-to-all. The paper does not say
if its N is the N of the whole layer or of one rank. weft assumes the whole layer, because N = 106496 is twice the width
of the whole MLP of Llama-3-405B. So with tensor parallelism a rank computes N / W columns (`GatheredGemm.sharded`). M
and K are not divided, because a rank gathers all rows of A. With expert parallelism (g13 to g16) a rank has M / W rows
and all N columns, which is the same number of operations.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", table I and VI-D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.resources import files
from typing import Any

from weft.reading import parse_toml

MOST_PIECES = 64  # pieces of M and of K
_MULTIPLES = {"m": MOST_PIECES, "n": 8, "k": MOST_PIECES}  # n: rows of 16 bytes, which cuBLAS's fast kernels need


@dataclass(frozen=True)
class GatheredGemm:
    """A GEMM C [m, n] = A [m, k] @ B [k, n], before which A is gathered from all ranks."""

    name: str
    parallelism: str
    model: str
    m: int
    n: int
    k: int
    item_bytes: int = 2

    @property
    def ops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def traffic(self) -> int:
        return self.item_bytes * (self.m * self.k + self.k * self.n + self.m * self.n)

    @property
    def op_to_byte(self) -> float:
        return self.ops / self.traffic

    @property
    def run_bytes(self) -> int:
        """The bytes of memory that a rank needs to measure the GEMM. They hold A, B, two results, two copies of the gathered A,
        and a shard of A.
        """
        return self.traffic + self.item_bytes * (3 * self.m * self.k + self.m * self.n)

    def sharded(self, ranks: int) -> GatheredGemm:
        """Return the GEMM that each of `ranks` ranks computes in tensor parallelism: N is divided by `ranks`, and rounded up."""
        return replace(self, n=-(-self.n // ranks))

    def piece(self, rows: int = 1, columns: int = 1) -> GatheredGemm:
        """Return the GEMM that multiplies one block of A, if A is cut into equal blocks.

        rows, columns: the number of blocks in each direction.
        """
        return replace(self, m=self.m // rows, k=self.k // columns)

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


_ALL = [
    GatheredGemm(name, **of)
    for name, of in parse_toml(files("weft.bench").joinpath("table_1.toml").read_text(), "table_1.toml").items()
]
TABLE_1 = tuple(gemm for gemm in _ALL if gemm.model != "synthetic")
SYNTHETIC = tuple(gemm for gemm in _ALL if gemm.model == "synthetic")


def find_gemms(names: Sequence[str]) -> tuple[GatheredGemm, ...]:
    """Return the GEMMs of table I with these names; all if `names` is empty. Raise `ValueError` for an unknown name."""
    for name in names:
        if name not in {gemm.name for gemm in TABLE_1}:
            raise ValueError(f"no GEMM {name!r} in table I: give names from g1 to g{len(TABLE_1)}, separated by commas")
    return tuple(gemm for gemm in TABLE_1 if gemm.name in names or not names)


@dataclass(frozen=True)
class Fitted:
    """A GEMM of the paper, reduced to fit a machine. paper: the full GEMM. run: the reduced GEMM.

    To reduce the GEMM, N is divided by `ranks`, then M, N and K by `all_by`, and then the larger of M and K by `large_by`.
    """

    paper: GatheredGemm
    run: GatheredGemm
    ranks: int
    all_by: Fraction
    large_by: int

    def __str__(self) -> str:
        large = "M" if self.paper.m > self.paper.k else "K"
        said = [f"N/{self.ranks}"] + [f"all/{self.all_by}"] * (self.all_by != 1)
        return ", ".join(said + [f"{large}/{self.large_by}"] * (self.large_by != 1))


def fit(gemm: GatheredGemm, *, ranks: int, scale: Fraction, most_ops: float, most_bytes: float) -> Fitted:
    """Return the GEMM of one of `ranks` ranks, reduced to at most `most_ops` operations and `most_bytes` (`run_bytes`)
    bytes.

    First, M, N and K are multiplied by `scale`. If the result is still too large, the larger of M and K is halved, but
    not below the other. (FiCCO's heuristic depends on which of them is larger.) Then M, N and K are halved together. M
    and K stay multiples of 64, so that all pieces are equal. Raise `ValueError` if the GEMM cannot be reduced further.
    """
    all_by, large_by = 1 / scale, 1
    while True:
        sizes: dict[str, Any] = {"m": gemm.m / all_by, "n": gemm.n / ranks / all_by, "k": gemm.k / all_by}
        sizes["m" if gemm.m > gemm.k else "k"] /= large_by
        whole: dict[str, Any] = {name: max(of, int(sizes[name]) // of * of) for name, of in _MULTIPLES.items()}
        fitted = Fitted(gemm, replace(gemm, **whole), ranks, all_by, large_by)
        if fitted.run.ops <= most_ops and fitted.run.run_bytes <= most_bytes:
            return fitted
        smaller, larger = sorted((fitted.run.m, fitted.run.k))
        if larger // 2 > smaller:
            large_by *= 2
        elif larger > MOST_PIECES:
            all_by *= 2
        else:
            raise ValueError(
                f"{gemm.name} does not fit, even reduced to {fitted.run}: it needs {fitted.run.run_bytes} bytes, and "
                f"{most_bytes:.3g} are free. Free memory on this machine"
            )
