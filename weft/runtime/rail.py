"""The rails of CPU ranks on several hosts.

A **rail** consists of the ranks with the same index on their hosts, one on each host. If data for another host travel along
rails, each byte crosses the network once per host. So in an all-gather, a host with L ranks sends L shards to each other host.
A ring would instead pass the shards of almost all ranks through every host.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005; Cho et al.,
    "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network hierarchy", 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.runtime.per_communicator import of_communicator
from weft.runtime.rail_link import RailLink
from weft.symm import Communicator

_known: dict[Communicator, Rail] = {}


def rail_on(comm: Communicator) -> Rail:
    """Return this rank's rail: the ranks with the same index on their hosts, one on each host. All hosts must have the
    same number of ranks (`ranks_per_host`). All ranks must make the first call together.
    """
    per_host = ranks_per_host(comm.hosts)
    return of_communicator(_known, comm, lambda made: Rail(made, per_host, made.setup_deadline_s()))


def ranks_per_host(hosts: Sequence[str]) -> int:
    """Return the number of ranks on each host if the ranks form rails (groups with one rank on each host), else 0.

    Ranks form rails if there are several hosts, and each has the same number of consecutive ranks, at least two.

    hosts: the host of each rank.
    """
    count = len(set(hosts))
    per_host = len(hosts) // count
    starts = list(hosts[::per_host])
    regular = [host for host in starts for _ in range(per_host)] == list(hosts) and len(starts) == count
    return per_host if regular and count > 1 and per_host > 1 else 0


class Rail:
    """This rank's rail (the ranks with the same index on their hosts, one on each host), with connections to these ranks
    (`weft.runtime.rail_link`).

    per_host: the result of `ranks_per_host`. deadline_s: the longest wait for connections along the rail, in seconds.
    """

    def __init__(self, comm: Communicator, per_host: int, deadline_s: float) -> None:
        self.comm, self.per_host, self.n_hosts = comm, per_host, comm.world_size // per_host
        self.host, self.index = divmod(comm.rank, per_host)
        self.link = RailLink(
            comm, [r for r in range(self.index, comm.world_size, per_host) if r != comm.rank], deadline_s
        )
        comm._holders.add(self)

    def close(self) -> None:
        """End the connections. The communicator calls this method when it closes."""
        self.link.close()
        _known.pop(self.comm, None)
