"""GEMM + MoE combine: after a dispatch, multiply each row by its expert's weights and send it back to the rank of its token.

    h         the rows that a rank has received, sorted by local expert, then by source rank
    counts    two tables [ranks, experts], one below the other. The first has the number of rows of h from each rank for each
              local expert. The second has the number of this rank's tokens for each expert of each rank
    y         the results for this rank's tokens, sorted by global expert, so that the results from each rank are adjacent

Each rank computes all sizes from its own two tables: the number of rows that it sends to each rank, and the place of
each block of its result. So ranks exchange no sizes before the GEMMs. If the tables of two ranks contradicted each
other, some rows would stay unwritten. So ranks send their tables with the results, and a receiver fills a peer's rows
with NaN if the peer's table contradicts its own (`weft.schedule.steps.Agree`).

One grouped GEMM kernel has a group of rows for each (source rank, expert). It reads rows of h in place and writes the
rows for one rank contiguously. Two orders of computation overlap with the exchange:

    combine            source by source: rank r multiplies the rows of rank r + 1, then of rank r + 2, and so on, its own rows
                       last. So no two ranks send to one rank together, and rows travel while the own rows are multiplied
    combine_by_expert  expert by expert, a few experts at a time for all sources. Every weight is read once, but the rows of the
                       last experts are sent after all GEMMs. With one expert, its GEMM needs no groups, so cuBLAS runs it

There are three ways to send results:

    dma      the receiver's copy engine copies them from the sender's memory into the result
    kernel   a kernel of the sender puts them into a slot on the receiver, which copies them into the result. The CPU need not
             know the sizes
    store    the GEMM itself stores them in the slot on the receiver, without a copy on the sender

Sources: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 4.4 (staggered producers,
stores into a peer's memory), 7.1 and 7.2 (all-to-all, experts).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from weft.builders.operands import peer, split
from weft.builders.partial_products import By
from weft.builders.problems.matmul_all_to_all import MatmulAllToAll
from weft.builders.registry import NotApplicableError, builder, require_peers
from weft.schedule.expr import RANK, Expr, Index, total
from weft.schedule.kernels import LibraryGroupedMatmul, OnlyExpertMatmul, Permute, ReturningMatmul
from weft.schedule.regions import Buffer
from weft.schedule.schedule import Draft, LaneDraft, Schedule
from weft.schedule.steps import Agree, Compute, Copy, ReadBy, Region

_TILE = "t"


@builder(MatmulAllToAll)
def serial(p: MatmulAllToAll) -> Schedule:
    """Run cuBLAS's GEMMs, sort the rows by source rank, then run NCCL's all-to-all.

    If the problem is `exact`, the CPU knows the sizes, because it has read them in the dispatch.
    """
    d, world, expert = _Combine("serial", p), p.world_size, Expr(_TILE)
    lane, of_expert = (
        d.learn(d.lane("compute"), "known" if p.exact else "host"),
        (d.first_in_h(0, expert), d.of_expert(expert)),
    )
    room = sum(p.rows)
    made = ordered = d.y if world == 1 else d.buffer("made", room, p.n, p.dtype, "scratch")
    gemm = d.matmul(made.part(rows=of_expert), of_expert, expert)
    lane.tiles(LibraryGroupedMatmul(), _TILE, p.experts, gemm)
    if world == 1:
        return d.schedule()
    if p.experts > 1:
        ordered = d.buffer("ordered", room, p.n, p.dtype, "scratch")
        begin: Index = 0
        for source in range(world):
            rows, target = d.received(source, expert, 1), begin + d.received(source, 0, expert)
            computed = made.part(rows=(d.first_in_h(source, expert), rows))
            copy = Copy(computed, ordered.part(rows=(target, rows)), "kernel")
            lane.tiles(Permute(), _TILE, p.experts, copy)
            begin = begin + d.received(source)
    to_each, from_each = ([of(rank) for rank in range(world)] for of in (d.received, d.given))
    lane.exchange(ordered.part(rows=(0, d.came)), d.y.part(), to_each, from_each, known=p.exact)
    return d.schedule()


@builder(MatmulAllToAll, chunks=(1, 2, 4), by=("dma", "kernel", "store"))
def combine(p: MatmulAllToAll, *, chunks: int, by: By) -> Schedule:
    """Multiply and send back the rows of one rank after the other.

    chunks: the number of groups into which a rank's experts are divided; each group is multiplied and sent separately.
    by: how results are sent: "dma", "kernel" or "store" (see the top of this file).
    """
    d = _Sending("combine", p, by, chunks)
    for distance in range(1, p.world_size):
        for c, piece in enumerate(d.pieces):
            d.multiply(distance, 1, *piece)
            d.send([distance], c)
    d.multiply(0, 1, 0, p.experts)
    return d.done()


@builder(MatmulAllToAll, chunks=(1, 2, 4, 8), by=("dma", "kernel"))
def combine_by_expert(p: MatmulAllToAll, *, chunks: int, by: Literal["dma", "kernel"]) -> Schedule:
    """Multiply the rows of all ranks and send back the results, a few experts at a time.

    chunks: the number of groups into which a rank's experts are divided. With 1, nothing overlaps. Then copies by
        kernel run after the GEMM in the same lane, so the GEMM can use all compute units. If a rank has one expert,
        cuBLAS multiplies the rows of all ranks.
    by: how results are sent: "dma" or "kernel" (see the top of this file).
    """
    if by == "kernel" and chunks == p.experts == 1:
        return _of_only_expert(p)
    d = _Sending("combine_by_expert", p, by, chunks, one_lane=by == "kernel" and chunks == 1)
    for c, piece in enumerate(d.pieces):
        d.multiply(0, p.world_size, *piece)
        d.send(range(1, p.world_size), c)
    return d.done()


def _of_only_expert(p: MatmulAllToAll) -> Schedule:
    """Return `combine_by_expert` for ranks with one expert: one GEMM of cuBLAS, then one launch that sends the products.

    The first rows of the buffer `made` have the products, and the other rows are slots for the results from peers. Both are in
    one buffer, so that one launch can copy them into y.
    """
    require_peers(p)
    d, world, room = _Combine("combine_by_expert", p), p.world_size, p.world_size * p.most
    made = d.buffer("made", room + (world - 1) * p.most, p.n, p.dtype, "symmetric")
    sent = d.buffer("sent", world**2, 1, "int64", "symmetric")
    credit, there, lane = d.signals("credit", world - 1), d.signals("there", world - 1), d.lane("compute")
    slots = [(number, room + number * p.most, peer(world, 1 + number)) for number in range(world - 1)]
    d.learn(lane, "device")
    rows = 0, d.of_expert(0)
    kernel = OnlyExpertMatmul(d.counts.name, d.h.name, d.weights.name, made.name, room)
    lane.tiles(kernel, _TILE, 1, d.matmul(made.part(rows=rows), rows, Expr(_TILE)))
    for number, _, _ in slots:  # from here on one launch (`weft.schedule.launches.RoundTrip`)
        lane.wait(credit, number, previous=True)
    d.tell(lane, sent)
    for _, slot, to in slots:
        products = made.part(rows=(d.first_in_h(to, 0), d.received(to)))
        lane.copy(products, made.part(rows=(slot, products.rows), at=to), "kernel")
    for number, _, to in slots:
        lane.set(there, number, at=to)
    own = made.part(rows=(d.first_in_h(RANK, 0), d.received(RANK)))
    lane.copy(own, d.y.part(rows=(d.first_in_y(RANK), own.rows)), "kernel")
    for number, _, _ in slots:
        lane.wait(there, number)
    for number, slot, _ in slots:
        source = peer(world, -1 - number)
        place = d.y.part(rows=(d.first_in_y(source), d.given(source)))
        lane.copy(made.part(rows=(slot, place.rows)), place, "kernel")
    lane.then(Agree(d.counts.part(rows=(world, world)), sent.part(), d.y.part()))
    for number, _, _ in slots:
        lane.set(credit, number, at=peer(world, -1 - number))
    return d.schedule()


class _Combine(Draft):
    """A `Draft` (a schedule under construction) with the caller's tensors as buffers, and expressions for dynamic
    sizes.
    """

    def __init__(self, name: str, p: MatmulAllToAll) -> None:
        super().__init__(name, p.world_size)
        self.p, self._all, world = p, p.world_size * p.experts, p.world_size
        self._before: dict[Index, Index] = {}  # local expert -> the first row in h of its rows
        self.counts = self.buffer("counts", 2 * world, p.experts, "int64", "scratch")
        came = [[n for of_rank in p.splits for n in of_rank[r * p.experts : (r + 1) * p.experts]] for r in range(world)]
        self.holds(self.counts, [[*came[r], *p.splits[r]] for r in range(world)])
        self.came = total("counts", 0, self._all)
        self.h = self.buffer("h", self.came, p.k, p.dtype, "input")
        self._received = self.buffer("received", world, p.experts, "int64", "input")
        self._splits = self.buffer("splits", world, p.experts, "int64", "input")
        self.weights = self.buffer("w", p.experts * p.k, p.n, p.dtype, "input")
        self.y = self.buffer("y", total("counts", self._all, 2 * self._all), p.n, p.dtype, "output")

    def learn(self, lane: LaneDraft, by: ReadBy, also_to: Sequence[Region] = ()) -> LaneDraft:
        """Append the copies of `received` and `splits` into `counts`, and the step that reads sizes from `counts`
        (`Read`).

        also_to: further regions into which `received` is copied, such as regions of peers that compare it with their
            own table.
        """
        world = self.world_size
        for place in (self.counts.part(rows=(0, world)), *also_to):
            lane.copy(self._received.part(), place, "kernel")
        return lane.copy(self._splits.part(), self.counts.part(rows=(world, world)), "kernel").read(self.counts, by)

    def tell(self, lane: LaneDraft, sent: Buffer) -> None:
        """Append the copies of the table of received rows into `sent` of every rank, which compares it with its own table."""
        world = self.world_size
        for distance in range(world):
            to = peer(world, distance) if distance else RANK
            lane.copy(self.counts.part(rows=(0, world)), sent.part(rows=(RANK * world, world), at=to), "kernel")

    def received(self, source: Index, first: Index = 0, count: Index | None = None) -> Index:
        """Return the number of rows of h from rank `source` for the local experts first .. first + count - 1. If
        `count` is None, the range ends at the last expert.
        """
        return self._of_row(source, first, count)

    def given(self, rank: Index, first: Index = 0, count: Index | None = None) -> Index:
        """Return the number of this rank's tokens for the experts first .. first + count - 1 of rank `rank`. If `count`
        is None, the range ends at the last expert.
        """
        return self._of_row(self.world_size + rank, first, count)

    def of_expert(self, expert: Index) -> Index:
        """Return the number of rows of h for local expert `expert`."""
        return total("counts", expert, self._all, self.p.experts)

    def first_in_h(self, source: Index, expert: Index) -> Index:
        """Return the first row in h of the rows from rank `source` for local expert `expert`."""
        if (begin := self._before.get(expert)) is None:  # cached, because it does not depend on the source
            begin = 0
            for any_source in range(self.world_size):
                begin = begin + self.received(any_source, 0, expert)
            self._before[expert] = begin
        return begin + total("counts", expert, source * self.p.experts + expert, self.p.experts)

    def first_in_y(self, rank: Index, expert: Index = 0) -> Index:
        """Return the first row in y of the results from expert `expert` of rank `rank`."""
        return total("counts", self._all, self._all + rank * self.p.experts + expert)

    def matmul(self, out: Region, rows: tuple[Index, Index], expert: Index) -> Compute:
        weights = self.weights.part(rows=(expert * self.p.k, self.p.k))
        return Compute("matmul", out, (self.h.part(rows=rows), weights))

    def _of_row(self, row: Index, first: Index, count: Index | None) -> Index:
        begin = row * self.p.experts + first
        return total("counts", begin, begin + (self.p.experts if count is None else count))


class _Sending(_Combine):
    """A `_Combine` that stores the results for each peer in a slot (a block of rows), and sends the slot in parts.

    pieces: the local experts whose results are in each part, as (first expert, number of experts).
    one_lane: True to put the copies by kernel into the lane of the GEMMs.
    """

    def __init__(self, name: str, p: MatmulAllToAll, by: By, chunks: int, *, one_lane: bool = False) -> None:
        super().__init__(name, p)
        require_peers(p)
        if by == "dma" and not p.exact:
            raise NotApplicableError(
                "the CPU must not wait for sizes in this call, but copy engines need sizes that the CPU knows: "
                "use by=kernel or by=store"
            )
        self.pieces = split(p.experts, chunks, what="experts of a rank")
        read_by: ReadBy = "host" if by == "dma" else "device"
        self._by, peers = by, p.world_size - 1
        room = peers * p.most, p.n, p.dtype
        if by == "kernel":
            self._outbox, self._inbox = (
                self.buffer("outbox", *room, "scratch"),
                self.buffer("inbox", *room, "symmetric"),
            )
        else:  # one buffer for both: with dma it is in the sender's memory, with store in the receiver's
            self._outbox = self._inbox = self.buffer("inbox" if by == "store" else "outbox", *room, "symmetric")
        self._sent = self.buffer("sent", p.world_size**2, p.experts, "int64", "symmetric")
        self._credit, self._there = self.signals("credit", peers), self.signals("there", peers * chunks)
        table = (RANK * p.world_size, p.world_size)
        own, *others = (self._sent.part(rows=table, at=peer(p.world_size, d)) for d in range(p.world_size))
        self._compute = self.lane("compute")
        if by != "kernel":
            self._wait_for_room(self._compute)
        self._one_lane, self._mover = one_lane, self._compute
        self.learn(self._compute, read_by, [] if one_lane else [own] if by == "kernel" else [own, *others])
        if by != "store" and not one_lane:
            told = self.signals("told", 1)
            self._compute.set(told)
            self._mover = self.lane("from peers" if by == "dma" else "to peers", "copy").wait(told)
            self._mover.read(self.counts, read_by)
        if by == "kernel" and not one_lane:
            self._computed = self.signals("computed", peers * chunks)
            self._wait_for_room(self._mover)
            for place in others:
                self._mover.copy(self._received.part(), place, "kernel")

    def _wait_for_room(self, lane: LaneDraft) -> None:
        for i in range(self.world_size - 1):
            lane.wait(self._credit, i, previous=True)

    def multiply(self, first_source: int, n_sources: int, first: int, count: int) -> None:
        """Append a GEMM of the rows from `n_sources` consecutive ranks for local experts first .. first + count - 1.

        first_source: the first of these ranks, as the distance after this rank in the ring.
        """
        p, expert = self.p, Expr(_TILE) + first
        at = peer(p.world_size, first_source) if self._by == "store" else RANK
        kernel = ReturningMatmul(
            self.counts.name, self.h.name, self.weights.name, self.y.name, self._outbox.name, at, p.experts, p.most,
            first_source, n_sources, first, count,
        )  # fmt: skip
        segments = [self._segment(first_source + i, expert, at) for i in range(n_sources)]
        self._compute.tiles(kernel, _TILE, count, *segments)

    def _segment(self, distance: int, expert: Index, at: Index) -> Compute:
        source = peer(self.world_size, distance) if distance else RANK
        rows = self.received(source, expert, 1)
        if distance:
            begin = self._slot(distance) + self.received(source, 0, expert)
            out = self._outbox.part(rows=(begin, rows), at=at)
        else:
            out = self.y.part(rows=(self.first_in_y(RANK, expert), rows))
        return self.matmul(out, (self.first_in_h(source, expert), rows), expert)

    def send(self, distances: Sequence[int], chunk: int) -> None:
        """Append the steps that send the results of experts `pieces[chunk]`.

        distances: the receiving ranks, as distances after this rank in the ring.
        """
        piece, first = self.pieces[chunk], self.pieces[chunk][0]
        numbers = {distance: (distance - 1) * len(self.pieces) + chunk for distance in distances}
        if self._by == "kernel":
            if self._one_lane:  # from here on one launch (`weft.schedule.launches.RoundTrip`)
                self._wait_for_room(self._compute)
                self.tell(self._compute, self._sent)
            else:
                computed = numbers[distances[0]]
                self._compute.set(self._computed, computed)
                self._mover.wait(self._computed, computed)
            for distance in distances:
                to = peer(self.world_size, distance)
                rows = self._slot(distance) + self.received(to, 0, first), self.received(to, *piece)
                self._mover.copy(self._outbox.part(rows=rows), self._inbox.part(rows=rows, at=to), "kernel")
            for distance, number in numbers.items():
                self._mover.set(self._there, number, at=peer(self.world_size, distance))
            return
        for distance, number in numbers.items():
            self._compute.set(self._there, number, at=peer(self.world_size, distance))
            if self._by == "dma":
                self._mover.wait(self._there, number)
                self._place(self._mover, distance, piece)

    def done(self) -> Schedule:
        """Append the copies of arrived results into y, the comparison of tables, and the signals that slots are free.
        Return the schedule.
        """
        chunks, world = len(self.pieces), self.world_size
        if self._by == "dma":
            placed = self.signals("placed", 1)
            self._mover.set(placed)
            self._compute.wait(placed)
        else:
            for number in range((world - 1) * chunks):
                self._compute.wait(self._there, number)
            for distance in range(1, world):  # one launch
                self._place(self._compute, distance, (0, self.p.experts))
        self._compute.then(Agree(self.counts.part(rows=(world, world)), self._sent.part(), self.y.part()))
        for distance in range(1, world):
            self._compute.set(self._credit, distance - 1, at=peer(world, -distance))
        return self.schedule()

    def _place(self, lane: LaneDraft, distance: int, piece: tuple[int, int]) -> None:
        """Append the copy of a peer's results into y. distance: the peer is `distance` places before this rank in the
        ring. piece: the peer's experts that computed these results, as (first expert, number of experts).
        """
        source, (first, _) = peer(self.world_size, -distance), piece
        rows = self.given(source, *piece)
        begin, at = self._slot(distance) + self.given(source, 0, first), source if self._by == "dma" else RANK
        target = self.y.part(rows=(self.first_in_y(source, first), rows))
        lane.copy(self._inbox.part(rows=(begin, rows), at=at), target, "dma" if self._by == "dma" else "kernel")

    def _slot(self, distance: int) -> int:
        """Return the first row of slot number `distance`.

        In the outbox, the slot has rows for the rank `distance` places after this rank in the ring. In the inbox, it
        has rows from the rank `distance` places before this rank.
        """
        return (distance - 1) * self.p.most
