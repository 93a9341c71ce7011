"""A switch to which every GPU is connected by one port, such as NVSwitch. With two GPUs, the topology is the link
between them.
"""

from weft.hw.topology.links import Topology
from weft.hw.topology.shape import PORTS, shape
from weft.hw.topology.shapes.hosts import hosts


@shape(PORTS)
def switch(ranks: int, bytes_per_us: float, latency_us: float = 0.0) -> Topology:
    """Return a topology of all ranks on one switch. A rank's port limits its total sending and its total receiving rate.

    bytes_per_us, latency_us: the bandwidth and the latency of each link between a rank and the switch. A route has two links.
    """
    return hosts(ranks, bytes_per_us, latency_us, 1.0, 0.0, ranks)
