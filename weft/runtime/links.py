"""Measurements for groups of ranks on several hosts: the rates of links between hosts, of all-to-alls (gloo on CPU, NCCL on
GPUs), and of copies in memory.

    links       the rate and the round trip of each pair of hosts. The first ranks of two hosts exchange data. Pairs without a
                common host are measured at the same time, in rounds as in a tournament
    exchanges   an all-to-all of all ranks, each of which sends the same number of bytes to every rank
    copies      all ranks copy at the same time, to memory that was written before, and to new memory, which causes page faults.
                GPUs do not measure copies

All measurements together take about `BUDGET_S` seconds. To measure the rate of a link, its first rank sends, and its second
rank answers with one byte. The first rank measures the time, so it does not matter when the second rank starts. The round trip
is twice the time of the fastest exchange of one byte, including the library's own time. The numbers are equal on all ranks.
"""

from __future__ import annotations

import mmap
import statistics
import struct
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from weft.runtime.collectives import all_to_all_single, finish
from weft.runtime.own_nccl import own_nccl
from weft.sim.between_hosts import HostNetwork, LinkFound, Measured
from weft.symm import Communicator
from weft.symm.device import synchronize

BUDGET_S = 0.5
_LINKS_UNTIL, _EXCHANGES_UNTIL, _COPY_S = 0.4, 0.75, 0.015  # fractions of the budget; seconds
_WHAT = "a measurement of the links between hosts"
_TRIPS, _LEAST_TRIPS, _TRIPS_SHARE = 16, 3, 0.4
_FIRST_BYTES, _MOST_BYTES, _GROWTH = 64 << 10, 16 << 20, 4
_LEAST_TIMES, _MOST_TIMES = 3, 7
_FRESH_BYTES = 4 << 20

_networks: weakref.WeakKeyDictionary[Communicator, HostNetwork | None] = weakref.WeakKeyDictionary()


def network_of(comm: Communicator) -> HostNetwork | None:
    """Return the measured network that the planner uses for `comm`, equal on all ranks; None if it is unknown."""
    return _networks.get(comm)


def is_settled(comm: Communicator) -> bool:
    """True if `settle` has set the network (the rates between hosts) that the planner uses for `comm`. The rates may be
    unknown.
    """
    return comm in _networks


def settle(comm: Communicator, network: HostNetwork | None) -> None:
    """Set the rates between hosts that the planner uses for `comm` from now on. All ranks must pass an equal `network`;
    None means that the rates stay unknown.
    """
    _networks[comm] = network


