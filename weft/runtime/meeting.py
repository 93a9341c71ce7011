"""The rendezvous of a group's CPU ranks before each call.

Each rank publishes its next call (a `Topic`), or the reason why it refuses the call, and reads its peers' messages. This is
a small all-gather through shared memory, which takes microseconds. No rank computes, or reads data of its peers, until all
ranks are known to make the same call (with one exception, in `weft.runtime.unfused.begun`). On one host, the data of a
collective may travel with the messages (`weft.runtime.shared_collectives`). Errors:

    a rank refuses            `RefusedError` on every rank, with the reason. Nothing was begun, and the group stays usable
    topics differ             `DisagreementError` on every rank. Ranks are out of step by at least one call, so the group fails
    backwards differ          `DisagreementError` on every rank, if ranks run backward of different forward calls. The group fails
    a rank does not arrive    `DeadlineError` or `PeerLostError`. The group fails

All operators of a group use the same rendezvous. So the n-th call of one rank is compared with the n-th call of every peer.

GPU ranks do not synchronise, because a rendezvous would take longer than the call. `weft.operator.together` compares their
calls in another way.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import NoReturn

import torch
import torch.distributed as dist

from weft import _core
from weft.errors import DeadlineError, DisagreementError, RefusedError, WeftError
from weft.runtime.per_communicator import of_communicator
from weft.runtime.rails import Cargo, rails_for
from weft.runtime.within_host import NO_WORK
from weft.symm import Communicator, Exchange
from weft.symm.calls import calls_of
from weft.symm.communicator import LOOK_S
from weft.symm.layers import NOTHING, Noted, differ, difference
from weft.words import by_rank

_BYTES = 4096
DATA_BYTES = 256 << 10  # a rank has two buffers of this size for data of collectives. Larger buffers are not faster
_CALL, _REFUSAL = b"C", b"R"
_EXTRA = 16  # bytes that a call may publish for its peers
_NOTHING = bytes(_EXTRA)
_FORWARD = struct.Struct("<q")  # `Meeting.forward`
_FORWARD_AT = 1 + _EXTRA
UNKNOWN = -1
"""The number of a forward call that torch.compile or a dispatch mode has made. It matches every number in backward."""
_LAYERS = struct.Struct("<QQ")  # fingerprints of the options of layers, which ranks compare with the call
_LAYERS_AT = _FORWARD_AT + _FORWARD.size
_AT = _LAYERS_AT + _LAYERS.size  # offset of the part that ranks compare
HEADER = _CALL + _NOTHING + _FORWARD.pack(0) + _LAYERS.pack(*NOTHING.records)
"""The first bytes that a rank publishes for a forward call, if no layer has recorded options. `Topic.compared` follows."""
_DIGEST = 16
_KINDS_OF_CARGO = 16  # the most kinds of cargo for which a topic's bytes are kept
_PIECE_BYTES = 32 * 1024  # bytes of details per message, which may have up to 64 KiB
_NUMBER = re.compile(r"\b\d+\b")  # a size, but not the number in "fp32"
_RENDEZVOUS = "each call, forward, backward or refused, has one or more rendezvous"
_MISSED = (
    "Every rank must make this call, forward or backward, before the deadline, which deadline_s or "
    "WEFT_DEADLINE_S sets. Check whether a missing rank raised an error before the call, or skipped the call "
    f"({_RENDEZVOUS}). This group has failed: make a new process group"
)
_PREFETCH = "numbers of the input distribution"  # the first collective of a batch, which `weft.nn.InputDist` names
_ACCUMULATE = "the end of accumulate()"  # the call at the end of the context of a module with embedding tables


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


class Topic:
    """A description of a rank's next call, which ranks compare.

    text: the operator and the sizes. Error texts contain this text, truncated if it is too long.
    details: further text to compare, such as options.
    difference: a function that returns a text with the difference, if only the details differ. All ranks call this function,
        because it may communicate.
    hint: advice for the error text if the texts differ only in sizes.
    """

    def __init__(
        self, text: str, details: str = "", *, difference: Callable[[], str] | None = None, hint: str = ""
    ) -> None:
        self.text, self.difference, self.hint = text, difference, hint
        digest = _digest(f"{text}\0{details}".encode())
        self.compared = digest + text.encode()[: _BYTES - _AT - _DIGEST]
        self._with_cargo: dict[tuple[type[Cargo], int], bytes] = {}

    def compared_with(self, cargo: Cargo) -> bytes:
        """Return the bytes to compare if the data of `cargo` are sent with the rendezvous: ranks must expect the same data."""
        kind = type(cargo), cargo.far_bytes
        found = self._with_cargo.get(kind)
        if found is None:
            about = f"{kind[0].__name__} {kind[1]}".encode()
            found = _digest(self.compared[:_DIGEST] + about) + self.compared[_DIGEST:]
            if len(self._with_cargo) < _KINDS_OF_CARGO:
                self._with_cargo[kind] = found
        return found


class NumberedTopic(Topic):
    """A description of a call that ranks compare by a number. Its text and details are made only for errors.

    collective: the result of `number_of_collective`.
    call: a 64-bit hash of everything that ranks compare about the call, except the collective.
    make: a function that returns the description.
    """

    def __init__(self, collective: bytes, call: int, make: Callable[[], Topic]) -> None:
        self._make, self.compared = make, collective + call.to_bytes(8, "little")
        self._with_cargo = {}

    @functools.cached_property
    def _whole(self) -> Topic:
        return self._make()

    text = property(lambda self: self._whole.text)  # type: ignore[assignment]
    difference = property(lambda self: self._whole.difference)  # type: ignore[assignment]
    hint = property(lambda self: self._whole.hint)  # type: ignore[assignment]


@functools.cache
def number_of_collective(name: str) -> bytes:
    """Return 8 bytes that represent the name of a collective in a `NumberedTopic`."""
    return _digest(name.encode())[:8]


class Meeting:
    """The rendezvous before calls on `comm`, a communicator of CPU ranks. All ranks must construct this object, and use it from
    one thread at a time.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.calls = 0  # number of calls that this rank has published
        self.refused = 0  # number of calls that any rank has refused, the same on all ranks
        self.schedules = 0  # number of schedules made for this group
        self.forward = 0
        """During backward: the number of its forward call (the value of `calls` after this call), or `UNKNOWN`.
        Otherwise 0. Ranks compare the number to notice that they run backward of different calls of the same shape,
        which have equal topics.
        """
        self.lock = threading.Lock()  # a call holds it until its work is enqueued in order, or done
        self.publishing = threading.Lock()  # held from the publication of a call until all payloads and data are read
        self.rails = rails_for(comm, _BYTES)
        """The rendezvous of CPU ranks on several hosts, whose messages may also carry data. None if ranks form no rails: on one
        host, or if hosts do not have the same number of consecutive ranks, at least two.
        """
        data_bytes = max(DATA_BYTES, _core.SharedCollective.least_bytes(comm.world_size))
        self.exchange = Exchange(comm, _BYTES, data_bytes) if self.rails is None else None
        self._counts = calls_of(comm.group)
        self._layers = self._counts.layers
        comm._holders.add(self)

    def close(self) -> None:
        """Release the memory of this rendezvous. The communicator calls this method when it closes."""
        _meetings.pop(self.comm, None)
        if self.rails is not None:
            self.rails.close()

    def meet(
        self, topic: Topic, *, deadline_s: float | None, extra: bytes = _NOTHING, cargo: Cargo | None = None,
        meanwhile: Iterator[None] = NO_WORK, collective: _core.SharedCollective | None = None,
        ready: Callable[[list[bytes]], bool] = lambda extras: True,
    ) -> list[bytes]:  # fmt: skip
        """Wait until every rank is about to make the same call. Return each rank's `extra`, by rank.

        extra: 16 bytes that the caller sends to all ranks. They may differ between ranks.
        cargo: a collective whose data are sent with the messages of this rendezvous (`weft.runtime.rails`). The
            collective is complete on return. Pass `cargo` only if this object's `rails` is not None: for ranks on
            several hosts.
        meanwhile: work that needs no other rank, as an iterator that does a short step for each item. All steps are
            done on return if this object's `rails` is not None; otherwise no step is done.
        collective: a collective within the host, whose data travel with this rendezvous (`weft.runtime.shared_collectives`). It is
            complete on return.
        ready: a function that gets the `extra` of each rank before the data of `collective` are read. If it returns
            False, the data are not read, and the collective does not run. It must return the same value on all ranks.

        Raises `RefusedError` if a rank refuses the call, and `DisagreementError` if topics differ, or if ranks run backward
        of different calls.
        """
        noted = self._layers.take()
        forward = _FORWARD.pack(self.forward)
        of_topic = topic.compared if cargo is None else topic.compared_with(cargo)
        compared = _LAYERS.pack(*noted.records) + of_topic

        def agree(payloads: list[bytes]) -> bool:
            if _are_alike(payloads, payload):
                return True
            is_equal = all(payload[:1] == _CALL and payload[_LAYERS_AT:] == compared for payload in payloads)
            return is_equal and _one_forward(payloads, forward)

        payload = _CALL + extra + forward + compared
        with self.publishing:
            payloads, data = self._publish(payload, lambda: topic.text, deadline_s, agree, cargo, meanwhile, collective)
            if payloads.count(payload) < len(payloads) and not _are_alike(payloads, payload):
                self._require_equal(payload, payloads, topic, noted, of_topic)
            extras = [payload[1:_FORWARD_AT] for payload in payloads]
            if collective is not None and ready(extras):
                assert self.exchange is not None
                with _explained():
                    self.exchange.finish(collective, deadline_s=deadline_s, name=lambda: self._named(topic.text))
        if cargo is not None:
            cargo.unpack(data)
        return extras

    def settle(
        self, native: _core.PayloadExchange, topic: Topic, payload: bytes, is_complete: bool, deadline_s: float
    ) -> None:
        """Complete a rendezvous that native code has begun (`csrc/plain_steps.cpp`): wait for the other ranks, and compare their
        calls. Raise the errors of `meet`. The caller holds the lock `publishing`.

        native: the exchange of this rendezvous.
        payload: the bytes that this rank has published.
        is_complete: True if all ranks have arrived.
        """
        assert self.exchange is not None
        if not is_complete:
            until = time.monotonic() + deadline_s - min(LOOK_S, deadline_s)
            with _explained():
                self.exchange.wait(native, deadline_s, until, self._named(topic.text))
        payloads = native.payloads()
        if payloads.count(payload) < len(payloads):
            self._require_equal(payload, payloads, topic, NOTHING, topic.compared)

    def _named(self, text: str) -> str:
        return f"{text} (rendezvous {self.calls})"

    def go_on(self, name: str, is_complete: bool, deadline_s: float) -> None:
        """Complete a later round of a collective that native code runs (`Exchange.go_on`). The caller holds the lock `publishing`.

        name: the collective, for error texts.
        """
        assert self.exchange is not None
        with _explained():
            self.exchange.go_on(is_complete, deadline_s, self._named(name))

    def _require_equal(self, mine: bytes, payloads: list[bytes], topic: Topic, noted: Noted, of_topic: bytes) -> None:
        """Raise the errors of `meet`, unless all ranks are about to make the same call.

        mine: the bytes that this rank has published.
        payloads: the bytes that each rank has published.
        of_topic: the part of `mine` that describes the call.
        noted: the options of layers whose hashes are in `mine`.
        """
        if refusals := _refusals(payloads):
            self.refused += 1
            self._counts.met = self._counts.begun
            raise RefusedError(refusals)
        if any(payload[_LAYERS_AT:] != mine[_LAYERS_AT:] for payload in payloads):
            of_layers = ""
            if differ([_LAYERS.unpack_from(payload, _LAYERS_AT) for payload in payloads]):
                of_layers = difference(self.comm.all_gather(noted.texts, what="options of layers"))
            if any(payload[_AT:] != of_topic for payload in payloads):
                self._end(payloads, topic, of_layers)
            if of_layers:
                self.disagree(of_layers)
        if not _one_forward(payloads, mine[_FORWARD_AT:_LAYERS_AT]):
            whose = by_rank((rank, _backward_of(number)) for rank, number in enumerate(map(_forward_of, payloads)))
            self.disagree(f"ranks run {topic.text} for different calls: {whose} ({_RENDEZVOUS})")

    def refuse(self, text: str, *, deadline_s: float | None) -> str:
        """Publish that this rank refuses its next call, with the reason `text`. Return the reasons of all ranks that refuse the
        call.
        """
        self._layers.take()
        self.refused += 1
        self._counts.met = self._counts.begun
        message = bytes(_AT - 1) + text.encode()[: _BYTES - _AT]
        try:
            with self.publishing:
                return _refusals(self._publish(_REFUSAL + message, lambda: "the call that it refuses", deadline_s)[0])
        except WeftError as error:
            raise type(error)(f"{error}. This rank refused its call: {text}") from error

    def _publish(
        self, payload: bytes, what: Callable[[], str], deadline_s: float | None,
        agree: Callable[[list[bytes]], bool] = lambda payloads: False, cargo: Cargo | None = None,
        meanwhile: Iterator[None] = NO_WORK, collective: _core.SharedCollective | None = None,
    ) -> tuple[list[bytes], dict[int, torch.Tensor]]:  # fmt: skip
        """Publish `payload`, the bytes that describe this rank's call. Return the payloads of all ranks, and the data that
        `cargo` received, by host. The caller holds the lock `publishing`.

        what: a function that returns the call as text, for errors.
        agree: a function that gets the payloads of some ranks, and returns True if these ranks make the same call. If it
            returns False, no data of `cargo` are sent.
        """
        self.comm.check()
        self.calls += 1
        with _explained():
            if self.rails is not None:
                until_s = self.comm.deadline_s if deadline_s is None else deadline_s
                return self.rails.exchange(
                    payload, agree, cargo, deadline_s=until_s, name=self._named(what()), meanwhile=meanwhile
                )
            assert self.exchange is not None
            return self.exchange.exchange(
                payload, deadline_s=deadline_s, name=lambda: self._named(what()), collective=collective
            ), {}

    def _end(self, payloads: list[bytes], topic: Topic, of_layers: str) -> NoReturn:
        """Raise `DisagreementError`, because ranks make different calls (their topics differ), and make the group fail. Every
        rank raises, because all have read the same payloads.

        of_layers: the options of layers that differ too, as text.
        """
        texts = [payload[_AT + _DIGEST :].decode(errors="replace") for payload in payloads]
        if "" in texts:  # the empty text of a `NumberedTopic`; every rank sees it
            texts = self.comm.all_gather(topic.text, what="calls that differ")
        calls = by_rank(enumerate(texts))
        if len(set(texts)) == 1:
            other = topic.difference() if topic.difference else ""
            calls = other or f"{calls}, with different options"
        sizes_differ = len(set(texts)) > 1 and len({_NUMBER.sub("", text) for text in texts}) == 1
        hint = topic.hint * sizes_differ
        if 0 < sum(_ACCUMULATE in text for text in texts) < len(texts):
            hint = (
                "a rank may have left an accumulate() block by an exception, or not have entered it: every rank must reach the "
                "end of the block, so let the exception end the program, or make a new process group"
            )
        elif calls_of(self.comm.group).prefetches and 0 < sum(_PREFETCH in text for text in texts) < len(texts):
            hint = (
                "a rank may have run out of batches: give weft.nn.prefetched the same number of batches on every rank"
            )
        calls += f". Also, {of_layers}" if of_layers else ""
        self.disagree(
            f"ranks made different calls at rendezvous {self.calls} of this group ({_RENDEZVOUS}): {calls}", hint
        )

    def disagree(self, text: str, hint: str = "") -> NoReturn:
        """Raise `DisagreementError` with `text` and `hint`, and make the group fail. Call it only for an error that every
        rank finds.
        """
        self.comm.end(text)
        raise DisagreementError(
            f"{text}. Make the same calls in the same order on every rank{hint and '; '}{hint}. The ranks are out "
            "of step, so this group has failed: make a new process group"
        )


