"""Topologies: nodes, links, and the routes of bytes between ranks.

Nodes are numbered, ranks first, then switches. A link has one direction. Concurrent transfers share the bandwidth of a
link. The latency of a route is the sum of its links' latencies.

A route has as few links as possible. If several routes are equally short, the route whose links are earlier in the list of
links is used. A topology with another rule overrides `Topology._found`, as a torus does.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias


@dataclass(frozen=True)
class Link:
    kind: str
    at: int  # distinguishes links of the same kind: usually the rank that the link belongs to
    source: int
    target: int
    bytes_per_us: float
    latency_us: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.at} {self.kind}"


Route: TypeAlias = tuple[Link, ...]


class Paths(NamedTuple):
    """The routes between two ranks, and the latency and bandwidth of a transfer that runs alone.

    Even with several routes, the bandwidth is at most the bandwidth of one link.
    """

    routes: tuple[Route, ...]
    latency_us: float
    bytes_per_us: float


@dataclass(frozen=True)
class Topology:
    """The links between `ranks` ranks. Without links, transfers take no time.

    dims: the sizes of a grid of ranks, such as (GPUs per host, hosts), if collectives may use one dimension after the
        other. All lines along a dimension have equal links. Consecutive ranks lie along the first dimension.
    rings: True if each line along a dimension is a ring, with links in both directions.
    """

    ranks: int
    links: tuple[Link, ...]
    dims: tuple[int, ...] = ()
    rings: bool = False
    _routes: dict[int, dict[int, Route]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _paths: dict[tuple[int, int], Paths] = field(default_factory=dict, init=False, repr=False, compare=False)
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """A cache in which other modules store what they derive from this topology, each under its own keys."""

    def routes(self, source: int, target: int) -> tuple[Route, ...]:
        """Return the routes from `source` to `target`. Each route carries an equal part of a transfer.

        A rank's route to itself has no links. Raise `ValueError` if there is no route.
        """
        return self.paths(source, target).routes

    def paths(self, source: int, target: int) -> Paths:
        """Return the routes with their latency and bandwidth. Raise `ValueError` if there is no route."""
        found = self._paths.get((source, target))
        if found is None:
            routes = self._found(source, target)
            links = list(itertools.chain(*routes))
            latency_us = max(sum(link.latency_us for link in route) for route in routes)
            rate = min((link.bytes_per_us for link in links), default=math.inf)
            found = self._paths[source, target] = Paths(routes, latency_us, rate)
        return found

    def _found(self, source: int, target: int) -> tuple[Route, ...]:
        if not self.links or source == target:
            return ((),)
        if source not in self._routes:
            self._routes[source] = self._routes_from(source)
        if target not in self._routes[source]:
            raise ValueError(f"no links lead from rank {source} to rank {target}: add links to the topology")
        return (self._routes[source][target],)

    @cached_property
    def by_place(self) -> dict[tuple[str, int], Link]:
        return {(link.kind, link.at): link for link in self.links}

    def _routes_from(self, source: int) -> dict[int, Route]:
        routes: dict[int, Route] = {source: ()}
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
        """The smallest p such that renaming each rank r to r + p leaves the topology unchanged; at most `ranks`. p is 1 if
        the topology looks the same from all ranks. Unchanged means that the route from rank r + p to rank s + p has links
        of the same speeds and kinds as the route from r to s.
        """
        turns = (turn for turn in range(1, self.ranks) if self.ranks % turn == 0)
        return next((turn for turn in turns if self._is_same(turn)), self.ranks)

    def _is_same(self, turn: int) -> bool:
        """True if the topology is unchanged when each rank r is renamed to r + `turn`.

        Each link must be renamed to an equally fast link of the same kind. The order of links must not change either,
        because it selects one of several shortest routes.
        """
        moved: dict[int, int] = {}  # switch -> rotated switch
        for link in self.links:
            other = self.by_place.get((link.kind, (link.at + turn) % self.ranks))
            if other is None or (other.bytes_per_us, other.latency_us) != (link.bytes_per_us, link.latency_us):
                return False
            for node, to in ((link.source, other.source), (link.target, other.target)):
                if to != ((node + turn) % self.ranks if node < self.ranks else moved.setdefault(node, to)):
                    return False
        kinds = [[link.kind for link in self._leaving.get(rank, ())] for rank in range(self.ranks)]
        return all(kinds[rank] == kinds[rank - turn] for rank in range(self.ranks))


@dataclass(frozen=True)
class Wiring:
    """A rule that builds the topology of a given number of ranks.

    builder: the function that builds the topology, such as `weft.hw.topology.ring`.
    numbers: the builder's arguments after the number of ranks.
    ranks: the only allowed number of ranks; 0 if any number is allowed.
    """

    builder: Callable[..., Topology]
    numbers: tuple[float, ...] = ()
    ranks: int = 0

    def of(self, ranks: int) -> Topology:
        if self.ranks not in (0, ranks):
            raise ValueError(
                f"the topology has {self.ranks} ranks, not {ranks}: use ranks={self.ranks} or another topology"
            )
        return _built(self, ranks)

    def scaled(self, factor: float) -> Wiring:
        """Return the wiring with the bandwidth of all links, including links between hosts, multiplied by `factor`."""
        _, *names = inspect.signature(self.builder).parameters
        pairs = zip(itertools.chain(names, itertools.repeat("")), self.numbers)  # noqa: B905 - `torus` has more numbers than names
        return replace(self, numbers=tuple(n * factor if name.endswith("bytes_per_us") else n for name, n in pairs))

    def at_least(self, bytes_per_us: float) -> Wiring:
        """Return the wiring with the bandwidth of a rank's links (the builder's first number) raised to `bytes_per_us`,
        if it is lower.
        """
        if not self.numbers:
            return self
        return replace(self, numbers=(max(self.numbers[0], bytes_per_us), *self.numbers[1:]))


@lru_cache(maxsize=16)
def _built(wiring: Wiring, ranks: int) -> Topology:
    return wiring.builder(ranks, *wiring.numbers)


def unlimited(ranks: int) -> Topology:
    return Topology(ranks, ())
