"""The rendezvous of a group's ranks on CPU, before each call begins.

Each rank publishes its next call (a `Topic`), or the reason for a refusal, and reads its peers' messages. This is one small
all-gather through shared memory, which takes microseconds. No rank computes, sends or counts anything until all ranks are
known to make the same call:

    a rank refuses            `RefusedError` on every rank, with the reason. Nothing was begun: the group lives on
    topics differ             `DisagreementError` on every rank. Ranks are out of step, by at least one call: the group ends
    a rank does not arrive    `DeadlineError`, `PeerLostError`: the group ends

All calls of a group use one rendezvous, whichever operator makes them. So ranks' calls are compared by position: the n-th call of
one rank meets the n-th call of every peer.

On GPUs hosts do not synchronise, because a rendezvous would cost more than the call: see `weft.operator.together`.
"""

from __future__ import annotations

import hashlib
import re
import struct
import threading
from collections.abc import Callable
from itertools import zip_longest
from typing import NoReturn, TypeVar

import torch.distributed as dist

from weft.errors import DeadlineError, DisagreementError, RefusedError, WeftError
from weft.symm import Communicator, Exchange
from weft.symm.calls import calls_of
from weft.symm.layers import Noted, differ, difference
from weft.words import by_rank

_BYTES = 4096
_CALL, _REFUSAL = b"C", b"R"
_EXTRA = 16  # bytes that a call may add for peers to read
_NOTHING = bytes(_EXTRA)
_LAYERS = struct.Struct("<QQ")  # fingerprints of the options of layers, which the call carries
_LAYERS_AT = 1 + _EXTRA
_AT = _LAYERS_AT + _LAYERS.size  # where the compared part begins
_DIGEST = 16
_PIECE_BYTES = 32 * 1024  # of details per message; a message carries up to 64 KiB
_NUMBER = re.compile(r"\b\d+\b")  # a size, not a part of "fp32"
_MISSED = (
    "Every rank must make this call, forward or backward, before the deadline, which deadline_s or "
    "WEFT_DEADLINE_S sets. Check whether that rank raised an error before the call, or skipped it. This group "
    "has failed: make a new process group"
)

T = TypeVar("T")


class Topic:
    """The call that a rank is about to make, which is compared with its peers' calls.

    text: for messages; cut if it is too long. details: compared as well. difference: collective, on ranks with equal texts;
        returns how their details differ. hint: advice if only sizes differ.
    """

    def __init__(
        self, text: str, details: str = "", *, difference: Callable[[], str] | None = None, hint: str = ""
    ) -> None:
        self.text, self.difference, self.hint = text, difference, hint
        digest = hashlib.blake2b(f"{text}\0{details}".encode(), digest_size=_DIGEST).digest()
        self.compared = digest + text.encode()[: _BYTES - _AT - _DIGEST]


