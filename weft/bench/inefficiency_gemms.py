"""The GEMMs of the FiCCO paper, cut down to what a machine can hold and repeat, and what can be said of one on paper.

    op-to-byte   2 M N K / (bytes of the three matrices): arithmetic intensity
    traffic      bytes of the three matrices, each once

Table I does not say whether N is a layer's or a GPU's. Here it is taken as it stands, as what one GPU computes; tests of the
heuristic and of the simulator take it as a layer's, of which each of eight GPUs computes an eighth.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", table I and IV-C, IV-D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

MOST_PIECES = 64  # of M and of K
_N_MULTIPLE = 8  # bf16 rows of a multiple of 16 bytes, which the library's fast kernels want


@dataclass(frozen=True)
class Gemm:
    """C [m, n] = A [m, k] @ B [k, n]. A is what is gathered."""

    name: str
    parallelism: str
    model: str
    m: int
    n: int
    k: int

    @property
    def ops(self) -> int:
        return 2 * self.m * self.n * self.k

    def traffic(self, item_bytes: int) -> int:
        return item_bytes * (self.m * self.k + self.k * self.n + self.m * self.n)

    def op_to_byte(self, item_bytes: int) -> float:
        return self.ops / self.traffic(item_bytes)

    def piece(self, rows: int = 1, columns: int = 1) -> Gemm:
        """One of its pieces when A is cut into so many blocks of rows and of columns."""
        return replace(self, m=self.m // rows, k=self.k // columns)

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


_405B, _70B, _SP = "llama-3-405b", "llama-2-70b", "SP+TP"
TABLE_1 = (
    Gemm("g1", _SP, _405B, 16384, 16384, 131072),
    Gemm("g2", _SP, _405B, 131072, 16384, 16384),
    Gemm("g3", _SP, _405B, 53248, 16384, 131072),
    Gemm("g4", _SP, _405B, 131072, 53248, 16384),
    Gemm("g5", _SP, _70B, 8192, 8192, 262144),
    Gemm("g6", _SP, _70B, 262144, 8192, 8192),
    Gemm("g7", _SP, _70B, 28672, 8192, 262144),
    Gemm("g8", _SP, _70B, 262144, 28672, 8192),
    Gemm("g9", _SP, _405B, 196608, 18432, 16384),
    Gemm("g10", _SP, _405B, 196608, 106496, 16384),
    Gemm("g11", _SP, _70B, 1048576, 10240, 8192),
    Gemm("g12", _SP, _70B, 1048576, 57344, 8192),
    Gemm("g13", "EP", "DeepSeek", 1607680, 57344, 8192),
    Gemm("g14", "EP", "Mixtral", 147456, 28672, 4096),
    Gemm("g15", "EP", "Mixtral", 327680, 28672, 4096),
    Gemm("g16", "EP", "Mixtral", 229376, 28672, 4096),
)


def find_gemms(names: Sequence[str]) -> tuple[Gemm, ...]:
    """Those of table I, in its order; none named: all. Raises ValueError for a name that is not there."""
    known = {gemm.name for gemm in TABLE_1}
    for name in names:
        if name not in known:
            raise ValueError(f"no GEMM {name!r} in table I: give of g1 to g{len(TABLE_1)}, separated by commas")
    return tuple(gemm for gemm in TABLE_1 if gemm.name in names or not names)


@dataclass(frozen=True)
class Fitted:
    """A GEMM of the paper as it is run: M, N and K over `all_by`, then the larger of M and K over `large_by`."""

    paper: Gemm
    run: Gemm
    all_by: Fraction
    large_by: int

    def __str__(self) -> str:
        large = "M" if self.paper.m > self.paper.k else "K"
        said = [f"all/{self.all_by}"] * (self.all_by != 1) + [f"{large}/{self.large_by}"] * (self.large_by != 1)
        return ", ".join(said) or "as in the paper"


def fit(gemm: Gemm, *, scale: Fraction, most_ops: float, most_bytes: float, item_bytes: int) -> Fitted:
    """`gemm` with M, N, K times `scale`, then made smaller until it takes at most `most_ops` and `most_bytes`.

    Bytes are those of a run (see `run_bytes`). Each time the larger of M and K is halved as long as it stays the larger, for
    which of the two it is decides how the GEMM should be cut; then all three are. M and K become multiples of 64, so that
    all pieces are alike. Raises ValueError if nothing is left to halve.
    """
    all_by, large_by = 1 / scale, 1
    while True:
        fitted = Fitted(gemm, _divided(gemm, all_by, large_by), all_by, large_by)
        if fitted.run.ops <= most_ops and run_bytes(fitted.run, item_bytes) <= most_bytes:
            return fitted
        smaller, larger = sorted((fitted.run.m, fitted.run.k))
        if larger // 2 > smaller:
            large_by *= 2
        elif larger > MOST_PIECES:
            all_by *= 2
        else:
            raise ValueError(
                f"{gemm.name} does not fit even as {fitted.run}: {run_bytes(fitted.run, item_bytes)} bytes, and "
                f"{most_bytes:.3g} are free for it: free memory on this machine"
            )


def run_bytes(gemm: Gemm, item_bytes: int) -> int:
    """Memory of a rank that measures it: A, B, two results, and A gathered twice, by copies and by the library, from a
    shard that is less than A."""
    return item_bytes * (4 * gemm.m * gemm.k + gemm.k * gemm.n + 2 * gemm.m * gemm.n)


def _divided(gemm: Gemm, all_by: Fraction, large_by: int) -> Gemm:
    m = gemm.m / all_by / (large_by if gemm.m > gemm.k else 1)
    k = gemm.k / all_by / (large_by if gemm.k >= gemm.m else 1)
    return replace(gemm, m=_down(m, MOST_PIECES), n=_down(gemm.n / all_by, _N_MULTIPLE), k=_down(k, MOST_PIECES))


def _down(size: Fraction, multiple: int) -> int:
    return max(multiple, int(size) // multiple * multiple)
