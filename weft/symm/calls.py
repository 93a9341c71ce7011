"""The numbered calls of a group. On GPUs, this module also sends refusals and compares calls across ranks.

A rank makes calls on a group from one thread at a time. Ranks with GPUs do not synchronise before calls, so:

- Refusals. A rank that refuses a call notifies its peers, and each peer answers. If the peer has not reached the call, or
  refuses it for a reason of its own, both refuse the call, and the group stays usable. If the peer has already made the
  call, it would wait for this rank forever, so the group fails. The refusing rank makes no further call until all peers
  have answered: its next call could pair with the refused call of a peer.
- Comparison. For each call, a rank computes a digest of all its calls so far. A few times per second, the watchdog thread
  sends the newest digest to the peers, which compare it with their own digest for this call. A difference makes the group
  fail: ranks have made calls with different sizes, dtypes or options, so their results are wrong. The comparison takes less
  than a microsecond per call, and finds a difference within a quarter of a second.
- `WEFT_CHECK_CALLS=1` finds the source lines at which ranks make different calls. Each rank sends its peers the number and the
  place (operator, file and line) of every call. A peer's watchdog compares the place with the place of its own call of this
  number. If the places differ, the group fails, perhaps a few calls later. The messages cost some microseconds of CPU time per
  call.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import _pg_map

from weft import _core
from weft.symm.compilations import Compilations
from weft.symm.layers import NOTHING, Layers, MadeLayers, Noted, words_differ

_NUMBER = struct.Struct("<q")
_DIGEST = struct.Struct("<qQQQ")  # number of a call, digest of the calls up to it, two digests of layer options
_KEPT = 1 << 14  # digests to keep: more calls than a rank makes while a message is in transit


class GroupCalls(_core.CallCounts):
    """A record of this rank's calls on a group, by any operator. The calls are numbered from 1.

    The native base class has these attributes. Native code updates them when a call is replayed (`weft.operator.replay`):

    - begun, ended: the number of the last call that this rank has begun, and of the last call that it has ended.
    - running: a lock that a call holds from its beginning to its end.
    - refused_by_peers: the reasons of peers that refused a call, by the number of the call.
    - unanswered: the number of peers that have not answered this rank's last refusal.
    - compile_from: the number of the first call that may compile a size that recurs (`weft.symm.compilations`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.misused = ""  # an error that was found before a communicator could notify the peers
        self.met = 0
        """The value of `begun` on this rank at the last call that all CPU ranks refused. It may differ between ranks: one rank
        may refuse a forward without communication, while its peers refuse the backward of this forward.
        """
        self.are_compared = False  # True with `WEFT_CHECK_CALLS=1`, once the group has a communicator
        self.prefetches = False  # True once a module has prefetched a batch, for advice in error texts
        self.made = MadeCalls()
        self.compilations = Compilations(self)
        self.layers = Layers(self)
        """The options of layers, which ranks compare with the next call."""
        self._here: set[int] = set()
        self._there: dict[int, str] = self.refused_by_peers
        self._refused_last = 0
        self._answers: dict[int, int] = {}  # {call: number of answers that came before this rank refused it}
        self._lock = threading.Lock()

    def begin(self) -> str:
        """Begin the next call. If a peer has refused this call already, return the peer's reason, else ""."""
        self.begun += 1
        return self.refused() if self._there else ""

    def refused(self) -> str:
        """Return the reason of a peer that has refused this rank's newest call; "" if no peer has refused it."""
        return self._there.get(self.begun, "")

    def end(self) -> str:
        """End the newest call. If a peer has refused this call meanwhile, return the peer's reason, else ""."""
        self.ended = self.begun
        self.keep()
        self.made.end(self.begun, self.layers.take())
        return self.refused() if self._there else ""

    def refuse(self, text: str, peers: int = 0) -> bytes:
        """Record that this rank refuses its newest call. Return the message to send to every peer.

        text: the reason for the refusal.
        peers: the number of peers from which to expect an answer.
        """
        self.layers.take()
        with self._lock:
            self.ended = self.begun
            self._here.add(self.begun)
            self._refused_last = self.begun
            self.unanswered = peers - self._answers.pop(self.begun, 0)
        return _NUMBER.pack(self.begun) + text.encode()

    def heard(self, message: bytes) -> str:
        """Handle a peer's refusal of a call. If this rank has already made the call, return the peer's reason: the group
        must then fail. Otherwise return "".

        If this rank has refused the same call, the peer's refusal counts as the peer's answer.
        """
        number, text = _NUMBER.unpack_from(message)[0], message[_NUMBER.size :].decode(errors="replace")
        with self._lock:
            self._count(number)
            if number in self._here:
                return ""
            self._there[number] = text
            return text if self.ended >= number else ""

    def answer(self, message: bytes) -> bytes | None:
        """Return the answer to a peer's refusal: this rank will not make the call either.

        Return None if this rank has already begun the call. In this case the rank either refuses the call too, and so
        notifies the peer, or makes the call, and the group fails.
        """
        with self._lock:
            number = _NUMBER.unpack_from(message)[0]
            return None if number in self._here or self.begun >= number else _NUMBER.pack(number)

    def answered(self, message: bytes) -> None:
        """Handle a peer's answer: the peer will not make the call that this rank has refused."""
        with self._lock:
            self._count(_NUMBER.unpack_from(message)[0])

    def _count(self, number: int) -> None:
        if number in self._here:
            self.unanswered -= number == self._refused_last
        else:
            self._answers[number] = self._answers.get(number, 0) + 1


# by id(group) while the group exists; a dict lookup is fast, and every call needs one
_of_group: dict[int, GroupCalls] = {}


def calls_of(group: dist.ProcessGroup, check: Callable[[dist.ProcessGroup], None] | None = None) -> GroupCalls:
    """Return the record of this rank's calls on `group`. Create the record if there is none yet.

    check: a function that raises if the group is not usable. It runs when the record is created, and whenever torch no longer
        knows the group.
    """
    calls = _of_group.get(id(group))
    if check is not None and (calls is None or group not in _pg_map):
        check(group)
    if calls is None:
        calls = _of_group[id(group)] = GroupCalls()
        weakref.finalize(group, _of_group.pop, id(group), None).atexit = False
    return calls


class MadeCalls(_core.CallDigest):
    """Digests of this rank's calls, for comparison with the digests of peers. Digest n covers the calls 1 to n.

    `note(fingerprint, what)` of the native base class adds a call, or a part of a call, to the digest:

    fingerprint: a hash of the call, equal on all ranks that make equal calls.
    what: the text of the call, for errors.
    """

    def __init__(self) -> None:
        super().__init__(_KEPT)
        self._told = self._agreed = 0
        self._early: dict[int, bytes] = {}  # by rank: a message about a call that this rank has not made yet
        self._layers = MadeLayers()

    def end(self, number: int, noted: Noted = NOTHING) -> None:
        """Store the digest of all calls up to call `number`, which has ended.

        noted: the options of the layers that were called since the previous call. Ranks compare them together with this
            call.
        """
        if noted is not NOTHING:
            self.words = self._layers.add(self.words, noted)
        super().end(number)

    def news(self) -> bytes:
        """Return the message for every peer with the newest digest. Return b"" if peers have this digest already."""
        number = self.last
        if number == self._told or not self.digest:
            return b""
        self._told = number
        digests = _DIGEST.pack(number, self.digest_at(number), *self.words_at(number))
        return digests + b"\0".join([self.what.encode()[:1024], *self._layers.news()])

    def heard(self, rank: int, message: bytes) -> str:
        """Compare a peer's digest with this rank's digest of the same calls. The message has the digest and the number
        of the last call that it covers. Return an error text if the digests differ, else "". If this rank has not made
        all of these calls yet, keep the message for `heard_early`.
        """
        number, digest, *words = _DIGEST.unpack_from(message)
        what, *layers = message[_DIGEST.size :].split(b"\0")
        self._layers.heard(rank, layers)
        if number > self.last:
            self._early[rank] = message[: _DIGEST.size] + what
            return ""
        if number <= self.last - _KEPT // 2:  # this digest may be overwritten soon; a newer message will be compared
            return ""
        between = (
            f"between call {self._agreed + 1} and call {number} of weft on this group, forward and backward counted"
        )
        if self.digest_at(number) != digest:
            return (
                f"ranks have made different calls, {between}: the last ones are {self.what} here, and "
                f"{what.decode(errors='replace')} on rank {rank}. Make the same calls on every rank; "
                "WEFT_CHECK_CALLS=1 finds the lines that differ"
            )
        if words_differ(self.words_at(number), words):
            return (
                f"ranks have called layers with different options, {between}: {self._layers.difference(rank)}. Give a layer the "
                "same options on every rank"
            )
        self._agreed = max(self._agreed, number)
        return ""

    def heard_early(self) -> str:
        """Compare the digests that `heard` has kept, for calls that this rank has made since. Return an error text if they
        differ, else "".
        """
        for rank, message in [*self._early.items()]:
            if _DIGEST.unpack_from(message)[0] <= self.last:
                del self._early[rank]
                if text := self.heard(rank, message):
                    return text
        return ""


class CallLog:
    """The calls that ranks compare one by one if `WEFT_CHECK_CALLS=1`. A call of this rank is kept until all peers have sent
    their calls of the same number. A call of a peer is kept until this rank makes its call of this number.

    differ: a function that is called with an error text if two calls of one number differ.
    """

    def __init__(self, rank: int, world_size: int, differ: Callable[[str], None]) -> None:
        self._rank, self._peers, self._differ = rank, world_size - 1, differ
        # by number: the call, and the number of peers that have reported it
        self._mine: dict[int, tuple[bytes, int]] = {}
        self._theirs: dict[int, list[tuple[int, bytes]]] = {}
        self._lock = threading.Lock()

    def note(self, number: int, what: str) -> bytes:
        """Record this rank's call, and compare it with peers' calls of the same number that have arrived. Return the
        message to send to every peer.

        number: the number of the call.
        what: the call's operator, file and line.
        """
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
                f"ranks made different calls: call {number} of weft on this group, forward and backward counted, is {here} on rank "
                f"{self._rank}, and {there} on rank {rank}. "
                "WEFT_CHECK_CALLS compares operators and lines: make the same calls, from the same lines, on every "
                "rank"
            )
