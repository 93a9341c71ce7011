"""Links between ranks: nodes, the links between them, and the route of bytes from one rank to another.

Nodes are numbers: the ranks first, then switches. A link has one direction. A route has the fewest links; among equal routes, it
leaves each node by the link that is listed first. A flow shares the bandwidth of each link of its route, and the latencies of
these links add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Link:
    kind: str
    at: int  # distinguishes links of a kind: usually their rank
    source: int
    target: int
    bytes_per_us: float
    latency_us: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.at} {self.kind}"


@dataclass(frozen=True)
class Topology:
    """The links between `ranks` ranks, each with a unique name. Without links, ranks reach each other with no latency, at any
    rate."""

    ranks: int
    links: tuple[Link, ...]
    _routes: dict[int, dict[int, tuple[Link, ...]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def route(self, source: int, target: int) -> tuple[Link, ...]:
        """Return the links in order; none from a rank to itself. Raise `ValueError` if there is no route."""
        if not self.links:
            return ()
        if source not in self._routes:
            self._routes[source] = self._routes_from(source)
        if target not in self._routes[source]:
            raise ValueError(f"no links lead from rank {source} to rank {target}")
        return self._routes[source][target]

    def _routes_from(self, source: int) -> dict[int, tuple[Link, ...]]:
        routes: dict[int, tuple[Link, ...]] = {source: ()}
        missing = self.ranks - 1
        for node in (queue := [source]):
            for link in self._leaving.get(node, ()) if missing else ():
                if link.target not in routes:
                    routes[link.target] = (*routes[node], link)
                    queue.append(link.target)
                    missing -= link.target < self.ranks
        return routes

    @cached_property
    def _leaving(self) -> dict[int, list[Link]]:
        leaving: dict[int, list[Link]] = {}
        for link in self.links:
            leaving.setdefault(link.source, []).append(link)
        return leaving

    @cached_property
    def period(self) -> int:
        """The smallest rotation of the ranks under which the topology looks the same: 1 if all ranks see the same, `ranks`
        if no two do.

        Rotated by the period, every route becomes the route of the rotated ranks, over equally fast links of the same kinds.
        """
        pairs = [(a, b) for a in range(self.ranks) for b in range(self.ranks) if a != b]

        def seen(source: int, target: int, turn: int) -> list[tuple]:
            route = self.route((source + turn) % self.ranks, (target + turn) % self.ranks)
            return [(a.kind, (a.at - turn) % self.ranks, a.bytes_per_us, a.latency_us) for a in route]

        turns = (turn for turn in range(1, self.ranks) if self.ranks % turn == 0)
        return next((turn for turn in turns if all(seen(*p, 0) == seen(*p, turn) for p in pairs)), self.ranks)


@dataclass(frozen=True)
class Wiring:
    """A topology for any number of ranks: one of the functions below, and its arguments after the number of ranks."""

    builder: Callable[..., Topology]
    numbers: tuple[float, ...] = ()

    def of(self, ranks: int) -> Topology:
        return _built(self, ranks)

    def at_least(self, bytes_per_us: float) -> Wiring:
        """Return the wiring with a rank's links, its first number, at least as fast as `bytes_per_us`."""
        return replace(self, numbers=(max(self.numbers[0], bytes_per_us), *self.numbers[1:]))


@lru_cache(maxsize=16)
def _built(wiring: Wiring, ranks: int) -> Topology:
    return wiring.builder(ranks, *wiring.numbers)


def unlimited(ranks: int) -> Topology:
    return Topology(ranks, ())


def switch(ranks: int, bytes_per_us: float, latency_us: float = 0.0) -> Topology:
    """Return all ranks on one switch. A rank's port limits the total that it sends, and the total that it receives."""
    return hosts(ranks, bytes_per_us, latency_us, 1.0, 0.0, ranks)


def mesh(ranks: int, bytes_per_us: float, latency_us: float = 0.0) -> Topology:
    """Return two links between every two ranks, one in each direction."""
    pairs = ((rank, d) for rank in range(ranks) for d in range(1, ranks))
    return Topology(ranks, tuple(Link(f"to +{d}", r, r, (r + d) % ranks, bytes_per_us, latency_us) for r, d in pairs))


def ring(ranks: int, bytes_per_us: float, latency_us: float = 0.0) -> Topology:
    """Return links to the previous and to the next rank."""
    return torus(ranks, bytes_per_us, latency_us, ranks)


def torus(ranks: int, bytes_per_us: float, latency_us: float, columns: int) -> Topology:
    """Return a ring along each row of `columns` ranks and along each column. Routes go along the row first."""
    if ranks % columns:
        raise ValueError(f"a torus with rows of {columns} ranks cannot have {ranks} ranks: use a multiple of {columns}")
    links = []
    for rank in range(ranks):
        row = rank - rank % columns
        # In a ring of two, both neighbours are the same rank.
        along = [(f"row {step:+d}", row + (rank + step) % columns) for step in (1, -1)[: columns - 1]]
        along += [(f"column {n:+d}", (rank + n * columns) % ranks) for n in (1, -1)[: ranks // columns - 1]]
        links += [Link(kind, rank, rank, target, bytes_per_us, latency_us) for kind, target in along]
    return Topology(ranks, tuple(links))


def hosts(
    ranks: int, bytes_per_us: float, latency_us: float, nic_bytes_per_us: float, nic_latency_us: float, gpus: int
) -> Topology:
    """Return hosts of `gpus` ranks, each host with a switch. Every rank also has its own NIC on one network of all hosts."""
    links, network = [], ranks + -(-ranks // gpus)
    for rank in range(ranks):  # the host's switch comes first, so routes within the host take it
        for kind, hub, rate, us in (
            ("", ranks + rank // gpus, bytes_per_us, latency_us),
            ("NIC ", network, nic_bytes_per_us, nic_latency_us),
        )[: 2 if ranks > gpus else 1]:
            links += [Link(f"{kind}out", rank, rank, hub, rate, us), Link(f"{kind}in", rank, hub, rank, rate, us)]
    return Topology(ranks, tuple(links))
