"""Tokens go to the ranks of their experts and are multiplied there: mixture of experts, with sizes that only the run knows.

    splits   what this rank sends to each expert of all ranks, for tokens sorted by expert
    counts   the splits of all ranks, [ranks, experts of all ranks]: everybody puts his own into everybody's
    inbox    a slot for each other rank, with room for what it may send

    to peers: read splits; to each peer its tokens, in one piece, into the slot there; raise `arrived`
    compute:  exchange splits; read counts; the own tokens, in place; then, as they arrive, those of the others

The GEMMs are one kernel for all experts of a source. It puts rows where they belong in the result: by expert, and for one
expert by the rank that they come from. So nothing is put in order before or after, and only what leaves the rank is copied.

Copies by kernels take their sizes from the device. Copy engines take them from the host, which reads the splits once they
are computed: while it waits nothing can be queued behind. Where the result has exactly the rows that arrive (`exact`) the
host reads anyway.

Sources: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", II-B (all-to-all before the
GEMMs of experts, asymmetric traffic); "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute &
Collectives", 7.4 (all-to-all of experts).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from weft.schedule.expr import RANK, Expr, Index, total
from weft.schedule.operands import peer
from weft.schedule.problem import AllToAllMatmul, NotApplicableError, builder
from weft.schedule.schedule import Draft, LaneDraft, Schedule
from weft.schedule.steps import Compute, Copy, Region

_TILE = "t"


@builder(AllToAllMatmul)
def serial(p: AllToAllMatmul) -> Schedule:
    """The library's all-to-all; what came is put in the order of experts; then their GEMMs."""
    d, world, experts = _Dispatch("serial", p, "scratch"), p.world_size, p.experts
    room = sum(p.rows)
    unordered, ordered = (d.buffer(name, room, p.k, p.dtype, "scratch") for name in ("unordered", "ordered"))
    lane = d.lane("compute").all_gather(d.splits.part(), d.counts.part()).read(d.counts, "host")
    to_each = tuple(d.sent(RANK, to) for to in range(world))
    from_each = tuple(d.sent(source, RANK) for source in range(world))
    lane.exchange(d.tokens.part(), unordered.part(rows=(0, d.arriving)), to_each, from_each)
    expert: Index = Expr(_TILE)
    begin: Index = 0
    for source in range(world):
        rows = d.rows(source, expert)
        arrived = unordered.part(rows=(begin + d.first_of_block(source, expert), rows))
        target = ordered.part(rows=(d.first_of_result(source, expert), rows))
        lane.tiles("permute", _TILE, experts, Copy(arrived, target, "kernel"))
        begin = begin + d.sent(source, RANK)
    of_expert = (d.first_of_result(0, expert), d.rows_of_expert(expert))
    lane.tiles("grouped_matmul", _TILE, experts, d.matmul(of_expert, ordered.part(rows=of_expert), expert))
    d.tell(lane)
    return d.schedule()


