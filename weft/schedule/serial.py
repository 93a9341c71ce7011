"""The schedule without overlap: NCCL's all-gather, then cuBLAS's GEMM. It is the baseline for all others."""

from __future__ import annotations

from weft.schedule.builders import builder
from weft.schedule.operands import Operands
from weft.schedule.problems.all_gather_matmul import AllGatherMatmul
from weft.schedule.schedule import Schedule


@builder(AllGatherMatmul)
def serial(p: AllGatherMatmul) -> Schedule:
    o = Operands("serial", p)
    whole = o.rows("gathered", p.m, "scratch", data=o.gathered)
    lane = o.d.lane("compute")
    for src, dst in zip(o.x.part(), whole.part(), strict=True):
        lane.all_gather(src, dst)
    o.multiply_all(lane, whole.part())
    return o.d.schedule()
