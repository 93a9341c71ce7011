"""The thread that reads the connections to all peers (`weft.symm.connections`), even while this rank computes or waits."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Mapping

from weft.symm.connections import Connection

TICK_S = 0.25  # interval at which the watchdog checks if nothing arrives


class Watchdog:
    """The thread that reads the connections of rank `rank`, and the functions that send packets. The thread exists after `start`.

    connections: the connection to each peer, by rank.
    lock: the owner's reentrant lock. It guards the lifetime of descriptors.

    The thread calls these functions of the owner:

    read: for each packet of a peer, with the peer's rank, the packet and its file descriptors.
    lost: if a connection has ended, with the peer's rank, and the error of a connection between hosts, if any.
    looked: after each check of all connections, at least every `TICK_S`.
    ended: at the end of the thread.
    """

    def __init__(
        self, rank: int, connections: Mapping[int, Connection], lock: threading.RLock,
        read: Callable[[int, bytes, list[int]], None], lost: Callable[[int, OSError | None], None],
        looked: Callable[[], None], ended: Callable[[], None],
    ) -> None:  # fmt: skip
        self._rank, self._connections, self._lock = rank, connections, lock
        self._on_packet, self._on_loss, self._looked, self._ended = read, lost, looked, ended
        self._wake = -1
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._watch, name=f"weft-watchdog-{self._rank}", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def rouse(self) -> None:
        """Let the thread check now."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def stop(self, until: float) -> None:
        """End the thread, and wait at most until the time `until` for its end. Do not wait if the caller is the thread
        itself.
        """
        self._stopping = True
        self.rouse()
        if self._thread is not None and not self.is_current:
            self._thread.join(max(0.0, until - time.monotonic()))

    def release(self) -> None:
        with self._lock:  # no other thread may use a descriptor while it is being closed
            for connection in self._connections.values():
                connection.close()
            self._close_wake()

    def forked(self, lock: threading.RLock) -> None:
        """Reset the object in a forked child, where no thread holds `lock`."""
        self._lock = lock
        self._close_wake()

    def send(self, rank: int, packet: bytes, file: int | None = None, until: float = 0.0) -> None:
        """Send a packet. If the peer's buffer is full, retry until the time `until`. Do nothing if the peer is dead, which
        the thread detects.
        """
        connection = self._connections[rank]
        while True:
            try:
                with self._lock:
                    connection.send(packet, file)
                if connection.pending:
                    self.rouse()  # the thread sends the rest when the buffer has space
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    return
                time.sleep(0.001)
            except OSError:
                return

    def _close_wake(self) -> None:
        if self._wake >= 0:
            os.close(self._wake)
        self._wake = -1

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        connections = self._connections
        ranks = {connection.fileno(): rank for rank, connection in connections.items()}
        far = {connection.fileno() for connection in connections.values() if not connection.passes_files}
        for descriptor in [*ranks]:
            poll.register(descriptor, select.POLLIN)
            # The bootstrap may have read more than its packet.
            if descriptor in far and not self._read(ranks[descriptor]):
                poll.unregister(descriptor)
                del ranks[descriptor]
        while not self._stopping:
            for descriptor in far & ranks.keys():
                pending = connections[ranks[descriptor]].pending
                poll.modify(descriptor, select.POLLIN | select.POLLOUT if pending else select.POLLIN)
            for descriptor, event in poll.poll(1000 * TICK_S):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                    continue
                if event & select.POLLOUT:
                    self._flush(ranks[descriptor])
                if event & ~select.POLLOUT and not self._read(ranks[descriptor]):
                    poll.unregister(descriptor)
                    del ranks[descriptor]
            self._looked()
        self._ended()

    def _flush(self, rank: int) -> None:
        with self._lock, contextlib.suppress(OSError):  # reading will report the error
            self._connections[rank].flush()

    def _read(self, rank: int) -> bool:
        """Read the packets of `rank`. Return False if its connection has ended."""
        while True:
            try:
                packet, files = self._connections[rank].receive()
            except BlockingIOError:
                return True
            except ConnectionResetError:  # the peer left without reading all messages; its own last messages follow
                continue
            except OSError as error:  # only connections between hosts raise it
                self._on_loss(rank, error)
                return False
            if not packet:
                self._on_loss(rank, None)
                return False
            self._on_packet(rank, packet, files)
