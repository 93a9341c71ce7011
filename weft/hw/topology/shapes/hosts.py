"""Hosts of several GPUs, each host with a switch, and a NIC for each GPU on one network.

Plans and simulations use this topology. Real calls on GPUs of several hosts run only schedules in which ranks communicate by
NCCL's collectives, because a rank cannot address the memory of another host.
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
        "a ConnectX-7 sends 400 Gb/s (50 GB/s) with headers; a guess, not a measurement",
    ),
    "nic.latency": Quantity(
        2.5, "us", "assumed", "half of the 5 us of an RDMA transfer between GPUs of two hosts: a route has two links"
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
    """Return hosts of `gpus` ranks, each host with a switch. Every rank also has a NIC on the network that joins all hosts.

    A route between two ranks has two links: from the first rank to the switch or to the network, and on to the second rank.

    bytes_per_us, latency_us: the bandwidth and the latency of each link between a rank and the switch of its host.
    nic_bytes_per_us, nic_latency_us: the bandwidth and the latency of each link between a NIC and the network.
    """
    links, network = [], ranks + -(-ranks // gpus)
    for rank in range(ranks):  # the links of the host's switch are first, so that routes within a host take them
        for kind, hub, rate, us in (
            ("", ranks + rank // gpus, bytes_per_us, latency_us),
            ("NIC ", network, nic_bytes_per_us, nic_latency_us),
        )[: 2 if ranks > gpus else 1]:
            links += [Link(f"{kind}out", rank, rank, hub, rate, us), Link(f"{kind}in", rank, hub, rank, rate, us)]
    dims = (gpus, ranks // gpus) if gpus < ranks and ranks % gpus == 0 else ()
    return Topology(ranks, tuple(links), dims=dims)
