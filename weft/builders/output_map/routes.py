"""The output maps of all ranks together: the destinations and sources of each chunk, and a check that every result is complete.

An error in one rank's map would cause a hang or a wrong sum on another rank. So the maps of all ranks are checked
against each other before a schedule is built. Errors name the chunk, the value and the fix.

    reduce_scatter   every rank computes every chunk. A rank sends each chunk once, to a rank that adds its own product, until
                     the sum reaches the owner of the rows: the paths of a chunk are a tree with the owner as its root
    all_gather       a rank computes its own chunks, and each chunk is stored on every other rank exactly once
    all_to_all       every rank computes every chunk, and stores it on the rank that owns it. Nothing is reduced

Maps number chunks in the order of computation. This module uses the *place* of a chunk instead, which is the same on
all ranks. Chunk i of the rows of rank `owner` has the place `owner * per_rank + i`. A *node* is a pair (rank, place): a
chunk as one rank computes or receives it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np

from weft.schedule.expr import RANK, Expr, Index, value
from weft.words import counted

CollectiveName: TypeAlias = Literal["reduce_scatter", "all_gather", "all_to_all"]
MapKind: TypeAlias = Literal["local", "remote_map", "dma_map"]
StoreOp: TypeAlias = Literal["store", "update"]
ChunkOrder: TypeAlias = tuple[Index, ...] | None
"""The places of the chunks in the order of computation. None: the staggered order, from the next rank's chunks to this
rank's.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a map: a call of `local`, `remote_map` or `dma_map`."""

    how: MapKind
    chunk: int
    to: Index = RANK
    op: StoreOp = "store"
    after: int = 1

    def __str__(self) -> str:
        if self.how == "local":
            return f"local({self.chunk})"
        after = f", after={self.after}" if self.how == "dma_map" else ""
        return f"{self.how}({self.chunk}, to={self.to}, op={self.op!r}{after})"


class Send(NamedTuple):
    how: MapKind
    to: int


Node: TypeAlias = tuple[int, int]
"""(rank, place): the chunk at this place, as the rank computes or receives it."""


@lru_cache(maxsize=64)
def routes_of(
    collective: CollectiveName, world: int, chunks: int, maps: tuple[tuple[ChunkOrder, tuple[Entry, ...]], ...]
) -> Routes:
    """Return the `Routes` of output maps: which rank sends each chunk to which rank. Raise `ValueError` for impossible maps.

    maps: a map, as (order, entries), for each rank, or one map for all ranks.

    chunks: the number of chunks of the whole output.
    """
    return Routes(collective, world, chunks, maps)


