"""Algorithms of collectives (NCCL, RCCL) on a topology: the bytes that each rank sends to each other rank, in rounds.

An algorithm is a sequence of stages, and a stage is one phase or several concurrent phases. A phase has a number of equal
rounds. In each round, every rank sends the same number of bytes to each of its peers in this phase. A round begins when the
previous round's data has arrived, and a stage begins when the previous stage has ended. So a stage with one phase takes

    rounds * (latency of the longest route + bytes on the busiest link / its bandwidth)

Phases of one stage share links. Such a stage takes the longest latency of its phases plus the time of the busiest link.

    algorithm            rounds           bytes that a rank sends; S: the bytes of all shards together, W: the number of ranks
    direct               1                S / W to each other rank
    ring                 W - 1            S / W to the next rank, in one direction
    halving-doubling     log2 W           S / 2, S / 4, ... to the ranks at distances 1, 2, 4, ...
    tree (all-reduce)    2 log2 W         S towards the root, and S back
    by dimension         (see below)      direct or ring along one dimension after the other
    all dimensions       (see below)      concurrent rings along all dimensions of a torus, in both directions

By dimension: in a reduce-scatter, the ranks on each line along the first dimension use the direct algorithm (1 round) or
a ring (size of the dimension - 1 rounds). Then the ranks on each line along the second dimension reduce and scatter the
results, and so on. An all-gather takes the dimensions in reverse order.

All dimensions: on a torus of d >= 2 dimensions, the bytes are cut into 2 d equal parts. Each part is reduced and scattered
by rings along all dimensions, as before. Two parts begin with each dimension: one goes in each direction of its rings. A part
that begins with dimension i continues with dimension i + 1, and after the last dimension with the first. So in each of the d
stages, all links of a rank carry a part. With n ranks along each dimension, a reduce-scatter of S bytes takes

    d (n - 1) latency + (1 - 1 / n^d) S / (2 d bandwidth)

which is the bound that all links of a rank set. If the sizes differ, the largest dimension determines the time of each
stage: a torus of 16 x 8 takes 1.06 times the bound, a torus of 16 x 8 x 4 takes 1.20 times. Small payloads use "direct",
because this algorithm has as many rounds as rings by dimension.

A ring (a single dimension) is used in one direction, as in T3's closed form. A ring in both directions would halve the bytes
on each link, and so take half the time without latency.

The fastest algorithm is used, because libraries also choose the fastest. An all-to-all is always direct. On a torus its routes
follow the dimensions. The measured rate of NCCL or RCCL (`collective.all_gather` in a machine file) is an upper limit for all
algorithms.

A topology has period p if it looks the same from rank r and from rank r + p. Its first p ranks then represent all
ranks.

Sources: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience",
    2007. Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
    message-passing systems", 1997 (halving-doubling for any number of ranks). Jain and Sabharwal, "Optimal bucket
    algorithms for large MPI collectives on torus interconnects", 2010 (all dimensions).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from weft.hw.topology import Topology

Op: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


class Phase(NamedTuple):
    """A phase of an algorithm: `rounds` equal rounds.

    part: the bytes that a rank sends to each of its peers in a round, as a fraction of the bytes of all shards.
    peers: a function from a rank to the ranks to which it sends.
    """

    rounds: int
    part: float
    peers: Callable[[int], tuple[int, ...]]


Stage: TypeAlias = tuple[Phase, ...]
"""Concurrent phases."""


@dataclass(frozen=True)
class Algorithm:
    """The cost of a collective algorithm on a topology whose links are otherwise idle. "Per byte" means per byte of all ranks'
    shards together.

    latency_us: the sum of the latencies of all rounds.
    us_per_byte: the time in us per byte, in addition to the latency.
    links: for each rank of the topology's first period, the links that carry the data which this rank sends. A link is given as
        (its kind, distance, time in us per byte for which it is busy). The distance leads from the sending rank to the rank to
        which the link belongs (`Link.at`).
    sent: the number of bytes that a rank sends, per byte.
    """

    name: str
    latency_us: float
    us_per_byte: float
    links: tuple[tuple[tuple[str, int, float], ...], ...]
    sent: float

    def time_us(self, count: float) -> float:
        return self.latency_us + count * self.us_per_byte


def algorithm(topology: Topology, op: Op, count: float) -> Algorithm:
    """Return the fastest algorithm for `count` bytes.

    count: for an all-gather, the bytes of all shards; for other collectives, the bytes of one rank's input. If several
    algorithms are equally fast, return the first in the table at the top of this file.
    """
    return min(algorithms(topology, op), key=lambda one: one.time_us(count))


def algorithms(topology: Topology, op: Op) -> tuple[Algorithm, ...]:
    """Return all algorithms of `op` that the topology allows, in the order of the table at the top of this file."""
    key = ("algorithms", op)
    if key not in topology.known:
        topology.known[key] = tuple(_examined(topology, *one) for one in _stages(topology, op))
    found: tuple[Algorithm, ...] = topology.known[key]
    return found


def _stages(topology: Topology, op: Op) -> Iterator[tuple[str, list[Stage]]]:
    world = topology.ranks
    if op == "all_to_all":
        yield "direct", [(_direct(world),)]
        return
    scatters: dict[str, list[Stage]] = {"direct": [(_direct(world),)]}
    lines = [size for size in topology.dims if size > 1]
    if topology.links and world > 2:
        if len(lines) < 2:  # with several dimensions, a ring of all ranks would use the slow links of a single rank
            scatters["ring"] = [(Phase(world - 1, 1 / world, lambda rank: ((rank + 1) % world,)),)]
        scatters["halving-doubling"] = [(phase,) for phase in _halving(world)]
    if len(lines) > 1:
        order = [i for i, size in enumerate(topology.dims) if size > 1]
        for name, around in (("direct by dimension", False), ("ring by dimension", True)):
            scatters[name] = [(phase,) for phase in _by_dimension(topology.dims, order, 1.0, 1 if around else 0)]
        if topology.rings:
            scatters["rings along all dimensions, both directions"] = list(_all_dimensions(topology.dims, order))
    for name, stages in scatters.items():
        yield name, {"reduce_scatter": stages, "all_gather": stages[::-1]}.get(op, stages + stages[::-1])
    if op == "all_reduce" and topology.links and world > 2:
        yield "tree", [(phase,) for phase in _tree(world)]


def _direct(world: int) -> Phase:
    return Phase(1, 1 / world, lambda rank: tuple((rank + d) % world for d in range(1, world)))


def _halving(world: int) -> Iterator[Phase]:
    """Yield the phases of a reduce-scatter by halving-doubling (see the module), the phase with the most bytes first."""
    distances = [1 << i for i in range((world - 1).bit_length())]
    for distance in reversed(distances):
        shards = min(distance, world - distance)
        yield Phase(1, shards / world, lambda rank, d=distance: ((rank + d) % world,))  # type: ignore[misc]


def _tree(world: int) -> Iterator[Phase]:
    """Yield the phases of an all-reduce over a binomial tree with root 0. Messages are not pipelined between levels."""
    levels = [1 << i for i in range((world - 1).bit_length())]
    for d in levels:
        yield Phase(1, 1.0, lambda rank, d=d: (rank - d,) if rank % (2 * d) == d else ())  # type: ignore[misc]
    for d in reversed(levels):
        yield Phase(1, 1.0, lambda rank, d=d: (rank + d,) if rank % (2 * d) == 0 and rank + d < world else ())  # type: ignore[misc]


def _by_dimension(dims: tuple[int, ...], order: Sequence[int], part: float, way: int) -> Iterator[Phase]:
    """Yield the phases of a reduce-scatter along one dimension after the other.

    order: the dimensions, as indices of `dims`. The last dimension carries the fewest bytes.
    part: the fraction of the bytes of all shards that is reduced and scattered.
    way: the direction of the rings, 1 or -1; 0 for the direct algorithm in place of rings.
    """
    for i in order:
        size, stride = dims[i], math.prod(dims[:i])
        part /= size
        steps = (way,) if way else tuple(range(1, size))

        def peers(rank: int, stride: int = stride, size: int = size, steps: tuple[int, ...] = steps) -> tuple[int, ...]:
            here = rank // stride % size
            return tuple(rank + ((here + step) % size - here) * stride for step in steps)

        yield Phase(size - 1 if way else 1, part, peers)


def _all_dimensions(dims: tuple[int, ...], order: list[int]) -> Iterator[Stage]:
    """Yield the stages of a reduce-scatter by concurrent rings along all dimensions (see the top of this file)."""
    orders = [order[i:] + order[:i] for i in range(len(order))]
    parts = [_by_dimension(dims, one, 1 / (2 * len(orders)), way) for one in orders for way in (1, -1)]
    yield from zip(*parts, strict=True)


def _examined(topology: Topology, name: str, stages: list[Stage]) -> Algorithm:
    """Return the cost of the algorithm with these stages.

    Only the sends of the first ranks are evaluated, which represent all ranks (see the top of this file). In a tree,
    ranks send different amounts, so the sends of all ranks are evaluated, and a link gets the mean of their traffic.
    """
    alike = name != "tree"
    ranks = range(topology.period if alike else topology.ranks)
    latency_us = us = sent = 0.0
    links: list[dict[tuple[str, int], float]] = [{} for _ in range(topology.period)]
    for stage in stages:
        busy_us: dict[tuple[str, int], float] = {}
        longest = 0.0
        for phase, rank in itertools.product(stage, ranks):
            loads = links[rank % topology.period]
            for peer in phase.peers(rank):
                routes = topology.routes(rank, peer)
                latencies = (sum(link.latency_us for link in route) for route in routes)
                longest = max(longest, phase.rounds * max(latencies, default=0.0))
                sent += phase.rounds * phase.part / len(ranks)
                for link in itertools.chain(*routes):
                    link_us = phase.rounds * phase.part / len(routes) / link.bytes_per_us
                    link_class = (link.kind, link.at % len(ranks))
                    busy_us[link_class] = busy_us.get(link_class, 0.0) + link_us
                    place = (link.kind, (link.at - rank) % topology.ranks)
                    loads[place] = loads.get(place, 0.0) + link_us * topology.period / len(ranks)
        latency_us += longest
        us += max(busy_us.values(), default=0.0)
    of_ranks = tuple(tuple((kind, at, link_us) for (kind, at), link_us in loads.items()) for loads in links)
    return Algorithm(name, latency_us, us, of_ranks, sent)


class Cut(NamedTuple):
    """A division of the ranks into groups of equal size, with the bandwidths between a group and the other ranks.

    share: the fraction of all ranks that are in a group.
    out: the least bandwidth, in bytes/us, out of a group. into: the least bandwidth into a group.
    mean: the lower of two means over all groups: the bandwidth out of a group, and the bandwidth into a group.
    """

    share: float
    out: float
    into: float
    mean: float


def least_us(topology: Topology, op: Op, count: float) -> float:
    """Return a lower bound on the time of a collective in us.

    The bound from one group of ranks is (bytes that must leave or enter the group) / (bandwidth of the links out of or into the
    group). The result is the maximum over the groups of all cuts (`_cuts`). With `share`, the fraction of ranks in a group,
    these bytes are:

        reduce-scatter    (1 - share) `count`: a group sends a partial sum for each shard of the other ranks
        all-gather        (1 - share) `count`: a group receives each shard of the other ranks
        all-reduce        `count` in each direction: for each element, a group sends its partial sum or the result, and
                          receives the other. On average over all groups 2 (1 - share) `count`, to reduce and distribute
    """
    cuts: tuple[Cut, ...] | None = topology.known.get("cuts")
    if cuts is None:
        cuts = topology.known["cuts"] = tuple(_cuts(topology))
    longest = 0.0
    for cut in cuts:
        crossing = count * (1 - cut.share)
        if op == "all_reduce":
            longest = max(longest, count / min(cut.out, cut.into), 2 * crossing / cut.mean)
        else:
            longest = max(longest, crossing / (cut.into if op == "all_gather" else cut.out))
    return longest


def _cuts(topology: Topology) -> Iterator[Cut]:
    """Yield the cuts of the topology: into single ranks, and into blocks of consecutive ranks along its dimensions,
    such as the GPUs of a host.
    """
    world = topology.ranks
    if world < 2 or not topology.links:
        return
    sizes = {1, *itertools.accumulate(topology.dims, operator.mul)}
    for size in sorted(size for size in sizes if size < world and world % size == 0):
        firsts = range(0, math.lcm(topology.period, size), size)  # these groups represent all groups
        rates = [_crossing(topology, range(first, first + size)) for first in firsts]
        outs, intos = zip(*rates, strict=True)
        yield Cut(size / world, min(outs), min(intos), min(math.fsum(outs), math.fsum(intos)) / len(rates))


def _crossing(topology: Topology, group: range) -> tuple[float, float]:
    """Return the total bandwidths, in bytes/us, of the links out of the ranks `group` and of the links into them."""
    out: dict[tuple[str, int], float] = {}
    into: dict[tuple[str, int], float] = {}
    for inside, outside in itertools.product(group, range(topology.ranks)):
        if outside not in group:
            for route in topology.routes(inside, outside):
                link = next(link for link in reversed(route) if link.source in group)
                out[link.kind, link.at] = link.bytes_per_us
            for route in topology.routes(outside, inside):
                link = next(link for link in route if link.target in group)
                into[link.kind, link.at] = link.bytes_per_us
    return math.fsum(out.values()), math.fsum(into.values())
