"""How the ranks of a group on one host find each other: a full mesh of connected Unix sockets.

Protocol. Each rank listens on a socket in the abstract namespace under a random 128-bit name and publishes the name
and a random token through the process group's store. A rank connects to every lower rank and accepts from every higher
one; the one packet sent on that connection says who it is, shows the token of whom it meant to reach, and hands over
one end of a fresh socket pair, which alone is used from there on (an accepted socket would go on bearing the listener's
name). When a rank has all its sockets it sends "ready" with the other's token down each of them and waits for the same
from all. Then the listener is closed and the published entry wiped: nothing has a name, and only the pairs remain.
A rank that fails half-way hangs up and leaves the reason in its entry, for those whose entries it had seen.

Both sides check that the other process runs under the same user (SO_PEERCRED), so knowing a name is not enough.
Entries of an earlier attempt that failed may still be in the store: a refused connection is tried again with a fresh
look at the entry, until the deadline.

Sequential-packet sockets: one send is one message, file descriptors travel with it, and end-of-file without a goodbye
means that the process on the other end is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from weft.errors import DeadlineError, PeerLostError

PREFIX = "weft-"
MAX_PACKET = 64 * 1024  # far below every default socket buffer (208 KiB), so that a send of one message never stalls


@dataclass(frozen=True)
class Peer:
    rank: int
    pid: int  # as this process sees it; 0 if it is in a process namespace that this one cannot see
    socket: socket.socket


@dataclass(frozen=True)
class _Entry:
    """What a rank publishes about itself."""

    rank: int
    name: str
    token: str
    host: str
    kernel: str  # boot id and network namespace: abstract sockets reach no further

    @staticmethod
    def of_this_process(rank: int) -> _Entry:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/net")
        kernel = f"{boot} {namespace}"
        return _Entry(rank, PREFIX + secrets.token_hex(16), secrets.token_hex(16), socket.gethostname(), kernel)


# Sockets are inherited by a forked child, and one that outlives us there would hide our death from the peers.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)


def connect(store: dist.Store, rank: int, world_size: int, deadline_s: float) -> list[Peer]:
    """A connected socket to every other rank of the group, in rank order. Collective over the group's ranks.

    Raises `ValueError` if the ranks are not all on this host, `DeadlineError` naming who has not come within
    `deadline_s` seconds, `PeerLostError` if another rank gave up in the middle, or the store is gone with the process that
    kept it. In all cases nothing stays open.

    Of a rank that died before it came here nothing is known, not even its pid, so the others wait for it until the deadline.
    """
    if world_size == 1:
        return []
    setup = _Setup(store, rank, world_size, deadline_s)
    last_words = ""
    try:
        setup.run()
    except BaseException as error:
        for peer in setup.peers.values():
            peer.socket.close()
        last_words = json.dumps({"gave_up": str(error), "met": [entry.name for entry in setup.entries.values()]})
        if isinstance(error, dist.DistNetworkError):
            raise PeerLostError(
                f"rank {rank} lost the store of this process group while setting up symmetric memory ({error}): the process "
                "that kept it has ended, which is rank 0 unless a launcher keeps it: start the ranks again"
            ) from error
        raise
    finally:
        setup.listener.close()
        with contextlib.suppress(RuntimeError):  # the store may have gone with the rank that kept it
            # Not deleted: a peer that has just found the entry there would wait for it to come back.
            store.set(str(rank), last_words)
    return [setup.peers[other] for other in sorted(setup.peers)]


class _Setup:
    def __init__(self, store: dist.Store, rank: int, world_size: int, deadline_s: float):
        self.store, self.rank, self.world_size, self.deadline_s = store, rank, world_size, deadline_s
        self.until = time.monotonic() + deadline_s
        self.mine = _Entry.of_this_process(rank)
        self.entries = {rank: self.mine}
        self.peers: dict[int, Peer] = {}
        self.listener = _socket()
        self.listener.bind("\0" + self.mine.name)
        self.listener.listen(128)

    def run(self) -> None:
        self.store.set(str(self.rank), json.dumps(asdict(self.mine)))
        self._read_entries()
        for other in range(self.rank):
            self._reach(other)
        while len(self.peers) < self.world_size - 1:
            self._accept()
        # Everyone must have met the same attempt of everyone: a rank that failed and came back has a new name.
        names = [self.entries[r].name for r in range(self.world_size)]
        attempt = hashlib.sha256(" ".join(names).encode()).hexdigest()
        for peer in self.peers.values():
            with self._giving_up(peer.rank):
                peer.socket.send(json.dumps({"ready": self.entries[peer.rank].token, "attempt": attempt}).encode())
        for peer in self.peers.values():
            if self._receive(peer) != {"ready": self.mine.token, "attempt": attempt}:
                raise PeerLostError(f"rank {peer.rank} is in another attempt at setting up this group: try again")

    def _read_entries(self) -> None:
        missing = [r for r in range(self.world_size) if r != self.rank]
        while True:
            for r in missing:
                self._look_up(r)
            missing = [r for r in missing if r not in self.entries]
            if not missing:
                break
            self._pause(missing)
        for entry in self.entries.values():
            if entry.kernel != self.mine.kernel:
                raise ValueError(
                    f"rank {entry.rank} (host {entry.host}) and rank {self.rank} (host {self.mine.host}) do not share "
                    "a kernel and network namespace: symmetric memory works inside one host (and one container), "
                    "make one group per host"
                )

    def _look_up(self, rank: int) -> None:
        if not self.store.check([str(rank)]) or not (text := self.store.get(str(rank))):
            return
        entry = json.loads(text)
        if "gave_up" not in entry:
            self.entries[rank] = _Entry(**entry)
        elif self.mine.name in entry["met"]:  # in this attempt, not in an earlier one
            raise PeerLostError(f"rank {rank} gave up while this group was being set up: {entry['gave_up']}")

    def _reach(self, other: int) -> None:
        while True:
            sock = _socket()
            sock.setblocking(False)  # a listener whose queue is full would have us wait without end
            try:
                sock.connect("\0" + self.entries[other].name)
                break
            except OSError:  # an entry of an earlier attempt, whose listener is gone; or that full queue
                sock.close()
                self._pause([other])
                self._look_up(other)
        with sock:
            pid = _same_user(sock)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _sockets.update([ours, theirs])
            self.peers[other] = Peer(other, pid, ours)
            hello = json.dumps({**asdict(self.mine), "to": self.entries[other].token}).encode()
            with theirs, self._giving_up(other):
                socket.send_fds(sock, [hello], [theirs.fileno()])

    def _accept(self) -> None:
        if self._is_anybody_there(max(0.0, self.until - time.monotonic())):
            self._welcome(self.listener.accept()[0])
        elif time.monotonic() >= self.until:
            raise self._too_late([r for r in range(self.rank + 1, self.world_size) if r not in self.peers])

    def _is_anybody_there(self, timeout_s: float) -> bool:
        """Whether a connection has come in; raises if a peer that we have met has hung up."""
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        for peer in self.peers.values():
            poll.register(peer.socket, 0)  # hang-ups only: what they send is read later
        ready = [descriptor for descriptor, _ in poll.poll(1000 * timeout_s)]
        for peer in self.peers.values():
            if peer.socket.fileno() in ready:
                self._look_up(peer.rank)  # it may have left word why
                raise PeerLostError(f"rank {peer.rank} gave up while this group was being set up")
        return bool(ready)

    def _welcome(self, sock: socket.socket) -> None:
        """Take in who has connected, or turn it away: it may be a stranger, or a rank that has just died."""
        files: list[int] = []
        with sock, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            pid = _same_user(sock)
            sock.settimeout(max(0.001, self.until - time.monotonic()))
            data, files, _, _ = socket.recv_fds(sock, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
            hello = json.loads(data)
            if hello.pop("to") == self.mine.token and len(files) == 1:
                entry = _Entry(**hello)
                if self.rank < entry.rank < self.world_size and entry.rank not in self.peers:
                    self.entries[entry.rank] = entry
                    self.peers[entry.rank] = Peer(entry.rank, pid, socket.socket(fileno=files.pop()))
                    _sockets.add(self.peers[entry.rank].socket)
        for file in files:
            os.close(file)

    def _receive(self, peer: Peer) -> dict:
        peer.socket.settimeout(max(0.001, self.until - time.monotonic()))
        try:
            with self._giving_up(peer.rank):
                data = peer.socket.recv(MAX_PACKET)
                if not data:
                    raise ConnectionResetError("end of file")
        except TimeoutError:
            raise self._too_late([peer.rank]) from None
        peer.socket.setblocking(False)
        return json.loads(data)

    @contextlib.contextmanager
    def _giving_up(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (ConnectionError, BrokenPipeError) as error:
            raise PeerLostError(f"rank {rank} gave up while this group was being set up: {error}") from error

    def _pause(self, missing: list[int]) -> None:
        """Wait a moment for `missing` ranks, or raise if the deadline has passed or somebody has given up."""
        self._is_anybody_there(0.0)
        if time.monotonic() >= self.until:
            raise self._too_late(missing)
        time.sleep(0.002)

    def _too_late(self, missing: list[int]) -> DeadlineError:
        return DeadlineError(
            f"rank {self.rank} waited {self.deadline_s:g} s for ranks {missing} to set up symmetric memory: wanted "
            f"{self.world_size} ranks, found {self.world_size - len(missing)}. Every rank of the group must make the call"
        )


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _sockets.add(sock)
    return sock


def _same_user(sock: socket.socket) -> int:
    """The pid on the other end, which must run under our user."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.geteuid():
        raise PermissionError(f"the process on the other end of a weft socket runs under uid {uid}, not {os.geteuid()}")
    return pid