class Routes:
    """The maps of all ranks, with numbers in place of expressions of the rank.

    A place is the position of a chunk in the whole output: chunk i of the rows of rank `owner` has the place owner *
    per_rank + i.

    alike: True if the maps of all ranks are equal except for the ranks' positions in the ring. Then only rank 0's map is
        evaluated.
    order: for each evaluated rank, the places of its chunks, in the order of computation.
    number: for each evaluated rank, {place: index in its `order`}.
    """

    def __init__(
        self,
        collective: CollectiveName,
        world: int,
        chunks: int,
        maps: tuple[tuple[ChunkOrder, tuple[Entry, ...]], ...],
    ) -> None:
        if chunks % world:
            lower = max(chunks - chunks % world, world)
            raise ValueError(
                f"chunks={chunks} must be a multiple of world_size={world}, so that all ranks have the same "
                f"number of chunks: use {lower} or {lower + world}"
            )
        self.collective, self.world, self.chunks, self.per_rank = collective, world, chunks, chunks // world
        self.sums = collective == "reduce_scatter"
        of_rank = maps * world if len(maps) == 1 else maps
        turned = len(maps) == 1 and self._is_rotation(*maps[0])
        self.ranks = range(1 if turned else world)
        self.order = [self._order(rank, of_rank[rank][0]) for rank in self.ranks]
        self.number = [{place: number for number, place in enumerate(order)} for order in self.order]
        self._entries = [self._evaluated(rank, of_rank[rank][1]) for rank in self.ranks]
        self.alike = turned or all(self._relative_to(rank) == self._relative_to(0) for rank in self.ranks)
        self.ranks = range(1 if self.alike else world)
        self._sends: dict[Node, tuple[Send, ...]] = {}
        for rank in self.ranks:
            self._check_rank(rank)
        self._targets = [
            list(
                dict.fromkeys(
                    s.to for place in self.order[rank] for s in self._sends[rank, place] if s.how == "dma_map"
                )
            )
            for rank in self.ranks
        ]
        self._sources: dict[Node, list[int]] = defaultdict(list)
        for (source, place), sends in self._sends.items():
            for send in sends:
                rank, there = self.representative(send.to, self.landing(source, place))
                self._sources[rank, there].append((source + rank - send.to) % world)
        for (rank, _), sources in self._sources.items():
            sources.sort(key=lambda source: (rank - source) % world)
        for rank in self.ranks:
            self._check_arrivals(rank)
        self._nth: dict[Node, dict[int, int]] = {}
        self._times: dict[bool, dict[Node, int]] = {}
        self.times()

    def owner(self, place: int) -> int:
        return place // self.per_rank

    def computes(self, rank: int, place: int) -> bool:
        return self.collective != "all_gather" or self.owner(place) == rank

    def computed(self, rank: int) -> list[int]:
        """Return the chunks that a rank computes, as positions in the whole output, in the order of computation."""
        return [place for place in self.order[rank] if self.computes(rank, place)]

    def landing(self, source: int, place: int) -> int:
        """Return the place at which the receiver stores a chunk that rank `source` sends. A place is a position in the
        whole output.

        place: the chunk's place on the sender. The receiver's place differs from it only in an all-to-all.
        """
        return source * self.per_rank + place % self.per_rank if self.collective == "all_to_all" else place

    def sends(self, rank: int, place: int) -> tuple[Send, ...]:
        """Return a `Send` (map method, target rank) for each rank to which `rank` sends a chunk.

        place: the chunk's position in the whole output.
        """
        found = self._sends.get(self.representative(rank, place), ())
        return tuple(Send(how, (to + rank) % self.world) for how, to in found) if self.alike and rank else found

    def sources(self, rank: int, place: int) -> list[int]:
        """Return the ranks that send data for a chunk to `rank`. The nearest rank before `rank` in the ring is first.

        place: the chunk's position in the whole output.
        """
        found = self._sources.get(self.representative(rank, place), [])
        return [(source + rank) % self.world for source in found] if self.alike and rank else found

    def nth(self, source: int, rank: int, place: int) -> int:
        """Return the index of `source` among the ranks that send a chunk to `rank` (`sources`). This index selects the receive
        buffer and the signal.

        place: the chunk's position in the whole output.
        """
        if self.alike:
            source = (source - rank) % self.world
        node = self.representative(rank, place)
        if node not in self._nth:
            self._nth[node] = {source: nth for nth, source in enumerate(self._sources[node])}
        return self._nth[node][source]

    def targets(self, rank: int) -> list[int]:
        """Return the ranks to which the copy engines of `rank` send."""
        return [(to + rank) % self.world for to in self._targets[0]] if self.alike and rank else self._targets[rank]

    def arriving(self, rank: int, place: int) -> list[int]:
        """Return the ranks from which `rank` must receive data for a chunk, before it sends the chunk or completes the
        chunk's sum. In an all-gather, `rank` forwards these data. In a reduce-scatter, it adds the arrived sums to its
        own product. In an all-to-all, no chunk waits.

        place: the chunk's position in the whole output.
        """
        return [] if self.collective == "all_to_all" else self.sources(rank, place)

    def representative(self, rank: int, place: int) -> Node:
        """Return the key under which the properties of a chunk are stored: (rank, place). If ranks are alike, the key
        is the key of the corresponding chunk of rank 0.

        place: the chunk's position in the whole output.
        """
        return (0, self._renumbered(rank, place)) if self.alike else (rank, place)

    def _renumbered(self, rank: int, place: int) -> int:
        """Return the position of a chunk in the whole output after the ranks are renumbered so that `rank` becomes rank
        0. place: the position before the renumbering.
        """
        return (place - rank * self.per_rank) % self.chunks

    def times(self, in_turn: bool = False) -> dict[Node, int]:
        """Return {chunk: the time at which it may be forwarded}, in units of the time to compute a chunk. A chunk is given as
        (rank, its position in the whole output).

        in_turn: True if a GEMM waits for the arriving chunk into which it accumulates. The GEMM then also delays all later
            GEMMs of its rank.

        Raise `ValueError` if chunks wait for each other.
        """
        if in_turn not in self._times:
            before, least = self._waits(self.ranks, in_turn)
            if self.alike:
                before = {node: [self.representative(*one) for one in earlier] for node, earlier in before.items()}
            found = _times(before, least)
            if len(found) < len(before):
                before, least = self._waits(range(self.world), in_turn)
                found = _times(before, least)
                self._refuse_circle(
                    {node: [n for n in e if n not in found] for node, e in before.items() if node not in found}
                )
            self._times[in_turn] = found
        return self._times[in_turn]

    def _waits(self, ranks: Sequence[int], in_turn: bool) -> tuple[dict[Node, list[Node]], dict[Node, int]]:
        """Return the two arguments of `_times` for the chunks of `ranks`: the chunks for which each chunk waits, and
        the earliest time of each chunk without these waits. A chunk is given as (rank, its position in the whole output).

        in_turn: True if each chunk also waits for the previous chunk of its rank.
        """
        before: dict[Node, list[Node]] = {}
        least: dict[Node, int] = {}
        for rank in ranks:
            order = self._order_of(rank)
            computed = [place for place in order if self.computes(rank, place)]
            position = {place: i for i, place in enumerate(computed)}
            for place in order:
                node = rank, place
                least[node] = position.get(place, 0)
                before[node] = [(source, place) for source in self.arriving(rank, place)]
                if in_turn and position.get(place, 0):
                    before[node].append((rank, computed[position[place] - 1]))
        return before, least

    def _order_of(self, rank: int) -> Sequence[int]:
        if rank in self.ranks:
            return self.order[rank]
        return [self._renumbered(-rank, place) for place in self.order[0]]

    def _is_rotation(self, order: ChunkOrder, entries: tuple[Entry, ...]) -> bool:
        """True if the map (`order`, `entries`) is valid, and differs between ranks only by their position in the ring."""
        distances = [_distance(e.to, self.world, self.world) for e in entries]
        distances += [_distance(place, self.chunks, self.world) for place in order or ()]
        return None not in distances

    def _order(self, rank: int, order: ChunkOrder) -> tuple[int, ...]:
        per = self.per_rank
        if order is None:
            first = (rank + 1) * per
            return tuple((first + number) % self.chunks for number in range(self.chunks))
        places = tuple(value(place, rank=rank) for place in order)
        if sorted(places) != list(range(self.chunks)):
            wrong = next(p for p in places if not 0 <= p < self.chunks or places.count(p) > 1)
            raise ValueError(
                f"chunk {places.index(wrong)} of rank {rank}: order={list(places)} contains {wrong}, but must "
                f"contain each of the {self.chunks} places from 0 to {self.chunks - 1} exactly once"
            )
        return places

    def _evaluated(self, rank: int, entries: tuple[Entry, ...]) -> dict[int, list[Entry]]:
        """Return {place: the entries of the map for the chunk at this place}. A place is a position in the whole output.
        Targets in entries are rank numbers, evaluated for `rank`.
        """
        found = defaultdict[int, list[Entry]](list)
        for e in entries:
            to = value(e.to, rank=rank)
            found[self.order[rank][e.chunk]].append(Entry(e.how, e.chunk, to, e.op, e.after))
        return found

    def _relative_to(self, rank: int) -> list[tuple]:
        """Return the entries of `rank`, with each rank in them replaced by its distance from `rank`. The results are
        equal for ranks whose maps differ only by their positions in the ring.
        """
        return [
            (
                ((self.owner(place) - rank) % self.world, place % self.per_rank),
                [(e.how, _from(rank, e.to, self.world), e.op, e.after) for e in self._entries[rank].get(place, [])],
            )
            for place in self.order[rank]
        ]

    def _refuse(self, rank: int, place: int, text: str) -> NoReturn:
        owner = self.owner(place)
        whose = "its own rows" if owner == rank else f"rows of rank {owner}"
        raise ValueError(f"chunk {self._number(rank, place)} of rank {rank}, {whose}: {text}")

    def _check_rank(self, rank: int) -> None:
        for place in self.order[rank]:
            entries = self._entries[rank].get(place, [])
            for e in entries:
                if trouble := self._trouble(rank, place, e):
                    self._refuse(rank, place, trouble)
            self._check_together(rank, place, entries)
            self._sends[rank, place] = tuple(Send(e.how, int(e.to)) for e in entries if e.how != "local")

    def _trouble(self, rank: int, place: int, e: Entry) -> str:
        """Return the error text if the map of `rank` must not have the entry `e`; "" if the entry is valid.

        place: the position, in the whole output, of the chunk to which the entry belongs.
        """
        owner, to, c, gather = self.owner(place), int(e.to), e.chunk, self.collective == "all_gather"
        own, computes = owner == rank, self.computes(rank, place)
        if e.how == "local":
            if own:
                return ""
            if gather:
                return (
                    f"local({c}) is for chunks of this rank, but rank {owner} computes this chunk: use "
                    f"dma_map({c}, to=..., after=1), or remove the call if the chunk is not sent further"
                )
            return (
                f"local({c}) would keep the chunk here, but it belongs to rank {owner}: use remote_map({c}, to=...) or "
                f"dma_map({c}, to=..., after=...)"
            )
        if not 0 <= to < self.world:
            return f"to={to} is not a rank of this group: use 0 to {self.world - 1}"
        if to == rank:
            return f"to={to} is this rank itself: use local({c})"
        if own and not gather:
            return f"to={to}, but the chunk belongs to this rank: use local({c})"
        if gather and to == owner:
            return f"to={to} would write the chunk twice, because that rank computes it too: remove this call"
        if not computes and e.how == "remote_map":
            return f"remote_map, but no GEMM of this rank computes the chunk: use dma_map({c}, to={to}, op='store', after=1)"
        if self.collective == "all_to_all" and to != owner:
            return f"to={to}, but in an all-to-all the chunk belongs to rank {owner}: use to={owner}"
        if self.sums and e.op == "store":
            return f"op='store' would overwrite the product of rank {to}, which must be summed: use op='update'"
        if not self.sums and e.op == "update":
            return f"op='update' would add to memory of rank {to} that was not written: use op='store'"
        return ""

    def _check_together(self, rank: int, place: int, entries: list[Entry]) -> None:
        c, own, gather = self.number[rank][place], self.owner(place) == rank, self.collective == "all_gather"
        said = " and ".join(map(str, entries))
        twice = len(entries) > 1 and (not gather or len({e.to for e in entries}) < len(entries))
        if twice:
            self._refuse(rank, place, f"it is written twice, by {said}: remove one of them")
        if own and not any(e.how == "local" for e in entries):
            self._refuse(rank, place, f"it belongs to this rank, but the map does not keep it here: add local({c})")
        if not entries and self.computes(rank, place):
            self._refuse(
                rank,
                place,
                f"it has no destination: add remote_map({c}, to=..., op=...) or dma_map({c}, to=..., op=..., "
                "after=...)",
            )

    def _check_arrivals(self, rank: int) -> None:
        for place in self.order[rank]:
            c, sources = self.number[rank][place], self.arriving(rank, place)
            who = _ranks(sources)
            computes = self.computes(rank, place)
            if self.collective == "all_gather" and not computes and len(sources) != 1:
                if sources:
                    self._refuse(rank, place, f"it is written twice, by {who}: send it from one of them only")
                self._refuse(
                    rank,
                    place,
                    f"no rank sends it here: send it from one rank, by remote_map or dma_map with to={rank}",
                )
            local = 1 if computes else 0
            come = [*["from this rank's GEMM"] * local, *(f"from rank {source}" for source in sources)]
            for e in self._entries[rank].get(place, []):
                if e.how == "remote_map" and self.sums and sources:
                    self._refuse(
                        rank, place,
                        f"{who} sends updates of this chunk here, but remote_map leaves no chunk in this rank's "
                        f"memory to which they could be added: use dma_map({c}, to={e.to}, op='update', "
                        f"after={len(come)}), or send them elsewhere",
                    )  # fmt: skip
                if e.how == "dma_map" and e.after != len(come):
                    trouble = "never be sent" if e.after > len(come) else "be sent before all updates have arrived"
                    self._refuse(
                        rank, place,
                        f"after={e.after}, but the chunk gets {counted(len(come), 'update')}, {' and '.join(come)}. It would "
                        f"{trouble}: use after={len(come)}, or change which ranks send it here",
                    )  # fmt: skip

    def _refuse_circle(self, waiting: dict[Node, list[Node]]) -> NoReturn:
        """Raise `ValueError` for chunks that wait for each other.

        waiting: the chunks that wait forever, as {chunk: the chunks that it waits for}. A chunk is given as (rank, its position
            in the whole output).
        """
        node, path = min(waiting), list[Node]()
        while node not in path:
            path.append(node)
            node = waiting[node][0]
        circle = path[path.index(node) :]
        names = [f"chunk {self._number(rank, place)} of rank {rank}" for rank, place in circle]
        in_turn = len({place for _, place in circle}) > 1
        fix = (
            "with add='gemm', GEMMs wait for arriving chunks in order: use add='reduce'"
            if in_turn
            else "send one of these chunks to another rank"
        )
        self._refuse(
            *circle[0],
            "chunks wait for each other, so none of them is ever sent: this chunk waits for "
            f"{', which waits for '.join([*names[1:], names[0]])}. Fix: {fix}",
        )

    def _number(self, rank: int, place: int) -> int:
        return self.number[0][self._renumbered(rank, place)] if self.alike else self.number[rank][place]

    def arrivals(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (rank, place, i, source) for each chunk that arrives at a rank: `source`, the i-th of the chunk's senders
        (`sources`), sends it to `rank`. place: the chunk's position in the whole output.

        If ranks are alike, yield only the chunks that arrive at rank 0.
        """
        for (rank, place), sources in self._sources.items():
            for nth, source in enumerate(sources):
                yield rank, place, nth, source


def _ranks(ranks: list[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def _times(before: dict[Node, list[Node]], least: dict[Node, int]) -> dict[Node, int]:
    """Return {chunk: the earliest time at which it may be forwarded}, in units of the time to compute a chunk. Chunks that wait
    for each other are omitted.

    before: the waits, as {chunk: the chunks that it waits for}. The chunk's time is later than the times of these chunks.
    least: when each chunk is computed at the earliest, as {chunk: its index in the order of computation}. The index is 0 if the
        chunk's rank does not compute it.
    """
    after: dict[Node, list[Node]] = defaultdict(list)
    for node, earlier in before.items():
        for one in earlier:
            after[one].append(node)
    left = {node: len(earlier) for node, earlier in before.items()}
    ready, found = [node for node, count in left.items() if not count], dict[Node, int]()
    for node in ready:
        found[node] = max(least[node], *(found[one] + 1 for one in before[node]), 0)
        for one in after[node]:
            left[one] -= 1
            if not left[one]:
                ready.append(one)
    return found


def _from(rank: int, to: Index, world: int) -> int:
    """Return the distance in the ring from `rank` to `to`. If `to` is not a valid rank, return it unchanged, for the
    error text.
    """
    number = int(to)
    return (number - rank) % world if 0 <= number < world else number


@lru_cache(maxsize=1 << 12)  # the maps of all candidates repeat the same expressions
def _distance(number: Index, count: int, world: int) -> int | None:
    """Return a distance in a ring of `count` ranks or chunks: from this rank to rank `number`, or from this rank's
    first chunk to chunk `number`.

    Return None if the distance differs between ranks, or if the expression `number` is out of range on some rank.

    number: a rank, or a chunk's position in the whole output, as an expression of `rank`.
    count: the number of ranks if `number` is a rank, otherwise the number of all chunks.
    """
    ranks = np.arange(world)
    try:
        found = np.asarray(number.evaluated_over({"rank": ranks}) if isinstance(number, Expr) else number)
    except (KeyError, IndexError, ArithmeticError):
        return None  # evaluation of single entries reports the error with rank and number
    distances = (found - ranks * (count // world)) % count
    legal = (found >= 0).all() and (found < count).all()
    return int(distances[0]) if legal and (distances == distances[0]).all() else None