class Meeting:
    """The rendezvous of all calls of `communicator`, which is on CPU. The constructor is collective. One thread at a time may
    call."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.calls = 0  # calls that this rank has published
        self.schedules = 0  # schedules made to run on this group
        self.lock = threading.Lock()  # held by a call until its work is enqueued in order, or done
        self._publishing = threading.Lock()
        self._exchange = Exchange(comm, _BYTES)
        self._layers = calls_of(comm.group).layers
        comm._holders.add(self)

    def close(self) -> None:
        """Drop the rendezvous of this communicator at its end."""
        _meetings.pop(self.comm, None)

    def meet(self, topic: Topic, *, deadline_s: float | None, extra: bytes = _NOTHING) -> list[bytes]:
        """Wait until every rank is about to make the same call. Return each rank's `extra`, 16 bytes, by rank."""
        noted = self._layers.take()
        compared = _LAYERS.pack(*noted.records) + topic.compared
        payloads = self._publish(_CALL + extra + compared, topic.text, deadline_s)
        if refusals := _refusals(payloads):
            raise RefusedError(refusals)
        if any(payload[_LAYERS_AT:] != compared for payload in payloads):
            if any(payload[_AT:] != topic.compared for payload in payloads):
                self._end(payloads, topic)
            if differ([_LAYERS.unpack_from(payload, _LAYERS_AT) for payload in payloads]):
                self._end_layers(noted)
        return [payload[1:_LAYERS_AT] for payload in payloads]

    def refuse(self, text: str, *, deadline_s: float | None) -> str:
        """Publish that this rank refuses its next call. Return the reasons of all ranks that refuse."""
        self._layers.take()
        message = bytes(_AT - 1) + text.encode()[: _BYTES - _AT]
        try:
            return _refusals(self._publish(_REFUSAL + message, "the call that it refuses", deadline_s))
        except WeftError as error:
            raise type(error)(f"{error}. This rank had refused its call: {text}") from error

    def _publish(self, payload: bytes, what: str, deadline_s: float | None) -> list[bytes]:
        with self._publishing:
            self.comm.check()
            self.calls += 1
            name = f"{what} (call {self.calls})"
            try:
                return self._exchange.exchange(payload, deadline_s=deadline_s, name=name)
            except DeadlineError as error:
                raise DeadlineError(f"{error}. {_MISSED}") from error

    def _end(self, payloads: list[bytes], topic: Topic) -> NoReturn:
        """End the group. Every rank has read the same payloads, so each rank ends its own side."""
        texts = [payload[_AT + _DIGEST :].decode(errors="replace") for payload in payloads]
        calls = by_rank(enumerate(texts))
        if len(set(texts)) == 1:
            other = topic.difference() if topic.difference else ""
            calls = other or f"{calls}, with other details"
        sizes_differ = len(set(texts)) > 1 and len({_NUMBER.sub("", text) for text in texts}) == 1
        self.disagree(
            f"ranks made different calls (call {self.calls} of each rank): {calls}", topic.hint * sizes_differ
        )

    def _end_layers(self, noted: Noted) -> NoReturn:
        """Gather the options and call `disagree`. Every rank does so, because all have read the same fingerprints."""
        self.disagree(difference(self.comm.all_gather(noted.texts, what="options of layers")))

    def disagree(self, text: str, hint: str = "") -> NoReturn:
        """End the group and raise `DisagreementError`, for an error that every rank finds."""
        self.comm.end(text)
        raise DisagreementError(
            f"{text}. Make the same calls in the same order on every rank{hint and '; '}{hint}. The ranks are out "
            "of step, so this group has failed: make a new process group"
        )


def _refusals(payloads: list[bytes]) -> str:
    return by_rank(
        (rank, payload[_AT:].decode(errors="replace"))
        for rank, payload in enumerate(payloads)
        if payload[:1] == _REFUSAL
    )


def shown(comm: Communicator, details: str) -> Callable[[], str]:
    """Return a topic's `difference`, which shows the details of each rank.

    If the details are several lines "name: value", it shows the first line that differs.
    """
    return lambda: _difference(comm, details)


def _difference(comm: Communicator, details: str) -> str:
    mine, theirs = details.encode(), [b""] * comm.world_size
    for begin in range(0, max(comm.all_gather(len(mine), what="lengths of details of a call")), _PIECE_BYTES):
        pieces = comm.all_gather(mine[begin : begin + _PIECE_BYTES], what="details of a call")
        theirs = [before + piece for before, piece in zip(theirs, pieces, strict=True)]
    texts = [text.decode() for text in theirs]
    if not any("\n" in text for text in texts):
        return by_rank(enumerate(texts))
    for lines in zip_longest(*(text.split("\n") for text in texts), fillvalue=""):
        for rank, line in enumerate(lines):
            if line != lines[0]:
                name = (lines[0] or line).partition(": ")[0]
                here, there = (one.partition(": ")[2] or "nothing" for one in (lines[0], line))
                return f"{name} is {here!r} on rank 0 and {there!r} on rank {rank}"
    return ""


def refuse(comm: Communicator, text: str, *, deadline_s: float | None) -> NoReturn:
    """Take part in a call whose input is bad here. Raise `RefusedError` with `text`, on CPU on every rank."""
    if comm.device.type == "cpu":
        raise RefusedError(meeting_of(comm).refuse(text, deadline_s=deadline_s))
    comm.check()
    comm.poison(text)
    raise RefusedError(f"rank {comm.rank}: {text}")


_meetings: dict[Communicator, Meeting] = {}


def meeting_of(comm: Communicator) -> Meeting:
    """Return the rendezvous of a communicator. Collective at the first call for a communicator."""
    return of_communicator(_meetings, comm, Meeting)


def published_on(group: dist.ProcessGroup) -> int:
    """Return the number of calls that this rank has published to its peers on CPU."""
    for comm, meeting in _meetings.items():
        if comm.is_of(group):
            return meeting.calls
    return 0


def of_communicator(known: dict[Communicator, T], comm: Communicator, make: Callable[[Communicator], T]) -> T:
    """Return the entry of `comm`, and make it first if there is none.

    Then drop the entries of closed communicators: an entry may hold its communicator, so nothing else would free them."""
    found = known.get(comm)
    if found is None:
        for closed in [one for one in known if one.closed]:
            del known[closed]
        found = known[comm] = make(comm)
    return found
