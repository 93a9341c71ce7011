"""Library collectives (NCCL, RCCL) as algorithms: which rank sends how much to which, in rounds, on a topology.

An algorithm is a sequence of phases. A phase has a number of equal rounds, and in each round every rank sends the same number of
bytes to each of its peers of the phase. A round begins when the one before has arrived, so that a phase takes

    rounds * (latency of the longest route + bytes on the fullest link / its bandwidth)

    algorithm            rounds           bytes that a rank sends, of S bytes of all shards together
    direct               1                S / W to each other rank
    ring                 W - 1            S / W to the next rank, in one direction
    halving-doubling     log2 W           S / 2, S / 4, ... to the ranks 1, 2, 4, ... further on
    tree (all-reduce)    2 log2 W         S towards the root, and S back
    by dimension         of each line     direct or ring along the first dimension, then along the next, with less and less left

The fastest algorithm is used, as libraries tune theirs. An all-to-all is always direct: nothing can be combined. On tori its
routes go along dimensions. A measured rate of the library (`collective.all_gather` of a machine file) still limits them all.

Sources: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience", 2007; Bruck,
Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997,
for halving-doubling between ranks at distances of 1, 2, 4, ..., which needs no power of two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from weft.hw.topology import Topology

Op: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


class Phase(NamedTuple):
    """Equal rounds. part: the share of all bytes that a rank sends to each of `peers(rank)` in a round."""

    rounds: int
    part: float
    peers: Callable[[int], tuple[int, ...]]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm on a topology with idle links.

    latency_us: the latencies of all rounds. us_per_byte: the time for each byte of all shards together. links: (kind, distance of
    the rank that it is at, its time for each byte of all shards) of what rank 0, 1, ... up to the topology's period sends. sent:
    bytes that a rank sends, for each byte of all shards.
    """

    name: str
    latency_us: float
    us_per_byte: float
    links: tuple[tuple[tuple[str, int, float], ...], ...]
    sent: float

    def time_us(self, count: float) -> float:
        return self.latency_us + count * self.us_per_byte


def algorithm(topology: Topology, op: Op, count: float) -> Algorithm:
    """Return the fastest algorithm for `count` bytes: of all shards of an all-gather, or of a rank's input otherwise.

    Of equally fast algorithms the first in the module's table is returned.
    """
    return min(algorithms(topology, op), key=lambda one: one.time_us(count))


def algorithms(topology: Topology, op: Op) -> tuple[Algorithm, ...]:
    """Return all algorithms of `op` that the topology allows, in the order of the module's table."""
    key = ("algorithms", op)
    if key not in topology.known:
        topology.known[key] = tuple(_examined(topology, *one) for one in _phases(topology, op))
    found: tuple[Algorithm, ...] = topology.known[key]
    return found


def _phases(topology: Topology, op: Op) -> Iterator[tuple[str, list[Phase]]]:
    world = topology.ranks
    if op == "all_to_all":
        yield "direct", [_direct(world)]
        return
    scatters = {"direct": [_direct(world)]}
    lines = [size for size in topology.dims if size > 1]
    if topology.links and world > 2:
        if len(lines) < 2:  # over several dimensions a ring of all ranks crosses the slow links of one rank only
            scatters["ring"] = [Phase(world - 1, 1 / world, lambda rank: ((rank + 1) % world,))]
        scatters["halving-doubling"] = list(_halving(world))
    if len(lines) > 1:
        scatters["direct by dimension"] = list(_by_dimension(topology.dims, around=False))
        scatters["ring by dimension"] = list(_by_dimension(topology.dims, around=True))
    for name, phases in scatters.items():
        yield name, {"reduce_scatter": phases, "all_gather": phases[::-1]}.get(op, phases + phases[::-1])
    if op == "all_reduce" and topology.links and world > 2:
        yield "tree", list(_tree(world))


def _direct(world: int) -> Phase:
    return Phase(1, 1 / world, lambda rank: tuple((rank + d) % world for d in range(1, world)))


