"""The peers that are late for a rendezvous between hosts (`weft.runtime.rails`). Each rendezvous is a numbered round.

In a round, a rank receives messages from some peers only. So a waiting rank cannot tell if such a peer is late, or if the
peer itself waits for a third rank. Therefore a rank that has waited for a moment sends all peers the number of its round. A
peer answers as soon as it has begun this round. Peers that have not answered are absent. If all ranks arrive in time, no
such message is sent.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable

_NUMBER = struct.Struct("!Q")


class Rounds:
    """The newest round that this rank has begun, and the newest that each peer is known to have begun.

    lock: a reentrant lock that guards this object.
    tell: a function that sends a message to a peer.
    """

    def __init__(self, peers: Iterable[int], lock: threading.RLock, tell: Callable[[int, bytes], None]) -> None:
        self._lock, self._tell = lock, tell
        self._number = 0  # the number of the last round that this rank has begun
        self._told = dict.fromkeys(peers, 0)  # the last round of this rank of which the peer knows
        self._known = dict(self._told)  # the last round that the peer is known to have begun

    def begin(self) -> None:
        """Begin the next round, and answer the peers that have asked about it."""
        with self._lock:
            self._number += 1
            for peer, known in self._known.items():
                if known >= self._number:  # the peer waits
                    self._tell_one(peer)

    def tell_all(self) -> None:
        """Send the number of this rank's round to all peers that do not know it."""
        with self._lock:
            for peer in self._told:
                self._tell_one(peer)

    def _tell_one(self, peer: int) -> None:
        if self._told[peer] < self._number:
            self._told[peer] = self._number
            self._tell(peer, _NUMBER.pack(self._number))

    def hear(self, peer: int, body: bytes) -> None:
        """Record the number of `peer`'s round, which is in the message. Answer if this rank has begun the round."""
        with self._lock:
            (self._known[peer],) = _NUMBER.unpack(body)
            if self._number >= self._known[peer]:
                self._tell_one(peer)

    @property
    def absent(self) -> list[int]:
        """The peers that are not known to have begun this rank's round."""
        with self._lock:
            return [peer for peer, known in self._known.items() if known < self._number]
