"""The report of `weft doctor --group`: the host and device of each rank, and the connection between each pair of ranks.

A launcher such as torchrun starts the command on every rank. The ranks form a gloo process group, which needs neither a
GPU nor NCCL.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from weft import env, symm
from weft.bench.core.arguments import check_file
from weft.errors import WeftError
from weft.files import write_whole
from weft.operator.know_links import remember
from weft.runtime.links import measure_links
from weft.runtime.meeting import Topic, meeting_of
from weft.runtime.rail import ranks_per_host
from weft.sim.between_hosts import LinkFound, Measured
from weft.symm import Communicator
from weft.words import counted

_ROUNDS = 20


@dataclass(frozen=True)
class Seat:
    """The place where one rank runs: its host, its process and its device.

    gpu: the name of the rank's GPU, or "". cores: the number of CPU cores that the rank may use.
    """

    host: str
    pid: int
    gpu: str
    cores: int
    device: str
    peers: tuple[int, ...] = ()
    """The indices of the GPUs on the same host that this rank's GPU can access."""


@dataclass(frozen=True)
class GroupReport:
    """The results of the checks.

    seats: the host, process and device of each rank, in rank order.
    paths: how each pair of ranks is connected, by (lower rank, higher rank).
    rendezvous_us: the median time in which all ranks synchronise. CPU ranks do this before each call.
    rendezvous: the way in which the ranks synchronise, as text for the report.
    rails: the ranks of each rail, if CPU ranks form rails (docs/hosts.md).
    """

    seats: tuple[Seat, ...]
    paths: dict[tuple[int, int], str]
    rendezvous_us: float
    rendezvous: str = "over sockets"
    rails: tuple[tuple[int, ...], ...] = ()
    measured: Measured | None = None
    """The numbers measured between hosts, over gloo; None if all ranks are on one host."""

    @property
    def links(self) -> tuple[LinkFound, ...]:
        return () if self.measured is None else self.measured.links

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(seat.host for seat in self.seats))


def examine_group(group: dist.ProcessGroup) -> GroupReport:
    """Return the report, equal on all ranks. All ranks must make this call.

    Raises the errors of `weft.symm.communicator`, for example if a rank cannot be reached.
    """
    comm = symm.communicator(group, "cpu")
    seats = tuple(comm.all_gather(_seat(comm), what="weft doctor --group"))
    pairs = [(low, high) for high in range(comm.world_size) for low in range(high)]
    on_cpu = not any(seat.gpu for seat in seats)
    meeting, topic = meeting_of(comm) if on_cpu else None, Topic("weft doctor --group")
    times_us = []
    for _ in range(_ROUNDS if comm.world_size > 1 else 0):
        start = time.perf_counter()
        if meeting is None:
            comm.meet(b"", name="weft doctor --group")
        else:
            meeting.meet(topic, deadline_s=None)
        times_us.append(1e6 * (time.perf_counter() - start))
    slowest = max(comm.all_gather(statistics.median(times_us or [0.0]), what="round trips"))
    paths = {pair: _path(seats[pair[0]], seats[pair[1]]) for pair in pairs}
    per_host, how = ranks_per_host(comm.hosts) if on_cpu else 0, "over sockets"
    if on_cpu and (per_host or comm.all_mapped):
        how = "through shared memory and gloo" if per_host else "through shared memory"
    rails = tuple(tuple(range(index, comm.world_size, per_host)) for index in range(per_host))
    return GroupReport(seats, paths, slowest, how, rails, None if comm.all_mapped else measure_links(comm))


def _seat(comm: Communicator) -> Seat:
    host, pid, cores = comm.hosts[comm.rank], os.getpid(), len(os.sched_getaffinity(0))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return Seat(host, pid, "", cores, "cpu")
    index = env.local_rank() % count
    peers = tuple(i for i in range(count) if i != index and torch.cuda.can_device_access_peer(index, i))
    return Seat(host, pid, torch.cuda.get_device_name(index), cores, f"cuda:{index}", peers)


def _path(one: Seat, other: Seat) -> str:
    if bool(one.gpu) != bool(other.gpu):
        return "none: only one of the ranks has a GPU"
    if one.host != other.host:
        return "NCCL" if one.gpu else "gloo"
    if not one.gpu:
        return "shared memory"
    if one.device == other.device:
        return "the same GPU"
    index = int(other.device.partition(":")[2])
    return "peer access" if index in one.peers else "no peer access"


