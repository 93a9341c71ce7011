"""Distances that are alike: flows over them take the same shares of equally fast links, on the resources of a lowered schedule.

A lowered schedule has the resources of its first ranks only, each for those of all ranks that it represents (`weft.sim.lower`).
Routes of distances d and d + period may differ in the number, kind, rate, latency and represented ranks of their links. If they do
not, steps cost the same. On a switch all distances are alike, on hosts those within the host and those beyond it, for each place
in a host.
"""

from __future__ import annotations

from weft.hw.topology import Paths, Topology


class Distances:
    """The distances from each of the `period` simulated ranks."""

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
        """Return the first distance from `rank` that was looked up and is equivalent to `distance`."""
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
