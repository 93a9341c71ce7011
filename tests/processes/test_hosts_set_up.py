"""A group on several hosts, pretended on this machine: its set-up over TCP, and who is let in.

The functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

import logging
import re
import socket
import time

import pytest
import torch
import torch.distributed as dist
from pool import traces
from support.on_ranks import told
from support.pretended_hosts import claimed, on_two_hosts

import weft
from weft import symm
from weft.launch import Pool
from weft.symm import hosts

LONG_S = 50.0
PROMPT_S = 10.0


# -- set-up


def set_up(group):
    before = traces()  # of groups of earlier tests in this process
    with on_two_hosts(group) as own:
        comm = symm.communicator(own, "cpu")
        gathered = comm.all_gather((comm.rank, b"x" * 200_000 * comm.rank), what="much")
        assert [(rank, len(data)) for rank, data in gathered] == [(r, 200_000 * r) for r in range(comm.world_size)]
        exchange = symm.Exchange(comm)
        for epoch in range(20):
            assert exchange.exchange(bytes([comm.rank, epoch])) == [bytes([r, epoch]) for r in range(comm.world_size)]
        found = comm.hosts, comm.mapped
    return found, traces(before)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_meet_over_tcp_and_know_whose_memory_is_mapped(pool: Pool, world: int) -> None:
    at = {2: "ab", 3: "aab", 8: "aaaabbbb"}[world]
    for rank, ((names, mapped), left) in enumerate(pool.run(set_up, ranks=world)):
        assert names == tuple({"a": "alpha", "b": "beta"}[one] for one in at)
        assert mapped == tuple(one == at[rank] for one in at)
        assert not any(left.values()), left


def hosts_of_one_name(group):
    with claimed("pod", kernel=f"kernel {group.rank() % 2}"):
        return symm.communicator(dist.new_group(range(group.size())), "cpu").hosts


def test_hosts_of_one_name_are_numbered(pool: Pool) -> None:
    assert pool.run(hosts_of_one_name, ranks=3) == [("pod #1", "pod #2", "pod #1")] * 3


def other_versions(group):
    versions = {} if group.rank() < 2 else {"versions": "weft 9.9, torch 2.13.0"}
    with on_two_hosts(group, **versions) as own:
        return told(lambda: symm.communicator(own, "cpu", deadline_s=LONG_S))


def test_other_versions_on_a_host_are_refused_on_every_rank(pool: Pool) -> None:
    found = pool.run(other_versions, ranks=3, timeout_s=40)
    here = f"weft {weft.__version__}, torch {torch.__version__.partition('+')[0]}"
    assert set(found) == {
        f"RefusedError: ranks of this group have different versions: {here} on ranks [0, 1], host alpha; weft 9.9, torch 2.13.0 "
        "on ranks [2], host beta. Install the same versions on every host"
    }


def no_way(group):
    """The first rank publishes a port on which nobody listens."""
    native = hosts.ControlPort.__init__

    def closed(self, *given):
        native(self, *given)
        with socket.create_server(("127.0.0.1", 0)) as other:
            self.port = hosts.Port(("127.0.0.1",), other.getsockname()[1])

    hosts.ControlPort.__init__ = closed
    try:
        with on_two_hosts(group) as own:
            return told(lambda: symm.communicator(own, "cpu", deadline_s=1.5 + group.rank()))
    finally:
        hosts.ControlPort.__init__ = native


def test_it_is_said_who_cannot_reach_whom(pool: Pool) -> None:
    waiting, dialing = pool.run(no_way, ranks=2, timeout_s=40)
    assert re.search(
        r"rank 1 on host beta cannot reach rank 0 on host alpha: 127.0.0.1:\d+: Connection refused. Open TCP", dialing
    )
    assert re.search(r"to arrive, rank 1 on host beta must reach rank 0 at 127.0.0.1:\d+", waiting)
    assert waiting.startswith("DeadlineError: ")
    assert dialing.startswith(("DeadlineError: ", "PeerLostError: rank 0 gave up "))


# -- strangers


def knock(group, knocks):
    """Strangers connect to rank 0's control port before rank 1 does."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("weft").addHandler(handler)
    strangers = []

    def port_of(setup, entry):
        port = native(setup, entry)
        if port is not None and not strangers:
            for what in knocks:
                strangers.append(stranger := socket.create_connection((port.addresses[0], port.number)))
                if what == "answers":
                    stranger.settimeout(5)
                    nonce = stranger.recv(hosts.NONCE_BYTES, socket.MSG_WAITALL)
                    stranger.send(hosts._WHO.pack(1, b"a" * 16, b"n" * 32) + hosts._code("a guess", b"connects", nonce))
                elif what:
                    stranger.send(what)
        return port

    setup = symm.bootstrap._Setup
    native, setup.port_of = setup.port_of, port_of
    try:
        with on_two_hosts(group) as own:
            start = time.monotonic()
            assert symm.communicator(own, "cpu", deadline_s=LONG_S).all_gather(group.rank()) == [0, 1]
            seconds = time.monotonic() - start
    finally:
        setup.port_of = native
        logging.getLogger("weft").removeHandler(handler)
    return seconds, said, [stranger.recv(1000) for stranger in strangers if stranger.settimeout(5) is None]


def test_strangers_are_refused_and_logged(pool: Pool) -> None:
    knocks = [b"GET / HTTP/1.1\r\n\r\n" * 5, b"\x80\x04K\x01." * 30, "answers", b"too short", b"", *[b""] * 70]
    (seconds, said, _), (*_, answers) = pool.run(knock, knocks, ranks=2, timeout_s=60)
    assert seconds < PROMPT_S
    refused = [line for line in said if "refused a connection from 127.0.0.1 port " in line]
    assert len(refused) == len(knocks)
    assert all("did not prove that it knows the secret of this process group" in line for line in refused)
    assert {len(answer) for answer in answers} <= {0, hosts.NONCE_BYTES}  # the nonce is all that a stranger gets


def impostor(group):
    """Rank 0 does not know the secret that rank 1 reads in the store: to rank 1 it is another process on that address."""
    native = hosts._code
    if group.rank() == 0:
        hosts._code = lambda token, *rest: native("another secret", *rest)
    try:
        with on_two_hosts(group) as own:
            # Rank 0 waits longer, so that it listens for as long as rank 1 tries.
            return told(lambda: symm.communicator(own, "cpu", deadline_s=1.5 if group.rank() else 10.0))
    finally:
        hosts._code = native


def test_a_listener_without_the_secret_is_left(pool: Pool) -> None:
    listening, dialing = pool.run(impostor, ranks=2, timeout_s=40)
    assert re.search(r"127.0.0.1:\d+: the peer (closed the connection|does not belong to this process group)", dialing)
    assert dialing.startswith("DeadlineError: ")
    assert listening.startswith("PeerLostError: rank 1 gave up ")
