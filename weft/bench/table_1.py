"""The GEMMs with which FiCCO is studied: the sixteen of its table I (g1 to g16), and sixteen drawn at random (s1 to s16).

[m, k] @ [k, n]: A is gathered, or sent all-to-all, and W ranks compute it. The paper's N is the layer's: with tensor parallelism W
ranks divide the weight's columns, so each computes N / W of them (`Gemm.sharded`). The paper does not say so. It calls the shapes
those of models with tensor parallelism, and an N of 106496 is twice the whole MLP of Llama-3-405B. Every study and test here
reads it so. M and K are whole: A's rows are gathered from all ranks. With expert parallelism (g13 to g16) a rank has M / W of the
rows, and all of N: as many operations.

Of its synthetic scenarios the paper says no more than "sixteen additional synthetic scenarios with diverse OTB and MT
combinations".
Here each of M, N and K is drawn evenly in its logarithm between the least and the most of table I. Draws whose op-to-byte ratio or
memory traffic, N divided by the paper's eight, is beyond those of table I are drawn again.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", table I and VI-D.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

PAPERS_RANKS = 8
SEED = 0
"""Of `SYNTHETIC`."""
_MULTIPLES = {"m": 4096, "n": 1024, "k": 1024}  # eight shards of eight pieces, in whole tiles


@dataclass(frozen=True)
class Gemm:
    """C [m, n] = A [m, k] @ B [k, n]. A is what is gathered."""

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
        """Memory of a rank that measures it: A, B, two results, and A gathered twice, by copies and by the library, from a
        shard that is less than A."""
        return self.traffic + self.item_bytes * (3 * self.m * self.k + self.m * self.n)

    def sharded(self, ranks: int) -> Gemm:
        """What one of `ranks` computes: N over them, rounded up."""
        return replace(self, n=-(-self.n // ranks))

    def piece(self, rows: int = 1, columns: int = 1) -> Gemm:
        """One of its pieces when A is cut into so many blocks of rows and of columns."""
        return replace(self, m=self.m // rows, k=self.k // columns)

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


TABLE_1 = tuple(
    Gemm(name, **of) for name, of in tomllib.loads(files("weft.bench").joinpath("table_1.toml").read_text()).items()
)


def _synthetic(count: int) -> tuple[Gemm, ...]:
    draw, found = random.Random(SEED), list[Gemm]()
    known = [gemm.sharded(PAPERS_RANKS) for gemm in TABLE_1]
    while len(found) < count:
        sizes = {}
        for name, multiple in _MULTIPLES.items():
            least, most = (math.log(of(getattr(gemm, name) for gemm in TABLE_1)) for of in (min, max))
            sizes[name] = max(1, round(math.exp(draw.uniform(least, most)) / multiple)) * multiple
        gemm = Gemm(f"s{len(found) + 1}", "SP+TP", "synthetic", **sizes)
        mine = gemm.sharded(PAPERS_RANKS)
        if all(
            min(getattr(one, what) for one in known) <= getattr(mine, what) <= max(getattr(one, what) for one in known)
            for what in ("op_to_byte", "traffic")
        ):
            found.append(gemm)
    return tuple(found)


SYNTHETIC = _synthetic(16)


def find_gemms(names: Sequence[str], among: Sequence[Gemm] = TABLE_1) -> tuple[Gemm, ...]:
    """Those of table I (`among`), in its order; none named: all. Raises ValueError for a name that is not there."""
    for name in names:
        if name not in {gemm.name for gemm in among}:
            raise ValueError(f"no GEMM {name!r} in table I: give of g1 to g{len(TABLE_1)}, separated by commas")
    return tuple(gemm for gemm in among if gemm.name in names or not names)