def print_group(report: GroupReport) -> None:
    """Print the host and the device of each rank, and the kind of connection of each pair of ranks."""
    world = len(report.seats)
    print(f"{counted(world, 'rank')} on {counted(len(report.hosts), 'host')}\n")
    for host in report.hosts:
        print(f"{host}:")
        for rank, seat in enumerate(report.seats):
            if seat.host == host:
                what = f"{seat.device}, {seat.gpu}" if seat.gpu else f"CPU, {counted(seat.cores, 'core')}"
                print(f"  rank {rank}  pid {seat.pid}  {what}")
    for path in dict.fromkeys(report.paths.values()):
        pairs = [f"{low}-{high}" for (low, high), found in report.paths.items() if found == path]
        print(f"\n{path}: pairs {', '.join(pairs)}")
    if world > 1:
        print(
            f"\nA rendezvous of all ranks takes {report.rendezvous_us:.0f} us (median of {_ROUNDS}, {report.rendezvous})."
        )
    if report.links:
        print("\nBetween hosts, measured with one stream of gloo:")
        for link in report.links:
            rate, trip = f"{link.bytes_per_us:.0f} MB/s", f"round trip {link.round_trip_us:.0f} us"
            print(f"  {link.hosts[0]} - {link.hosts[1]}  {rate}, {trip}")
        found = report.measured
        assert found is not None
        if found.exchange_bytes_per_us and found.copy_bytes_per_us:
            print(f"  all ranks at the same time: {found.exchange_bytes_per_us:.0f} MB/s leave a host in an all-to-all, "
                  f"and each rank copies {found.copy_bytes_per_us:.0f} MB/s in memory")  # fmt: skip
    if len(report.hosts) > 1 and not any(seat.gpu for seat in report.seats):
        if report.rails:
            rails = "; ".join("-".join(map(str, rail)) for rail in report.rails)
            print(f"\nData cross between hosts along the rails {rails} (docs/hosts.md).")
        else:
            print(
                "\nThe ranks form no rails, so small calls are slower: start the same number of consecutive ranks on each host, "
                "at least two (docs/hosts.md)."
            )
    elif len(report.hosts) > 1:
        print(
            "\nThe group is on several hosts: data are sent by torch.distributed, mostly without overlap (docs/hosts.md). "
            "For more overlap, use groups of ranks on the same host."
        )


def topology_of(report: GroupReport) -> str:
    """Return the text of a topology file for `weft plan --topology FILE`. All its links have the speed of the slowest
    measured link.
    """
    rate = min(link.bytes_per_us for link in report.links)
    trip_us = max(link.round_trip_us for link in report.links)
    per_host = max(sum(seat.host == host for seat in report.seats) for host in report.hosts)
    source = 'source = "measured"\nnote = "by weft doctor --group: one stream of gloo, the slowest pair of hosts'
    return (
        f'name = "{counted(len(report.hosts), "host")} of {per_host}, measured"\nshape = "hosts"\n\n'
        f'[hosts.gpus]\nvalue = {per_host}\nunit = "1"\nsource = "measured"\n\n'
        f'[nic.usable]\nvalue = {rate / 1e3:.4g}\nunit = "GB/s"\n{source}"\n\n'
        f'[nic.latency]\nvalue = {trip_us / 4:.4g}\nunit = "us"\n{source}, a quarter of a round trip"\n'
    )


def _write_links(path: Path, report: GroupReport) -> str:
    """Write the topology to `path` if links were measured. Return a sentence for the user on what was written."""
    if not report.links:
        return f"--links {path}: nothing is written, because no links between hosts were measured"
    write_whole(path, topology_of(report))
    return f"The topology is in {path}: weft plan OP --topology {path}"


def run(links: Path | None = None) -> int:
    """Run `weft doctor --group` on this rank, and return its exit status. links: the path of the topology file that
    rank 0 writes; None to write none.
    """
    if not env.under_torchrun():
        print(
            "weft doctor --group must be started by a launcher, on every host, such as\n"
            "  torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr HOST -m weft.cli doctor --group"
        )
        return 2
    if env.rank() == 0 and links is not None:
        check_file("--links", links)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    try:
        report = examine_group(group)
    except WeftError as error:
        print(f"rank {dist.get_rank()}: {error}")
        return 1
    if dist.get_rank() == 0:
        print_group(report)
        if report.measured is not None:
            remember(report.measured)  # for later jobs on the same hosts
        if links is not None:
            print(f"\n{_write_links(links, report)}")
    dist.destroy_process_group()
    return 0