def _are_alike(payloads: list[bytes], mine: bytes) -> bool:
    """True if the calls that all ranks have published are equal to `mine`, this rank's call, except for the caller's
    extra bytes.
    """
    rest = mine[_FORWARD_AT:]
    return [(one[:1], one[_FORWARD_AT:]) for one in payloads].count((_CALL, rest)) == len(payloads)


def _forward_of(payload: bytes) -> int:
    return int(_FORWARD.unpack_from(payload, _FORWARD_AT)[0])


def _one_forward(payloads: list[bytes], mine: bytes) -> bool:
    """True if all ranks run forward, or if all ranks run backward of the same forward call.

    payloads: the bytes that each rank has published.
    mine: the part of this rank's bytes that contains a number: 0 in forward, and in backward the number of its forward call.
    """
    if all(payload[_FORWARD_AT:_LAYERS_AT] == mine for payload in payloads):
        return True
    numbers = set(map(_forward_of, payloads))
    return 0 not in numbers and len(numbers - {UNKNOWN}) == 1


def _backward_of(number: int) -> str:
    return (
        "forward"
        if number == 0
        else "backward of a compiled call"
        if number == UNKNOWN
        else f"backward of the call at rendezvous {number}"
    )


def _refusals(payloads: list[bytes]) -> str:
    return by_rank(
        (rank, payload[_AT:].decode(errors="replace"))
        for rank, payload in enumerate(payloads)
        if payload[:1] == _REFUSAL
    )