@builder(AllToAllMatmul, by=("dma", "kernel"), rest=("each", "together"))
def dispatch(p: AllToAllMatmul, *, by: Literal["dma", "kernel"], rest: Literal["each", "together"]) -> Schedule:
    """rest: a GEMM for the tokens of each other rank when they are there, or one when all are."""
    world, experts = p.world_size, p.experts
    if world == 1:
        raise NotApplicableError("one rank has nobody to send to")
    if rest == "together" and world == 2:
        raise NotApplicableError("the rest comes from one rank")
    if by == "dma" and not p.exact:
        raise NotApplicableError("copy engines take sizes from the host, which may not wait for them here")
    d = _Dispatch("dispatch", p, "symmetric")
    inbox = d.buffer("inbox", (world - 1) * p.most, p.k, p.dtype, "symmetric")
    known, arrived, free = (d.signals(name, world) for name in ("known", "arrived", "free"))
    told = d.signals("told", 1)
    compute, sender = d.lane("compute"), d.lane("to peers", "copy")
    own_row = (RANK, 1)
    for distance in range(1, world):
        to = peer(world, distance)
        compute.wait(free, to, previous=True)
        compute.copy(d.splits.part(), d.counts.part(rows=own_row, at=to), "kernel").set(known, RANK, at=to)
    compute.copy(d.splits.part(), d.counts.part(rows=own_row), "kernel")
    for distance in range(1, world):
        compute.wait(known, peer(world, -distance))
    compute.set(told)

    sender.wait(told).read(d.counts, "host" if by == "dma" else "device")
    for distance in range(1, world):
        to = peer(world, distance)
        mine = d.tokens.part(rows=(d.first_sent(to), d.sent(RANK, to)))
        slot = inbox.part(rows=((world - 1 - distance) * p.most, d.sent(RANK, to)), at=to)
        sender.copy(mine, slot, by).set(arrived, RANK, at=to)

    compute.read(d.counts, "host" if p.exact else "device")
    d.tell(compute)
    expert = Expr(_TILE)
    own = (d.first_sent(RANK) + d.first_of_block(RANK, expert), d.rows(RANK, expert))
    result = (d.first_of_result(RANK, expert), own[1])
    compute.tiles("grouped_matmul", _TILE, experts, d.matmul(result, d.tokens.part(rows=own), expert))

    def of_source(distance: Index, expert: Index) -> Compute:
        source = (RANK + (world - distance)) % world
        rows = d.rows(source, expert)
        theirs = inbox.part(rows=((world - 1 - distance) * p.most + d.first_of_block(source, expert), rows))
        return d.matmul((d.first_of_result(source, expert), rows), theirs, expert)

    if rest == "each":
        for distance in range(1, world):
            compute.wait(arrived, peer(world, -distance))
            compute.tiles("grouped_matmul", _TILE, experts, of_source(distance, expert))
    else:
        for distance in range(1, world):
            compute.wait(arrived, peer(world, -distance))
        one_of = of_source(Expr(_TILE) // experts + 1, Expr(_TILE) % experts)
        compute.tiles("grouped_matmul", _TILE, (world - 1) * experts, one_of)
    for distance in range(1, world):
        compute.set(free, RANK, at=peer(world, -distance))
    return d.schedule()


class _Dispatch(Draft):
    """The caller's tensors, and the numbers that follow from `counts`."""

    def __init__(self, name: str, p: AllToAllMatmul, counts: Literal["scratch", "symmetric"]) -> None:
        super().__init__(name, p.world_size)
        self.p, self._all = p, p.world_size * p.experts
        flat = [n for of_rank in p.splits for n in of_rank]
        self.counts = self.buffer("counts", p.world_size, self._all, "int64", counts)
        self.holds(self.counts, [flat] * p.world_size)
        self.arriving = self._of_all(lambda source: self.sent(source, RANK))
        self.tokens = self.buffer("tokens", self._between(RANK, 0, self._all), p.k, p.dtype, "input")
        self.splits = self.buffer("splits", 1, self._all, "int64", "input")
        self.weights = self.buffer("w", p.experts * p.k, p.n, p.dtype, "input")
        self.y = self.buffer("y", self.arriving, p.n, p.dtype, "output")
        self.received = self.buffer("received", p.world_size, p.experts, "int64", "output")

    def rows(self, source: Index, expert: Index) -> Index:
        """From `source`, for a local expert."""
        first = self._mine(source) + expert
        return total("counts", first, first + 1)

    def rows_of_expert(self, expert: Index) -> Index:
        first = RANK * self.p.experts + expert
        return total("counts", first, self.p.world_size * self._all, self._all)

    def sent(self, source: Index, to: Index) -> Index:
        return self._between(source, to * self.p.experts, (to + 1) * self.p.experts)

    def first_sent(self, to: Index) -> Index:
        """Where in this rank's tokens those for rank `to` begin."""
        return self._between(RANK, 0, to * self.p.experts)

    def first_of_block(self, source: Index, expert: Index) -> Index:
        """Where in what `source` sends here a local expert's rows begin."""
        return total("counts", self._mine(source), self._mine(source) + expert)

    def first_of_result(self, source: Index, expert: Index) -> Index:
        """Where in y the rows of a local expert that come from `source` begin."""
        experts_before = self._of_all(lambda any_source: self.first_of_block(any_source, expert))
        first = RANK * self.p.experts + expert
        return experts_before + total("counts", first, source * self._all + first, self._all)

    def matmul(self, result: tuple[Index, Index], x: Region, expert: Index) -> Compute:
        weights = self.weights.part(rows=(expert * self.p.k, self.p.k))
        return Compute("matmul", self.y.part(rows=result), (x, weights))

    def tell(self, lane: LaneDraft) -> None:
        """The caller learns how many rows came, from whom and for which expert."""
        block = self.counts.part(cols=(RANK * self.p.experts, self.p.experts))
        lane.copy(block, self.received.part(), "kernel")

    def _of_all(self, number_of: Callable[[int], Index]) -> Index:
        """The sum over sources."""
        result: Index = 0
        for source in range(self.p.world_size):
            result = result + number_of(source)
        return result

    def _between(self, source: Index, first: Index, end: Index) -> Index:
        row = source * self._all
        return total("counts", row + first, row + end)

    def _mine(self, source: Index) -> Index:
        """Of the row of `source` in counts, where this rank's experts begin."""
        return source * self._all + RANK * self.p.experts
