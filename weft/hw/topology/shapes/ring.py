"""A ring: each GPU has links to the previous and to the next GPU."""

from weft.hw.topology.links import Topology
from weft.hw.topology.shape import PAIRS, shape
from weft.hw.topology.shapes.torus import torus


@shape(PAIRS)
def ring(ranks: int, bytes_per_us: float, latency_us: float = 0.0) -> Topology:
    """Return a ring: links from each rank to the previous and to the next rank.

    bytes_per_us, latency_us: the bandwidth and the latency of each link.
    """
    return torus(ranks, bytes_per_us, latency_us, ranks)
