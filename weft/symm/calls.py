"""Calls of a group by their number, on GPUs, where hosts do not meet: which one a rank refuses, and, on demand, whether all make
the same ones.

A refusal is told to the peers, and each answers. One that has not come to this call yet refuses it too, and the group lives on; so
it does if the peer has refused it by itself. One that has made it has sent what the refusing rank will never answer: that ends the
group. Until all have answered, the rank that refused makes no other call: that one would pair with what they have made.

`WEFT_CHECK_CALLS=1` is a mode for finding ranks that make different calls: each rank tells its peers the number and the place of
every call (operator, file and line). A peer's watchdog thread compares that with its own call of this number, off the critical
path, and ends the group where they differ: by then a few more calls may have been enqueued. It costs each call a message to every
peer, some microseconds of the host.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable

import torch.distributed as dist

_NUMBER = struct.Struct("<q")


class GroupCalls:
    """How many calls this rank has begun and ended on a group, whichever operator, and which of them somebody refuses."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self._here: set[int] = set()
        self._there: dict[int, str] = {}
        self._refused_last = 0
        self._answers: dict[int, int] = {}  # to calls that this rank has not refused, or not yet
        self.unanswered = 0  # peers that have not said yet what they did with the call that this rank refused last
        self._lock = threading.Lock()

    def begin(self) -> str:
        """The next call; why a peer has refused it, or ''."""
        self.begun += 1
        return self.refused() if self._there else ""

    def refused(self) -> str:
        """Why a peer has refused the call that was begun last, or ''."""
        return self._there.get(self.begun, "")

    def end(self) -> str:
        """The call is made; why a peer has refused it meanwhile, or ''."""
        self.ended = self.begun
        return self.refused() if self._there else ""

    def refuse(self, text: str, peers: int = 0) -> bytes:
        """This rank refuses the call that was begun last: the message to every peer, of whom there are so many."""
        with self._lock:
            self.ended = self.begun
            self._here.add(self.begun)
            self._refused_last = self.begun
            self.unanswered = peers - self._answers.pop(self.begun, 0)
        return _NUMBER.pack(self.begun) + text.encode()

    def heard(self, message: bytes) -> str:
        """A peer refuses a call, which is its answer where this rank refuses it too. What ends the group, if this rank has made
        that call; or ''."""
        number, text = _NUMBER.unpack_from(message)[0], message[_NUMBER.size :].decode(errors="replace")
        with self._lock:
            self._count(number)
            if number in self._here:
                return ""
            self._there[number] = text
            return text if self.ended >= number else ""

    def answer(self, message: bytes) -> bytes | None:
        """To a refusal that was heard: that this rank will not make the call. None while it is at it: either it refuses it as well,
        and says so, or makes it, which ends the group."""
        with self._lock:
            number = _NUMBER.unpack_from(message)[0]
            return None if number in self._here or self.begun >= number else _NUMBER.pack(number)

    def answered(self, message: bytes) -> None:
        """A peer's answer."""
        with self._lock:
            self._count(_NUMBER.unpack_from(message)[0])

    def _count(self, number: int) -> None:
        if number in self._here:
            self.unanswered -= number == self._refused_last
        else:
            self._answers[number] = self._answers.get(number, 0) + 1


_of_group: dict[int, GroupCalls] = {}  # by identity of the group while it lives: every call looks here


def calls_of(group: dist.ProcessGroup, check: Callable[[dist.ProcessGroup], None] | None = None) -> GroupCalls:
    """check: what to call with a group that is new here."""
    calls = _of_group.get(id(group))
    if calls is None:
        if check is not None:
            check(group)
        calls = _of_group[id(group)] = GroupCalls()
        weakref.finalize(group, _of_group.pop, id(group), None).atexit = False
    return calls


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
