"""Gather, then one GEMM: the serial schedule with an all-gather of its own.

Nothing overlaps, but the GEMM stays whole and the gather is as short as the hardware makes it: every rank puts its shard
where the others' GEMM will read it, and one signal says so. That wins where a GEMM takes as long for half the rows, because
what it reads is mostly its weights, and where the library's collective takes longer to start than to move the data.
"""

from __future__ import annotations

from typing import Literal

from weft.schedule.expr import RANK, lookup
from weft.schedule.operands import all_gather_matmul_operands, peer, starts
from weft.schedule.problem import AllGatherMatmul, NotApplicableError, builder
from weft.schedule.schedule import Schedule


@builder(AllGatherMatmul, by=("kernel", "dma"))
def gather(p: AllGatherMatmul, *, by: Literal["dma", "kernel"]) -> Schedule:
    """by kernel: everything on one lane. by dma: a lane for each peer, so that the copies go at once."""
    world = p.world_size
    if world == 1:
        raise NotApplicableError("one rank has nothing to gather")
    d, x, ws, ys, gathered = all_gather_matmul_operands("gather", p)
    box = d.buffer("box", p.m, p.k, p.dtype, "symmetric")
    arrived, free = d.signals("arrived", world), d.signals("free", world)
    own = (lookup(starts(p.rows), RANK), lookup(p.rows, RANK))
    compute = d.lane("compute")
    for distance in range(1, world):
        to = peer(world, distance)
        sender = compute if by == "kernel" else d.lane(f"to +{distance}", "copy")
        sender.wait(free, to, previous=True).copy(x.part(), box.part(rows=own, at=to), by).set(arrived, RANK, at=to)
    compute.copy(x.part(), box.part(rows=own), "kernel")
    for distance in range(1, world):
        compute.wait(arrived, peer(world, -distance))
    for w, y in zip(ws, ys, strict=True):
        compute.matmul(y.part(), box.part(), w.part())
    if gathered:
        compute.copy(box.part(), gathered.part(), "kernel")
    for distance in range(1, world):
        compute.set(free, RANK, at=peer(world, -distance))
    return d.schedule()
