"""Topologies from and to InfraGraph, a vendor-neutral description of hosts, GPUs, NICs, switches and their links.

    weft sim matmul_reduce_scatter --shape 16384,8192,4096 --hw mi300x --topology cluster.json

Every component of type `xpu` is a rank, in the order of the file; all other components forward bytes. An edge is two
links, one in each direction, with the bandwidth and latency of the edge's link. Edges without a bandwidth carry no
bytes. A flow uses the fastest of the routes with the fewest links. If several routes are equally fast, the bytes of the
flow spread over up to `MOST_ROUTES` of them. But the flow is no faster than on one route.

Collectives may use one dimension of a grid of ranks after the other. InfraGraph has no grids, so weft derives them from the
links: hosts are blocks of consecutive ranks with the best routes to each other, and a torus is recognised by its links.

Reading needs the PyPI package `infragraph`, which expands instances, indices and nested devices. Writing does not need
the package.

Source: "InfraGraph (INFRAstructure GRAPH)", https://infragraph.dev, version 3.1.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import reading
from weft.errors import UnreadableError
from weft.hw.topology.links import Link, Route, Topology, Wiring
from weft.hw.topology.shapes.torus import kinds_of_links, torus

MOST_ROUTES = 16
_UNITS = {"Gbps": 125.0, "GBps": 1000.0, "ms": 1e3, "us": 1.0, "ns": 1e-3}  # in bytes/us, and in us


class Spread(Topology):
    """A topology in which a flow spreads over up to `MOST_ROUTES` routes that are equally short and equally fast."""

    def _found(self, source: int, target: int) -> tuple[Route, ...]:
        if source == target:
            return ((),)
        ways: dict[int, list[Route]] = {source: [()]}
        while ways and target not in ways:
            further: dict[int, list[Route]] = {}
            for node, routes in ways.items():
                for link in self._leaving.get(node, ()):
                    if link.target not in self._seen(source, len(routes[0])):
                        found = further.setdefault(link.target, [])
                        found += [(*route, link) for route in routes[: MOST_ROUTES - len(found)]]
            ways = further
        if target not in ways:
            raise ValueError(
                f"no links with a bandwidth lead from rank {source} to rank {target}: add links, or bandwidths, to the InfraGraph"
            )
        fastest = max(map(_quickness, ways[target]))
        return tuple(route for route in ways[target] if _quickness(route) == fastest)

    def _seen(self, source: int, steps: int) -> set[int]:
        """Return the nodes that are at most `steps` links away from `source`."""
        levels: list[set[int]] = self.known.setdefault(("seen", source), [{source}])
        while len(levels) <= steps:
            beyond = {link.target for node in levels[-1] for link in self._leaving.get(node, ())}
            levels.append(levels[-1] | beyond)
        return levels[steps]


def _quickness(route: Route) -> tuple[float, float]:
    return min(link.bytes_per_us for link in route), -sum(link.latency_us for link in route)


@dataclass(frozen=True)
class Graph:
    """The links of one cluster. Call the object with the number of ranks to get the topology.

    dims: the sizes of the grid of ranks, as in `Topology`; () if there is none. hosts: True if the grid is (GPUs of a host, hosts).
    """

    links: tuple[Link, ...]
    dims: tuple[int, ...] = ()
    hosts: bool = False

    def __call__(self, ranks: int) -> Topology:
        return Spread(ranks, self.links, dims=self.dims, rings=bool(self.dims) and not self.hosts)


def read_infragraph(path: str | Path) -> Wiring:
    """Return the wiring in a JSON file of an InfraGraph `Infrastructure`.

    Raises `ValueError` if `infragraph` is not installed, or if the file has no xpu, or no bandwidth of links between xpus. Raises
    `UnreadableError` for a file that is not an Infrastructure.
    """
    try:
        content = reading.read_bytes(Path(path), reading.MOST_JSON_BYTES)
    except OSError as error:
        raise UnreadableError(
            f"the InfraGraph file {path} cannot be read ({error.strerror}): give another path"
        ) from error
    reading.parse_json(content, str(path))
    try:
        from infragraph.infragraph_service import InfraGraphService
    except ImportError as error:
        raise ValueError(f"{path}: InfraGraph files need the package infragraph: pip install infragraph") from error
    service = InfraGraphService()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            service.set_graph(content.decode())
    except Exception as error:  # the package raises its own errors, and those of yaml and networkx
        raise UnreadableError(f"{path} is not a valid InfraGraph infrastructure: {error}") from error
    graph = service.get_networkx_graph()
    return _wiring(str(path), list(graph.nodes(data="type")), list(graph.edges(data=True)))


def _wiring(path: str, nodes: Sequence[tuple[str, str]], edges: Sequence[tuple[str, str, dict[str, Any]]]) -> Wiring:
    ranks = [name for name, of in nodes if of == "xpu"]
    if not ranks:
        raise ValueError(f"{path} has no component of type xpu: give the GPUs this type, because each xpu is a rank")
    numbers = {name: number for number, name in enumerate((*ranks, *(name for name, of in nodes if of != "xpu")))}
    links: list[Link] = []
    sent, got = [0] * len(numbers), [0] * len(numbers)
    without = set()
    for one, other, about in edges:
        if "bandwidth" not in about:
            without.add(about.get("link"))
            continue
        rate = _number(path, about, "bandwidth")
        us = _number(path, about, "latency") if "latency" in about else 0.0
        for source, target in ((numbers[one], numbers[other]), (numbers[other], numbers[one])):
            # Name links by rank, so that ranks are alike if each has equal links in equal order.
            if source < len(ranks):
                kind, at = f"out {sent[source]}", source
                sent[source] += 1
            elif target < len(ranks):
                kind, at = f"in {got[target]}", target
                got[target] += 1
            else:
                kind, at = f"between {len(links)}", 0
            links.append(Link(kind, at, source, target, rate, us))
    per_host = _per_host(len(ranks), links)
    dims = (per_host, len(ranks) // per_host) if per_host else _torus(len(ranks), links)
    graph = Graph(tuple(links), dims, hosts=bool(per_host))
    found = Wiring(graph, (), len(ranks))
    topology = found.of(len(ranks))
    for rank in range(1, len(ranks)):
        for source, target in ((0, rank), (rank, 0)):
            try:
                topology.paths(source, target)
            except ValueError as error:
                named = f"; these links have none: {', '.join(sorted(map(str, without)))}" if without else ""
                raise ValueError(
                    f"{path}: {error}{named}. Give physical.bandwidth to the links between xpus"
                ) from error
    return found


def _per_host(ranks: int, links: Sequence[Link]) -> int:
    """Return the number of ranks of each host. Hosts are equal blocks of consecutive ranks, in which each rank has its best
    routes to the other ranks of its block. The best routes are the fastest among the routes with the fewest links.
    Return 0 if there are no such blocks.
    """
    leaving: dict[int, list[Link]] = {}
    for link in links:
        leaving.setdefault(link.source, []).append(link)
    size = len(_nearest(0, ranks, leaving)) + 1
    if not 1 < size < ranks or ranks % size:
        return 0
    blocks = (range(rank - rank % size, rank - rank % size + size) for rank in range(ranks))
    return size if all(_nearest(rank, ranks, leaving) == {*block} - {rank} for rank, block in enumerate(blocks)) else 0


def _nearest(rank: int, ranks: int, leaving: dict[int, list[Link]]) -> set[int]:
    """Return the ranks to which `rank` has its best routes."""
    rates, seen = {rank: math.inf}, {rank}
    while rates:
        further: dict[int, float] = {}
        for node, rate in rates.items():
            for link in leaving.get(node, ()):
                if link.target not in seen:
                    further[link.target] = max(further.get(link.target, 0.0), min(rate, link.bytes_per_us))
        peers = {node: rate for node, rate in further.items() if node < ranks}
        if peers:
            best = max(peers.values())
            return {node for node, rate in peers.items() if rate == best}
        seen.update(further)
        rates = further
    return set()


def _torus(ranks: int, links: Sequence[Link]) -> tuple[int, ...]:
    """Return the sizes of the torus that has exactly these links; () if there is no such torus with at least two dimensions."""
    linked = {(link.source, link.target) for link in links}
    near = {target for source, target in linked if source == 0}
    for dims in _factors(ranks):
        if len(dims) > 1 and near == {step % size * stride for _, step, stride, size in kinds_of_links(dims)}:
            grid = torus(ranks, 1.0, 0.0, *dims[:-1])
            if linked == {(link.source, link.target) for link in grid.links}:
                return dims
    return ()


def _factors(number: int) -> Iterator[tuple[int, ...]]:
    """Yield all sequences of numbers above 1 whose product is `number`."""
    if number > 1:
        yield (number,)
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            yield from ((first, *others) for others in _factors(number // first))


def _number(path: str, about: dict[str, Any], what: str) -> float:
    value, unit = str(about[what]).split(" ")
    if unit not in _UNITS:
        raise ValueError(
            f"{path}: link {about.get('link')!r} has a {what} in {unit}: give gigabits_per_second or gigabytes_per_second"
        )
    if not float(value) >= (least := 0 if what == "latency" else 1e-6):
        raise ValueError(
            f"{path}: link {about.get('link')!r} has a {what} of {value} {unit}: give at least {least:g} {unit}"
        )
    return float(value) * _UNITS[unit]


def infragraph_of(topology: Topology, name: str) -> dict[str, Any]:
    """Return a topology as a JSON value of an InfraGraph `Infrastructure`: an instance for each rank and each switch.

    An edge of InfraGraph has no direction. So raise `ValueError` unless linked nodes have exactly one link in each direction,
    both with the same bandwidth and latency.
    """
    if not topology.links:
        raise ValueError("the topology has no links to write: use a topology of at least 2 ranks")
    between: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for link in topology.links:
        between.setdefault((link.source, link.target), []).append((link.bytes_per_us, link.latency_us))
    kinds: dict[tuple[float, float], str] = {}
    edges = []
    for (source, target), numbers in between.items():
        if len(numbers) > 1 or between.get((target, source)) != numbers:
            raise ValueError(
                f"InfraGraph cannot represent the links between nodes {source} and {target}: give these nodes exactly one link in "
                "each direction, both with the same bandwidth and latency"
            )
        if source < target:
            kind = kinds.setdefault(numbers[0], f"link{len(kinds)}")
            ends = (_endpoint(node, topology.ranks) for node in (source, target))
            edges.append({"ep1": next(ends), "ep2": next(ends), "scheme": "one2one", "link": kind})
    switches = len({*itertools.chain(*between)}) - topology.ranks
    devices = [("gpu", "xpu", topology.ranks), ("hub", "switch", switches)]
    links = [
        {
            "name": kind,
            "physical": {
                "bandwidth": {"choice": "gigabytes_per_second", "gigabytes_per_second": rate / 1e3},
                "latency": {"choice": "us", "us": us},
            },
        }
        for (rate, us), kind in kinds.items()
    ]
    return {
        "name": name,
        "devices": [
            {"name": device, "components": [{"name": of, "count": 1, "choice": of, of: {}}], "links": [], "edges": []}
            for device, of, count in devices if count
        ],
        "instances": [{"name": f"{device}s", "device": device, "count": count} for device, _, count in devices if count],
        "links": links,
        "edges": edges,
    }  # fmt: skip


def _endpoint(node: int, ranks: int) -> dict[str, str]:
    instance, component = (f"gpus[{node}]", "xpu[0]") if node < ranks else (f"hubs[{node - ranks}]", "switch[0]")
    return {"instance": instance, "component": component}