def _halving(world: int) -> Iterator[Phase]:
    """Yield the rounds of a reduce-scatter, with the most bytes first."""
    distances = [1 << i for i in range((world - 1).bit_length())]
    for distance in reversed(distances):
        shards = min(distance, world - distance)
        yield Phase(1, shards / world, lambda rank, d=distance: ((rank + d) % world,))  # type: ignore[misc]


def _tree(world: int) -> Iterator[Phase]:
    """Yield the rounds up a binomial tree and down again. The root is rank 0; all its levels take the time of whole messages."""
    levels = [1 << i for i in range((world - 1).bit_length())]
    for d in levels:
        yield Phase(1, 1.0, lambda rank, d=d: (rank - d,) if rank % (2 * d) == d else ())  # type: ignore[misc]
    for d in reversed(levels):
        yield Phase(1, 1.0, lambda rank, d=d: (rank + d,) if rank % (2 * d) == 0 and rank + d < world else ())  # type: ignore[misc]


def _by_dimension(dims: tuple[int, ...], around: bool) -> Iterator[Phase]:
    """Yield the phases of a reduce-scatter along each dimension. The last one, which may be slow, has the fewest bytes left."""
    stride, left = 1, 1.0
    for size in dims:
        if size == 1:
            continue
        left /= size
        steps = (1,) if around else tuple(range(1, size))

        def peers(rank: int, stride: int = stride, size: int = size, steps: tuple[int, ...] = steps) -> tuple[int, ...]:
            here = rank // stride % size
            return tuple(rank + ((here + step) % size - here) * stride for step in steps)

        yield Phase(size - 1 if around else 1, left, peers)
        stride *= size


def _examined(topology: Topology, name: str, phases: list[Phase]) -> Algorithm:
    """Return the algorithm with its times and loads.

    Ranks up to the topology's period represent the others: what they send over all links of a kind meets on one link. In a tree
    ranks differ, so all are looked at, and each gets the mean of the loads.
    """
    alike = name != "tree"
    ranks = range(topology.period if alike else topology.ranks)
    latency_us = us = sent = 0.0
    links: list[dict[tuple[str, int], float]] = [{} for _ in range(topology.period)]
    for phase in phases:
        busy_us: dict[tuple[str, int], float] = {}
        longest = 0.0
        for rank in ranks:
            loads = links[rank % topology.period]
            for peer in phase.peers(rank):
                routes = topology.routes(rank, peer)
                longest = max(longest, *(sum(link.latency_us for link in route) for route in routes), 0.0)
                sent += phase.rounds * phase.part / len(ranks)
                for link in itertools.chain(*routes):
                    link_us = phase.part / len(routes) / link.bytes_per_us
                    link_class = (link.kind, link.at % len(ranks))
                    busy_us[link_class] = busy_us.get(link_class, 0.0) + link_us
                    place = (link.kind, (link.at - rank) % topology.ranks)
                    loads[place] = loads.get(place, 0.0) + phase.rounds * link_us * topology.period / len(ranks)
        latency_us += phase.rounds * longest
        us += phase.rounds * max(busy_us.values(), default=0.0)
    of_ranks = tuple(tuple((kind, at, link_us) for (kind, at), link_us in loads.items()) for loads in links)
    return Algorithm(name, latency_us, us, of_ranks, sent)


def least_us(topology: Topology, op: Op, count: float) -> float:
    """Return a bound that no algorithm can beat: what each rank must send, over all links that leave it.

    Every rank sends the sums of W - 1 shards, or receives W - 1 shards, and for an all-reduce both.
    """
    if "leaving" not in topology.known:
        rates = dict.fromkeys(range(topology.ranks), 0.0)
        for link in topology.links:
            if link.source in rates:
                rates[link.source] += link.bytes_per_us
        topology.known["leaving"] = min(rates.values()) if topology.links else math.inf
    needed = count * (topology.ranks - 1) / topology.ranks * (2 if op == "all_reduce" else 1)
    return needed / topology.known["leaving"]
