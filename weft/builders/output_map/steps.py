"""The schedule of an output map: the map gives only the destination of each chunk, and this file adds GEMMs, copies, sums and
waits.

    compute     GEMMs, chunk by chunk in the order of production. Remote-mapped chunks are stored in the peer's slot. A chunk that
                stays too is stored here, and a kernel behind the GEMM stores it there
    to peers    copy engines send dma-mapped chunks on, in the order in which they complete; one lane, or several
    sums        add=reduce: adds arriving updates to chunks that are sent on, beside the GEMMs
    to y        copies arrived chunks from slots into the result

T3's memory adds where updates meet, and today's does not. So every update is a store into a slot of the receiver, one for each
arriving chunk, and the receiver adds. add=gemm: the GEMM that computes the same chunk adds (beta = 1, in place on the arrived
chunk), and waits for it. add=reduce: a kernel behind the GEMM adds, and the GEMM does not wait. Updates from several peers are
reduced in fp32, nearest behind in the ring first, so that equal calls give equal bits.

gemm=tracked: one kernel computes all chunks in the order of production, and sets a chunk's signal when all its tiles are stored,
here or in a peer's slot: T3's tracker in software. It waits for nothing, so it needs add=reduce.

A slot is filled again when its last reader signals it (`free`) to each rank that fills slots here. The signal covers all slots of
that rank, since a run of other sizes may place its chunks differently.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from weft.builders.operands import cut, peer
from weft.builders.output_map.routes import Node, Routes, Send
from weft.builders.output_map.tiles import TilesInOrder, TilesOfRank
from weft.builders.partial_products import Add, Chunk
from weft.schedule.expr import RANK, Index, lookup
from weft.schedule.schedule import Draft, LaneDraft, Schedule
from weft.schedule.steps import Buffer, Compute, CopyBy, Region, Resource, Set, Signals

Gemm: TypeAlias = Literal["chunks", "tracked"]
_LANES: dict[str, Resource] = {"compute": "compute", "sums": "compute", "to y": "copy"}
"""The resources of lanes by name; lanes to peers are copy lanes."""


class Product(NamedTuple):
    """The GEMM of a rank: [rows, k] @ [k, n]; in an all-gather a rank has only its part of the rows."""

    rows: int
    n: int
    k: int
    dtype: str


def scheduled(name: str, routes: Routes, p: Product, *, gemm: Gemm, add: Add, by: CopyBy, engines: int) -> Schedule:
    """Return the schedule of these routes.

    Raises `ValueError` if GEMMs that add to arriving chunks would wait for one another, and `NotApplicableError` for fewer rows
    than pieces."""
    plan = _Plan(name, routes, p, gemm, add, by, engines)
    if routes.alike:
        _RankLanes(plan, 0, lambda rank: peer(routes.world, rank) if rank else RANK, plan.d.lane).write()
        return plan.d.schedule()
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
    return plan.d.schedule()


def _resource(lane: str) -> Resource:
    return _LANES.get(lane, "copy")


class _Plan:
    """The parts of the schedule that all ranks share: memory, signals, and the last readers of slots.

    m: rows that a rank owns. slots, made_slots: by node, the first part in `box` of the updates that it receives, and in `made`
    of its product, counted in m rows. frees: for each rank, the (rank, lane) pairs that signal that its slots there are free.
    """

    def __init__(self, name: str, routes: Routes, p: Product, gemm: Gemm, add: Add, by: CopyBy, engines: int) -> None:
        self.routes, self.p, self.add, self.by = routes, p, add, by
        self._senders = ["to peers" if engines == 1 else f"to peers {i}" for i in range(engines)]
        self.lanes = [*_LANES, *self._senders]
        self.d, self.m = Draft(name, routes.world), p.rows // routes.world
        self.tiling = TilesOfRank(self.m, p.n, routes.per_rank) if gemm == "tracked" else None
        self.pieces = self.tiling.pieces if self.tiling else cut(self.m, routes.per_rank, what="rows of a rank's part")
        self.times = routes.times(in_turn=routes.sums and add == "gemm")
        gather = routes.collective == "all_gather"
        self.x = self.d.buffer("x", self.m if gather else p.rows, p.k, p.dtype, "input")
        self.w = self.d.buffer("w", p.k, p.n, p.dtype, "input")
        self.y = self.d.buffer("y", self.m if routes.sums else p.rows, p.n, p.dtype, "output")
        self.slots, boxes = self._placed({node: len(routes.sources[node[0]].get(node[1], ())) for node in self.times})
        self.made_slots, scratch = self._placed({node: int(self.has_scratch(node)) for node in self.times})
        # Tiles of one kernel are stored in one buffer, here or at a peer.
        shared = self.tiling is not None and any(
            s.how == "remote_map" for one in routes.sends for sends in one.values() for s in sends
        )
        self.box = self._memory("box", boxes + scratch * shared, "symmetric")
        self.made = self.box if shared else self._memory("made", scratch, "scratch")
        self.made_first = boxes * shared
        telling: dict[int, set[tuple[int, str]]] = defaultdict(set)
        for rank, place, nth, source in routes.arrivals():
            telling[source] |= {(rank, lane) for lane in self.last_readers(rank, place, nth)}
        self.frees = {
            source: sorted(told, key=lambda one: ((one[0] - source) % routes.world, self.lanes.index(one[1])))
            for source, told in telling.items()
        }
        self._counts = {
            "free": max((len(told) for told in self.frees.values()), default=0),
            "there": boxes * routes.per_rank,
            "computed": routes.chunks,
            "added": routes.chunks,
            "placed": routes.per_rank,
            "opened": routes.world - 1,
            "done": routes.chunks + boxes * routes.per_rank,
        }
        self._signals: dict[str, Signals] = {}

    def signals(self, name: str) -> Signals:
        """Return the signals of this name, declared at first use."""
        if name not in self._signals:
            self._signals[name] = self.d.signals(name, self._counts[name])
        return self._signals[name]

    def has_scratch(self, node: Node) -> bool:
        """True if the node's product is kept in `made` to be sent, not in a slot or in the result."""
        rank, place = node
        by_engine = any(send.how == "dma_map" for send in self.routes.sends[rank].get(place, ()))
        if self.tiling is not None:
            return self.routes.collective != "all_gather" and (by_engine or self.routes.owner(place) == rank)
        if self.routes.sums:
            return by_engine and (self.add == "reduce" or not self.routes.arriving(rank, place))
        return by_engine and self.routes.collective == "all_to_all"

    def slot(self, rank: int, place: int, nth: int) -> int:
        """Return the number of the slot for the chunk that the nth source sends there."""
        return self.slots[rank, place] + nth

    def sender(self, rank: int, to: int) -> str:
        """Return the lane on which a rank's engines send to rank `to`; targets are spread over the lanes in order."""
        return self._senders[self.routes.targets[rank].index(to) % len(self._senders)]

    def last_readers(self, rank: int, place: int, nth: int) -> list[str]:
        """Return the lanes that read last the slot that the nth source of a node fills."""
        routes = self.routes
        engines = [send.to for send in routes.sends[rank].get(place, ()) if send.how == "dma_map"]
        sent_on = [self.sender(rank, to) for to in engines]
        if not routes.sums:
            return ["to y"] if routes.computes(rank, place) else ["to y", *sent_on]
        if not sent_on:
            return ["to y" if self.add == "gemm" and len(routes.sources[rank][place]) == 1 else "compute"]
        if self.add == "reduce":
            return ["sums"]
        return ["compute"] if nth else sent_on

    def _memory(self, name: str, parts: int, role: Literal["symmetric", "scratch"]) -> Buffer:
        declared = self.d.buffer if parts else Draft("", 1).buffer  # unused buffers are not in the schedule
        return declared(name, parts * self.m, self.p.n, self.p.dtype, role)

    def _placed(self, counts: dict[Node, int]) -> tuple[dict[Node, int], int]:
        """Return (first part of each node, most parts on a rank). Pieces of one owner's rows are side by side."""
        routes, most, found = self.routes, 0, dict[Node, int]()
        for rank in range(routes.world):
            begin = 0
            for owner in dict.fromkeys(map(routes.owner, routes.order[rank])):
                nodes = [(rank, owner * routes.per_rank + piece) for piece in range(routes.per_rank)]
                found |= dict.fromkeys(nodes, begin)
                begin += max(counts[node] for node in nodes)
            most = max(most, begin)
        return found, most


