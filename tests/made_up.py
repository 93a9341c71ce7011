"""A schedule that somebody made up: one builder, and nothing else in the house knows of it.

The tests register it for as long as they need it (`registered`) and run, simulate, verify, trace and plan with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from weft.schedule import AllGatherMatmul, NotApplicableError, Schedule, builder, lookup, unregister
from weft.schedule.operands import all_gather_matmul_operands, peer, starts


def ring(p: AllGatherMatmul, *, by: Literal["dma", "kernel"]) -> Schedule:
    """Everybody loads from the left neighbour only, what that has just got itself: W - 1 hops, a signal for each.

        pull:     own shard into the own box; for each hop, when the left one has the shard: load it, tell the right one
        compute:  own rows of y; then the rows of each shard that has come

    A box has one writer, its owner, and besides the owner one reader, on the right; `free` says that the reader is done.
    """
    if p.world_size == 1:
        raise NotApplicableError("one rank has nothing to gather")
    d, x, ws, ys, gathered = all_gather_matmul_operands("ring", p)
    box = d.buffer("box", p.m, p.k, p.dtype, "symmetric")
    there, here, free = d.signals("there", p.world_size - 1), d.signals("here", p.world_size - 1), d.signals("free", 1)
    left, right = peer(p.world_size, -1), peer(p.world_size, 1)
    compute, pull = d.lane("compute"), d.lane("pull", "copy")
    for hop in range(p.world_size):
        whose = peer(p.world_size, -hop)
        rows = (lookup(starts(p.rows), whose), lookup(p.rows, whose))
        if hop == 0:
            own = rows
            pull.wait(free, previous=True).copy(x.part(), box.part(rows=own), by)
        else:
            pull.wait(there, hop - 1).copy(box.part(rows=rows, at=left), box.part(rows=rows), by).set(here, hop - 1)
            compute.wait(here, hop - 1)
        if hop < p.world_size - 1:
            pull.set(there, hop, at=right)
        for w, y in zip(ws, ys, strict=True):
            compute.matmul(y.part(rows=rows), box.part(rows=rows) if hop else x.part(), w.part())
    pull.set(free, at=left)
    if gathered:
        compute.copy(box.part(), gathered.part(), "kernel")
    return d.schedule()


@contextmanager
def registered() -> Iterator[None]:
    """What a user does for good by writing `@builder(AllGatherMatmul, by=("dma", "kernel"))` above the function."""
    builder(AllGatherMatmul, by=("dma", "kernel"))(ring)
    try:
        yield
    finally:
        unregister(AllGatherMatmul, "ring")
