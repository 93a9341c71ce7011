"""Connections between hosts: packets of any size arrive complete and in order. Bytes that are not frames of the peer
are refused.
"""

from __future__ import annotations

import random
import select
import socket

import pytest

from weft.runtime import rail_link
from weft.symm import connections, hosts
from weft.symm.connections import MAX_PACKET, BadFrameError, TcpConnection

KEYS = b"there" * 8, b"back" * 8
LONG_S = 20.0


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        return left, listener.accept()[0]


def pair() -> tuple[TcpConnection, TcpConnection]:
    left, right = sockets()
    return TcpConnection(left, *KEYS, 60.0), TcpConnection(right, *reversed(KEYS), 60.0)


def next_packet(connection: TcpConnection, sender: TcpConnection) -> bytes:
    while True:
        try:
            return connection.receive()[0]
        except BlockingIOError:
            sender.flush()


def test_packets_arrive_whole_and_in_order() -> None:
    left, right = pair()
    generator = random.Random(1)
    sent = [generator.randbytes(generator.choice([1, 2, 300, MAX_PACKET])) for _ in range(300)]
    waiting, arrived, was_full = sent[::-1], [], False
    while len(arrived) < len(sent):
        try:
            while waiting:
                left.send(waiting[-1])
                waiting.pop()
        except BlockingIOError:
            was_full = True
        arrived.append(next_packet(right, left))
    assert arrived == sent
    assert was_full
    right.send(b"back")
    assert next_packet(left, right) == b"back"
    left.close()
    assert right.receive() == (b"", [])
    right.close()


def test_pending_packets_leave_before_the_link_closes() -> None:
    left, right = pair()
    left.send(b"x" * MAX_PACKET)
    left.send(b"goodbye")
    left.close()
    assert [len(next_packet(right, right)) for _ in range(3)] == [MAX_PACKET, 7, 0]
    right.close()


def test_files_do_not_travel() -> None:
    left, right = pair()
    with pytest.raises(ValueError, match="file descriptors cannot be sent to another host"):
        left.send(b"x", 0)
    left.close()
    right.close()


def frame(length: int, code: bytes, packet: bytes) -> bytes:
    return connections._HEADER.pack(length, code) + packet


@pytest.mark.parametrize("length", [0, MAX_PACKET + 1, 2**32 - 1])
def test_a_frame_larger_than_allowed_is_refused_before_it_is_read(length: int) -> None:
    raw, right = sockets()
    connection = TcpConnection(right, *reversed(KEYS), 60.0)
    raw.send(frame(length, b"c" * 16, b""))
    with pytest.raises(BadFrameError, match=rf"a message has {length} bytes, but at most {MAX_PACKET} are allowed"):
        next_packet(connection, connection)
    raw.close()
    connection.close()


@pytest.mark.parametrize("what", ["changed", "again", "another key", "other direction"])
def test_what_is_not_the_peers_next_frame_is_refused(what: str) -> None:
    raw, right = sockets()
    connection = TcpConnection(right, *reversed(KEYS), 60.0)
    first = frame(5, connections._code(KEYS[0], 0, b"first"), b"first")
    raw.send(first)
    assert next_packet(connection, connection) == b"first"
    code = connections._code({"another key": b"a guess", "other direction": KEYS[1]}.get(what, KEYS[0]), 1, b"after")
    raw.send({"again": first, "changed": frame(5, code, b"evil!")}.get(what, frame(5, code, b"after")))
    with pytest.raises(BadFrameError, match="message 1 does not have the peer's authentication code"):
        next_packet(connection, connection)
    raw.close()
    connection.close()


def test_a_handshake_makes_a_link_for_those_who_know_the_secret() -> None:
    port = hosts.ControlPort(0, "the secret", 4)
    here = hosts.Port(("127.0.0.1",), port.port.number)
    dialing = hosts.Dialing(here, "the secret", 3, "an attempt")
    made, caller = None, None
    for _ in range(1000):
        made = made or dialing.go_on(0.01)
        for sock in port.sockets() if caller is None else ():
            caller = caller or port.go_on(sock)
        if caller is not None and made is None:
            connection = caller.accept()
            made = dialing.go_on(1.0)
        if made is not None:
            break
    assert caller is not None
    assert made is not None
    assert (caller.rank, caller.attempt) == (3, hosts.attempt_of("an attempt"))
    made.send(b"hello")
    assert next_packet(connection, made) == b"hello"
    connection.send(b"and back")
    assert next_packet(made, connection) == b"and back"
    for one in (port, dialing, made, connection):
        one.close()


