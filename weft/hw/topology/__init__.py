"""Topologies as data: which links there are between ranks, and over which of them a flow goes."""

from weft.hw.topology.file import known_topologies, load_topology
from weft.hw.topology.links import Link, Topology, Wiring, hosts, mesh, ring, switch, torus, unlimited

__all__ = [
    "Link", "Topology", "Wiring", "hosts", "known_topologies", "load_topology", "mesh", "ring", "switch", "torus", "unlimited",
]  # fmt: skip
