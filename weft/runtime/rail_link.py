"""Connections along rails, for small messages between CPU ranks of several hosts.

A gloo collective hands its messages to other threads, which takes longer than to send a small message. So the ranks of a rail
(`weft.runtime.rail`) also have TCP connections of their own, on which the calling thread sends and receives
(`csrc/rail.cpp`). Both ends of a connection prove that they belong to the group (`weft.symm.hosts`). The secret for
this proof is derived from the keys of the connection between their watchdogs. Like gloo's messages, messages on these
connections have no authentication codes.

A message begins with its number, which must be the same on both ends, and its length, which must fit into the receive buffer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from weft import _core
from weft.errors import DeadlineError
from weft.runtime.collectives import finish_by
from weft.symm import Communicator
from weft.symm.hosts import ControlPort, Dialing, Port

_BUFFER_BYTES = (
    1 << 20
)  # in the kernel, for messages that a peer has not received yet; the kernel may set a lower limit
_LOOK_S = 0.05


class RailLink:
    """Connections to the other ranks of a rail. All ranks must construct this object.

    peers: the other ranks of this rank's rail. deadline_s: the longest wait for connections, in seconds.

    Raises `DeadlineError` on every rank if ranks cannot connect.
    """

    def __init__(self, comm: Communicator, peers: Sequence[int], deadline_s: float) -> None:
        self._comm, self._peers = comm, peers
        made = _connected(comm, peers, deadline_s)
        self._sockets = [made[rank] for rank in peers]
        weakref.finalize(self, _close, self._sockets).atexit = False
        self._native = _core.RailLink(self._sockets, comm.failed_address)
        self._memory: tuple[torch.Tensor, ...] = ()

    @property
    def bytes_sent(self) -> int:
        """The number of bytes that this rank has sent."""
        return self._native.bytes_sent

    @property
    def messages(self) -> int:
        """The number of messages that this rank has sent to each peer."""
        return self._native.number

    def begin(self, sent: torch.Tensor, starts: Sequence[int], sizes: Sequence[int], received: torch.Tensor) -> None:
        """Begin to send a message to each peer, and to receive a message from each peer.

        sent: a tensor that contains the messages. The message to peer number i has sizes[i] bytes, from byte starts[i] on.
        received: the memory for the messages of all peers, divided equally.
        """
        self._memory = sent, received  # keep it until the messages are sent
        at = sent.data_ptr()
        messages = [(at + start, size) for start, size in zip(starts, sizes, strict=True)]
        self._native.begin(messages, received.data_ptr(), received.numel() // len(self._peers))

    def finish(self, what: str, deadline_s: float, absent: Callable[[], list[int]]) -> None:
        """Wait until all messages have been sent and received. Raise the errors of `weft.runtime.collectives.finish`.

        what: the name of the exchange, for error texts. absent: a function that returns the ranks that have not begun it.
        """

        def completed(seconds: float) -> bool:
            outcome, peer = self._native.go_on(max(0.0, seconds))
            if outcome == _LOST:
                raise RuntimeError(
                    f"the connection to {self._comm.name(self._peers[peer])} failed: {self._native.error}"
                )
            return outcome == _DONE

        finish_by(completed, self._comm, what, deadline_s, absent)

    def close(self) -> None:
        """End the connections. Their descriptors are closed when no call uses them any more."""
        for one in self._sockets:
            with contextlib.suppress(OSError):  # the peer has ended the connection
                one.shutdown(socket.SHUT_RDWR)


def _close(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


_DONE, _LOST = 0, 3  # outcomes of `_core.RailLink.go_on`


def _connected(comm: Communicator, peers: Sequence[int], deadline_s: float) -> dict[int, socket.socket]:
    """Connect to the `peers`, ranks on other hosts. Return the sockets, by rank. All ranks must make this call."""
    until, made, error = time.monotonic() + deadline_s, dict[int, socket.socket](), ""
    ports, dials = dict[int, ControlPort](), dict[int, Dialing]()
    try:
        try:
            for rank in peers:
                if rank > comm.rank:
                    ports[rank] = ControlPort(comm.rank, comm.secret_of(rank), 2)
        except OSError as failed:
            error = f"rank {comm.rank} cannot listen on a TCP port for ranks of other hosts: {failed}"
        found = comm.all_gather(({rank: port.port for rank, port in ports.items()}, error), what="ports of rails")
        error = next((text for _, text in found if text), "")
        while not error and len(made) < len(peers):
            for rank in peers:
                if rank < comm.rank and rank not in made:
                    _dial(comm, rank, found[rank][0][comm.rank], dials, made)
            _accept(ports, made)
            comm.check()
            if time.monotonic() >= until and (missing := [rank for rank in peers if rank not in made]):
                error = (
                    f"rank {comm.rank} could not connect to {comm.name(missing[0])} within {deadline_s:g} s: check that "
                    " WEFT_SOCKET_IFNAME (or GLOO_SOCKET_IFNAME) names an interface that reaches the other hosts"
                )
        errors = [text for text in comm.all_gather(error, what="connections of rails") if text]
    finally:
        for port in ports.values():
            port.close()
        for dial in dials.values():
            dial.close()
    if errors:
        raise DeadlineError(errors[0])
    return made


def _dial(comm: Communicator, rank: int, port: Port, dials: dict[int, Dialing], made: dict[int, socket.socket]) -> None:
    if rank in dials and dials[rank].failed:
        dials.pop(rank).close()
        time.sleep(_LOOK_S)
    if rank not in dials:
        dials[rank] = Dialing(port, comm.secret_of(rank), comm.rank, "rail")
    if (connection := dials[rank].go_on(_LOOK_S)) is not None:
        made[rank] = _for_messages(connection.socket)


def _accept(ports: dict[int, ControlPort], made: dict[int, socket.socket]) -> None:
    poll, known = select.poll(), {}
    for rank, port in ports.items():
        for sock in port.sockets() if rank not in made else ():
            poll.register(sock, select.POLLIN)
            known[sock.fileno()] = rank, sock
    for descriptor, _ in poll.poll(1000 * _LOOK_S) if known else ():
        rank, sock = known[descriptor]
        if (caller := ports[rank].go_on(sock)) is None:
            continue
        # The peer connects to each address of this host, and uses one connection.
        if caller.rank == rank and rank not in made:
            with contextlib.suppress(OSError):  # the other end has already closed the connection
                made[rank] = _for_messages(caller.accept().socket)
                continue
        caller.socket.close()


def _for_messages(sock: socket.socket) -> socket.socket:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return sock
