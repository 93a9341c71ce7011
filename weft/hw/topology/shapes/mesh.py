"""A full mesh, such as Infinity Fabric between eight MI300X."""

from weft.hw.topology.links import Link, Topology
from weft.hw.topology.shape import PAIRS, shape


@shape(PAIRS)
def mesh(ranks: int, bytes_per_us: float, latency_us: float = 0.0) -> Topology:
    """Return a full mesh: links between every two ranks, one in each direction.

    bytes_per_us, latency_us: the bandwidth and the latency of each link.
    """
    pairs = ((rank, d) for rank in range(ranks) for d in range(1, ranks))
    return Topology(ranks, tuple(Link(f"to +{d}", r, r, (r + d) % ranks, bytes_per_us, latency_us) for r, d in pairs))
