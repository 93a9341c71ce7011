"""All-gather + GEMM, for shards of rows that are sent whole or in a few parts.

    serial   no overlap: NCCL's all-gather, then cuBLAS's GEMM; the baseline for all others
    gather   serial with an all-gather by puts: then one GEMM
    shard    a rank computes on its own shard while the others' arrive, one whole shard (or `chunks` parts of it) at a time

`weft.builders.ficco` has schedules that cut shards finer.

**gather.** Nothing overlaps, but the GEMM stays whole and the gather is as short as the hardware allows. Every rank
puts its shard where the peers' GEMMs will read it, and sets one signal. This schedule wins under two conditions. A GEMM
takes as long for half the rows, because most of its reads are weights. And NCCL's all-gather takes longer to start than
to move the data.

**shard.**

    to peers: wait until rank + i has read the previous run's rows; put the shard into its `box`; set `arrived` there
    compute:  own rows of y; then for each other rank, as its rows arrive: those rows of y; set `credit` at their sender

Shards are put, not fetched. A put starts from the caller's own tensor, so nothing is copied into symmetric memory
first, and the owner need not signal that the shard is ready. Every rank first sends to its right neighbour, so that no
two ranks send to the same rank.

If sending takes longer than the GEMM of this rank's own rows, the last chunk's GEMM is exposed after the last chunk arrives. So
that chunk should be small ("3:1"). But small GEMMs use a GPU badly, so most of the rest should stay whole ("2:1:1"). The
first chunk need not be small, because a rank begins with its own rows.

Sources: torch's asynchronous tensor parallelism and distributed GEMM fetch shards this way; "Design Space Exploration of DMA
based Finer-Grain Compute Communication Overlap", II-B, calls it shard-based overlap.
"""

from __future__ import annotations

from typing import Literal

from weft.builders.operands import Operands, Pieces, copy_rows, offsets, peer, split
from weft.builders.problems.all_gather_matmul import AllGatherMatmul
from weft.builders.registry import NotApplicableError, builder
from weft.schedule.expr import RANK, Index, lookup
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


@builder(AllGatherMatmul, by=("kernel", "dma"))
def gather(p: AllGatherMatmul, *, by: Literal["dma", "kernel"]) -> Schedule:
    """Put this rank's rows to all peers, then run one GEMM.

    by kernel: everything on one lane. A run's first launch also signals that the box is free for the peers' rows. by dma: a lane
    for each peer, so that the copies run concurrently; the box is free when the previous run has read its rows."""
    world = p.world_size
    if world == 1:
        raise NotApplicableError("there is only one rank, so there is nothing to gather")
    o = Operands("gather", p)
    d, x, box = o.d, o.x, o.rows("box", p.m, "symmetric")
    arrived, credit = d.signals("arrived", world), d.signals("credit", world)
    own = (lookup(offsets(p.rows), RANK), lookup(p.rows, RANK))
    compute, peers = d.lane("compute"), [peer(world, distance) for distance in range(1, world)]
    if by == "dma":
        for distance, to in enumerate(peers, start=1):
            sender = d.lane(f"to +{distance}", "copy").wait(credit, to, previous=True)
            copy_rows(sender, x.part(), box.part(own, at=to), by).set(arrived, RANK, at=to)
        copy_rows(compute, x.part(), box.part(own), "kernel")
    else:  # one source after the other, to all peers and to this rank's own place: one launch for each source
        for to in peers:
            compute.set(credit, RANK, at=to)
        for to in peers:
            compute.wait(credit, to)
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
            compute.set(credit, RANK, at=peer(world, -distance))
    return d.schedule()


@builder(AllGatherMatmul, chunks=(1, 2, "3:1", "2:1:1"), send=("in_turn", "at_once"), by=("dma", "kernel"))
def shard(
    p: AllGatherMatmul, *, chunks: Pieces, send: Literal["in_turn", "at_once"], by: Literal["dma", "kernel"]
) -> Schedule:
    """Put shards to the peers, and multiply them as they arrive.

    chunks: parts of a shard with a signal each, a number or a proportion. send in_turn: to one peer after the other, fastest for
    the first shard on a switch; at_once: over all links of a mesh."""
    world = p.world_size
    if world == 1:
        raise NotApplicableError("there is only one rank, so there is nothing to gather")
    if len(set(p.rows)) > 1 and chunks != 1:
        raise NotApplicableError(
            f"shards of {p.rows} rows differ in size, so they cannot be split into {chunks} chunks each: use chunks=1"
        )
    if send == "at_once" and world == 2:
        raise NotApplicableError("with 2 ranks there is only one peer, so send=at_once is the same as send=in_turn")
    o = Operands("shard", p)
    d, x, gathered, box = o.d, o.x, o.gathered, o.rows("box", p.m, "symmetric")
    begin = offsets(p.rows)
    own = (lookup(begin, RANK), lookup(p.rows, RANK))
    compute = d.lane("compute")
    readers = [compute, d.lane("copy out", "copy")] if gathered else [compute]
    whole: list[tuple[int, Index]] = [(0, lookup(p.rows, RANK))]
    pieces = whole if chunks == 1 else split(p.rows[0], chunks, what="rows of a shard")
    arrived = d.signals("arrived", world * len(pieces))
    credit = d.signals("credit", world * len(readers))

    o.multiply_all(compute, x.part(), own)
    if gathered:
        readers[-1].copy(x.data.part(), gathered.part(rows=own))
    for distance in range(1, world):
        to, source = peer(world, distance), peer(world, -distance)
        sender = d.lane(f"to +{distance}" if send == "at_once" else "to peers", "copy")
        for i in range(len(readers)):
            sender.wait(credit, to * len(readers) + i, previous=True)
        for c, (first, count) in enumerate(pieces):
            target = box.part((lookup(begin, RANK) + first, count), at=to)
            copy_rows(sender, x.part((first, count)), target, by).set(arrived, RANK * len(pieces) + c, at=to)
            rows = (lookup(begin, source) + first, lookup(p.rows, source) if chunks == 1 else count)
            came = source * len(pieces) + c
            compute.wait(arrived, came)
            o.multiply_all(compute, box.part(rows), rows)
            if gathered:
                readers[-1].wait(arrived, came).copy(box.data.part(rows=rows), gathered.part(rows=rows))
        for i, reader in enumerate(readers):
            reader.set(credit, RANK * len(readers) + i, at=source)
    return d.schedule()