def rounds_of(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Divide all pairs of hosts into rounds, as in a tournament, so that the pairs of a round can be measured at the same time.
    In a round each host occurs at most once.
    """
    circle: list[str | None] = [*hosts, *[None] * (len(hosts) % 2)]
    rounds = []
    for _ in range(len(circle) - 1):
        both = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        rounds.append([(one, other) for one, other in both if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def library_of(comm: Communicator) -> str:
    """Return the library that sends data between hosts: gloo for CPU ranks, NCCL for GPUs."""
    return "gloo" if comm.device.type == "cpu" else "nccl"


def measure_links(comm: Communicator, deadline_s: float | None = None) -> Measured:
    """Measure the links of a group on several hosts. Return the same result on every rank. All ranks must make this call.
    GPUs must use NCCL.

    Raises `DeadlineError` after `deadline_s` (default `WEFT_DEADLINE_S`), or the group's error.
    """
    probe = _Probe(comm, comm.deadline_s if deadline_s is None else deadline_s)
    links = _measure_pairs(probe, comm, _LINKS_UNTIL * BUDGET_S)
    world, until_s = comm.world_size, _EXCHANGES_UNTIL * BUDGET_S
    every = [(a, b) for a in range(world) for b in range(world)]
    far = max(count * (world - count) for count in map(comm.hosts.count, comm.hosts))
    latency_s = max((link.round_trip_us for link in links), default=0.0) / 2e6
    timed = probe.largest_in(until_s, lambda size: probe.exchange_s(every, size), latency_s, parts=world)
    exchange = far * _rate([(size, max(times)) for size, times in timed], latency_s)
    copy, fresh = probe.copies() if comm.device.type == "cpu" else (None, None)
    return Measured(comm.hosts, links, exchange, copy, fresh, library_of(comm))


def _measure_pairs(probe: _Probe, comm: Communicator, until_s: float) -> tuple[LinkFound, ...]:
    hosts = list(dict.fromkeys(comm.hosts))
    first = {host: comm.hosts.index(host) for host in hosts}
    found, rounds = [], rounds_of(hosts)
    for number, pairs in enumerate(rounds):
        ranks = [(first[one], first[other]) for one, other in pairs]
        begin_s, end_s = (until_s * (number + i) / len(rounds) for i in (0, 1))
        back = ranks + [(there, here) for here, there in ranks]
        trips = [probe.exchange_s(back, 1) for _ in range(_LEAST_TRIPS)]
        del trips[0]  # the first exchange also opens connections
        while len(trips) < _TRIPS and probe.elapsed_s < begin_s + _TRIPS_SHARE * (end_s - begin_s):
            trips.append(probe.exchange_s(back, 1))
        trip_s = {both: 2 * min(max(one[rank] for rank in both) for one in trips) for both in ranks}
        timed = probe.largest_in(
            end_s, lambda size, ranks=ranks: probe.answered_s(ranks, size), min(trip_s.values())  # type: ignore[misc]
        )  # fmt: skip
        for pair, both in zip(pairs, ranks, strict=True):
            rate = _rate([(size, times[both[0]]) for size, times in timed], trip_s[both])
            found.append(LinkFound(pair, rate, trip_s[both] * 1e6))
    return tuple(found)


def _rate(timed: Sequence[tuple[int, float]], latency_s: float) -> float:
    """Return the rate of a link in bytes per microsecond.

    The rate is the difference of the sizes of two transfers, divided by the difference of their times. So the latency cancels.
    If the difference of the times is too small, because the machine was busy, return the rate of the large transfer.

    timed: (bytes, seconds) of a small and of a large transfer. latency_s: the latency of a transfer.
    """
    (small, small_s), (large, large_s) = timed
    if large > small and large_s >= 2 * small_s:
        return (large - small) / (large_s - small_s) / 1e6
    return large / max(large_s - latency_s, large_s / 2) / 1e6


class _Probe:
    """A probe that times exchanges and copies of all ranks.

    elapsed_s: the time since the construction of the probe, on the slowest rank. It is equal on all ranks.
    """

    def __init__(self, comm: Communicator, deadline_s: float) -> None:
        self._comm, self._deadline_s = comm, deadline_s
        self._on_cpu = comm.device.type == "cpu"
        self._group = comm.group if self._on_cpu else own_nccl(comm)
        self._start, self.elapsed_s = time.perf_counter(), 0.0
        # The kernel maps pages at the first write, which must not count as time of the network.
        self._sent, self._received = self._buffers(_FIRST_BYTES)

    def largest_in(
        self, until_s: float, send_s: Callable[[int], list[float]], latency_s: float, parts: int = 1
    ) -> list[tuple[int, list[float]]]:  # fmt: skip
        """Time transfers of growing sizes. Stop if a few transfers of the next size would not end before `until_s`, a value of
        `elapsed_s` in seconds. Then repeat the largest transfer until `elapsed_s` reaches `until_s`. Return (bytes, each rank's
        time in seconds) for the two largest sizes. For the largest size, the times are of the fastest transfer.

        send_s: a function that sends a number of bytes, and returns each rank's time.
        latency_s: the part of a time that does not grow with the size.
        parts: the number of ranks to which a rank sends at the same time.
        """
        size = _FIRST_BYTES // parts
        before, found = (size, send_s(size)), [send_s(size)]

        def fits_larger() -> bool:
            next_s = latency_s + _GROWTH * max(0.0, max(found[0]) - latency_s)
            return size * parts * _GROWTH <= _MOST_BYTES and self.elapsed_s + _LEAST_TIMES * next_s <= until_s

        while fits_larger():
            before, size = (size, found[0]), size * _GROWTH
            found = [send_s(size)]
        while len(found) < _MOST_TIMES and self.elapsed_s + max(found[-1]) < until_s:
            found.append(send_s(size))
        return [before, (size, min(found, key=max))]

    def exchange_s(self, pairs: Sequence[tuple[int, int]], nbytes: int) -> list[float]:
        """Send `nbytes` from the first to the second rank of each pair. Return each rank's time, in seconds."""
        return self._timed([(pairs, nbytes)])

    def answered_s(self, pairs: Sequence[tuple[int, int]], nbytes: int) -> list[float]:
        """Send `nbytes` from the first to the second rank of each pair, and one byte back. Return the times of all ranks, in
        seconds. Only the time of each pair's first rank is meaningful.
        """
        return self._timed([(pairs, nbytes), ([(there, here) for here, there in pairs], 1)])

    def _timed(self, exchanges: Sequence[tuple[Sequence[tuple[int, int]], int]]) -> list[float]:
        """Run exchanges one after the other. Return each rank's time for all of them, in seconds.

        exchanges: a list of (pairs, bytes). The first rank of each pair sends this number of bytes to the second rank.
        """
        comm, ranks = self._comm, range(self._comm.world_size)
        sizes = [
            ([n * ((rank, comm.rank) in pairs) for rank in ranks], [n * ((comm.rank, rank) in pairs) for rank in ranks])
            for pairs, n in exchanges
        ]
        self._reserve(max(sum(counts) for both in sizes for counts in both))
        synchronize(comm.device)
        comm.meet(b"", name=_WHAT, deadline_s=self._deadline_s)
        start = time.perf_counter()
        for came, leaving in sizes:
            received, sent = self._received[: sum(came)], self._sent[: sum(leaving)]
            work = all_to_all_single(received, sent, came, leaving, group=self._group, async_op=self._on_cpu)
            if self._on_cpu:
                finish(work, comm, _WHAT, self._deadline_s, sent, received)
        synchronize(comm.device)
        return self._share(time.perf_counter() - start)

    def copies(self) -> tuple[float, float]:
        """Return (rate of copies to memory that was written before, rate of copies to new memory, which causes page
        faults) in bytes per microsecond.

        All ranks copy at the same time. A host's rate is the mean of its ranks' rates. The result is the rate of the
        slowest host.
        """
        self._reserve(_MOST_BYTES)
        self._comm.meet(b"", name=_WHAT, deadline_s=self._deadline_s)
        mapped = self._share(_copied_s_per_byte(lambda: self._received, self._sent))
        part = self._sent[:_FRESH_BYTES]
        fresh = self._share(_copied_s_per_byte(_fresh_memory, part))
        return self._slowest_host(mapped), self._slowest_host(fresh)

    def _slowest_host(self, s_per_byte: Sequence[float]) -> float:
        hosts = self._comm.hosts
        rates = ([1e-6 / s for s, at in zip(s_per_byte, hosts, strict=True) if at == host] for host in set(hosts))
        return min(map(statistics.mean, rates))

    def _reserve(self, nbytes: int) -> None:
        if nbytes > len(self._sent):
            self._sent, self._received = self._buffers(nbytes)

    def _buffers(self, nbytes: int) -> list[torch.Tensor]:
        return [torch.ones(nbytes, dtype=torch.uint8, device=self._comm.device) for _ in range(2)]

    def _share(self, mine_s: float) -> list[float]:
        """Send `mine_s`, a measured time of this rank in seconds or in seconds per byte, to all ranks. Return the times of all
        ranks. Also update `elapsed_s`.
        """
        mine = struct.pack("<2d", mine_s, time.perf_counter() - self._start)
        both = [struct.unpack("<2d", one) for one in self._comm.meet(mine, name=_WHAT, deadline_s=self._deadline_s)]
        self.elapsed_s = max(elapsed for _, elapsed in both)
        return [one for one, _ in both]


def _copied_s_per_byte(target: Callable[[], torch.Tensor], source: torch.Tensor) -> float:
    """Copy `source` again and again for `_COPY_S` seconds. Return the seconds per byte.

    target: a function that returns the tensor to copy to.
    """
    start, count = time.perf_counter(), 0
    while not count or time.perf_counter() - start < _COPY_S:
        target().copy_(source)
        count += 1
    return (time.perf_counter() - start) / (count * source.nbytes)


def _fresh_memory() -> torch.Tensor:
    memory = mmap.mmap(-1, _FRESH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)
