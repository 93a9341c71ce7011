"""The bootstrap of a group: a full mesh of connections, Unix sockets within a host and TCP between hosts.

Within a host, each rank listens on a socket in the abstract namespace under a random 128-bit name. It publishes the name and a
random token in the process group's store. A rank connects to every lower rank and accepts connections from every higher rank.
On a connection the rank sends one packet: its identity, the peer's token, and one end of a new socket pair. From then on only
the pair is used, because an accepted socket would keep the listener's name. When a rank has all its sockets, it sends "ready"
with a digest of the peer's token on each socket, and waits for the same message from all peers. Then it closes the listener,
clears its entry, sends "withdrawn", and waits for this message from all peers. So no named socket remains, and a rank that sets
up the group again immediately does not find entries of this attempt.

Two ranks are on one host if their boot ids and network namespaces are equal, since abstract socket names are valid only
there. In a group on several hosts, a rank also listens on a TCP port, which it publishes in the store. Higher ranks on
other hosts connect to this port. Both ends prove that they know the token, which is never sent over these connections
(`weft.symm.hosts`). All ranks refuse a group with different versions of weft or torch.

A rank that fails during the bootstrap writes the reason into its entry and closes its connections. Ranks whose entries the
failing rank had seen raise an error with this reason. Unless the cause is a missed deadline or a lost peer, every other
rank raises it once too, even a rank that arrives later.

Ranks do not wait for a dead peer. A rank detects the death by the pid in the peer's entry. If another group of the
rank's process has lost the peer, that group reports the death (the argument `ended` of `connect`).

Within a host both sides check that the other process runs under the same user (SO_PEERCRED). So a process of another user
cannot connect, even if it knows the name of a socket. A connection that has not identified itself delays no rank, because a
rank polls its listener and all unidentified connections together. The store may still have entries of an earlier, failed
attempt. So after a refused connection, a rank reads the entry again and retries until the deadline.

A packet is one message (`weft.symm.connections`). Within a host it can carry file descriptors. End-of-file without a
goodbye means that the process on the other end has ended.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch.distributed as dist

from weft.errors import DisagreementError, PeerLostError, WeftError
from weft.reading import parse_json
from weft.symm import hosts
from weft.symm.attempt import Attempt, port_key
from weft.symm.connections import MAX_PACKET, BadFrameError, Connection, TcpConnection, UnixConnection, ours, same_user
from weft.symm.entries import Entry, hosts_of, require_one_version, require_valid_settings

_LOOK_S = 0.1  # interval at which a wait for peers checks that they are alive
_REASON_S = 1.0  # time to wait for the reason of a rank that closed its connection: the store may be slow
_MOST_UNKNOWN = 64  # connections that have sent nothing yet; beyond this number the oldest is closed


@dataclass(frozen=True)
class Peer:
    """A connected rank.

    pid: the process id in this process's namespace; 0 if it is not visible here. For a rank on another host, the
        process id on that host.
    host: the name of the rank's host; "" if the whole group is on one host.
    """

    rank: int
    pid: int
    connection: Connection
    host: str = ""


class Mesh(NamedTuple):
    """The connections of this rank to its peers, and the host name of every rank. Different hosts with equal names are
    numbered.
    """

    peers: list[Peer]
    hosts: tuple[str, ...]


_spare = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
"""A spare file descriptor. If no descriptors are left, a rank closes it, so that the rank can still write its last
entry into a file store.
"""


def connect(
    store: dist.Store,
    rank: int,
    world_size: int,
    deadline_s: float,
    ended: Callable[[int], str] = lambda rank: "",
    calls: int = 0,
) -> Mesh:
    """Connect to every other rank of the group. All ranks must make this call.

    ended: a function that returns the reason why a rank's process has ended, if another group knows it, else "". Without
        this reason, ranks wait until the deadline for a peer that died before it published its entry.
    calls: the number of calls that this rank has begun on the group since CPU ranks last refused a call. If the numbers of two
        ranks differ, the ranks are out of step, and all ranks raise `DisagreementError`.

    Raises:

    - `RefusedError` if versions of weft or torch differ, or environment variables of weft are invalid
      (`weft.symm.entries`).
    - `DeadlineError`, which names the ranks that did not arrive within `deadline_s` seconds or cannot be reached.
    - `PeerLostError` if another rank died, if it gave up (the text has its reason), or if the process that served the store
      has ended.
    - `DisagreementError` if `calls` differs between ranks.
    - `WeftError` for an error of this rank, such as no free descriptor.

    After any error all sockets are closed, and the peers are notified.
    """
    if world_size == 1:
        return Mesh([], (socket.gethostname(),))
    setup = _Setup(store, rank, world_size, deadline_s, ended, calls)
    try:
        return _connect(setup)
    finally:
        setup.store.close()


def _connect(setup: _Setup) -> Mesh:
    rank = setup.rank
    try:
        setup.run()
    except BaseException as error:
        words = json.dumps(setup.last_words(error))
        # Publish the reason before closing the connections, because a peer reads the reason as soon as its connection closes.
        said = setup.say(words)
        setup.close(*setup.peers.values())
        if not said:
            _say_at_any_price(setup, words)
        if isinstance(error, dist.DistNetworkError):
            raise PeerLostError(
                f"rank {rank} lost the store of this process group while setting up symmetric memory ({error}). The "
                "process that serves the store, rank 0 or the launcher, has ended: start the ranks again"
            ) from error
        if isinstance(error, Exception) and not isinstance(error, WeftError):
            raise WeftError(f"rank {rank} could not set up symmetric memory: {error}") from error
        raise
    peers = [setup.peers[other] for other in sorted(setup.peers)]
    if setup.control is not None:
        peers = [replace(peer, host=setup.hosts[peer.rank]) for peer in peers]
    return Mesh(peers, setup.hosts)


def _say_at_any_price(setup: _Setup, words: str) -> None:
    """Publish `words`, the reason why this rank gives up. If the process has no free file descriptor, first close the spare
    descriptor `_spare`, which exists for this purpose.
    """
    if not setup.say(words) and _spare:
        os.close(_spare.pop())
        setup.say(words)
        with contextlib.suppress(OSError):
            _spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


class _Setup(Attempt):
    """An attempt to set up the group, with its listener and its connections."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.peers: dict[int, Peer] = {}
        self.listener: socket.socket | None = None
        self.unknown: list[socket.socket] = []  # connected, but not identified yet

    def close(self, *peers: Peer) -> None:
        if self.listener is not None:
            self.listener.close()
        if self.control is not None:
            self.control.close()
        for sock in self.unknown:
            sock.close()
        for peer in peers:
            peer.connection.close()

    def run(self) -> None:
        self.mine = self.entries[self.rank] = Entry.of_this_process(self.rank, self.name, self.calls)
        self.listener = _socket()
        self.listener.bind("\0" + self.name)
        self.listener.listen(128)
        self.listener.setblocking(False)
        self.store.set(str(self.rank), json.dumps(asdict(self.mine)))
        self._read_entries()
        entries = [self.entries[r] for r in range(self.world_size)]
        self.cause = self.entries[0].name  # for the errors below, which every rank finds
        require_one_version(entries)
        require_valid_settings(entries)
        self.cause = ""
        self.hosts = hosts_of(entries)
        if any(map(self.is_far, self.entries)):
            self.control = hosts.ControlPort(self.rank, self.mine.token, self.world_size)
            self.store.set(port_key(self.mine), json.dumps(self.control.port))
        for other in range(self.rank):
            if self.is_far(other):
                self._dial(other)
            else:
                self._reach(other)
        while len(self.peers) < self.world_size - 1:
            self._accept()
        # All ranks must have seen the same attempt of each rank. A rank that failed and tries again has a new name.
        names = [self.entries[r].name for r in range(self.world_size)]
        self._exchange("ready", _digest(" ".join(names)))
        calls = [self.entries[r].calls for r in range(self.world_size)]
        if len(set(calls)) > 1:
            made = ", ".join(f"call {number} of rank {rank}" for rank, number in enumerate(calls))
            raise DisagreementError(
                f"ranks set up this group in different calls of weft's operators: {made}, counted on this group since its first "
                "call or since the last call that a rank refused. A rank has missed a deadline before, so "
                "the ranks are out of step: make a new process group"
            )
        # A rank that leaves may immediately set up the group again. It must not find this rank's entry or listener then.
        self.close()
        self.say("")
        self._exchange("withdrawn", "")

    def _exchange(self, what: str, value: str) -> None:
        """Send `value` to every peer, and wait for the same value from every peer."""
        for peer in self.peers.values():
            with self._giving_up(peer.rank):
                peer.connection.send(json.dumps({what: value, "to": _digest(self.entries[peer.rank].token)}).encode())
        for peer in self.peers.values():
            if self._receive(peer) != {what: value, "to": _digest(self.mine.token)}:
                raise PeerLostError(f"rank {peer.rank} is in another attempt to set up this group: try again")

    def _read_entries(self) -> None:
        missing = self._others()
        while True:
            self._look_up_all(missing)
            missing = [r for r in missing if r not in self.entries]
            if not missing:
                break
            self._pause(missing)

    def _others(self) -> list[int]:
        return [r for r in range(self.world_size) if r != self.rank]

    def _look_up_all(self, missing: list[int]) -> None:
        """Read the entries of the `missing` ranks (`look_up`). If one of these ranks has given up with an error that
        does not concern this rank, read the entries of all ranks. A third rank may have published an error that does.
        """
        for rank in self._others() if any(r in self.gave_up for r in missing) else missing:
            self.look_up(rank)

    def _reach(self, other: int) -> None:
        while True:
            sock = _socket()
            sock.setblocking(False)  # connecting to a listener with a full queue would block
            try:
                sock.connect("\0" + self.entries[other].name)
                break
            except OSError:  # the entry is of an earlier attempt, whose listener is closed; or the queue is full
                sock.close()
                self._pause([other])
                self._look_up_all([other])
        with sock:
            pid = same_user(sock)
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours(theirs)
            self.peers[other] = Peer(other, pid, UnixConnection(mine))
            hello = json.dumps({**asdict(self.mine), "to": self.entries[other].token}).encode()
            with theirs, self._giving_up(other):
                socket.send_fds(sock, [hello], [theirs.fileno()])

    def _dial(self, other: int) -> None:
        """Connect to `other`, a lower rank on another host."""
        entry = self.entries[other]
        dialing: hosts.Dialing | None = None
        try:
            while True:
                if entry != self.entries[other] or (dialing is not None and dialing.failed):
                    if dialing is not None:
                        dialing.close()
                    entry, dialing = self.entries[other], None
                if dialing is None and (port := self.port_of(entry)) is not None:
                    dialing = hosts.Dialing(port, entry.token, self.rank, self.name)
                if dialing is not None and (made := dialing.go_on(_LOOK_S)) is not None:
                    self._add_far(other, made)
                    self.trouble.pop(other, None)
                    return
                if dialing is not None and (dialing.failed or other not in self.trouble):
                    self.trouble[other] = (
                        f"rank {self.rank} on host {self.hosts[self.rank]} cannot reach rank {other} on host {self.hosts[other]}: "
                        f"{dialing.trouble}. Open TCP ports between the hosts, or name the network with WEFT_SOCKET_IFNAME"
                    )
                if dialing is not None and dialing.failed:
                    time.sleep(_LOOK_S)  # the peer logs each refused attempt, so wait before the next attempt
                self._pause([other])
                self._look_up_all([other])
        finally:
            if dialing is not None:
                dialing.close()

    def _add_far(self, rank: int, connection: TcpConnection) -> None:
        self.peers[rank] = Peer(rank, self.entries[rank].pid, connection)

    def _accept(self) -> None:
        ready = self._ready(min(_LOOK_S, max(0.0, self.until - time.monotonic())))
        for sock in ready:
            if sock is self.listener:
                self._let_in(sock)
            elif sock not in self.unknown:
                self._welcome_far(sock)
            else:
                self.unknown.remove(sock)
                self._welcome(sock)
        missing = [r for r in range(self.rank + 1, self.world_size) if r not in self.peers]
        if not missing or (ready and time.monotonic() < self.until):
            return
        self._look_up_all(missing)
        self.still_wait_for(missing)

    def _ready(self, timeout_s: float) -> list[socket.socket]:
        """Return the sockets that have something to read: the listener if there is a new connection, and connections whose
        other end has not identified itself yet. Raise an error if a known peer has closed its connection.
        """
        assert self.listener is not None
        listening = [self.listener, *self.unknown, *(self.control.sockets() if self.control is not None else ())]
        poll = select.poll()
        for sock in listening:
            poll.register(sock, select.POLLIN)
        for peer in self.peers.values():
            # Poll for hang-ups only: other code reads the messages.
            poll.register(peer.connection, select.POLLRDHUP if self.is_far(peer.rank) else 0)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * timeout_s)}
        for peer in self.peers.values():
            if peer.connection.fileno() in ready:
                raise self._lost(peer.rank, "it closed the connection")
        return [sock for sock in listening if sock.fileno() in ready]

    def _let_in(self, listener: socket.socket) -> None:
        """Accept a connection, but do not wait for its first packet: a process outside the group may never send it."""
        with contextlib.suppress(BlockingIOError, ConnectionError):  # the other end has already closed the connection
            self.unknown.append(ours(listener.accept()[0]))
        if len(self.unknown) > _MOST_UNKNOWN:
            self.unknown.pop(0).close()

    def _welcome(self, sock: socket.socket) -> None:
        """Accept a peer that has identified itself. Close any other connection: it comes from outside the group, or from a
        rank that has just died.
        """
        files: list[int] = []
        with sock:
            try:
                pid = same_user(sock)
                flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
                data, files, _, _ = socket.recv_fds(sock, MAX_PACKET, 1, flags)
                hello = parse_json(data, "the first packet of a connection")
                is_ours = hello.pop("to") == self.mine.token
                entry = Entry(**hello) if is_ours else self.mine
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                is_ours = False
        if is_ours and self.rank < entry.rank < self.world_size and entry.rank not in self.peers:
            if not files:  # the kernel drops a received descriptor if this process has too many
                raise OSError(
                    errno.EMFILE,
                    f"the system dropped a file descriptor from rank {entry.rank}, {os.strerror(errno.EMFILE)}: raise ulimit -n",
                )
            self.entries[entry.rank] = entry
            self.peers[entry.rank] = Peer(entry.rank, pid, UnixConnection(socket.socket(fileno=files.pop())))
        for file in files:
            os.close(file)

    def _welcome_far(self, sock: socket.socket) -> None:
        """Continue the handshake of a connection to the control port. Accept the peer when it has proved that it belongs to
        the group.
        """
        assert self.control is not None
        if (caller := self.control.go_on(sock)) is None:
            return
        rank = caller.rank
        if self.rank < rank < self.world_size and rank not in self.peers and self.is_far(rank):
            if hosts.attempt_of(self.entries[rank].name) != caller.attempt:  # the rank has begun a new attempt
                self.look_up(rank)
            if hosts.attempt_of(self.entries[rank].name) == caller.attempt:
                with contextlib.suppress(OSError):  # the other end has already closed the connection
                    self._add_far(rank, caller.accept())
                    return
        caller.socket.close()

    def _receive(self, peer: Peer) -> dict:
        poll = select.poll()
        poll.register(peer.connection, select.POLLIN)
        has_waited = False
        with self._giving_up(peer.rank):
            while True:
                try:
                    data, _ = peer.connection.receive()
                    break
                except BlockingIOError:
                    if has_waited and time.monotonic() >= self.until:
                        raise self.too_late([peer.rank]) from None
                has_waited = not poll.poll(1000 * max(0.001, self.until - time.monotonic()))
            if not data:
                raise ConnectionResetError("end of file")
        return parse_json(data, f"the packet of rank {peer.rank}")

    @contextlib.contextmanager
    def _giving_up(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (ConnectionError, BrokenPipeError, BadFrameError) as error:
            raise self._lost(rank, str(error)) from error

    def _lost(self, rank: int, text: str) -> PeerLostError:
        """Return the error for a known rank that has closed its connection. Wait a moment for the rank's reason; without
        it, the text says that the rank died.
        """
        until = time.monotonic() + _REASON_S
        self.gave_up.pop(rank, None)
        # A rank that gave up before it read this rank's entry does not address this rank. Its reason applies
        # nevertheless.
        while rank not in self.gave_up and time.monotonic() < until:
            self.look_up(rank)
            self.raise_if_ended(rank)
            time.sleep(0.002)
        return PeerLostError(f"rank {rank} gave up while this group was being set up: {self.gave_up.get(rank, text)}")

    def _pause(self, missing: list[int]) -> None:
        """Wait a moment for `missing` ranks. Raise an error if the deadline has passed or a rank has given up."""
        self._ready(0.0)
        self.still_wait_for(missing)
        time.sleep(0.002)


def _socket() -> socket.socket:
    return ours(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
