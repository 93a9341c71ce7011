"""Shard overlap: a rank computes on its own shard while the others' arrive, one whole shard (or `chunks` parts of it) at a time.

    to peers: wait until rank + i has read the previous run's rows; put the shard into its `box`; set `arrived` there
    compute:  own rows of y; then for each other rank, as its rows arrive: those rows of y; set `free` at their sender

Shards are put, not fetched: a put starts from the caller's own tensor, so nothing is copied into symmetric memory first, and the
owner need not signal that the shard is ready. Every rank first sends to its right neighbour, so that no two send to one.

If sending takes longer than the own rows, the last chunk's GEMM remains when the last chunk arrives: that chunk should be small
("3:1"). Yet small GEMMs use a GPU badly, so most of the rest should stay whole ("2:1:1"). The first chunk need not be small,
since a rank has its own rows to begin with.

Sources: torch's asynchronous tensor parallelism and distributed GEMM fetch shards this way; "Design Space Exploration of DMA
based Finer-Grain Compute Communication Overlap", II-B, calls it shard-based overlap.
"""

from __future__ import annotations

from typing import Literal

from weft.schedule.builders import NotApplicableError, builder
from weft.schedule.expr import RANK, Index, lookup
from weft.schedule.operands import Operands, Pieces, carry, cut, peer, starts
from weft.schedule.problems.all_gather_matmul import AllGatherMatmul
from weft.schedule.schedule import Schedule


@builder(AllGatherMatmul, chunks=(1, 2, "3:1", "2:1:1"), send=("in_turn", "at_once"), by=("dma", "kernel"))
def shard(
    p: AllGatherMatmul, *, chunks: Pieces, send: Literal["in_turn", "at_once"], by: Literal["dma", "kernel"]
) -> Schedule:
    """Put shards to the peers, and multiply them as they arrive.

    chunks: parts of a shard with a signal each, a number or a proportion. send in_turn: to one peer after the other, fastest for
    the first shard behind a switch; at_once: over all links of a mesh."""
    world = p.world_size
    if world == 1:
        raise NotApplicableError("one rank has nothing to gather")
    if len(set(p.rows)) > 1 and chunks != 1:
        raise NotApplicableError(f"shards of {p.rows} rows are sent whole, not in {chunks} parts: use chunks=1")
    if send == "at_once" and world == 2:
        raise NotApplicableError("there is one peer to send to")
    o = Operands("shard", p)
    d, x, gathered, box = o.d, o.x, o.gathered, o.rows("box", p.m, "symmetric")
    begin = starts(p.rows)
    own = (lookup(begin, RANK), lookup(p.rows, RANK))
    compute = d.lane("compute")
    readers = [compute, d.lane("copy out", "copy")] if gathered else [compute]
    whole: list[tuple[int, Index]] = [(0, lookup(p.rows, RANK))]
    pieces = whole if chunks == 1 else cut(p.rows[0], chunks, what="rows of a shard")
    arrived = d.signals("arrived", world * len(pieces))
    free = d.signals("free", world * len(readers))

    o.multiply_all(compute, x.part(), own)
    if gathered:
        readers[-1].copy(x.data.part(), gathered.part(rows=own))
    for distance in range(1, world):
        to, source = peer(world, distance), peer(world, -distance)
        sender = d.lane(f"to +{distance}" if send == "at_once" else "to peers", "copy")
        for i in range(len(readers)):
            sender.wait(free, to * len(readers) + i, previous=True)
        for c, (first, count) in enumerate(pieces):
            target = box.part((lookup(begin, RANK) + first, count), at=to)
            carry(sender, x.part((first, count)), target, by).set(arrived, RANK * len(pieces) + c, at=to)
            rows = (lookup(begin, source) + first, lookup(p.rows, source) if chunks == 1 else count)
            came = source * len(pieces) + c
            compute.wait(arrived, came)
            o.multiply_all(compute, box.part(rows), rows)
            if gathered:
                readers[-1].wait(arrived, came).copy(box.data.part(rows=rows), gathered.part(rows=rows))
        for i, reader in enumerate(readers):
            reader.set(free, RANK * len(readers) + i, at=source)
    return d.schedule()
