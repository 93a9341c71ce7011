"""The buffers and signals of an output map's schedule. `weft.builders.output_map.steps` appends the steps that use
them.

A *node* is a pair (rank, place): a chunk as one rank computes or receives it. The place is the chunk's position in the
whole output: the rows of rank 0, then of rank 1, and so on.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal, TypeAlias

from weft.builders.fetched import Fetched
from weft.builders.output_map.routes import Node, Routes
from weft.builders.partial_products import Add, PartialProducts
from weft.builders.tracked_tiles import TrackedTiles
from weft.schedule.schedule import Draft
from weft.schedule.steps import Buffer, CopyBy, Resource, Signals

Gemm: TypeAlias = Literal["chunks", "tracked"]
LANES: dict[str, Resource] = {"compute": "compute", "sums": "compute", "to sums": "copy", "to y": "copy"}
"""The resource of each lane, by name. All other lanes send to peers, and are copy lanes."""


class SharedMemory:
    """The buffers and signals of an output map's schedule, which are the same on all ranks.

    Buffers are divided into slots of `m` rows. Slots of `box` receive chunks from other ranks. Slots of `made` have
    chunks of this rank's GEMM that later steps send or add. A node is a pair (rank, place): a chunk as one rank
    computes or receives it.

    m: the number of rows that a rank owns.
    times: the time at which each chunk may be forwarded, as {node: time}, in units of the time to compute a chunk
        (`Routes.times`).
    slots: where each chunk is received, as {node: its first slot in `box`}. A node has a slot for each rank that sends to it.
    made_slots: where the GEMM stores each chunk that it computes, as {node: slot in `made`}.
    """

    def __init__(
        self, o: PartialProducts, routes: Routes, y: Buffer, gemm: Gemm, add: Add, by: CopyBy, senders: list[str],
        fetched: Fetched | None,
    ) -> None:  # fmt: skip
        self.o, self.d, self.m, self.y, self.fetched = o, o.d, o.m, y, fetched
        self.routes, self.add, self.by, self._senders = routes, add, by, senders
        self.lanes = [*LANES, *senders]
        self.tiles = TrackedTiles(self.m, o.p.n, routes.per_rank) if gemm == "tracked" else None
        self.pieces = self.tiles.pieces if self.tiles else o.chunks(routes.per_rank)
        self.times = routes.times(in_turn=routes.sums and add == "gemm")
        self.slots, boxes = self._placed({node: len(routes.sources(*node)) for node in self.times})
        self.made_slots, scratch = self._placed({node: int(self.has_scratch(node)) for node in self.times})
        # Tiles of one kernel are stored in one buffer, here or at a peer.
        stored = [self._by(rank, "remote_map") for rank in routes.ranks]
        shared = self.tiles is not None and any(stored)
        self.box = self._memory("box", boxes + scratch * shared, "symmetric")
        self.made = self.box if shared else self._memory("made", scratch, "scratch")
        self.made_first = boxes * shared
        # Peers copy `y` chunk by chunk, so this rank's product, which one GEMM may compute for all chunks, must not be in `y`.
        self.own = o.parts("own", 1, "scratch") if fetched and add == "reduce" and not self.tiles else None
        begin = self.made_first * routes.per_rank
        self.kept = [
            {place: begin + i for i, place in enumerate(p for p in routes.computed(rank) if p not in stored[rank])}
            for rank in routes.ranks
        ]
        """For each rank, {place of a tracked chunk that the GEMM stores locally: index of its signal}."""
        sent = 1 + max(
            (routes.number[rank][place] for rank in routes.ranks for place in self._by(rank, "dma_map")), default=0
        )
        telling: dict[int, set[tuple[int, str]]] = defaultdict(set)
        for rank, place, nth, source in routes.arrivals():
            distance = (rank - source) % routes.world
            telling[0 if routes.alike else source] |= {(distance, lane) for lane in self.last_readers(rank, place, nth)}
        self._grants: dict[int, dict[int, list[tuple[int, str]]]] = {}  # {source: {distance: [(index, lane), ...]}}
        for source, told in telling.items():
            of_source = self._grants.setdefault(source, defaultdict(list))
            for number, (distance, lane) in enumerate(sorted(told, key=lambda one: (one[0], self.lanes.index(one[1])))):
                of_source[distance].append((number, lane))
        self._counts = {
            "credit": max(map(len, telling.values()), default=0),
            "there": boxes * routes.per_rank,
            "computed": sent,
            "added": sent,
            "placed": routes.per_rank,
            "opened": routes.world - 1,
            "done": begin + max(map(len, self.kept)),
        }
        self._signals: dict[str, Signals] = {}

    def _by(self, rank: int, how: str) -> set[int]:
        """Return the places (positions in the whole output) of the chunks that `rank` sends by the map's method
        `how`: "remote_map" or "dma_map".
        """
        sends = self.routes.sends
        return {place for place in self.routes.order[rank] if any(send.how == how for send in sends(rank, place))}

    def grants(self, rank: int, distance: int) -> list[tuple[int, str]]:
        """Return the credit signals for which `rank` waits before it fills the slots on a peer again. Each is given as
        (index of the signal, lane of the peer that sets the signal). The peer sets a credit signal when it has read the
        data in a slot, so that `rank` may overwrite them.

        distance: the distance in the ring from `rank` to the peer.
        """
        return self._grants.get(0 if self.routes.alike else rank, {}).get(distance, [])

    def signals(self, name: str) -> Signals:
        """Return the signals with this name. The first call declares them."""
        if name not in self._signals:
            self._signals[name] = self.d.signals(name, self._counts[name])
        return self._signals[name]

    def has_scratch(self, node: Node) -> bool:
        """True if the GEMM stores the chunk `node` in the buffer `made`, from which a later step sends or adds it. False if the
        GEMM stores the chunk in a slot of `box` or in the result.

        node: (rank, the chunk's position in the whole output).
        """
        rank, place = node
        by_engine = any(send.how == "dma_map" for send in self.routes.sends(rank, place))
        if self.tiles is not None:
            return self.routes.collective != "all_gather" and (by_engine or self.routes.owner(place) == rank)
        if self.routes.sums:
            return by_engine and (self.add == "reduce" or not self.routes.arriving(rank, place))
        return by_engine and self.routes.collective == "all_to_all"

    def slot(self, rank: int, place: int, nth: int) -> int:
        """Return the index of the slot in `box` for a chunk that `rank` receives.

        place: the chunk's position in the whole output.
        nth: the index of the sender among all ranks that send this chunk to `rank` (`Routes.sources`).
        """
        return self.slots[self.routes.representative(rank, place)] + nth

    def sender(self, rank: int, to: int) -> str:
        """Return the name of the lane on which copy engines of `rank` send to rank `to`."""
        return self._senders[self.routes.targets(rank).index(to) % len(self._senders)]

    def last_readers(self, rank: int, place: int, nth: int) -> list[str]:
        """Return the lanes of `rank` that read a slot of `box` last. After these reads, another rank may fill the slot again.

        place, nth: the chunk in the slot and the index of its sender, as for `slot`.
        """
        routes = self.routes
        engines = [send.to for send in routes.sends(rank, place) if send.how == "dma_map"]
        sent_on = [self.sender(rank, to) for to in engines]
        if not routes.sums:
            return ["to y"] if routes.computes(rank, place) else ["to y", *sent_on]
        if not sent_on:
            return ["to sums" if self.adds_to_copy(rank, place) else "compute"]
        if self.add == "reduce":
            return ["sums"]
        return ["compute"] if nth else sent_on

    def adds_to_copy(self, rank: int, place: int) -> bool:
        """True if, with add=gemm, only one update from a peer is added to this rank's product of a chunk. The update is
        then copied into the result, and the chunk's GEMM accumulates into this copy.

        place: the chunk's position in the whole output.
        """
        alone = len(self.routes.sources(rank, place)) == 1
        return self.add == "gemm" and alone and not self.o.following_part(None)

    def _memory(self, name: str, parts: int, role: Literal["symmetric", "scratch"]) -> Buffer:
        declared = self.d.buffer if parts else Draft("", 1).buffer  # unused buffers are not in the schedule
        return declared(name, parts * self.m, self.o.p.n, self.o.p.dtype, role)

    def _placed(self, counts: dict[Node, int]) -> tuple[dict[Node, int], int]:
        """Assign consecutive slots to the chunks of each rank. A slot has `m` rows, as many as a rank owns. So all chunks of
        the rows that one rank owns fit into a slot, and share it.

        Return ({chunk: its first slot}, the largest number of slots of a rank). A chunk is given as (rank, its position in the
        whole output).

        counts: the number of slots that each chunk needs.
        """
        routes, most, found = self.routes, 0, dict[Node, int]()
        for rank in routes.ranks:
            begin = 0
            for owner in dict.fromkeys(map(routes.owner, routes.order[rank])):
                nodes = [(rank, owner * routes.per_rank + piece) for piece in range(routes.per_rank)]
                found |= dict.fromkeys(nodes, begin)
                begin += max(counts[node] for node in nodes)
            most = max(most, begin)
        return found, most
