"""Gather, then one GEMM: the serial schedule with an all-gather by puts.

Nothing overlaps, but the GEMM stays whole and the gather is as short as the hardware allows. Every rank puts its shard where the
others' GEMMs will read it, and sets one signal. That wins if a GEMM takes as long for half the rows, because most of its reads
are weights, and if NCCL's all-gather takes longer to start than to move the data.
"""

from __future__ import annotations

from typing import Literal

from weft.schedule.builders import NotApplicableError, builder
from weft.schedule.expr import RANK, lookup
from weft.schedule.operands import Operands, carry, peer, starts
from weft.schedule.problems.all_gather_matmul import AllGatherMatmul
from weft.schedule.schedule import Schedule


@builder(AllGatherMatmul, by=("kernel", "dma"))
def gather(p: AllGatherMatmul, *, by: Literal["dma", "kernel"]) -> Schedule:
    """Put this rank's rows to all peers, then run one GEMM.

    by kernel: everything on one lane. A run's first launch also signals that the box is free for the peers' rows. by dma: a lane
    for each peer, so that the copies run concurrently; the box is free when the run before has read its rows."""
    world = p.world_size
    if world == 1:
        raise NotApplicableError("one rank has nothing to gather")
    o = Operands("gather", p)
    d, x, box = o.d, o.x, o.rows("box", p.m, "symmetric")
    arrived, room = d.signals("arrived", world), d.signals("room", world)
    own = (lookup(starts(p.rows), RANK), lookup(p.rows, RANK))
    compute, peers = d.lane("compute"), [peer(world, distance) for distance in range(1, world)]
    if by == "dma":
        for distance, to in enumerate(peers, start=1):
            sender = d.lane(f"to +{distance}", "copy").wait(room, to, previous=True)
            carry(sender, x.part(), box.part(own, at=to), by).set(arrived, RANK, at=to)
        carry(compute, x.part(), box.part(own), "kernel")
    else:  # one source after the other, to all peers and to the own place: one launch for each source
        for to in peers:
            compute.set(room, RANK, at=to)
        for to in peers:
            compute.wait(room, to)
        for i, src in enumerate(x.part()):
            for to in peers:
                compute.copy(src, box.part(own, at=to)[i], by)
            for to in peers if i + 1 == len(x.part()) else ():
                compute.set(arrived, RANK, at=to)
            compute.copy(src, box.part(own)[i], by)
    for distance in range(1, world):
        compute.wait(arrived, peer(world, -distance))
    o.multiply_all(compute, box.part())
    if o.gathered:
        compute.copy(box.data.part(), o.gathered.part(), "kernel")
    if by == "dma":
        for distance in range(1, world):
            compute.set(room, RANK, at=peer(world, -distance))
    return d.schedule()
