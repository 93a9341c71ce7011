"""Measurements of the rate and the round trip between each pair of hosts, with the process group's all-to-all on CPU.

The first ranks of two hosts exchange data. Pairs without a common host are measured at the same time, in rounds as in a
tournament. All rounds together take about `_MOST_S`. The round-trip time is twice the time of the fastest exchange of
one byte, including gloo's own time.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft import env
from weft.runtime.collectives import all_to_all_single, finish
from weft.symm import Communicator

_MOST_S = 0.5  # time of all rounds together
_WHAT = "a measurement of the links between hosts"
_TRIPS, _FIRST_BYTES, _MOST_BYTES, _GROWTH = 16, 64 << 10, 64 << 20, 4


@dataclass(frozen=True)
class LinkFound:
    """The link between two hosts. bytes_per_us: the rate from the first host to the second, with one stream."""

    hosts: tuple[str, str]
    bytes_per_us: float
    round_trip_us: float


def rounds_of(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return all pairs of hosts, in rounds in which each host occurs at most once."""
    circle: list[str | None] = [*hosts, *[None] * (len(hosts) % 2)]
    rounds = []
    for _ in range(len(circle) - 1):
        both = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        rounds.append([(one, other) for one, other in both if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def measure_links(comm: Communicator) -> list[LinkFound]:
    """Return the links between all hosts of a group of CPU ranks, the same on every rank; no links for one host. All
    ranks must make this call.

    Ranks that measure nothing take part in the exchanges, but send nothing. Raises `DeadlineError` after
    `WEFT_DEADLINE_S`, or the group's error.
    """
    hosts = list(dict.fromkeys(comm.hosts))
    first = {host: comm.hosts.index(host) for host in hosts}
    found, rounds = [], rounds_of(hosts)
    for pairs in rounds:
        ranks = [(first[one], first[other]) for one, other in pairs]
        both = ranks + [(there, here) for here, there in ranks]
        trips = [_exchange_s(comm, both, 1) for _ in range(_TRIPS)][1:]  # the first trip connects
        trip_s = [2 * min(max(times[here], times[there]) for times in trips) for here, there in ranks]
        size, spent_s = _FIRST_BYTES, 0.0
        while True:
            times = _exchange_s(comm, ranks, size)
            spent_s += (slowest_s := max(times))
            if size >= _MOST_BYTES or spent_s + _GROWTH * slowest_s > _MOST_S / len(rounds):
                break
            size *= _GROWTH
        for pair, (here, there), trip in zip(pairs, ranks, trip_s, strict=True):
            took_s = max(times[here], times[there])
            found.append(LinkFound(pair, size / max(took_s - trip / 2, took_s / 2) / 1e6, trip * 1e6))
    return found


def _exchange_s(comm: Communicator, pairs: Sequence[tuple[int, int]], nbytes: int) -> list[float]:
    """Send `nbytes` from the first to the second rank of each pair. Return the times of all ranks, in seconds."""
    leaving = [nbytes * ((comm.rank, rank) in pairs) for rank in range(comm.world_size)]
    came = [nbytes * ((rank, comm.rank) in pairs) for rank in range(comm.world_size)]
    sent, received = (torch.empty(sum(counts), dtype=torch.uint8) for counts in (leaving, came))
    comm.meet(b"", name=_WHAT)
    start = time.perf_counter()
    work = all_to_all_single(received, sent, came, leaving, group=comm.group, async_op=True)
    finish(work, comm, _WHAT, env.deadline_s(), sent, received)
    mine = struct.pack("<d", time.perf_counter() - start)
    return [struct.unpack("<d", one)[0] for one in comm.meet(mine, name=_WHAT)]
