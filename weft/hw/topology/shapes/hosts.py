"""Hosts of several GPUs, each host with a switch, and a NIC for each GPU on one network.

Only plans and simulations use this topology, because weft overlaps only within a host.
"""

from weft.hw.quantity import Quantity
from weft.hw.topology.links import Link, Topology
from weft.hw.topology.shape import PORTS, shape

_GIVEN = {
    "hosts.gpus": Quantity(8, "1", "datasheet", "HGX H200 and DGX H200"),
    "nic.usable": Quantity(
        48,
        "GB/s",
        "assumed",
        "400 Gb/s are 50 GB/s (ConnectX-7), and headers take a part of it; no measurement is at hand",
    ),
    "nic.latency": Quantity(
        2.5, "us", "assumed", "for each of the two links of a route: 5 us between GPUs of two hosts, as RDMA takes"
    ),
}


@shape(
    (*PORTS, "nic.usable", "nic.latency", "hosts.gpus"),
    ("hosts", "hosts.gpus"),
    _GIVEN,
)
def hosts(
    ranks: int, bytes_per_us: float, latency_us: float, nic_bytes_per_us: float, nic_latency_us: float, gpus: int
) -> Topology:
    """Return hosts of `gpus` ranks, each host with a switch. Every rank also has a NIC on the network that joins all hosts."""
    links, network = [], ranks + -(-ranks // gpus)
    for rank in range(ranks):  # the links of the host's switch are first, so that routes within a host take them
        for kind, hub, rate, us in (
            ("", ranks + rank // gpus, bytes_per_us, latency_us),
            ("NIC ", network, nic_bytes_per_us, nic_latency_us),
        )[: 2 if ranks > gpus else 1]:
            links += [Link(f"{kind}out", rank, rank, hub, rate, us), Link(f"{kind}in", rank, hub, rank, rate, us)]
    dims = (gpus, ranks // gpus) if gpus < ranks and ranks % gpus == 0 else ()
    return Topology(ranks, tuple(links), dims=dims)
