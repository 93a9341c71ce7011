"""Schedules of all-gather + GEMM. They send each rank's shard of rows as a whole, or in a few chunks.

    serial   NCCL's all-gather, then cuBLAS's GEMM: the baseline
    gather   every rank puts its shard into all peers' memory, then one GEMM
    shard    a GEMM for each shard, or each chunk of a shard, while later shards arrive. This rank's own shard is first

`weft.builders.ficco` has schedules that cut shards into smaller chunks.

**gather.** Nothing overlaps. Every rank puts its shard directly where the peers' GEMMs read it, and sets one signal per
peer. This schedule is the fastest for small M, where NCCL's all-gather takes longer to start than to move the data.
There, cutting the GEMM would not help, because each piece would read all weights again.

**shard.**

    to peers   for each peer: wait until the peer has read the previous run's shard; put the shard into its `box`; set `arrived`
    compute    multiply this rank's shard; then for each peer: wait for `arrived`; multiply the peer's shard; set `credit`

A rank's `box` is the symmetric buffer into which its peers put their shards. `arrived` tells the rank that a peer's
shard is in its box. `credit` tells the peer that its shard has been read.

Shards are sent by puts, not gets. A put reads the caller's tensor directly. A get would need a copy of the shard in
symmetric memory, and a signal that the copy is ready. Rank r sends first to rank r + 1, then to r + 2, and so on. So no
two ranks send to the same rank at the same time.

Nothing is left to transfer during the GEMM of the last chunk, so a small last chunk helps, such as chunks="3:1". The
other chunks should be large, because GPUs are inefficient at small GEMMs.

Sources: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", II-B (shard-based overlap).
    PyTorch's async tensor parallelism also overlaps shard by shard, but with gets.
"""

from __future__ import annotations

from typing import Literal

from weft.builders.operands import Operands, Pieces, copy_rows, offsets, peer, split
from weft.builders.problems.all_gather_matmul import AllGatherMatmul
from weft.builders.registry import NotApplicableError, builder, require_peers
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
    """Put this rank's shard into the symmetric buffer `box` of every rank, which then runs one GEMM.

    by: "kernel" puts the shards with kernels, on the lane (stream) of the GEMM. "dma" uses copy engines, with a lane
        for each peer, so that the copies run concurrently.
    """
    require_peers(p)
    world = p.world_size
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
    else:  # x, then its scales: each is copied to all peers and to this rank's own box in one launch
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
    """Put this rank's shard into the peers' memory, and multiply their shards as they arrive.

    chunks: the number of chunks of a shard, or their proportions, such as "2:1:1".
    send: "in_turn" sends to one peer after the other. On a switch, the first shard then arrives earliest. "at_once"
        sends to all peers concurrently, which uses all links of a mesh.
    by: copy with copy engines ("dma") or kernels ("kernel").
    """
    require_peers(p)
    world = p.world_size
    if len(set(p.rows)) > 1 and chunks != 1:
        raise NotApplicableError(
            f"the ranks' shards have {p.rows} rows, but chunks={chunks} needs equal shards: use chunks=1"
        )
    if send == "at_once" and world == 2:
        raise NotApplicableError(
            "with 2 ranks there is only one peer, so send=at_once would be the same as send=in_turn: use send=in_turn"
        )
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
