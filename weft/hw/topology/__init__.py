"""Topologies as data: the links between ranks, and the routes of flows over them."""

from weft.hw.topology.file import known_topologies, load_topology, ranks_of
from weft.hw.topology.infragraph import infragraph_of, read_infragraph
from weft.hw.topology.links import Link, Paths, Topology, Wiring, unlimited
from weft.hw.topology.shapes.hosts import hosts
from weft.hw.topology.shapes.mesh import mesh
from weft.hw.topology.shapes.ring import ring
from weft.hw.topology.shapes.switch import switch
from weft.hw.topology.shapes.torus import torus

__all__ = [
    "Link", "Paths", "Topology", "Wiring", "hosts", "infragraph_of", "known_topologies", "load_topology", "mesh", "ranks_of",
    "read_infragraph", "ring", "switch", "torus", "unlimited",
]  # fmt: skip
