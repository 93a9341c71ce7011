"""A schedule of an output map: who computes, copies, adds and waits where the map says only where each chunk goes.

    compute     GEMMs, chunk by chunk in the order of production; a chunk that is remote-mapped they store in the peer's slot
    to peers    copy engines send dma-mapped chunks on, in the order in which these are complete
    sums        add=reduce: adds what came to a chunk that is sent on, beside the GEMMs
    to y        brings what came from slots to the result

T3's memory adds where updates meet, and today's does not. So every update is a store into a slot of the receiver's, one for each
chunk that comes, and the receiver adds: add=gemm with the GEMM that computes the same chunk (beta = 1, in place on what came),
which waits for that; add=reduce with a kernel behind the GEMM, which does not. What several peers have sent is added up in fp32,
nearest behind in the ring first, so that equal calls give equal bits.

A slot is filled again when who read it last says so (`free`), to each of those who fill slots here: of all their slots together,
since a run of other sizes may have its chunks elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from weft.schedule.expr import RANK, Index, lookup
from weft.schedule.operands import cut, peer
from weft.schedule.output_routes import Node, Routes, Send
from weft.schedule.schedule import Draft, LaneDraft, Schedule
from weft.schedule.steps import Buffer, Region, Resource, Signals

Add: TypeAlias = Literal["gemm", "reduce"]
By: TypeAlias = Literal["dma", "kernel"]
_LANES: dict[str, Resource] = {"compute": "compute", "sums": "compute", "to y": "copy", "to peers": "copy"}


class Product(NamedTuple):
    """Of a rank: [rows, k] @ [k, n], or of an all-gather a part of the rows."""

    rows: int
    n: int
    k: int
    dtype: str


def scheduled(name: str, routes: Routes, p: Product, *, add: Add, by: By) -> Schedule:
    """`ValueError` if GEMMs that add to what comes would wait for one another; `NotApplicableError` for fewer rows than pieces."""
    plan = _Plan(name, routes, p, add, by)
    if routes.alike:
        _Rank(plan, 0, lambda rank: peer(routes.world, rank) if rank else RANK, plan.d.lane).write()
        return plan.d.schedule()
    for name, resource in _LANES.items():
        plan.d.lane(name, resource)
    for rank in range(routes.world):
        lanes: dict[str, LaneDraft] = {}

        def lane(name: str, resource: Resource, lanes: dict[str, LaneDraft] = lanes) -> LaneDraft:
            return lanes.setdefault(name, LaneDraft(name, resource))

        def at(other: int, rank: int = rank) -> Index:
            return RANK if other == rank else other

        _Rank(plan, rank, at, lane).write()
        only = lookup([int(other == rank) for other in range(routes.world)], RANK)
        for name, made in lanes.items():
            plan.d.lane(name).repeat("only", only, *made.steps)
    return plan.d.schedule()


class _Plan:
    """What holds for all ranks: memory, signals, who reads which slot last.

    m: rows that a rank owns. slots, made_slots: by node, where in `box` what comes to it begins, and where in `made` its product
    is, counted in m rows. frees: of each rank, who tells it that its slots there are free: (rank, lane).
    """

    def __init__(self, name: str, routes: Routes, p: Product, add: Add, by: By) -> None:
        self.routes, self.p, self.add, self.by = routes, p, add, by
        self.d, self.m = Draft(name, routes.world), p.rows // routes.world
        self.pieces = cut(self.m, routes.per_rank, what="rows of a rank's part")
        self.times = routes.times(in_turn=routes.sums and add == "gemm")
        gather = routes.collective == "all_gather"
        self.x = self.d.buffer("x", self.m if gather else p.rows, p.k, p.dtype, "input")
        self.w = self.d.buffer("w", p.k, p.n, p.dtype, "input")
        self.y = self.d.buffer("y", self.m if routes.sums else p.rows, p.n, p.dtype, "output")
        self.slots, boxes = self._placed({node: len(routes.sources[node[0]].get(node[1], ())) for node in self.times})
        self.made_slots, scratch = self._placed({node: int(self.has_scratch(node)) for node in self.times})
        self.box, self.made = self._memory("box", boxes, "symmetric"), self._memory("made", scratch, "scratch")
        telling: dict[int, set[tuple[int, str]]] = defaultdict(set)
        for rank, place, nth, source in routes.arrivals():
            telling[source].add((rank, self.last_reader(rank, place, nth)))
        order = list(_LANES)
        self.frees = {
            source: sorted(told, key=lambda one: ((one[0] - source) % routes.world, order.index(one[1])))  # noqa: B023
            for source, told in telling.items()
        }
        self._counts = {
            "free": max((len(told) for told in self.frees.values()), default=0),
            "there": boxes * routes.per_rank,
            "computed": routes.chunks,
            "added": routes.chunks,
            "placed": routes.per_rank,
            "passed": boxes * routes.per_rank,
        }
        self._signals: dict[str, Signals] = {}

    def signals(self, name: str) -> Signals:
        """Declared when they are first needed."""
        if name not in self._signals:
            self._signals[name] = self.d.signals(name, self._counts[name])
        return self._signals[name]

    def has_scratch(self, node: Node) -> bool:
        """Whether its product is kept to be sent, and not in a slot or in the result."""
        rank, place = node
        by_engine = any(send.how == "dma_map" for send in self.routes.sends[rank].get(place, ()))
        if self.routes.sums:
            return by_engine and (self.add == "reduce" or not self.routes.arriving(rank, place))
        return by_engine and self.routes.collective == "all_to_all"

    def last_reader(self, rank: int, place: int, nth: int) -> str:
        """The lane behind which a slot is free, of the one that the nth source of a node fills."""
        routes = self.routes
        if not routes.sums:
            return "to y"
        if routes.owner(place) == rank:
            return "to y" if self.add == "gemm" and len(routes.sources[rank][place]) == 1 else "compute"
        if self.add == "reduce":
            return "sums"
        return "compute" if nth else "to peers"

    def _memory(self, name: str, parts: int, role: Literal["symmetric", "scratch"]) -> Buffer:
        declared = self.d.buffer if parts else Draft("", 1).buffer  # what nobody uses is not in the schedule
        return declared(name, parts * self.m, self.p.n, self.p.dtype, role)

    def _placed(self, counts: dict[Node, int]) -> tuple[dict[Node, int], int]:
        """(where each node's parts begin, parts on a rank at most): pieces of one owner's rows are beside each other."""
        routes, most, found = self.routes, 0, dict[Node, int]()
        for rank in range(routes.world):
            begin = 0
            for distance in range(1, routes.world + 1):
                owner = (rank + distance) % routes.world
                nodes = [(rank, owner * routes.per_rank + piece) for piece in range(routes.per_rank)]
                found |= dict.fromkeys(nodes, begin)
                begin += max(counts[node] for node in nodes)
            most = max(most, begin)
        return found, most


class _Rank:
    """The lanes of one rank. at: how another is called there: by its number, or by where in the ring it is from here."""

    def __init__(
        self, plan: _Plan, rank: int, at: Callable[[int], Index], lane: Callable[[str, Resource], LaneDraft]
    ) -> None:
        self.plan, self.routes, self.rank, self.at = plan, plan.routes, rank, at
        self.lane = lambda name: lane(name, _LANES[name])
        self._sent_by_gemm = {
            send.to for sends in plan.routes.sends[rank].values() for send in sends if send.how == "remote_map"
        }
        self._opened: set[tuple[str, int]] = set()

    def write(self) -> None:
        routes, rank, gather = self.routes, self.rank, self.routes.collective == "all_gather"
        computed = routes.computed(rank)
        for place in computed:
            if gather:
                self._compute_gathered(place)
            elif routes.owner(place) == rank:
                self._compute_own(place)
            else:
                self._compute_sent(place, *routes.sends[rank][place])
        if routes.sums and self.plan.add == "reduce":
            self._add_up(computed)
        order = sorted(routes.order[rank], key=lambda place: self.plan.times[rank, place])
        for place in order:
            self._send(place)
        if not routes.sums:
            self._receive(order)
        self._free()

    def _compute_gathered(self, place: int) -> None:
        """A chunk that stays, and that others get too."""
        compute, sends = self._multiply(place, self._result(place)), self.routes.sends[self.rank][place]
        if any(send.how == "dma_map" for send in sends):
            compute.set(self.plan.signals("computed"), self._number(place))
        for send in sends:
            if send.how == "remote_map":
                self._open(compute, send.to)
                self._sent(compute.copy(self._result(place), self._slot_at(place, send), "kernel"), place, send)

    def _compute_sent(self, place: int, send: Send) -> None:
        """A chunk that goes to one other rank."""
        plan, compute, sources = self.plan, self.lane("compute"), self._sources(place)
        if send.to in self._sent_by_gemm:  # engines that send there too come after this chunk
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

    def _compute_own(self, place: int) -> None:
        """A chunk of the result, and of a sum what others add to it."""
        plan, compute, result = self.plan, self.lane("compute"), self._result(place)
        if not self._sources(place) or plan.add == "reduce":
            self._multiply(place, result)
        elif len(self._sources(place)) > 1:
            compute.reduce(result, *self._arrived(compute, place))
            self._multiply(place, result, add=True)
        else:
            receiver, placed, piece = self.lane("to y"), plan.signals("placed"), place % self.routes.per_rank
            (arrived,) = self._arrived(receiver, place)
            receiver.copy(arrived, result).set(placed, piece)
            compute.wait(placed, piece)
            self._multiply(place, result, add=True)

    def _add_up(self, computed: list[int]) -> None:
        """What came, behind the GEMMs: on a lane of its own where it is sent on, so that no GEMM waits for it."""
        plan, rank = self.plan, self.rank
        for place in sorted(computed, key=lambda place: plan.times[rank, place]):
            if not self._sources(place):
                continue
            if self.routes.owner(place) == rank:
                compute, result = self.lane("compute"), self._result(place)
                compute.reduce(result, result, *self._arrived(compute, place))
            else:
                sums, kept = self.lane("sums").wait(plan.signals("computed"), self._number(place)), self._kept(place)
                sums.reduce(kept, kept, *self._arrived(sums, place)).set(plan.signals("added"), self._number(place))

    def _send(self, place: int) -> None:
        """By engine, where it is complete."""
        plan, sources = self.plan, self._sources(place)
        sends = [send for send in self.routes.sends[self.rank].get(place, ()) if send.how == "dma_map"]
        if not sends:
            return
        sender, forwarded = self.lane("to peers"), not self.routes.computes(self.rank, place)
        for send in sends:
            if send.to not in self._sent_by_gemm or self.routes.collective == "all_gather":
                self._open(sender, send.to)
        if forwarded:
            (source,) = self._arrived(sender, place)
        else:
            done = "added" if self.routes.sums and sources and plan.add == "reduce" else "computed"
            sender.wait(plan.signals(done), self._number(place))
            source = self._complete(place)
        for send in sends:
            self._sent(sender.copy(source, self._slot_at(place, send), plan.by), place, send)
        if forwarded:
            sender.set(plan.signals("passed"), self._signal(self.rank, place))

    def _receive(self, order: list[int]) -> None:
        """What others computed and this rank keeps."""
        times, rank, receiver = self.plan.times, self.rank, self.lane("to y")
        came = [(place, source) for place, sources in self.routes.sources[rank].items() for source in sources]
        distance = {source: (rank - source) % self.routes.world for _, source in came}
        for place, source in sorted(came, key=lambda one: (times[one[1], one[0]], distance[one[1]], one[0])):
            if self.routes.sends[rank].get(place) and not self.routes.computes(rank, place):
                receiver.wait(self.plan.signals("passed"), self._signal(rank, place))
                arrived = self._slot(rank, place)
            else:
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
        """Before a lane fills slots of a rank for the first time in a run."""
        if (lane.name, to) not in self._opened:
            self._opened.add((lane.name, to))
            for index, (rank, _) in enumerate(self.plan.frees[self.rank]):
                if rank == to:
                    lane.wait(self.plan.signals("free"), index, previous=True)

    def _multiply(self, place: int, out: Region, *, add: bool = False) -> LaneDraft:
        first, count = self._piece(place)
        if self.routes.collective != "all_gather":  # of which the own rows are all there are
            first = self.at(self.routes.owner(place)) * self.plan.m + first
        rows = self.plan.x.part(rows=(first, count))
        return self.lane("compute").matmul(out, rows, self.plan.w.part(), accumulate=add)

    def _sent(self, lane: LaneDraft, place: int, send: Send) -> None:
        landing = self.routes.landing(self.rank, place)
        nth = self.routes.sources[send.to][landing].index(self.rank)
        lane.set(self.plan.signals("there"), self._signal(send.to, landing, nth), at=self.at(send.to))

    def _arrived(self, lane: LaneDraft, place: int) -> list[Region]:
        """The slots of a chunk, on a lane that has waited for all of them."""
        slots = range(len(self.routes.sources[self.rank][place]))
        for nth in slots:
            lane.wait(self.plan.signals("there"), self._signal(self.rank, place, nth))
        return [self._slot(self.rank, place, nth) for nth in slots]

    def _sources(self, place: int) -> list[int]:
        return self.routes.arriving(self.rank, place)

    def _number(self, place: int) -> int:
        return self.routes.number[self.rank][place]

    def _piece(self, place: int) -> tuple[int, int]:
        return self.plan.pieces[place % self.routes.per_rank]

    def _signal(self, rank: int, place: int, nth: int = 0) -> int:
        """Its number, of what the nth source sends there."""
        return (self.plan.slots[rank, place] + nth) * self.routes.per_rank + place % self.routes.per_rank

    def _slot(self, rank: int, place: int, nth: int = 0) -> Region:
        first, count = self._piece(place)
        row = (self.plan.slots[rank, place] + nth) * self.plan.m + first
        return self.plan.box.part(rows=(row, count), at=self.at(rank))

    def _slot_at(self, place: int, send: Send) -> Region:
        landing = self.routes.landing(self.rank, place)
        return self._slot(send.to, landing, self.routes.sources[send.to][landing].index(self.rank))

    def _kept(self, place: int) -> Region:
        first, count = self._piece(place)
        return self.plan.made.part(rows=(self.plan.made_slots[self.rank, place] * self.plan.m + first, count))

    def _complete(self, place: int) -> Region:
        """Where a chunk is that this rank computes and an engine sends on."""
        if self.plan.has_scratch((self.rank, place)):
            return self._kept(place)
        return self._slot(self.rank, place) if self.routes.sums else self._result(place)

    def _result(self, place: int) -> Region:
        first, count = self._piece(place)
        row = 0 if self.routes.sums else self.at(self.routes.owner(place)) * self.plan.m
        return self.plan.y.part(rows=(row + first, count))
