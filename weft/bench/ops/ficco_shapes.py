"""FiCCO's GEMMs (`weft.bench.table_1`) as presets of all_gather_matmul, reduced to fit this machine.


    g1 ... g16, s1 ... s16      a GEMM of table I, or a synthetic one: N over the ranks, M halved until it fits
    g1-m4                       with a quarter of M, on every machine the same
    table-1, synthetic          all sixteen; table-1-m16 with a sixteenth of M

A rank holds the gathered input several times, results in float64, and the buffers of each measured schedule. So the size that
fits depends on the variants too. Only M is reduced, since batch and sequence determine it, while the model determines N and K.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from weft.bench.core.harness import Ranks
from weft.bench.core.run import free_bytes
from weft.bench.ops.gemms import MEMORY_SHARE, GemmShape, memory_of_schedules
from weft.bench.table_1 import SYNTHETIC, TABLE_1, GatheredGemm

_GROUPS = {"table-1": TABLE_1, "synthetic": SYNTHETIC}
_GEMMS = {gemm.name: (gemm,) for gemms in _GROUPS.values() for gemm in gemms}
_NAME = re.compile(r"(table-1|synthetic|[gs][1-9]\d?)(?:-m([1-9]\d{0,5}))?")


_USED = 0.9  # share of the free memory: libraries take the rest


@dataclass(frozen=True)
class GatherShape(GemmShape):
    """A shape. gemm: its name in the paper's table; "" for other shapes. over: the divisor of M; 0: the smallest that fits."""

    gemm: str = ""
    over: int = 1

    written: ClassVar[str] = (
        f"{GemmShape.written}; or of FiCCO's GEMMs g1 to g16, s1 to s16, table-1 or synthetic, with -m4 behind for a quarter of M"
    )

    @property
    def name(self) -> str:
        if not self.gemm:
            return super().name
        return f"{self.gemm}-m{self.over}" if self.over > 1 else self.gemm

    @classmethod
    def named(cls, name: str, groups: Mapping[str, Any]) -> list[Self]:
        """Return the shapes of this name. The paper's GEMMs have the layer's N (`on` divides it)."""
        match = _NAME.fullmatch(name)
        gemms: Sequence[GatheredGemm] = (_GROUPS | _GEMMS).get(match[1], ()) if match else ()
        if not match or not gemms:
            return super().named(name, groups)
        over, by = int(match[2] or 0), int(match[2] or 1)
        if odd := [gemm for gemm in gemms if gemm.m % by]:
            of = f"M={odd[0].m} of {odd[0].name}"
            raise ValueError(f"preset {name!r}: {of} cannot be divided by {over}: use a power of two")
        return [cls(g.m // by, g.n, g.k, (), gemm=g.name, over=over) for g in gemms]

    def on(self, ranks: int) -> Self:
        """Return the shape as one of `ranks` ranks computes it: N divided by the ranks."""
        if not self.gemm:
            return self
        (gemm,) = _GEMMS[self.gemm]
        if self.m % ranks:
            raise ValueError(f"preset {self.name}: M={self.m} must be divisible by ranks={ranks}")
        said = f"FiCCO's {self.gemm}, {gemm}: N / {ranks}" + (f", M / {self.over}" if self.over > 1 else "")
        return replace(self, n=gemm.sharded(ranks).n, sources=(said,))

    def halved(self, ranks: int) -> Self:
        return replace(self, m=self.m // 2, over=2 * max(1, self.over)).on(ranks)

    def bytes(self, ranks: int, item_bytes: int) -> float:
        """Return the bytes of a run. The paper's GEMMs may fill a GPU, so their estimate is closer to the peak of a run.

        It counts the input gathered, for the comparison and twice while that is made, in a buffer, and two sets of shards; the
        weight, also in float64; two results, likewise."""
        if not self.gemm:
            return super().bytes(ranks, item_bytes)
        m, n, k = self.m, self.n, self.k
        return 6 * m * k * item_bytes + (8 + item_bytes) * (k * n + 2 * m * n)


def fitted(shape: GatherShape, ranks: Ranks, op: str, dtype: str, item_bytes: int, names: Sequence[str]) -> GatherShape:
    """Return one of the paper's GEMMs with M halved until inputs, results and all schedules that `names` begin fit. Collective.

    Any other shape, or a shape with a given M, is returned unchanged. If no part fits, the whole shape is returned, which is
    refused later. See `pinned_schedules`.
    """
    if not shape.gemm or shape.over:
        return shape
    free, world = free_bytes(ranks), ranks.world_size
    whole = part = replace(shape, over=1)
    while True:
        left = _USED * free - part.bytes(world, item_bytes)
        if left > 0 and memory_of_schedules(part.problems(op, world, dtype), names) <= MEMORY_SHARE * left:
            return part
        if part.m % (2 * world * world):  # a shard is cut into `world` pieces
            return whole
        part = part.halved(world)
