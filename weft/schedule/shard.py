"""Shard overlap: compute on one's own shard while the others' arrive, one whole shard (or `chunks` parts of it) at a time.

    to +i:    wait until rank + i has read the previous run's rows; put the shard into its `box`; raise `arrived` there
    compute:  own rows of y; then for each other rank, as its rows arrive: those rows of y; raise `free` at their sender

Shards are put, not fetched: a put starts from the caller's own tensor, so that nothing is copied into symmetric memory
first, and it needs no word from the owner that the shard is ready. Everybody first sends to the right neighbour, so that
no two send to one.

Sources: torch's asynchronous tensor parallelism and distributed GEMM fetch shards this way; "Design Space Exploration of DMA
based Finer-Grain Compute Communication Overlap", II-B, calls it shard-based overlap.
"""

from __future__ import annotations

from typing import Literal

from weft.schedule.expr import RANK, lookup
from weft.schedule.operands import all_gather_matmul_operands, cut, peer, starts
from weft.schedule.problem import AllGatherMatmul, NotApplicableError, builder
from weft.schedule.schedule import Schedule


@builder(AllGatherMatmul, chunks=(1, 2, 4), lanes=(1, 2), by=("dma", "kernel"))
def shard(p: AllGatherMatmul, *, chunks: int, lanes: int, by: Literal["dma", "kernel"]) -> Schedule:
    """chunks: parts of a shard with a signal each. lanes: streams on which the GEMMs take turns, so that the last wave of
    one is filled up by the first of the next."""
    world = p.world_size
    if world == 1:
        raise NotApplicableError("one rank has nothing to gather")
    if len(set(p.rows)) > 1 and chunks > 1:
        raise NotApplicableError(f"shards of {p.rows} rows are sent whole, not in {chunks} parts")
    if lanes > 1 and (world - 1) * chunks < lanes - 1:
        raise NotApplicableError(f"{(world - 1) * chunks} chunks to receive do not keep {lanes} lanes busy")
    d, x, ws, ys, gathered = all_gather_matmul_operands("shard", p)
    box = d.buffer("box", p.m, p.k, p.dtype, "symmetric")
    begin = starts(p.rows)
    own = (lookup(begin, RANK), lookup(p.rows, RANK))
    compute = [d.lane(f"compute {i}" if i else "compute") for i in range(lanes)]
    readers = [*compute, d.lane("copy out", "copy")] if gathered else compute
    arrived = d.signals("arrived", world * chunks)
    free = d.signals("free", world * len(readers))

    for w, y in zip(ws, ys, strict=True):
        compute[0].matmul(y.part(rows=own), x.part(), w.part())
    if gathered:
        readers[-1].copy(x.part(), gathered.part(rows=own))
    for distance in range(1, world):
        to, source = peer(world, distance), peer(world, -distance)
        pieces = cut(p.rows[0], chunks, what="rows of a shard") if chunks > 1 else [(0, lookup(p.rows, RANK))]
        sender = d.lane(f"to +{distance}", "copy")
        reading = {((distance - 1) * chunks + c + 1) % lanes for c in range(chunks)} | set(range(lanes, len(readers)))
        for i in sorted(reading):
            sender.wait(free, to * len(readers) + i, previous=True)
        for c, (first, count) in enumerate(pieces):
            target = box.part(rows=(lookup(begin, RANK) + first, count), at=to)
            sender.copy(x.part(rows=(first, count)), target, by).set(arrived, RANK * chunks + c, at=to)
            rows = (lookup(begin, source) + first, count if chunks > 1 else lookup(p.rows, source))
            consumer = compute[((distance - 1) * chunks + c + 1) % lanes].wait(arrived, source * chunks + c)
            for w, y in zip(ws, ys, strict=True):
                consumer.matmul(y.part(rows=rows), box.part(rows=rows), w.part())
            if gathered:
                readers[-1].wait(arrived, source * chunks + c).copy(box.part(rows=rows), gathered.part(rows=rows))
        for i in sorted(reading):
            readers[i].set(free, RANK * len(readers) + i, at=source)
    return d.schedule()
