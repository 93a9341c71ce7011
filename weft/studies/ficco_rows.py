"""The names of FiCCO's schedules in the paper and in weft, and the rows of the evaluation. A row has the time of each
schedule for one GEMM.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", V and VI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.bench.core.tables import Record
from weft.bench.table_1 import GatheredGemm
from weft.plan import AUTOTUNE

SHARD = "shard[chunks=1,send=in_turn,by=dma]"
"""The paper's shard overlap: whole shards, sent to one peer after the other."""
ASYNCTP, SERIAL, WEFT = "asynctp", "serial", "weft"
NEAR = 0.03


def ficco(shape: str, start: str, gemms: str, by: str = "dma") -> str:
    """Return weft's name of a FiCCO schedule with as many steps as ranks. `weft.builders.ficco` explains the choices.

    shape: "1d" (chunks of rows) or "2d" (chunks of columns).
    start: "uniform" or "hetero".
    gemms: "fused" or "unfused".
    by: how chunks are copied: "dma", "kernel" or "collective".
    """
    if by == "collective":
        return f"ficco_{shape}_collective[start={start},gemms={gemms},steps=0]"
    return f"ficco_{shape}[start={start},gemms={gemms},steps=0,by={by}]"


def _all_of(*shapes: str, by: str = "dma") -> dict[str, str]:
    """Return {the paper's name of a schedule, such as "hetero-fused-1D": weft's name}, for all schedules of these shapes."""
    return {
        f"{start}-{gemms}-{shape.upper()}": ficco(shape, start, gemms, by)
        for shape in shapes for start in ("uniform", "hetero") for gemms in ("fused", "unfused")
    }  # fmt: skip


NAMED = _all_of("1d", "2d")
EIGHT = tuple(NAMED.values())
STUDIED = {
    name: NAMED[name] for name in ("uniform-fused-1D", "hetero-fused-1D", "hetero-unfused-1D", "uniform-fused-2D")
}
"""The four schedules that the paper studies."""
KINDS: dict[str, tuple[str, ...]] = {
    "shard": (SHARD,),
    "shard, to all peers at once": ("shard[chunks=1,send=at_once,by=dma]",),
    "AsyncTP": (ASYNCTP,),
    "FiCCO 1D": EIGHT[:4],
    "FiCCO 2D": EIGHT[4:],
    "FiCCO by all-gathers": tuple(_all_of("1d", "2d", by="collective").values()),
    "FiCCO by copy kernels": tuple(_all_of("1d", "2d", by="kernel").values()),
    "weft's choice": (WEFT,),
    "weft, autotuned": (AUTOTUNE,),
}
"""{kind of overlap: its variants}. For each GEMM, the fastest variant of a kind is used (figure 14)."""


class GemmRows(list["GemmRow"]):
    """The rows of a run, one for each GEMM.

    others: the records that are not about one GEMM, such as the sensitivity analysis, by variant.
    mesh: True if the GPUs were fully connected, as in the paper.
    """

    others: Mapping[str, Record]
    mesh: bool = False


@dataclass(frozen=True)
class GemmRow:
    """The results for one GEMM.

    gemm: the sizes that ran. N is the number of columns on one rank, and M may be smaller than in the paper.
    pick: the schedule that the paper's heuristic chooses. The heuristic uses the threshold of the machine that ran, or
        of the paper's machine if weft has no file for the machine that ran.
    ms: the time in milliseconds per call, by variant, including serial.
    closed: the schedule that weft's closed form chooses; "" if it was not recorded.
    losses: the simulated losses of FiCCO's schedules (`weft.studies.ficco_losses.losses_of`); empty for measured times.
    """

    config: str
    gemm: GatheredGemm
    pick: str
    ms: Mapping[str, float]
    gemm_ms: float
    communication_ms: float
    closed: str = ""
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.gemm_ms / self.communication_ms

    @property
    def ideal(self) -> float:
        return self.ms[SERIAL] / max(self.gemm_ms, self.communication_ms)

    def best(self, among: Sequence[str]) -> str | None:
        return min((name for name in among if name in self.ms), key=lambda name: self.ms[name], default=None)

    def speedup(self, *among: str) -> float | None:
        """Return the speedup over serial of the fastest variant in `among`; None if none of them was recorded."""
        best = self.best(among)
        return None if best is None else self.ms[SERIAL] / self.ms[best]

    def lost(self, chosen: str, among: Sequence[str]) -> float | None:
        """Return the fraction of the best speedup in `among` that is lost with `chosen`: 1 - speedup of `chosen` / best
        speedup.

        Return None if a time is missing.
        """
        best, mine = self.speedup(*among), self.speedup(chosen)
        return None if best is None or mine is None else max(0.0, 1 - mine / best)
