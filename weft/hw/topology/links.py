"""How ranks are linked: nodes, the links between them, and the route that bytes take from one rank to another.

Nodes are numbers: the ranks first, then switches. A link goes one way. A route has the fewest links; where several have as
few, it leaves each node by the link that is listed first. What a route costs is said by its links: a flow takes a part of the
bandwidth of each, and their latencies add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Link:
    kind: str
    at: int  # tells links of a kind apart: mostly the rank that has it
    source: int
    target: int
    bytes_per_us: float
    latency_us: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.at} {self.kind}"


@dataclass(frozen=True)
class Topology:
    """Of so many ranks. Without any link, ranks reach each other at once, as fast as they like."""

    ranks: int
    links: tuple[Link, ...]
    _routes: dict[int, dict[int, tuple[Link, ...]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len({link.name for link in self.links}) < len(self.links):
            raise ValueError("two links of a topology have one name: give each a kind or an `at` of its own")
        for link in self.links:
            if not (link.bytes_per_us > 0 and link.latency_us >= 0):
                raise ValueError(f"{link}: bytes_per_us must be above 0, and latency_us 0 or more")

    def route(self, source: int, target: int) -> tuple[Link, ...]:
        """In order; none to itself. `ValueError` if no links lead there."""
        if source not in self._routes:
            self._routes[source] = self._routes_from(source) if self.links else {}
        routes = self._routes[source]
        if self.links and target not in routes:
            raise ValueError(f"no links lead from rank {source} to rank {target}")
        return routes.get(target, ())

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
        """By how many ranks on it looks the same at least: 1 if all see the same, `ranks` if no two do. Every route is, that much
        turned, the route of other ranks, over as fast links of the same kinds that are as much further on."""
        pairs = [(a, b) for a in range(self.ranks) for b in range(self.ranks) if a != b]

        def seen(source: int, target: int, turn: int) -> list[tuple]:
            route = self.route((source + turn) % self.ranks, (target + turn) % self.ranks)
            return [(a.kind, (a.at - turn) % self.ranks, a.bytes_per_us, a.latency_us) for a in route]

        turns = (turn for turn in range(1, self.ranks) if self.ranks % turn == 0)
        return next((turn for turn in turns if all(seen(*p, 0) == seen(*p, turn) for p in pairs)), self.ranks)


@dataclass(frozen=True)
class Wiring:
    """A topology for any number of ranks: one of the functions below, and what it is given after that number."""

    builder: Callable[..., Topology]
    numbers: tuple[float, ...] = ()

    def of(self, ranks: int) -> Topology:
        return _built(self, ranks)

    def at_least(self, bytes_per_us: float) -> Wiring:
        """With links of a rank, the first number, that are no slower than that."""
        return replace(self, numbers=(max(self.numbers[0], bytes_per_us), *self.numbers[1:]))


@lru_cache(maxsize=16)
def _built(wiring: Wiring, ranks: int) -> Topology:
    return wiring.builder(ranks, *wiring.numbers)


def unlimited(ranks: int) -> Topology:
    """No link is ever short."""
    return Topology(ranks, ())


def switch(ranks: int, bytes_per_us: float, latency_us: float = 0.0) -> Topology:
    """All on one switch. A rank's port limits what it sends to the others together, and what it receives."""
    return Topology(ranks, tuple(_ports(ranks, ("out", "in"), lambda rank: ranks, bytes_per_us, latency_us)))


def mesh(ranks: int, bytes_per_us: float, latency_us: float = 0.0) -> Topology:
    """Two links between every two ranks, one in each direction."""
    pairs = ((rank, d) for rank in range(ranks) for d in range(1, ranks))
    return Topology(ranks, tuple(Link(f"to +{d}", r, r, (r + d) % ranks, bytes_per_us, latency_us) for r, d in pairs))


def ring(ranks: int, bytes_per_us: float, latency_us: float = 0.0) -> Topology:
    """Links to the rank before and to the one behind."""
    return torus(ranks, bytes_per_us, latency_us, ranks)


def torus(ranks: int, bytes_per_us: float, latency_us: float, columns: int) -> Topology:
    """A ring along each row of `columns` ranks and along each column. Routes go along the row first."""
    if columns < 1 or ranks % columns:
        raise ValueError(f"a torus with rows of {columns} ranks cannot have {ranks}: give it a multiple of {columns}")
    links = []
    for rank in range(ranks):
        row = rank - rank % columns
        along = [(f"row {step:+d}", row + (rank + step) % columns) for step in _steps(columns)]
        along += [(f"column {step:+d}", (rank + step * columns) % ranks) for step in _steps(ranks // columns)]
        links += [Link(kind, rank, rank, target, bytes_per_us, latency_us) for kind, target in along]
    return Topology(ranks, tuple(links))


def _steps(length: int) -> tuple[int, ...]:
    """To the neighbours in a ring: of two, both are the same."""
    return (1, -1)[: length - 1]


def hosts(
    ranks: int, bytes_per_us: float, latency_us: float, nic_bytes_per_us: float, nic_latency_us: float, gpus: int
) -> Topology:
    """Hosts of `gpus` ranks, each with a switch; every rank also has a NIC of its own on one network of all hosts."""
    of_host = _ports(ranks, ("out", "in"), lambda rank: ranks + rank // gpus, bytes_per_us, latency_us)
    network = ranks + -(-ranks // gpus)
    nics = _ports(ranks, ("NIC out", "NIC in"), lambda rank: network, nic_bytes_per_us, nic_latency_us)
    return Topology(
        ranks, tuple(of_host + (nics if ranks > gpus else []))
    )  # in this order: a host's switch comes first


def _ports(
    ranks: int, kinds: tuple[str, str], hub: Callable[[int], int], bytes_per_us: float, latency_us: float
) -> list[Link]:
    out, into = kinds
    pairs = (
        (Link(out, r, r, hub(r), bytes_per_us, latency_us), Link(into, r, hub(r), r, bytes_per_us, latency_us))
        for r in range(ranks)
    )
    return [link for pair in pairs for link in pair]
