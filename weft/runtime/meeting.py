"""Where the ranks of a group meet in every call on CPU, before anything of it is begun.

Each rank says what it is about to do (a `Topic`), or why it refuses, and reads what the others say: one small all-gather through
shared memory, microseconds. So nothing is computed, sent or counted until it is known that all ranks do the same:

    one refuses               `RefusedError` on every rank, with the reason. Nothing was begun: the group lives on
    topics differ             `DisagreementError` on every rank. Ranks are out of step, by at least one call: the group ends
    one does not come         `DeadlineError`, `PeerLostError`: the group ends

All calls of a group go through one meeting, whichever operator makes them, and so the ranks' calls are compared by position:
the n-th of one rank meets the n-th of every other one.

On GPUs hosts do not meet, which would cost more than the call: see `weft.operator.together`.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch.distributed as dist

from weft.errors import DeadlineError, DisagreementError, RefusedError, WeftError
from weft.symm import Domain, Exchange
from weft.words import by_rank

_BYTES = 4096
_CALL, _REFUSAL = b"C", b"R"
_EXTRA = 16  # bytes that a call may add for the others to read
_NOTHING = bytes(_EXTRA)
_AT = 1 + _EXTRA  # where what is compared begins
_DIGEST = 16
_NUMBER = re.compile(r"\b\d+\b")  # a size, and no part of "fp32"
_MISSED = (
    "Every rank must make this call, forward or backward, within that time, which deadline_s or WEFT_DEADLINE_S says: see whether "
    "that rank raised an error before it, or left it out. This group has ended, make a new one"
)

T = TypeVar("T")


class Topic:
    """What ranks must all be about to do. text: for people; it is cut where it is too long. details: compared as well.

    difference: collective, on ranks whose texts are alike: says how their details differ. hint: what else may help
    where only sizes differ.
    """

    def __init__(
        self, text: str, details: str = "", *, difference: Callable[[], str] | None = None, hint: str = ""
    ) -> None:
        self.text, self.difference, self.hint = text, difference, hint
        digest = hashlib.blake2b(f"{text}\0{details}".encode(), digest_size=_DIGEST).digest()
        self.compared = digest + text.encode()[: _BYTES - _AT - _DIGEST]


class Meeting:
    """Of all calls of `domain`, which is on CPU. Making it is collective; calls are one thread's at a time."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.calls = 0  # that this rank has published
        self.schedules = 0  # that have been made to run on this group
        self.lock = threading.Lock()  # held by a call until what it has begun is in order, or done
        self._publishing = threading.Lock()
        self._exchange = Exchange(domain, _BYTES)
        domain._holders.add(self)

    def close(self) -> None:
        """The domain ends."""
        _meetings.pop(self.domain, None)

    def meet(self, topic: Topic, *, deadline_s: float | None, extra: bytes = _NOTHING) -> list[bytes]:
        """Return when every rank is about to do the same: what each adds, `extra`, 16 bytes, by rank."""
        payloads = self._publish(_CALL + extra + topic.compared, topic.text, deadline_s)
        if refusals := _refusals(payloads):
            raise RefusedError(refusals)
        if any(payload[_AT:] != topic.compared for payload in payloads):
            self._end(payloads, topic)
        return [payload[1:_AT] for payload in payloads]

    def refuse(self, text: str, *, deadline_s: float | None) -> str:
        """Publish that this rank refuses the call that it would make now; returns what all ranks that refuse say."""
        said = text.encode()[: _BYTES - _AT]
        try:
            return _refusals(self._publish(_REFUSAL + _NOTHING + said, "the call that it refuses", deadline_s))
        except WeftError as error:
            raise type(error)(f"{error}. This rank had refused the call: {text}") from error

    def _publish(self, payload: bytes, what: str, deadline_s: float | None) -> list[bytes]:
        with self._publishing:
            self.domain.check()
            self.calls += 1
            name = f"{what} (call {self.calls})"
            try:
                return self._exchange.exchange(payload, deadline_s=deadline_s, name=name)
            except DeadlineError as error:
                raise DeadlineError(f"{error}. {_MISSED}") from error

    def _end(self, payloads: list[bytes], topic: Topic) -> NoReturn:
        """Every rank has read the same, and so each ends the group for itself."""
        texts = [payload[_AT + _DIGEST :].decode(errors="replace") for payload in payloads]
        calls = by_rank(enumerate(texts))
        if len(set(texts)) == 1:
            other = topic.difference() if topic.difference else ""
            calls = other or f"{calls}, with other details"
        sizes_differ = len(set(texts)) > 1 and len({_NUMBER.sub("", text) for text in texts}) == 1
        self.disagree(f"ranks make different calls (call {self.calls} of each): {calls}", topic.hint * sizes_differ)

    def disagree(self, text: str, hint: str = "") -> NoReturn:
        """For what all ranks find out alike."""
        self.domain.end(text)
        raise DisagreementError(
            f"{text}. Call the same, in the same order, on every rank{hint and '; '}{hint}. The ranks are out of step: this group "
            "has ended, make a new one"
        )


def _refusals(payloads: list[bytes]) -> str:
    return by_rank(
        (rank, payload[_AT:].decode(errors="replace"))
        for rank, payload in enumerate(payloads)
        if payload[:1] == _REFUSAL
    )


def shown(domain: Domain, details: str) -> Callable[[], str]:
    """A topic's `difference`: the details themselves, of each rank."""
    return lambda: by_rank(enumerate(domain.all_gather(details, what="details of a call")))


_meetings: dict[Domain, Meeting] = {}


def meeting_of(domain: Domain) -> Meeting:
    """Collective at the first call for a domain."""
    meeting = _meetings.get(domain)
    if meeting is None:
        drop_closed(_meetings)
        meeting = _meetings[domain] = Meeting(domain)
    return meeting


def said_on(group: dist.ProcessGroup) -> int:
    """How many calls this rank has published to its peers on CPU."""
    for domain, meeting in _meetings.items():
        if domain.is_of(group):
            return meeting.calls
    return 0


def drop_closed(of_domain: dict[Domain, T]) -> None:
    """What is kept per domain may hold the domain, so it goes when the next is made."""
    for domain in [domain for domain in of_domain if domain.closed]:
        del of_domain[domain]
