"""The steps of an output map's schedule: GEMMs, copies, sums and waits, derived from the destinations of the chunks.
The *whole output* is the output of the GEMM with the rows of all ranks, in rank order.

The schedule has these lanes:

    compute     GEMMs, chunk by chunk. They store chunks of `remote_map` in the peer's slot. If such a chunk also stays, the GEMM
                stores it locally, and a kernel then copies it into the peer's slot
    to peers    copy engines send chunks of `dma_map` in the order of completion. There are one or more such lanes
    sums        with add=reduce: adds arrived updates to chunks that are forwarded, concurrently with the GEMMs
    to sums     copies a chunk's only update into the result, where the GEMM accumulates its product
    to y        copies arrived chunks from slots into the result

T3's memory adds updates in place. GPU memory cannot, so every update is stored into a slot on the receiver, which adds
it. With add=gemm, the GEMM of the same chunk waits for the update and accumulates into it (beta = 1). With add=reduce,
a kernel adds the update after the GEMM, and the GEMM does not wait. Updates from several peers are reduced in fp32 in
ring order, starting with the rank before the receiver, so that the bits are reproducible.

With gemm=tracked, one kernel computes all chunks in order. It implements T3's tracker in software: it sets a chunk's
signal when all tiles of the chunk are stored, locally or in a peer's slot. The kernel cannot wait, so it requires
add=reduce.

A rank fills slots of a peer again only after the peer's signal `credit`. One signal covers all slots on the peer,
because the next run may use other slots for other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.builders.fetched import Fetched
from weft.builders.operands import peer
from weft.builders.output_map.memory import LANES, Gemm, SharedMemory
from weft.builders.output_map.routes import Routes, Send
from weft.builders.partial_products import Add, Chunk, PartialProducts
from weft.builders.tracked_tiles import TrackedTiles
from weft.schedule.expr import RANK, Index, lookup
from weft.schedule.kernels import TrackedMatmul
from weft.schedule.schedule import LaneDraft
from weft.schedule.steps import Buffer, Compute, CopyBy, Region, Resource, Set


def write(
    o: PartialProducts, routes: Routes, y: Buffer, *, gemm: Gemm, add: Add, by: CopyBy, engines: int = 1,
    sender: str = "to peers", fetched: Fetched | None = None,
) -> list[Chunk]:  # fmt: skip
    """Append the steps of all ranks' maps to the draft `o`. routes: the maps. Return (first row, number of rows) of
    each chunk of a rank's rows.

    y: the buffer of this rank's result.
    sender: the name of the lanes of copy engines.
    fetched: for an all-reduce, the all-gather by which all ranks copy the sums from `y`. Its signals then replace the
        credit signals: a rank fills a peer's slots again when the peer has copied the sums of the previous run.
    gemm, add, by, engines: as in `OutputMap.schedule`.

    Raise `ValueError` if GEMMs that accumulate into arriving chunks would wait for each other, and `NotApplicableError`
    if there are fewer rows than chunks.
    """
    plan = SharedMemory(
        o, routes, y, gemm, add, by, [sender] if engines == 1 else [f"{sender} {i}" for i in range(engines)], fetched
    )
    if routes.alike:
        ranks = [RANK, *(peer(routes.world, distance) for distance in range(1, routes.world))]
        _RankLanes(plan, 0, ranks.__getitem__, plan.d.lane).write()
        return plan.pieces
    for name in plan.lanes:
        plan.d.lane(name, _resource(name))
    for rank in range(routes.world):
        lanes: dict[str, LaneDraft] = {}

        def lane(name: str, resource: Resource, lanes: dict[str, LaneDraft] = lanes) -> LaneDraft:
            return lanes.setdefault(name, LaneDraft(name, resource))

        def at(other: int, rank: int = rank) -> Index:
            return RANK if other == rank else other

        _RankLanes(plan, rank, at, lane).write()
        only = lookup([int(other == rank) for other in range(routes.world)], RANK)
        for name, made in lanes.items():
            plan.d.lane(name).repeat("only", only, *made.steps)
    return plan.pieces


def _resource(lane: str) -> Resource:
    return LANES.get(lane, "copy")


class _RankLanes:
    """The lanes of one rank, to which `write` appends the steps of the rank.

    at: a function that converts a rank number to an expression. If one schedule describes all ranks, `rank` is 0, and
        number d means "d places after this rank in the ring".
    """

    def __init__(
        self, plan: SharedMemory, rank: int, at: Callable[[int], Index], lane: Callable[[str, Resource], LaneDraft]
    ) -> None:
        self.plan, self.routes, self.rank, self.at = plan, plan.routes, rank, at
        gather = plan.routes.collective == "all_gather"
        self.lane = lambda name: lane(name, _resource(name))
        routes = plan.routes
        self._sent_by_gemm = {
            send.to for place in routes.order[rank] for send in routes.sends(rank, place) if send.how == "remote_map"
        }
        self._opened: set[tuple[str, int]] = set()
        self._computed = self.routes.computed(rank)
        self._own = self._joined([] if gather else [p for p in self._computed if self.routes.owner(p) == rank])

    def _joined(self, own: list[int]) -> dict[int, list[int]]:
        """Return {first chunk: all chunks} for each group of this rank's own chunks that one GEMM computes. A chunk is given by
        its position in the whole output.
        """
        sources = {tuple(self._sources(place)) for place in own}
        begin = self._computed.index(own[0]) if own else 0
        together = len(sources) == 1 and sorted(own) == self._computed[begin : begin + len(own)]
        if together and (self.plan.add == "reduce" or sources == {()}):
            return {own[0]: own}
        return {place: [place] for place in own}

    def write(self) -> None:
        routes, rank, gather = self.routes, self.rank, self.routes.collective == "all_gather"
        by_time = sorted(routes.order[rank], key=lambda place: self.plan.times[rank, place])
        self.lane("compute")
        for send in (send for place in by_time for send in routes.sends(rank, place) if send.how == "dma_map"):
            self.lane(self.plan.sender(rank, send.to))
        for place in [] if self.plan.tiles else self._computed:
            if gather:
                self._compute_gathered(place)
            elif place in self._own:
                self._compute_own(place, self._rows(self._own[place]))
            elif routes.owner(place) != rank:
                self._compute_sent(place, *routes.sends(rank, place))
        if self.plan.tiles:
            self._compute_tracked(self.plan.tiles.kernel)
        if routes.sums and self.plan.add == "reduce":
            self._add_up()
        for place in by_time:
            self._send(place)
        if not routes.sums:
            self._receive()
        self._grant_credit()

    def _compute_gathered(self, place: int) -> None:
        """Append the GEMM of a chunk of an all-gather. For each entry `remote_map` that the output map has for the chunk, also
        append a copy by kernel to the peer.

        place: the chunk's position in the whole output.
        """
        compute, sends = self._multiply(place, self._result(place)), self.routes.sends(self.rank, place)
        if any(send.how == "dma_map" for send in sends):
            compute.set(self.plan.signals("computed"), self._number(place))
        for send in sends:
            if send.how == "remote_map":
                self._open(compute, send.to)
                self._sent(compute.copy(self._result(place), self._slot_at(place, send), "kernel"), place, send)

    def _compute_sent(self, place: int, send: Send) -> None:
        """Append the GEMM of a chunk that is then sent to another rank.

        place: the chunk's position in the whole output. send: the map's method, and the target rank.
        """
        plan, compute, sources = self.plan, self.lane("compute"), self._sources(place)
        # Copy engines that also send to rank `send.to` wait for this GEMM, and not for the credit.
        if send.to in self._sent_by_gemm:
            self._open(compute, send.to)
        if send.how == "remote_map":
            self._sent(self._multiply(place, self._slot_at(place, send)), place, send)
            return
        if sources and plan.add == "gemm":
            first, *others = self._arrived(compute, place)
            if others:
                compute.reduce(first, first, *others)
            self._multiply(place, first, add=True)
        else:
            self._multiply(place, self._kept(place))
        compute.set(plan.signals("computed"), self._number(place))

    def _compute_tracked(self, kernel: TrackedMatmul) -> None:
        """Append one tracked GEMM, which computes all chunks of this rank and signals finished tiles. It stores each chunk in a
        peer's slot, in the result, or in `made`, the buffer of chunks that later steps send or add.
        """
        plan, routes, rank, compute = self.plan, self.routes, self.rank, self.lane("compute")
        sends = [next((s for s in routes.sends(rank, p) if s.how == "remote_map"), None) for p in self._computed]
        for send in filter(None, sends):
            self._open(compute, send.to)
        tiles = TrackedTiles(plan.m, plan.o.p.n, routes.per_rank, [place % routes.per_rank for place in self._computed])
        owner = self._ranks(tiles, [routes.owner(place) for place in self._computed])
        at = self._ranks(tiles, [send.to if send else rank for send in sends])
        arrivals = [
            (send.to, *self._arrival(place, send)) if send else None
            for place, send in zip(self._computed, sends, strict=True)
        ]
        numbers = [
            self._signal(*one) if one else plan.kept[rank][place]
            for place, one in zip(self._computed, arrivals, strict=True)
        ]
        first, count = tiles.rows
        if routes.collective == "all_gather":
            out = plan.y.part(rows=(owner * plan.m + first, count), cols=tiles.cols)
        else:
            parts = [
                plan.slot(*one) if one else plan.made_first + plan.made_slots[rank, place]
                for place, one in zip(self._computed, arrivals, strict=True)
            ]
            out = plan.made.part(rows=(tiles.by_chunk(parts) * plan.m + first, count), cols=tiles.cols, at=at)
        x = plan.o.x.part(rows=(plan.o.first_row(owner, tiles.rows), count))
        matmul = Compute("matmul", out, (x, plan.o.w.part(cols=tiles.cols)))
        compute.tiles(kernel, "t", tiles.extent, matmul, Set(plan.signals("done").name, tiles.by_chunk(numbers), at))

    def _ranks(self, tiles: TrackedTiles, ranks: list[int]) -> Index:
        """Return, as an expression of the tile's index t, the rank that `ranks` gives for the chunk of tile t.

        ranks: a rank for each chunk, such as its owner or its destination, in the order of computation.
        """
        if len(set(ranks)) == 1:
            return self.at(ranks[0])
        if self.routes.alike:
            return (
                RANK + tiles.by_chunk([(rank - self.rank) % self.routes.world for rank in ranks])
            ) % self.routes.world
        return tiles.by_chunk(ranks)

    def _compute_own(self, place: int, rows: Chunk) -> None:
        """Append one GEMM for adjacent chunks that stay on this rank. With add=gemm, the GEMM adds its product to the sum of
        the other ranks' updates.

        place: the position of the first chunk in the whole output.
        rows: (first, count) of the rows to compute, counted from this rank's first row.
        """
        plan, compute, result = self.plan, self.lane("compute"), self._result(place, rows)
        if not self._sources(place) or plan.add == "reduce":
            self._multiply(place, self._kept(place, rows) if plan.own else result, rows)
            return
        if plan.adds_to_copy(self.rank, place):
            receiver, placed, piece = self.lane("to sums"), plan.signals("placed"), place % self.routes.per_rank
            (arrived,) = self._arrived(receiver, place)
            receiver.copy(arrived, result).set(placed, piece)
            compute.wait(placed, piece)
        else:
            compute.reduce(result, *self._arrived(compute, place), *plan.o.following_part(rows))
        self._multiply(place, result, add=True)
        self._summed(place)

    def _summed(self, place: int) -> None:
        """Append the signals that tell all ranks that a chunk of this rank's sums is complete, if an all-gather (`fetched`)
        follows.

        place: the chunk's position in the whole output.
        """
        if self.plan.fetched:
            self.plan.fetched.tell(self.lane("compute"), place % self.routes.per_rank)

    def _add_up(self) -> None:
        """Append the kernels that add the updates from other ranks to this rank's products. For chunks that this rank forwards,
        these kernels are in the separate lane `sums`, so that no GEMM waits for them.
        """
        plan, rank, compute = self.plan, self.rank, self.lane("compute")
        for place in sorted(self._computed, key=lambda place: plan.times[rank, place]):
            if not self._sources(place):
                continue
            if place in self._own:
                own = self._own[place]
                for places in [[one] for one in own] if plan.fetched else [own]:
                    rows = self._rows(places)
                    made = self._kept if plan.tiles or plan.own else self._result
                    parts = [made(places[0], rows), *self._arrived(compute, *places), *plan.o.following_part(rows)]
                    compute.reduce(self._result(places[0], rows), *parts)
                    self._summed(places[0])
            elif self.routes.owner(place) != rank:
                sums, kept = self._after_gemm("sums", place), self._kept(place)
                sums.reduce(kept, kept, *self._arrived(sums, place)).set(plan.signals("added"), self._number(place))

    def _send(self, place: int) -> None:
        """Append the copies by which copy engines send a chunk when it is complete.

        place: the chunk's position in the whole output.
        """
        plan, sources, seen = self.plan, self._sources(place), set[str]()
        added = self.routes.sums and bool(sources) and plan.add == "reduce"
        for send in self.routes.sends(self.rank, place):
            if send.how == "remote_map":
                continue
            sender = self.lane(plan.sender(self.rank, send.to))
            self._open(sender, send.to)
            forwarded = not self.routes.computes(self.rank, place)
            if sender.name not in seen:
                seen.add(sender.name)
                if forwarded:
                    self._arrived(sender, place)
                elif added:
                    sender.wait(plan.signals("added"), self._number(place))
                else:
                    self._after_gemm(sender.name, place)
            source = self._slot(self.rank, place) if forwarded else self._complete(place)
            self._sent(sender.copy(source, self._slot_at(place, send), plan.by), place, send)

    def _receive(self) -> None:
        """Append copies to the lane "to y": each copies a chunk that another rank sent, from its slot to the result.
        With gemm=tracked, the lane first copies this rank's own chunks to the result.
        """
        routes, rank, receiver = self.routes, self.rank, self.lane("to y")
        came = [(place, source) for place in routes.order[rank] for source in routes.sources(rank, place)]

        def when(one: tuple[int, int]) -> tuple[int, int, int]:
            place, source = one
            sent = self.plan.times[routes.representative(source, routes.landing(rank, place))]
            return sent, (rank - source) % routes.world, place

        for place in self._own if self.plan.tiles else ():
            rows = self._rows(self._own[place])
            for one in self._own[place]:
                self._after_gemm(receiver.name, one)
            receiver.copy(self._kept(place, rows), self._result(place, rows))
        for place, _ in sorted(came, key=when):
            (arrived,) = self._arrived(receiver, place)
            receiver.copy(arrived, self._result(place))

    def _grant_credit(self) -> None:
        plan, world = self.plan, self.routes.world
        if plan.fetched:
            return
        for distance in range(1, world):
            source = (self.rank - distance) % world
            for index, name in plan.grants(source, distance):
                self.lane(name).set(plan.signals("credit"), index, at=self.at(source))

    def _open(self, lane: LaneDraft, to: int) -> None:
        """Append to `lane` a wait until rank `to` allows this rank to fill slots on rank `to`. Each lane waits only
        once.

        Only one lane waits directly for the signal `credit` of rank `to`. If GEMMs fill some of the slots, it is the lane
        `compute`. Then lanes that forward chunks wait for the signal `opened`, which `compute` sets after its wait. Lanes that
        send the output of a GEMM need no wait for `opened`, because they wait for that GEMM.
        """
        if (lane.name, to) in self._opened:
            return
        self._opened.add((lane.name, to))
        behind_gemm = to in self._sent_by_gemm and lane.name != "compute"
        forwards = self.routes.collective == "all_gather" and to in self.routes.targets(self.rank)
        opened = (to - self.rank) % self.routes.world - 1
        if behind_gemm and forwards:
            lane.wait(self.plan.signals("opened"), opened)
        if behind_gemm:
            return
        for index, _ in self.plan.grants(self.rank, opened + 1):
            if self.plan.fetched:
                self.plan.fetched.wait_for(lane, index)
            else:
                lane.wait(self.plan.signals("credit"), index, previous=True)
        if lane.name == "compute" and forwards:
            lane.set(self.plan.signals("opened"), opened)

    def _multiply(self, place: int, out: Region, rows: Chunk | None = None, *, add: bool = False) -> LaneDraft:
        return self.plan.o.multiply(self.lane("compute"), out, self._owner(place), rows or self._rows([place]), add=add)

    def _sent(self, lane: LaneDraft, place: int, send: Send) -> None:
        lane.set(self.plan.signals("there"), self._signal(send.to, *self._arrival(place, send)), at=self.at(send.to))

    def _arrived(self, lane: LaneDraft, *places: int) -> list[Region]:
        """Append waits until adjacent chunks have arrived from all ranks that send them. Return a region for each of these
        ranks, with the chunks that it sent.

        places: the positions of the chunks in the whole output.
        """
        slots = range(len(self.routes.sources(self.rank, places[0])))
        for place in places:
            for nth in slots:
                self._wait_for(lane, place, nth)
        return [self._slot(self.rank, places[0], nth, self._rows(places)) for nth in slots]

    def _wait_for(self, lane: LaneDraft, place: int, nth: int) -> None:
        """Append a wait until a chunk has arrived from one of its senders.

        place: the chunk's position in the whole output. nth: the index of the sender in `Routes.sources(rank, place)`.
        """
        plan, routes, number = self.plan, self.routes, self._signal(self.rank, place, nth)
        source = routes.sources(self.rank, place)[nth]
        sends = routes.sends(source, routes.landing(self.rank, place))
        if plan.tiles and any(send == ("remote_map", self.rank) for send in sends):
            lane.wait(plan.signals("done"), number, count=plan.tiles.counts[place % routes.per_rank])
        else:
            lane.wait(plan.signals("there"), number)

    def _after_gemm(self, name: str, place: int) -> LaneDraft:
        """Append to lane `name` a wait until the GEMM of a chunk has stored the chunk. Return the lane.

        place: the chunk's position in the whole output.
        """
        lane, plan = self.lane(name), self.plan
        if plan.tiles:
            count = plan.tiles.counts[place % self.routes.per_rank]
            return lane.wait(plan.signals("done"), plan.kept[self.rank][place], count=count)
        return lane.wait(plan.signals("computed"), self._number(place))

    def _sources(self, place: int) -> list[int]:
        return self.routes.arriving(self.rank, place)

    def _number(self, place: int) -> int:
        return self.routes.number[self.rank][place]

    def _rows(self, places: Sequence[int]) -> Chunk:
        """Return (first, count) of the rows of adjacent chunks, counted from the first row of the rank that owns them.

        places: the positions of the chunks in the whole output.
        """
        pieces = [self.plan.pieces[place % self.routes.per_rank] for place in places]
        return pieces[0][0], sum(count for _, count in pieces)

    def _signal(self, rank: int, place: int, nth: int = 0) -> int:
        """Return the index of the signal that tells `rank` that a chunk has arrived from one of its senders.

        place: the chunk's position in the whole output. nth: the index of the sender in `Routes.sources(rank, place)`.
        """
        return self.plan.slot(rank, place, nth) * self.routes.per_rank + place % self.routes.per_rank

    def _owner(self, place: int) -> Index:
        return self.at(self.routes.owner(place))

    def _slot(self, rank: int, place: int, nth: int = 0, rows: Chunk | None = None) -> Region:
        number, rows = self.plan.slot(rank, place, nth), rows or self._rows([place])
        return self.plan.o.part(self.plan.box, number, self._owner(place), rows, at=self.at(rank))

    def _slot_at(self, place: int, send: Send) -> Region:
        landing, nth = self._arrival(place, send)
        return self._slot(send.to, landing, nth)

    def _arrival(self, place: int, send: Send) -> tuple[int, int]:
        """Return (place, index) for a chunk that this rank sends. place: the position at which the receiver stores the
        chunk. index: this rank's index among the senders to this position.

        place: the chunk's position on this rank. Both positions are in the whole output.
        """
        landing = self.routes.landing(self.rank, place)
        return landing, self.routes.nth(self.rank, send.to, landing)

    def _kept(self, place: int, rows: Chunk | None = None) -> Region:
        plan, rows = self.plan, rows or self._rows([place])
        if plan.own and self.routes.owner(place) == self.rank:
            return plan.o.part(plan.own, 0, self._owner(place), rows)
        number = plan.made_first + plan.made_slots[self.rank, place]
        return plan.o.part(plan.made, number, self._owner(place), rows)

    def _complete(self, place: int) -> Region:
        """Return the region from which a copy engine sends a chunk when it is complete.

        place: the chunk's position in the whole output.
        """
        if self.plan.has_scratch((self.rank, place)):
            return self._kept(place)
        return self._slot(self.rank, place) if self.routes.sums else self._result(place)

    def _result(self, place: int, rows: Chunk | None = None) -> Region:
        owner = self._owner(place)
        number = 0 if self.routes.sums else owner
        return self.plan.o.part(self.plan.y, number, owner, rows or self._rows([place]))
