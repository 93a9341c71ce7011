"""The FiCCO paper's GEMMs (`weft.bench.table_1`) as presets of all_gather_matmul, reduced to fit this machine.

    g1 ... g16, s1 ... s16      a GEMM of table I, or a synthetic GEMM: N is divided by the number of ranks, and M is halved until
                                the run fits into memory
    g1-m4                       the same GEMM, but M is divided by 4 on every machine
    table-1, synthetic          all sixteen GEMMs; table-1-m16: with M divided by 16

Only M is reduced, because it stands for batch and sequence length, while N and K are sizes of the model. A rank needs
memory for the gathered input several times, for results in float64, and for the buffers of each measured schedule. So M
also depends on the number of variants.
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


_USED = 0.9  # fraction of the free memory; libraries take the rest


@dataclass(frozen=True)
class GatherShape(GemmShape):
    """A shape of all_gather_matmul.

    gemm: the name of the paper's GEMM, or "" for other shapes. over: the number by which M was divided. 0: `fitted`
    finds the smallest divisor with which the run fits into memory.
    """

    gemm: str = ""
    over: int = 1

    written: ClassVar[str] = (
        f"{GemmShape.written}; or FiCCO's GEMMs g1 to g16, s1 to s16, table-1 or synthetic; append -m4 for a quarter of M"
    )

    @property
    def name(self) -> str:
        if not self.gemm:
            return super().name
        return f"{self.gemm}-m{self.over}" if self.over > 1 else self.gemm

    @classmethod
    def named(cls, name: str, groups: Mapping[str, Any]) -> list[Self]:
        """Return the shapes of preset `name`. The paper's GEMMs have the N of the whole layer, which `GatherShape.on`
        divides by the number of ranks.

        groups: the content of the file of shapes, for other presets.
        """
        match = _NAME.fullmatch(name)
        gemms: Sequence[GatheredGemm] = (_GROUPS | _GEMMS).get(match[1], ()) if match else ()
        if not match or not gemms:
            return super().named(name, groups)
        over, by = int(match[2] or 0), int(match[2] or 1)
        if odd := [gemm for gemm in gemms if gemm.m % by]:
            of = f"M={odd[0].m} of {odd[0].name}"
            raise ValueError(f"preset {name!r}: {of} is not divisible by {over}: divide by a power of two")
        return [cls(g.m // by, g.n, g.k, (), gemm=g.name, over=over) for g in gemms]

    def on(self, ranks: int) -> Self:
        """Return the shape that each of `ranks` ranks computes: N is divided by the number of ranks."""
        if not self.gemm:
            return self
        (gemm,) = _GEMMS[self.gemm]
        if self.m % ranks:
            raise ValueError(f"preset {self.name}: M={self.m} must be divisible by ranks={ranks}: use 2, 4 or 8 ranks")
        said = f"FiCCO's {self.gemm}, {gemm}: N / {ranks}" + (f", M / {self.over}" if self.over > 1 else "")
        return replace(self, n=gemm.sharded(ranks).n, sources=(said,))

    def halved(self, ranks: int) -> Self:
        return replace(self, m=self.m // 2, over=2 * max(1, self.over)).on(ranks)

    def bytes(self, ranks: int, item_bytes: int) -> float:
        """Return an estimate of a rank's peak memory in a run, in bytes.

        item_bytes: the bytes of an element.

        For shapes that are not the paper's, this is the estimate of `GemmShape.bytes`.

        The paper's GEMMs can fill a GPU's memory. For them the estimate counts six tensors of the gathered input's size, the
        weight and two results, and a float64 copy of weight and results.
        """
        if not self.gemm:
            return super().bytes(ranks, item_bytes)
        m, n, k = self.m, self.n, self.k
        return 6 * m * k * item_bytes + (8 + item_bytes) * (k * n + 2 * m * n)


def fitted(shape: GatherShape, ranks: Ranks, op: str, dtype: str, item_bytes: int, names: Sequence[str]) -> GatherShape:
    """Return `shape` with M halved until inputs, results and all measured schedules fit into memory. Return `shape`
    unchanged if it is not one of the paper's, or if its name already gives a number by which M is divided. If no M
    fits, also return `shape`: `check_room` then refuses it. All ranks must make this call.

    names: the variants to measure, as in `pinned_schedules`.
    """
    if not shape.gemm or shape.over:
        return shape
    free, world = free_bytes(ranks), ranks.world_size
    whole = part = replace(shape, over=1)
    while True:
        left = _USED * free - part.bytes(world, item_bytes)
        if left > 0 and memory_of_schedules(part.problems(op, world, dtype), names) <= MEMORY_SHARE * left:
            return part
        if part.m % (2 * world * world):  # schedules split a shard into `world` pieces
            return whole
        part = part.halved(world)