def test_a_rail_keeps_one_connection_to_a_peer_that_reaches_two_addresses(caplog: pytest.LogCaptureFixture) -> None:
    port = hosts.ControlPort(0, "the secret", 2)
    dialing = hosts.Dialing(hosts.Port(("127.0.0.1", "127.0.0.2"), port.port.number), "the secret", 1, "rail")
    made: dict[int, socket.socket] = {}
    while len(port.sockets()) < 3:
        rail_link._accept({1: port}, made)  # sends a nonce on each connection
    for dial in dialing._dials.values():
        select.select([dial.socket], [], [], LONG_S)
    dialing.go_on(LONG_S)
    for sock in port.sockets()[1:]:
        assert select.select([sock], [], [], LONG_S)[0]  # the peer's proof has arrived
    rail_link._accept({1: port}, made)
    kept = made[1].getpeername()[1]
    while (connection := dialing.go_on(LONG_S)) is None:
        pass
    assert connection.socket.getsockname()[1] == kept
    connection.socket.send(b"hello")
    assert select.select([made[1]], [], [], LONG_S)[0]
    assert made[1].recv(5) == b"hello"
    port.close()
    assert not caplog.messages
    made[1].close()
    connection.close()


def test_connections_that_a_peer_does_not_use_are_not_refused_as_strangers(caplog: pytest.LogCaptureFixture) -> None:
    port = hosts.ControlPort(0, "the secret", 2)
    here = hosts.Port(("127.0.0.1", "127.0.0.2", "127.0.0.3"), port.port.number)
    dialing = hosts.Dialing(here, "the secret", 1, "an attempt")
    while len(port.sockets()) < 4:
        port.go_on(port.sockets()[0])
    caller = connection = None
    while caller is None:
        dialing.go_on(0.01)
        caller = port.go_on(port.sockets()[1])
    accepted = caller.accept()
    while connection is None:
        connection = dialing.go_on(LONG_S)
    for sock in port.sockets()[1:]:
        assert select.select([sock], [], [], LONG_S)[0]
    port.close()
    assert not caplog.messages
    accepted.close()
    connection.close()


def test_addresses_of_this_host_are_usable() -> None:
    assert hosts.addresses_of_host(["lo"])[0] == "127.0.0.1"
    assert not any(hosts._is_local(address, False) for address in hosts.addresses_of_host())


@pytest.mark.parametrize(
    ("interfaces", "towards", "wanted"),
    [
        ((), "", ("10.0.0.1", "10.1.0.1", "fd00::1", "fd01::1")),
        ((), "fd01::1", ("fd01::1", "10.0.0.1", "10.1.0.1", "fd00::1")),
        (("eth1",), "", ("10.1.0.1", "169.254.7.7", "fd01::1")),
        (("eth1", "eth0"), "fd00::1", ("fd00::1", "10.1.0.1", "169.254.7.7", "fd01::1", "10.0.0.1")),
        (("lo",), "", ("127.0.0.1", "::1")),
    ],
)
def test_addresses_that_other_hosts_reach_are_published(
    monkeypatch: pytest.MonkeyPatch, interfaces: tuple[str, ...], towards: str, wanted: tuple[str, ...]
) -> None:
    of_version_4 = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "eth1": ["10.1.0.1", "169.254.7.7"]}
    of_version_6 = {"lo": ["::1"], "eth0": ["fe80::1", "fd00::1"], "eth1": ["fe80::2", "fd01::1"]}
    monkeypatch.setattr(hosts, "_ipv4", of_version_4.get)
    monkeypatch.setattr(hosts, "_ipv6", of_version_6.get)
    monkeypatch.setattr(hosts, "_towards", lambda host: towards)
    monkeypatch.setattr(hosts.socket, "if_nameindex", lambda: list(enumerate(of_version_4)))
    assert hosts.addresses_of_host(interfaces) == wanted


def test_an_interface_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SOCKET_IFNAME", "nowhere0, nowhere1")
    with pytest.raises(OSError, match="named nowhere0, nowhere1 has an address: correct WEFT_SOCKET_IFNAME or"):
        hosts.listen(1)