def shown(comm: Communicator, details: str) -> Callable[[], str]:
    """Return a function for `Topic(difference=...)`, which all ranks must call. The function returns a text with each
    rank's `details`.

    If `details` has several lines "name: value", the text has only the first line that differs.
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
    """Raise `RefusedError` with `text`, because an input of a call is bad on this rank. On CPU every rank raises it. On
    GPUs only this rank raises it, and the group fails.
    """
    if comm.device.type == "cpu":
        raise RefusedError(meeting_of(comm).refuse(text, deadline_s=deadline_s))
    comm.check()
    comm.poison(text)
    raise RefusedError(f"rank {comm.rank}: {text}")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Add advice to a `DeadlineError` that the body of this context manager raises."""
    try:
        yield
    except DeadlineError as error:
        raise DeadlineError(f"{error}. {_MISSED}") from error


_meetings: dict[Communicator, Meeting] = {}


def meeting_of(comm: Communicator) -> Meeting:
    """Return the rendezvous in which the CPU ranks of a communicator compare their calls. All ranks must make the first call
    together.
    """
    return of_communicator(_meetings, comm, Meeting)


@contextlib.contextmanager
def in_backward(comm: Communicator | None, forward: int) -> Iterator[None]:
    """Extend each rendezvous on `comm` inside this context manager: it also checks that all ranks run backward of the same
    forward call.

    comm: None if ranks do not synchronise. forward: the number of the forward call, or `UNKNOWN`.
    """
    if comm is None:
        yield
        return
    meeting = meeting_of(comm)
    before, meeting.forward = meeting.forward, forward
    try:
        yield
    finally:
        meeting.forward = before


def published_on(group: dist.ProcessGroup) -> int:
    """Return the number of calls on `group` that this rank has published in the rendezvous."""
    meeting = _meeting_on(group)
    return 0 if meeting is None else meeting.calls


def refused_on(group: dist.ProcessGroup) -> int:
    """Return the number of calls on `group` that any CPU rank has refused, the same on all ranks."""
    meeting = _meeting_on(group)
    return 0 if meeting is None else meeting.refused


def _meeting_on(group: dist.ProcessGroup) -> Meeting | None:
    return next((meeting for comm, meeting in _meetings.items() if comm.is_of(group)), None)
