"""The bootstrap between hosts: this host's addresses, a control port, and a proof that both ends belong to the group.

If a group is on several hosts, each rank listens on a TCP port while the ranks find each other. The shared secret is the
listening rank's token, a random 128-bit number in the rank's entry in the group's store. In the handshake, C is the rank
that connects, and L the rank that listens. code(x) is the HMAC-SHA256 of x with L's token as the key:

1. L sends a nonce: 32 random bytes.
2. C sends 84 bytes: its rank and attempt, a nonce of its own, and code(nonce of L, rank, attempt, nonce of C). L reads no more
   bytes, and checks the code before it uses the other fields.
3. L sends code(both nonces), so C knows that L belongs to the group too.

Both then derive a key for each direction from the nonces (`weft.symm.connections`). A connection without the right code is
logged and closed. A host may have several addresses, some of which may also exist on other hosts (container bridges). So C
tries all addresses at the same time, and uses the first whose proof succeeds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weft import env
from weft.symm.connections import TcpConnection, ours

_log = logging.getLogger("weft")
NONCE_BYTES = CODE_BYTES = 32
_WHO = struct.Struct("!I16s32s")  # rank, attempt, nonce
ANSWER_BYTES = _WHO.size + CODE_BYTES
_SIOCGIFADDR = 0x8915
_CONNECT_S = 3.0  # time limit for trying all addresses once
_MOST_CALLERS = 64  # least limit on unproven connections; beyond the limit the oldest is closed


class Port(NamedTuple):
    """The TCP port on which a rank listens for ranks of other hosts, and the addresses of its host."""

    addresses: tuple[str, ...]
    number: int

    def __str__(self) -> str:
        return ", ".join(
            f"[{a}]:{self.number}" if ":" in a else f"{a}:{self.number}" for a in self.addresses or ("no address",)
        )


def listen(backlog: int) -> tuple[socket.socket, Port]:
    """Return a listening socket and its port. The socket listens on all addresses, or with `WEFT_SOCKET_IFNAME` only on the
    first address of the named interfaces.

    backlog: the number of connections that may wait to be accepted.
    """
    interfaces = env.socket_interfaces()
    addresses = addresses_of_host(interfaces)
    if interfaces:
        if not addresses:
            raise OSError(
                errno.EADDRNOTAVAIL,
                f"no network interface of {socket.gethostname()} named {', '.join(interfaces)} has an address: correct "
                "WEFT_SOCKET_IFNAME or GLOO_SOCKET_IFNAME",
            )
        addresses = addresses[:1]
        family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
        sock = socket.create_server((addresses[0], 0), family=family, backlog=backlog)
    elif any(":" in address for address in addresses) and socket.has_dualstack_ipv6():
        sock = socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    else:
        sock = socket.create_server(("", 0), backlog=backlog)
    ours(sock).setblocking(False)
    return sock, Port(addresses, sock.getsockname()[1])


def addresses_of_host(interfaces: Sequence[str] = ()) -> tuple[str, ...]:
    """Return this host's IP addresses, without loopback and link-local addresses. The first is the address that this host
    uses to reach the launcher's host (`MASTER_ADDR`). Then follow the other IPv4 addresses, then IPv6.

    interfaces: the names of network interfaces. If this is not empty, return only the addresses of these interfaces,
        including loopback and link-local IPv4 addresses. After the first, addresses are in the order of `interfaces`.
    """
    names = interfaces or [name for _, name in socket.if_nameindex()]
    found = [address for name in names for address in (*_ipv4(name), *_ipv6(name))]
    usable = [address for address in found if not _is_local(address, bool(interfaces))]
    towards = _towards(env.launcher_host())
    return tuple(
        sorted(dict.fromkeys(usable), key=lambda address: (address != towards, not interfaces and ":" in address))
    )


def _is_local(address: str, is_named: bool) -> bool:
    """True if other hosts cannot connect to `address`. A link-local IPv6 address is valid only with the interface of the host
    that connects.

    is_named: True if the user has named the address's interface, and so wants its other local addresses.
    """
    parsed = ipaddress.ip_address(address)
    return parsed.is_link_local and parsed.version == 6 if is_named else parsed.is_loopback or parsed.is_link_local


def _ipv4(interface: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return [socket.inet_ntoa(answer[20:24])]
    return []


def _ipv6(interface: str) -> list[str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().split("\n")
    except OSError:
        return []
    fields = [line.split() for line in lines if line]
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(one[0])) for one in fields if one[5] == interface]


def _towards(host: str) -> str:
    """Return the local address from which the kernel would send packets to `host`; "" if there is no route. No packet is
    sent.
    """
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else ():
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0])
    return ""


class Caller:
    """An incoming connection to the control port. `rank` is the rank of the other end, or -1 until it has proved that it
    belongs to the group.
    """

    def __init__(self, sock: socket.socket, source: str, token: str) -> None:
        self.socket, self.source, self._token = ours(sock), source, token
        self.rank, self.attempt = -1, b""
        self._nonce, self._answer, self._theirs = secrets.token_bytes(NONCE_BYTES), b"", b""
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.send(self._nonce)

    def read(self) -> bool:
        """Read from the connection without blocking. Return True when the other end has proved that it belongs to the
        group, False if more bytes must arrive. Raise `PermissionError` if the proof is wrong or incomplete. Raise
        `ConnectionError` if the connection ended before anything was sent, as when a peer uses another address of this host.
        """
        try:
            data = self.socket.recv(ANSWER_BYTES - len(self._answer))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data and not self._answer:
            raise ConnectionError
        self._answer += data
        if data and len(self._answer) < ANSWER_BYTES:
            return False
        said, code = self._answer[: _WHO.size], self._answer[_WHO.size :]
        if not hmac.compare_digest(code, _code(self._token, b"connects", self._nonce, said)):
            raise PermissionError
        self.rank, self.attempt, self._theirs = _WHO.unpack(said)
        return True

    def accept(self) -> TcpConnection:
        """Send the proof that this end belongs to the group too. Return the connection. Raises `OSError`."""
        both = self._nonce, self._theirs
        self.socket.send(_code(self._token, b"listens", *both))
        return TcpConnection(
            self.socket, _code(self._token, b"to C", *both), _code(self._token, b"to L", *both), env.deadline_s()
        )


class ControlPort:
    """The listening port of `rank`, and incoming connections whose handshake has not ended.

    token: the secret of `rank`, which an incoming connection must prove to know.
    """

    def __init__(self, rank: int, token: str, world_size: int) -> None:
        self._rank, self._token = rank, token
        self._most = max(_MOST_CALLERS, 2 * world_size)  # all higher ranks may connect at the same time
        self._socket, self.port = listen(self._most)
        self._callers: dict[socket.socket, Caller] = {}

    def sockets(self) -> list[socket.socket]:
        """Return the sockets to poll for reading. Pass a readable socket to `go_on`."""
        return [self._socket, *self._callers]

    def go_on(self, sock: socket.socket) -> Caller | None:
        """Accept a new connection on `sock`, or read from it. Return the connection if its other end has now proved that it
        belongs to the group, else None.
        """
        if sock is self._socket:
            with contextlib.suppress(
                BlockingIOError, ConnectionError
            ):  # the other end has already closed the connection
                accepted, address = sock.accept()
                self._callers[accepted] = Caller(accepted, f"{address[0]} port {address[1]}", self._token)
            if len(self._callers) > self._most:
                self._refuse(next(iter(self._callers)))
            return None
        try:
            return self._callers.pop(sock) if self._callers[sock].read() else None
        except PermissionError:
            self._refuse(sock)
        except ConnectionError:
            self._callers.pop(sock).socket.close()
        return None

    def _refuse(self, sock: socket.socket) -> None:
        _log.warning(
            "rank %d: refused a connection from %s to its control port: it did not prove that it knows the secret of this process "
            "group. Nothing that it sent was interpreted",
            self._rank, self._callers.pop(sock).source,
        )  # fmt: skip
        sock.close()

    def close(self) -> None:
        self._socket.close()
        for sock in [*self._callers]:
            if (caller := self.go_on(sock)) is not None:  # a further connection of a rank of the group
                caller.socket.close()
            elif sock in self._callers:
                self._refuse(sock)


def attempt_of(name: str) -> bytes:
    """Return the 16 bytes that identify an attempt in a handshake: a hash of its name."""
    return hashlib.sha256(name.encode()).digest()[:16]


class Dialing:
    """Attempts to connect to a peer's `port`, at all its addresses at the same time. The first connection with a
    successful handshake is used.

    token: the peer's secret, with which both ends prove that they belong to the group.
    rank, name: this rank, and the name of its attempt to set up the group.
    """

    def __init__(self, port: Port, token: str, rank: int, name: str) -> None:
        self._token, self._port, self._who = token, port, (rank, attempt_of(name))
        self._troubles = dict.fromkeys(port.addresses, "no answer")
        self._until = time.monotonic() + _CONNECT_S
        self._dials: dict[int, _Dial] = {}
        self._poll = select.poll()
        for address in port.addresses:
            sock = ours(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM))
            sock.setblocking(False)
            self._dials[sock.fileno()] = _Dial(sock, address)
            self._poll.register(sock, select.POLLIN)
            failed = sock.connect_ex((address, port.number))
            if failed not in (0, errno.EINPROGRESS):
                self._drop(sock.fileno(), os.strerror(failed))

    @property
    def failed(self) -> bool:
        """True if no handshake can succeed any more: all addresses have failed, or none has accepted a connection in time. A
        peer that has accepted a connection may take longer for the rest of the handshake.
        """
        is_late = time.monotonic() >= self._until
        return not self._dials or (is_late and not any(dial.connected for dial in self._dials.values()))

    @property
    def trouble(self) -> str:
        """An error text with each address and its error."""
        said = [f"{Port((one,), self._port.number)}: {text}" for one, text in self._troubles.items()]
        return "; ".join(said) or "it has no address"

    def go_on(self, patience_s: float) -> TcpConnection | None:
        """Continue the handshakes for at most `patience_s` seconds. Return the first connection whose other end has proved
        that it belongs to the group, or None.
        """
        for descriptor, _ in self._poll.poll(1000 * patience_s):
            dial = self._dials[descriptor]
            try:
                if (keys := dial.read(self._token, *self._who)) is not None:
                    connection = TcpConnection(dial.socket, *keys, env.deadline_s())
                    del self._dials[descriptor]
                    self.close()  # the peer then drops the attempts at its other addresses
                    return connection
            except BlockingIOError:
                continue
            except OSError as error:
                self._drop(descriptor, str(error) if error.errno is None else os.strerror(error.errno))
        return None

    def _drop(self, descriptor: int, trouble: str) -> None:
        dial = self._dials.pop(descriptor)
        self._troubles[dial.address] = trouble
        self._poll.unregister(descriptor)
        dial.socket.close()

    def close(self) -> None:
        for descriptor in [*self._dials]:
            self._drop(descriptor, "closed")


class _Dial:
    """The handshake on one outgoing connection."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.socket, self.address = sock, address
        self._nonce, self._theirs, self._proof = secrets.token_bytes(NONCE_BYTES), b"", b""

    def read(self, token: str, rank: int, attempt: bytes) -> tuple[bytes, bytes] | None:
        """Continue the handshake. When the other end has proved that it belongs to the group, return the HMAC keys for
        sending and receiving, else None. Raises `OSError` if the connection failed or the proof is wrong.
        """
        said = _WHO.pack(rank, attempt, self._nonce)
        if len(self._theirs) < NONCE_BYTES:
            self._theirs += self._recv(NONCE_BYTES - len(self._theirs))
            if len(self._theirs) == NONCE_BYTES:
                self.socket.send(said + _code(token, b"connects", self._theirs, said))
            return None
        self._proof += self._recv(CODE_BYTES - len(self._proof))
        if len(self._proof) < CODE_BYTES:
            return None
        both = self._theirs, self._nonce
        if not hmac.compare_digest(self._proof, _code(token, b"listens", *both)):
            raise OSError("the peer does not belong to this process group")
        return _code(token, b"to L", *both), _code(token, b"to C", *both)

    @property
    def connected(self) -> bool:
        try:
            self.socket.getpeername()
        except OSError:
            return False
        return True

    def _recv(self, count: int) -> bytes:
        data = self.socket.recv(count)  # also raises the error of a connection that failed
        if not data:
            raise OSError("the peer closed the connection")
        return data


def _code(token: str, what: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token.encode(), b"\0".join([what, *parts]), "sha256")
