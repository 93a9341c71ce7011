"""The ranks that are known to take part in a round of a rendezvous between hosts (`weft.runtime.rails`).

In a round, a rank does not receive a message from every peer. So a rank that waits does not know if the peer that it waits for
is late itself, or waits for a third rank. A rank that has waited for a moment therefore sends all peers the number of its
round. Peers that have begun this round answer at once; other peers answer when they begin it. The peers that have not
answered are absent. If all ranks arrive in time, no such message is sent.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable

_NUMBER = struct.Struct("!Q")


class Rounds:
    """The rounds of one rank.

    lock: a reentrant lock that guards this object. tell: a function that sends a peer the number of this rank's round.
    """

    def __init__(self, peers: Iterable[int], lock: threading.RLock, tell: Callable[[int, bytes], None]) -> None:
        self._lock, self._tell = lock, tell
        self._number = 0  # of the last round that this rank has begun
        self._told = dict.fromkeys(peers, 0)  # the last round of this rank of which the peer knows
        self._known = dict(self._told)  # the last round that the peer is known to have begun

    def begin(self) -> None:
        """Begin the next round."""
        with self._lock:
            self._number += 1
            for peer, known in self._known.items():
                if known >= self._number:  # the peer waits
                    self._tell_one(peer)

    def tell_all(self) -> None:
        """Send all peers the number of this rank's round, unless they know it."""
        with self._lock:
            for peer in self._told:
                self._tell_one(peer)

    def _tell_one(self, peer: int) -> None:
        if self._told[peer] < self._number:
            self._told[peer] = self._number
            self._tell(peer, _NUMBER.pack(self._number))

    def hear(self, peer: int, body: bytes) -> None:
        """Handle a peer's message with the number of its round."""
        with self._lock:
            (self._known[peer],) = _NUMBER.unpack(body)
            if self._number >= self._known[peer]:
                self._tell_one(peer)

    @property
    def absent(self) -> list[int]:
        """The peers that are not known to have begun this rank's round."""
        with self._lock:
            return [peer for peer, known in self._known.items() if known < self._number]
