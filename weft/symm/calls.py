"""A mode for finding ranks that make different calls on GPUs, where hosts do not meet: `WEFT_CHECK_CALLS=1`.

Each rank tells its peers the number and the place of every call (operator, file and line). A peer's watchdog thread compares that
with its own call of this number, off the critical path, and ends the group where they differ: by then a few more calls may have
been enqueued. It costs each call a message to every peer, some microseconds of the host.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable

_NUMBER = struct.Struct("<q")


class CallLog:
    """This rank's calls that not every peer has told yet, and those of peers that this rank has not come to yet."""

    def __init__(self, rank: int, world_size: int, differ: Callable[[str], None]) -> None:
        self._rank, self._peers, self._differ = rank, world_size - 1, differ
        self._mine: dict[int, tuple[bytes, int]] = {}  # by number: what, and how many peers have told theirs
        self._theirs: dict[int, list[tuple[int, bytes]]] = {}
        self._lock = threading.Lock()

    def note(self, number: int, what: str) -> bytes:
        """This rank makes a call: the message to every peer."""
        mine = what.encode()
        with self._lock:
            early = self._theirs.pop(number, [])
            self._mine[number] = mine, 0
        for rank, theirs in early:
            self._compare(number, rank, theirs)
        return _NUMBER.pack(number) + mine

    def heard(self, rank: int, message: bytes) -> None:
        number, theirs = _NUMBER.unpack_from(message)[0], message[_NUMBER.size :]
        with self._lock:
            if number not in self._mine:
                self._theirs.setdefault(number, []).append((rank, theirs))
                return
        self._compare(number, rank, theirs)

    def _compare(self, number: int, rank: int, theirs: bytes) -> None:
        with self._lock:
            mine, told = self._mine[number]
            if told + 1 == self._peers:
                del self._mine[number]
            else:
                self._mine[number] = mine, told + 1
        if mine != theirs:
            here, there = mine.decode(errors="replace"), theirs.decode(errors="replace")
            self._differ(
                f"ranks make different calls: call {number} of rank {self._rank} is {here}; of rank {rank} {there}. "
                "WEFT_CHECK_CALLS compares operators and places: make the same calls, from the same lines, on every rank"
            )
