"""Predicted times of collectives of ranks on several hosts, from measured rates of the network and of memory.

    time = far / rate of the link + rounds * round trip / 2 + (copied - fresh) / rate of copies + fresh / rate into new memory

    far       bytes that the busiest host sends to other hosts
    rounds    messages that depend on each other
    copied    bytes that a rank copies or adds before and after the transfers. The rate of copies is measured while all ranks
              of a host copy, because they share its cores and its memory bandwidth
    fresh     the part of the copied bytes that is written to new memory, whose pages Linux has to map first

There are W ranks on H hosts, L on each, and a matrix of S bytes. In an all-gather or a reduce-scatter, the matrix consists of
all ranks' shards. In an all-to-all, S is the number of bytes of one rank's input:

    collective      by gloo: far, rounds, copied, fresh                    in two levels: far, rounds, copied
    all_gather      crossings * (W - 1) S / W, W - 1, S + S / W, S / W     (H - 1) S / H, H - 1, (1 + 1 / L) S
    reduce_scatter  crossings * 2 (W - 1) S / W, 2 (W - 1), S + S / W, S   (H - 1) S / H, 1, 2 S + S / L
    all_reduce      crossings * 2 (W - 1) S / W, 2 (W - 1), 0, 0           2 (H - 1) S / H, 2 (H - 1), 3 S
    all_to_all      L (W - L) S / W, 1, S / W, 0                           -

crossings: how many links of the ring leave one host, for the host with the most such links. It is 1 if the ranks of
    each host are consecutive.

gloo's all-gather and all-reduce are rings, with one stream in each direction over the link between two hosts. gloo's
all-to-all has a stream for each pair of ranks, and such a stream may carry one direction first and then the other
(`exchange_both_ways` in `weft.runtime.collectives`). So the rate of an all-to-all is measured separately. A rail
consists of the ranks with the same index on their hosts. It has a stream for each direction, and all rails together
reach the rate of a ring.

torch gathers into a new buffer and then copies it, and its reduce-scatter reduces a copy of the whole matrix
(torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, 2.13). The pages of the new buffer are mapped while bytes arrive, at
no cost in time, except the pages for a rank's own rows. For buffers of 32 MiB and more, glibc calls mmap each time
(mallopt(3), M_MMAP_THRESHOLD), so all pages are mapped again. Smaller buffers are reused, so for smaller matrices fresh
is 0.

NCCL's reduce-scatter sends as many bytes as an all-gather, in as many rounds: half of what gloo's reduce-scatter needs.
The rates of copies are not measured on GPUs, and copies are assumed to take no time. NCCL may use several streams and
network cards of a host, so its collectives may be faster than predicted.

The prediction assumes that nothing computes at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MAPPED_BYTES = 32 << 20


@dataclass(frozen=True)
class LinkFound:
    """The measured link between two hosts.

    bytes_per_us: the rate of one stream, from the first host to the second.
    """

    hosts: tuple[str, str]
    bytes_per_us: float
    round_trip_us: float


@dataclass(frozen=True)
class HostNetwork:
    """The measured rates of the hosts of a group, in bytes per microsecond.

    Each rate is the rate of the slowest host, or of the slowest pair of hosts.

    hosts: the host of each rank.
    bytes_per_us: the rate of one stream between two hosts, in one direction.
    exchange_bytes_per_us: the rate at which bytes leave a host in an all-to-all of all ranks.
    copy_bytes_per_us: the rate at which one rank copies while all ranks copy.
    fresh_bytes_per_us: the rate of such copies into new memory, whose pages Linux has to map first.
    library: "gloo" or "nccl", the library of the collectives.
    """

    hosts: tuple[str, ...]
    bytes_per_us: float
    round_trip_us: float
    exchange_bytes_per_us: float
    copy_bytes_per_us: float
    fresh_bytes_per_us: float
    library: str = "gloo"

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @property
    def per_host(self) -> int:
        """The largest number of ranks on a host."""
        return max(map(self.hosts.count, self.hosts))

    @property
    def crossings(self) -> int:
        """The largest number of ranks of a host whose next rank in the ring is on another host."""
        leaving = [here for rank, here in enumerate(self.hosts) if here != self.hosts[(rank + 1) % self.ranks]]
        return max(map(leaving.count, leaving), default=0)

    def collective_us(self, op: str, nbytes: int, two_levels: bool = False) -> float:
        """Return the predicted time of a collective in us.

        op: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all"; others raise `KeyError`.
        nbytes: the bytes of a rank's input; for an all-gather, the bytes of its result. The input of an all-to-all
            includes the part that the rank keeps.
        two_levels: True if the collective runs in two levels: within each host, and along each rail
            (`weft.runtime.rails`).
        """
        if two_levels:
            return self._in_two_levels_us(op, nbytes)
        ring = self.crossings * (self.ranks - 1) / self.ranks * nbytes
        rounds, reduces = self.ranks - 1, 1 if self.library == "nccl" else 2
        if op == "all_to_all":
            busiest = max(count * (self.ranks - count) for count in map(self.hosts.count, self.hosts))
            far = busiest * nbytes / self.ranks
            return far / self.exchange_bytes_per_us + self.round_trip_us / 2 + self._copied_us(nbytes / self.ranks)
        far, rounds, copied, fresh = {
            "all_gather": (ring, rounds, nbytes * (1 + 1 / self.ranks), nbytes / self.ranks),
            "reduce_scatter": (reduces * ring, reduces * rounds, nbytes * (1 + 1 / self.ranks), nbytes),
            "all_reduce": (2 * ring, 2 * rounds, 0, 0),
        }[op]
        return (
            far / self.bytes_per_us
            + rounds * self.round_trip_us / 2
            + self._copied_us(copied, fresh if nbytes >= _MAPPED_BYTES else 0)
        )

    def exchange_us(self, far_bytes: float) -> float:
        """Return the predicted time in us of an all-to-all in which the busiest host sends `far_bytes` to other hosts."""
        return far_bytes / self.exchange_bytes_per_us + self.round_trip_us / 2

    def _in_two_levels_us(self, op: str, nbytes: int) -> float:
        per_host, count = self.per_host, len(set(self.hosts))
        once = (count - 1) / count * nbytes
        far, rounds, copied = {
            "all_gather": (once, count - 1, (1 + 1 / per_host) * nbytes),
            "reduce_scatter": (once, 1, (2 + 1 / per_host) * nbytes),
            "all_reduce": (2 * once, 2 * (count - 1), 3 * nbytes),
        }[op]
        return far / self.bytes_per_us + rounds * self.round_trip_us / 2 + self._copied_us(copied)

    def _copied_us(self, copied: float, fresh: float = 0.0) -> float:
        return (copied - fresh) / self.copy_bytes_per_us + fresh / self.fresh_bytes_per_us


_PLAUSIBLE = {"rate": (0.01, 1e6), "round trip": (1.0, 1e7), "copy rate": (1.0, 1e6)}
"""(smallest, largest) plausible value. Rates are in bytes per microsecond, the round trip in microseconds."""


@dataclass(frozen=True)
class Measured:
    """The measured rates of the hosts of a group, before they are checked. A rate is None if it was not measured.

    hosts: the host of each rank.
    links: the link between each pair of hosts.

    The other fields are as in `HostNetwork`.
    """

    hosts: tuple[str, ...]
    links: tuple[LinkFound, ...]
    exchange_bytes_per_us: float | None = None
    copy_bytes_per_us: float | None = None
    fresh_bytes_per_us: float | None = None
    library: str = "gloo"

    def checked(self) -> tuple[Measured, tuple[str, ...]]:
        """Drop implausible rates. Return (the remaining rates, a sentence for each dropped rate)."""
        kept, said = [], []
        for link in self.links:
            if faults := [
                *_implausible("rate", link.bytes_per_us, "MB/s"), *_implausible("round trip", link.round_trip_us, "us")
            ]:  # fmt: skip
                said.append(f"the link {link.hosts[0]} - {link.hosts[1]} is ignored: {'; '.join(faults)}")
            else:
                kept.append(link)
        numbers = {}
        for name, kind, without in (
            ("exchange_bytes_per_us", "rate", "the rate of one stream is used for an all-to-all"),
            ("copy_bytes_per_us", "copy rate", "copies in memory are assumed to take no time"),
            ("fresh_bytes_per_us", "copy rate", "copies to unmapped memory are assumed to be as fast as other copies"),
        ):
            number: float | None = getattr(self, name)
            faults = [] if number is None else _implausible(kind, number, "MB/s")
            said += [f"{without}: {fault}" for fault in faults]
            numbers[name] = None if faults else number
        return Measured(self.hosts, tuple(kept), **numbers, library=self.library), tuple(said)

    def network(self) -> HostNetwork | None:
        """Return the slowest rates as a `HostNetwork`; None if no link was measured.

        If the rate of an all-to-all was not measured, use the rate of the slowest link. If the rate of copies into new
        memory was not measured, use the rate of other copies. If no copies were measured, their rate is infinite.
        """
        if not self.links:
            return None
        rate = min(link.bytes_per_us for link in self.links)
        copies = self.copy_bytes_per_us or math.inf
        trip_us = max(link.round_trip_us for link in self.links)
        exchanges, fresh = self.exchange_bytes_per_us or rate, self.fresh_bytes_per_us or copies
        return HostNetwork(self.hosts, rate, trip_us, exchanges, copies, fresh, self.library)


def _implausible(kind: str, number: float, unit: str) -> list[str]:
    least, most = _PLAUSIBLE[kind]
    return [] if least <= number <= most else [f"a {kind} of {number:.3g} {unit} is outside {least:g} to {most:g}"]
