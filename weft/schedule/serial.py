"""The schedule without overlap: the library's collective, then the library's GEMM. Every other one is measured by it."""

from __future__ import annotations

from weft.schedule.operands import all_gather_matmul_operands
from weft.schedule.problem import AllGatherMatmul, builder
from weft.schedule.schedule import Schedule


@builder(AllGatherMatmul)
def serial(p: AllGatherMatmul) -> Schedule:
    d, x, ws, ys, gathered = all_gather_matmul_operands("serial", p)
    whole = gathered or d.buffer("gathered", p.m, p.k, p.dtype, "scratch")
    lane = d.lane("compute").all_gather(x.part(), whole.part())
    for w, y in zip(ws, ys, strict=True):
        lane.matmul(y.part(), whole.part(), w.part())
    return d.schedule()
