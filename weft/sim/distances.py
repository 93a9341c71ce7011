"""Classes of equivalent distances between ranks: a step costs the same for peers at equivalent distances.

Two distances are equivalent if their routes have the same number of links, and the n-th links of both routes have the
same kind, bandwidth and latency. In addition, the simulator must represent the n-th links of both routes by one
resource. A resource may represent the links of several ranks (`weft.sim.lower`). On a switch, all distances are
equivalent. With several hosts, distances to other hosts are equivalent if the peers have the same index on their hosts.
"""

from __future__ import annotations

from weft.hw.topology import Paths, Topology


class Distances:
    """The latencies of routes on a topology, and the classes of equivalent distances (see the top of this file).

    period: the simulator simulates only ranks 0 to `period` - 1.
    """

    def __init__(self, topology: Topology, period: int) -> None:
        self._topology, self._period = topology, period
        self._latencies: dict[tuple[int, int], float] = {}
        self._alike: dict[tuple[int, int], int] = {}
        self._first: dict[tuple, int] = {}

    def latency_us(self, rank: int, distance: int) -> float:
        """Return the latency of the route from `rank` to the rank at `distance`."""
        found = self._latencies.get((rank, distance))
        if found is None:
            to = (rank + distance) % self._topology.ranks
            found = self._latencies[rank, distance] = self._topology.paths(rank, to).latency_us
        return found

    def first_like(self, rank: int, distance: int) -> int:
        """Return the representative of `distance`: equivalent distances from `rank` have the same representative."""
        if self._period == self._topology.ranks:
            return distance  # every rank has its own resources
        found = self._alike.get((rank, distance))
        if found is None:
            to = (rank + distance) % self._topology.ranks
            there, back = self._topology.paths(rank, to), self._topology.paths(to, rank)
            look = (rank, distance % self._period, distance == 0, self._look(there), self._look(back))
            found = self._alike[rank, distance] = self._first.setdefault(look, distance)
        return found

    def _look(self, paths: Paths) -> tuple:
        return tuple(
            tuple((link.kind, link.at % self._period, link.bytes_per_us, link.latency_us) for link in route)
            for route in paths.routes
        )


def distances(topology: Topology, period: int) -> Distances:
    """Return the `Distances` of a topology, from a cache. period: the number of simulated ranks."""
    key = ("distances", period)
    if key not in topology.known:
        topology.known[key] = Distances(topology, period)
    found: Distances = topology.known[key]
    return found
