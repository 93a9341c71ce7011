"""A connection between two ranks, over which their watchdogs exchange packets: a Unix socket on one host, TCP between
hosts.

|           | `UnixConnection`                              | `TcpConnection`                                        |
|-----------|-----------------------------------------------|--------------------------------------------------------|
| reach     | one kernel and network namespace              | other hosts                                            |
| a packet  | one message of a sequential-packet socket     | a frame: its length, an authentication code, the bytes |
| files     | a packet can carry a file descriptor          | not supported                                          |
| the end   | end-of-file: the peer's process has ended     | the same, or an error if the other host is silent      |

The authentication code of a frame is the HMAC-SHA256 of its sequence number and bytes. `weft.symm.hosts` derives the key when
the peers prove to each other that they know the group's secret. So nobody else can insert, change, repeat or reorder frames.
Frames are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
import time
import weakref
from typing import Protocol

MAX_PACKET = 64 * 1024  # far below the default socket buffer (208 KiB), so that sending one message never blocks
_HEADER = struct.Struct("!I16s")  # length of the packet in bytes, authentication code
_NUMBER = struct.Struct("!Q")
_MOST_PENDING = 4 * MAX_PACKET  # most bytes that may wait for a full socket; beyond this `send` raises
_LINGER_S = 0.5  # longest time that `close` waits for pending bytes to be sent
_LEAST_SILENCE_S = 10.0


class BadFrameError(OSError):
    """The peer sent an invalid frame: too large, or with a wrong authentication code."""


class Connection(Protocol):
    """A connection to one peer. `send` and `receive` raise `BlockingIOError` instead of blocking."""

    passes_files: bool

    def fileno(self) -> int: ...

    def send(self, packet: bytes, file: int | None = None) -> None:
        """Send a packet of at most `MAX_PACKET` bytes, and optionally a file descriptor."""

    def receive(self) -> tuple[bytes, list[int]]:
        """Return the next packet and its file descriptors. An empty packet means that the connection has ended."""

    @property
    def pending(self) -> bool:
        """True if some bytes could not be sent yet, because the socket's buffer was full. Call `flush` when the socket is
        writable.
        """

    def flush(self) -> None: ...

    def close(self) -> None: ...


# A forked child inherits sockets. If the child outlived this process, its copies would hide the death of this process
# from peers.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def ours(sock: socket.socket) -> socket.socket:
    """Return `sock`, registered to be closed in forked children."""
    _sockets.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)


class UnixConnection:
    """A connection within one host."""

    passes_files = True
    pending = False

    def __init__(self, sock: socket.socket) -> None:
        self._socket = ours(sock)
        sock.setblocking(False)  # needed because Python's recv_fds ignores MSG_DONTWAIT

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, packet: bytes, file: int | None = None) -> None:
        socket.send_fds(self._socket, [packet], [] if file is None else [file], socket.MSG_DONTWAIT)

    def receive(self) -> tuple[bytes, list[int]]:
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        data, files, _, _ = socket.recv_fds(self._socket, MAX_PACKET, 1, flags)
        return data, files

    def flush(self) -> None: ...

    def close(self) -> None:
        self._socket.close()


class TcpConnection:
    """A connection between hosts.

    sending, receiving: the HMAC keys that authenticate the frames in each direction.
    silence_s: the connection is lost if the other host's kernel does not respond for this number of seconds.
    """

    passes_files = False

    def __init__(self, sock: socket.socket, sending: bytes, receiving: bytes, silence_s: float) -> None:
        self._socket = ours(sock)
        sock.setblocking(False)
        silence_s = max(_LEAST_SILENCE_S, silence_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        each_s = max(1, min(15, int(silence_s / 3)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, each_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, each_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(1000 * silence_s), 2**31 - 1))
        self._keys = sending, receiving
        self._sent = self._received = 0  # frames
        self._leaving, self._arrived = bytearray(), bytearray()
        self._ended = False

    @property
    def secret(self) -> str:
        """A secret that only the two ends of this connection know. The two ranks use it to authenticate further connections
        to each other.
        """
        return hmac.digest(min(self._keys), b"further connections\0" + max(self._keys), "sha256").hex()

    @property
    def socket(self) -> socket.socket:
        """The socket, for a protocol without frames. Do not call other methods of this object then."""
        return self._socket

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, packet: bytes, file: int | None = None) -> None:
        if file is not None:
            raise ValueError("file descriptors cannot be sent to another host")
        self.flush()
        if len(self._leaving) + len(packet) > _MOST_PENDING:
            raise BlockingIOError
        self._leaving += _HEADER.pack(len(packet), _code(self._keys[0], self._sent, packet)) + packet
        self._sent += 1
        self.flush()

    @property
    def pending(self) -> bool:
        return bool(self._leaving)

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._leaving:
                del self._leaving[: self._socket.send(self._leaving)]

    def receive(self) -> tuple[bytes, list[int]]:
        while (packet := self._packet()) is None:
            data = b"" if self._ended else self._socket.recv(2 * MAX_PACKET)
            self._ended = not data
            if not data:
                return b"", []
            self._arrived += data
        return packet, []

    def _packet(self) -> bytes | None:
        if len(self._arrived) < _HEADER.size:
            return None
        length, code = _HEADER.unpack_from(self._arrived)
        if not 0 < length <= MAX_PACKET:
            raise BadFrameError(f"a message has {length} bytes, but at most {MAX_PACKET} are allowed")
        end = _HEADER.size + length
        if len(self._arrived) < end:
            return None
        packet = bytes(self._arrived[_HEADER.size : end])
        if not hmac.compare_digest(code, _code(self._keys[1], self._received, packet)):
            raise BadFrameError(f"message {self._received} does not have the peer's authentication code")
        self._received += 1
        del self._arrived[:end]
        return packet

    def close(self) -> None:
        """Close the connection when pending bytes have been sent, or after `_LINGER_S` seconds."""
        until = time.monotonic() + _LINGER_S
        with contextlib.suppress(OSError):
            self.flush()
            while self._leaving and (left := until - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                poll.poll(1000 * left)
                self.flush()
            # If unread bytes remain, the kernel sends a reset, which could overtake the last frames of this rank.
            while self._socket.recv(2 * MAX_PACKET):
                pass
        self._socket.close()


def _code(key: bytes, number: int, packet: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + packet, "sha256")[:16]


def same_user(sock: socket.socket) -> int:
    """Return the pid of the other end. Raise `PermissionError` unless the other end runs under the user of this
    process.
    """
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.geteuid():
        raise PermissionError(
            f"the process on the other end of a weft socket runs under uid {uid}, not {os.geteuid()}: start all ranks as one user"
        )
    return pid