class _RankLanes:
    """The lanes of one rank. at: the index of another rank: its number, or its place in the ring relative to this rank."""

    def __init__(
        self, plan: _Plan, rank: int, at: Callable[[int], Index], lane: Callable[[str, Resource], LaneDraft]
    ) -> None:
        self.plan, self.routes, self.rank, self.at = plan, plan.routes, rank, at
        gather = plan.routes.collective == "all_gather"
        self.lane = lambda name: lane(name, _resource(name))
        self._sent_by_gemm = {
            send.to for sends in plan.routes.sends[rank].values() for send in sends if send.how == "remote_map"
        }
        self._opened: set[tuple[str, int]] = set()
        self._computed = self.routes.computed(rank)
        self._own = self._joined([] if gather else [p for p in self._computed if self.routes.owner(p) == rank])

    def _joined(self, own: list[int]) -> dict[int, list[int]]:
        """Return the chunks that stay, in groups that are handled together, by the first of each group.

        No peer is signaled about them one by one. All are one group if they follow each other and no GEMM of one waits for an
        arriving chunk."""
        sources = {tuple(self._sources(place)) for place in own}
        begin = self._computed.index(own[0]) if own else 0
        together = len(sources) == 1 and sorted(own) == self._computed[begin : begin + len(own)]
        if together and (self.plan.add == "reduce" or sources == {()}):
            return {own[0]: own}
        return {place: [place] for place in own}

    def write(self) -> None:
        routes, rank, gather = self.routes, self.rank, self.routes.collective == "all_gather"
        for place in [] if self.plan.tiling else self._computed:
            if gather:
                self._compute_gathered(place)
            elif place in self._own:
                self._compute_own(place, self._rows(self._own[place]))
            elif routes.owner(place) != rank:
                self._compute_sent(place, *routes.sends[rank][place])
        if self.plan.tiling:
            self._compute_tracked(self.plan.tiling)
        if routes.sums and self.plan.add == "reduce":
            self._add_up()
        for place in sorted(routes.order[rank], key=lambda place: self.plan.times[rank, place]):
            self._send(place)
        if not routes.sums:
            self._receive()
        self._free()

    def _compute_gathered(self, place: int) -> None:
        """Compute a chunk that stays and that other ranks get too."""
        compute, sends = self._multiply(place, self._result(place)), self.routes.sends[self.rank][place]
        if any(send.how == "dma_map" for send in sends):
            compute.set(self.plan.signals("computed"), self._number(place))
        for send in sends:
            if send.how == "remote_map":
                self._open(compute, send.to)
                self._sent(compute.copy(self._result(place), self._slot_at(place, send), "kernel"), place, send)

    def _compute_sent(self, place: int, send: Send) -> None:
        """Compute a chunk that goes to one other rank."""
        plan, compute, sources = self.plan, self.lane("compute"), self._sources(place)
        if send.to in self._sent_by_gemm:  # engines that send there too run behind this chunk
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

    def _compute_tracked(self, tiling: TilesOfRank) -> None:
        """Compute all chunks in one launch. Each is stored at its destination, or kept until an engine sends it."""
        plan, routes, rank, compute = self.plan, self.routes, self.rank, self.lane("compute")
        sends = [next((s for s in routes.sends[rank][p] if s.how == "remote_map"), None) for p in self._computed]
        for send in filter(None, sends):
            self._open(compute, send.to)
        tiled = TilesInOrder(tiling, [place % routes.per_rank for place in self._computed])
        owner = self._ranks(tiled, [routes.owner(place) for place in self._computed])
        at = self._ranks(tiled, [send.to if send else rank for send in sends])
        chunks = list(zip(self._computed, sends, strict=True))
        first, count = tiled.rows
        if routes.collective == "all_gather":
            rows, out = first, plan.y.part(rows=(owner * plan.m + first, count), cols=tiled.cols)
        else:
            parts = [
                plan.slot(send.to, *self._arrival(place, send))
                if send
                else plan.made_first + plan.made_slots[rank, place]
                for place, send in chunks
            ]
            rows, row = owner * plan.m + first, tiled.by_chunk(parts) * plan.m + first
            out = plan.made.part(rows=(row, count), cols=tiled.cols, at=at)
        numbers = [
            routes.chunks + self._signal(send.to, *self._arrival(place, send)) if send else self._number(place)
            for place, send in chunks
        ]
        matmul = Compute("matmul", out, (plan.x.part(rows=(rows, count)), plan.w.part(cols=tiled.cols)))
        told = Set(plan.signals("done").name, tiled.by_chunk(numbers), at)
        compute.tiles(tiling.kernel, "t", tiled.extent, matmul, told)

    def _ranks(self, tiled: TilesInOrder, ranks: list[int]) -> Index:
        """Return the rank of each tile, from a rank for each chunk."""
        if len(set(ranks)) == 1:
            return self.at(ranks[0])
        if self.routes.alike:
            return (
                RANK + tiled.by_chunk([(rank - self.rank) % self.routes.world for rank in ranks])
            ) % self.routes.world
        return tiled.by_chunk(ranks)

    def _compute_own(self, place: int, rows: Chunk) -> None:
        """Compute a chunk that stays; with add=gemm, add the updates of other ranks to it."""
        plan, compute, result = self.plan, self.lane("compute"), self._result(place, rows)
        if not self._sources(place) or plan.add == "reduce":
            self._multiply(place, result, rows)
        elif len(self._sources(place)) > 1:
            compute.reduce(result, *self._arrived(compute, place))
            self._multiply(place, result, add=True)
        else:
            receiver, placed, piece = self.lane("to y"), plan.signals("placed"), place % self.routes.per_rank
            (arrived,) = self._arrived(receiver, place)
            receiver.copy(arrived, result).set(placed, piece)
            compute.wait(placed, piece)
            self._multiply(place, result, add=True)

    def _add_up(self) -> None:
        """Reduce arrived updates behind the GEMMs. Chunks that are sent on use a lane of their own, so that no GEMM waits for
        them."""
        plan, rank = self.plan, self.rank
        for place in sorted(self._computed, key=lambda place: plan.times[rank, place]):
            if not self._sources(place):
                continue
            if place in self._own:
                rows, compute = self._rows(self._own[place]), self.lane("compute")
                product = self._kept(place, rows) if plan.tiling else self._result(place, rows)
                compute.reduce(self._result(place, rows), product, *self._arrived(compute, *self._own[place]))
            elif self.routes.owner(place) != rank:
                sums, kept = self._after_gemm("sums", place), self._kept(place)
                sums.reduce(kept, kept, *self._arrived(sums, place)).set(plan.signals("added"), self._number(place))

    def _send(self, place: int) -> None:
        """Send a chunk by engine when it is complete."""
        plan, sources, seen = self.plan, self._sources(place), set[str]()
        added = self.routes.sums and bool(sources) and plan.add == "reduce"
        for send in self.routes.sends[self.rank].get(place, ()):
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
        """Copy the chunks that others computed and this rank keeps into the result."""
        times, rank, receiver = self.plan.times, self.rank, self.lane("to y")
        came = [(place, source) for place, sources in self.routes.sources[rank].items() for source in sources]

        def when(one: tuple[int, int]) -> tuple[int, int, int]:
            place, source = one
            return times[source, self.routes.landing(rank, place)], (rank - source) % self.routes.world, place

        for place in self._own if self.plan.tiling else ():
            rows = self._rows(self._own[place])
            for one in self._own[place]:
                self._after_gemm(receiver.name, one)
            receiver.copy(self._kept(place, rows), self._result(place, rows))
        for place, _ in sorted(came, key=when):
            (arrived,) = self._arrived(receiver, place)
            receiver.copy(arrived, self._result(place))

    def _free(self) -> None:
        plan, world = self.plan, self.routes.world
        for distance in range(1, world):
            source = (self.rank - distance) % world
            for index, (rank, name) in enumerate(plan.frees.get(source, ())):
                if rank == self.rank:
                    self.lane(name).set(plan.signals("free"), index, at=self.at(source))

    def _open(self, lane: LaneDraft, to: int) -> None:
        """Wait for free slots before a lane first fills slots of a rank in a run.

        Only one lane waits for them: the GEMMs' lane if it fills some of them. Otherwise a reader of its chunks might signal free
        slots again while a second lane still waits for the last signal. Other lanes run behind the GEMMs if these compute their
        chunks; lanes that forward chunks wait for `opened`."""
        if (lane.name, to) in self._opened:
            return
        self._opened.add((lane.name, to))
        behind_gemm = to in self._sent_by_gemm and lane.name != "compute"
        forwards = self.routes.collective == "all_gather" and to in self.routes.targets[self.rank]
        opened = (to - self.rank) % self.routes.world - 1
        if behind_gemm and forwards:
            lane.wait(self.plan.signals("opened"), opened)
        if behind_gemm:
            return
        for index, (rank, _) in enumerate(self.plan.frees[self.rank]):
            if rank == to:
                lane.wait(self.plan.signals("free"), index, previous=True)
        if lane.name == "compute" and forwards:
            lane.set(self.plan.signals("opened"), opened)

    def _multiply(self, place: int, out: Region, rows: Chunk | None = None, *, add: bool = False) -> LaneDraft:
        begin, count = rows or self._rows([place])
        first: Index = begin
        if self.routes.collective != "all_gather":  # in an all-gather x has only this rank's rows
            first = self.at(self.routes.owner(place)) * self.plan.m + first
        return self.lane("compute").matmul(
            out, self.plan.x.part(rows=(first, count)), self.plan.w.part(), accumulate=add
        )

    def _sent(self, lane: LaneDraft, place: int, send: Send) -> None:
        lane.set(self.plan.signals("there"), self._signal(send.to, *self._arrival(place, send)), at=self.at(send.to))

    def _arrived(self, lane: LaneDraft, *places: int) -> list[Region]:
        """Return the slots of adjacent chunks, on a lane that has waited for all of them."""
        slots = range(len(self.routes.sources[self.rank][places[0]]))
        for place in places:
            for nth in slots:
                self._wait_for(lane, place, nth)
        return [self._slot(self.rank, places[0], nth, self._rows(places)) for nth in slots]

    def _wait_for(self, lane: LaneDraft, place: int, nth: int) -> None:
        """Wait for the chunk from the nth source; if a tracked GEMM stores it, for all its tiles."""
        plan, routes, number = self.plan, self.routes, self._signal(self.rank, place, nth)
        source = routes.sources[self.rank][place][nth]
        sends = routes.sends[source][routes.landing(self.rank, place)]
        if plan.tiling and any(send == ("remote_map", self.rank) for send in sends):
            lane.wait(plan.signals("done"), routes.chunks + number, count=plan.tiling.tiles[place % routes.per_rank])
        else:
            lane.wait(plan.signals("there"), number)

    def _after_gemm(self, name: str, place: int) -> LaneDraft:
        """Return the lane of that name, after it waits for this rank's product."""
        lane, plan, number = self.lane(name), self.plan, self._number(place)
        if plan.tiling:
            return lane.wait(plan.signals("done"), number, count=plan.tiling.tiles[place % self.routes.per_rank])
        return lane.wait(plan.signals("computed"), number)

    def _sources(self, place: int) -> list[int]:
        return self.routes.arriving(self.rank, place)

    def _number(self, place: int) -> int:
        return self.routes.number[self.rank][place]

    def _rows(self, places: Sequence[int]) -> Chunk:
        """Return the rows of adjacent chunks, relative to their owner's rows."""
        pieces = [self.plan.pieces[place % self.routes.per_rank] for place in places]
        return pieces[0][0], sum(count for _, count in pieces)

    def _signal(self, rank: int, place: int, nth: int = 0) -> int:
        """Return the number of the signal for the chunk that the nth source sends there."""
        return self.plan.slot(rank, place, nth) * self.routes.per_rank + place % self.routes.per_rank

    def _slot(self, rank: int, place: int, nth: int = 0, rows: Chunk | None = None) -> Region:
        first, count = rows or self._rows([place])
        row = self.plan.slot(rank, place, nth) * self.plan.m + first
        return self.plan.box.part(rows=(row, count), at=self.at(rank))

    def _slot_at(self, place: int, send: Send) -> Region:
        landing, nth = self._arrival(place, send)
        return self._slot(send.to, landing, nth)

    def _arrival(self, place: int, send: Send) -> tuple[int, int]:
        """Return the place of a sent chunk at its receiver, and the number of sources before this rank there."""
        landing = self.routes.landing(self.rank, place)
        return landing, self.routes.sources[send.to][landing].index(self.rank)

    def _kept(self, place: int, rows: Chunk | None = None) -> Region:
        first, count = rows or self._rows([place])
        part = self.plan.made_first + self.plan.made_slots[self.rank, place]
        return self.plan.made.part(rows=(part * self.plan.m + first, count))

    def _complete(self, place: int) -> Region:
        """Return the region of a chunk that this rank computes and an engine sends on."""
        if self.plan.has_scratch((self.rank, place)):
            return self._kept(place)
        return self._slot(self.rank, place) if self.routes.sums else self._result(place)

    def _result(self, place: int, rows: Chunk | None = None) -> Region:
        first, count = rows or self._rows([place])
        row = 0 if self.routes.sums else self.at(self.routes.owner(place)) * self.plan.m
        return self.plan.y.part(rows=(row + first, count))
