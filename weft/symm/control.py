"""The control plane of a group: notifications that a rank has failed or left, and small messages during set-up.

A daemon thread, the watchdog (`weft.symm.watchdog`), reads the connections to all peers, and handles these messages:

- *data*: a peer's payload of a set-up collective, possibly with a file descriptor. A long payload is sent in parts: the
  last part is a *data* message, and the others are *more* messages.
- *goodbye*: the peer has left in an orderly way, with the reason. This is a failure only if a rank waits for a signal that
  only this peer could set.
- *poison*: a peer had an error, such as a missed deadline, after which ranks are out of step.
- *lost*: a peer saw another rank die. Every rank also detects the death by its own connection; with this message all ranks
  name the same cause.
- *call*: a peer's call, if `WEFT_CHECK_CALLS` compares every call. *made*: the digest of all the peer's calls so far.
  *refusal*: the peer refuses a call. *answer*: the peer will not make a call that this rank refused (`weft.symm.calls`).
- *meeting*: a peer's payload of a rendezvous, in groups on several hosts (`weft.symm.exchange`). *present*: the number of
  rounds that a peer has begun (`weft.symm.rounds`).
- end-of-file without goodbye: the peer is dead (kill -9, crash). The operating system reports it immediately, even from
    another host.
- an error of a connection between hosts: the other host has not responded for `WEFT_DEADLINE_S`, or sent an invalid frame.

A failure is final. The watchdog sets the *failed word* (a private int64 that native waits read) and runs the `on_failure`
callbacks. From then on, every use of the group raises. No failure is signalled in shared memory, so a rank that dies while
it writes leaves nothing that its peers could misread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from weft import _core, forks
from weft.errors import DeadlineError, DisagreementError, PeerLostError, PoisonedGroupError, WeftError
from weft.symm import bootstrap
from weft.symm.calls import CallLog, GroupCalls
from weft.symm.connections import MAX_PACKET, TcpConnection
from weft.symm.failures import logged
from weft.symm.rounds import Rounds
from weft.symm.watchdog import TICK_S, Watchdog
from weft.words import and_list

T = TypeVar("T")
_DATA, _MORE, _GOODBYE, _POISON, _LOST, _CALL = b"D", b"M", b"G", b"P", b"L", b"C"
_REFUSAL, _ANSWER, _MADE, _MEETING, _PRESENT = b"R", b"A", b"N", b"E", b"H"
_PART_BYTES = MAX_PACKET - 1
_AFTER_LOSS = "restart the job, or let the other ranks continue in a new process group (docs/failures.md)"
_CALL_S = 1.0  # longest time that a peer's full buffer may delay a message about a call
_LAST_LOOK_S = 0.2  # time for the watchdog to read messages that have arrived, after a deadline
CALLBACK_S = 2.0  # longest time that callbacks of `on_failure` may delay closing a group, or exiting the process
EXITING = "the process is exiting"
_STALE_S = 1.0  # if the last check is older, this process was stopped, and messages may be unread


class Control:
    """The control plane of rank `rank` of `world_size`. It takes over the connections of `peers`.

    calls: the record of this rank's calls.
    failed: a function that gets the error. The thread that detects a failure calls it as soon as the group fails.
    afterwards: a function that the watchdog thread calls after all callbacks of `on_failure`.

    If no file descriptor or thread is left for a watchdog, the constructor notifies the peers and raises `WeftError`.
    """

    def __init__(
        self, rank: int, world_size: int, peers: list[bootstrap.Peer], calls: GroupCalls, failed: Callable[[WeftError], None],
        afterwards: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self.rank, self.world_size = rank, world_size
        self.gone: dict[int, str] = {}  # reason, by rank that has said goodbye
        self.ended: dict[int, str] = {}  # error text, by rank whose process has ended
        self.closed = ""  # the reason, if this object is closed, else ""
        self.failure: tuple[type[WeftError], str] | None = None
        self._lost: int | None = None
        self._tell_owner, self._afterwards = failed, afterwards
        self._reported = False
        self.health = _core.Health(_STALE_S)  # native waits and replayed calls read it
        self._word = ctypes.c_int64.from_address(self.health.failed_address)
        self._peers = {peer.rank: peer for peer in peers}
        self._inbox: dict[int, deque[tuple[bytes, list[int]]]] = {peer.rank: deque() for peer in peers}
        self._met: dict[int, deque[bytes]] = {peer.rank: deque() for peer in peers}
        self._begun = {peer.rank: b"" for peer in peers}  # parts of messages whose last part has not arrived
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._calls, self._log = calls, CallLog(rank, world_size, self.poison)
        # Guards all attributes above, and the lifetime of descriptors. The lock is reentrant: an interrupt inside a
        # Condition's own __enter__, which is Python code, would otherwise leave the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._collective = threading.Lock()
        self.rounds = Rounds(self._peers, self._lock, lambda rank, body: self._watchdog.send(rank, _PRESENT + body))
        self._compared_at = self.health.looked_at  # time of the watchdog's last comparison of calls
        connections = {peer.rank: peer.connection for peer in peers}
        self._watchdog = Watchdog(rank, connections, self._lock, self._read, self._end_of, self._look, self._release)
        try:
            self._watchdog.start()
        except BaseException as error:
            text = f"rank {rank} cannot start its watchdog thread: {error!r}"
            self.poison(text)
            for other in self._peers:  # so that peers do not take the end of the connections for this rank's death
                self._watchdog.send(other, _GOODBYE + text.encode()[:_PART_BYTES])
            self._release()
            self._run_callbacks()
            if isinstance(error, Exception):
                raise WeftError(text) from error
            raise

    @property
    def failed(self) -> bool:
        return bool(self._word.value)

    @property
    def failed_address(self) -> int:
        return self.health.failed_address

    def name(self, rank: int) -> str:
        peer = self._peers.get(rank)
        return (
            f"rank {rank}" if peer is None else f"rank {rank} (pid {peer.pid}{peer.host and f' on host {peer.host}'})"
        )

    def secret_of(self, rank: int) -> str:
        """Return a secret that only this rank and `rank`, a rank on another host, know."""
        connection = self._peers[rank].connection
        assert isinstance(connection, TcpConnection)
        return connection.secret

    # -- failure

    def check(self) -> None:
        if not self._word.value and self.health.is_stale():
            self._let_watchdog_look()
        if self._word.value:
            raise self.error()

    def _let_watchdog_look(self) -> None:
        """Wait until the watchdog has read its connections. Call this method after this process was stopped for a
        while, because messages may have arrived meanwhile.
        """
        before, until = self.health.looked_at, time.monotonic() + _STALE_S
        self._watchdog.rouse()
        while self.health.looked_at == before and time.monotonic() < until and not self._watchdog.is_current:
            time.sleep(0.0005)

    def error(self, context: str = "") -> Exception:
        """Return the error to raise, because the group has failed or is closed. If a peer has died, the first error is a
        `PeerLostError`, and later errors are a `PoisonedGroupError`.

        context: text to append, such as the wait that the failure has ended.
        """
        with self._lock:
            if self.failure is None:
                return ValueError(f"this communicator (rank {self.rank} of {self.world_size}) is closed: {self.closed}")
            kind, text = self.failure
            first, self._reported = not self._reported, True
        if not first or kind is not PeerLostError:
            return unusable(text, context)
        return PeerLostError(f"{text}{context}. This group has failed: {_AFTER_LOSS}", self._lost)

    def poison(self, text: str) -> None:
        self._fail(PoisonedGroupError, text, _POISON + text.encode()[:_PART_BYTES])

    def end(self, text: str) -> None:
        self._fail(PoisonedGroupError, text)

    def tell_call(self, number: int, what: str) -> None:
        self._tell(_CALL + self._log.note(number, what))

    def tell_refusal(self, text: str) -> None:
        self._tell(_REFUSAL + self._calls.refuse(text, len(self._peers))[: _PART_BYTES - 1])

    def await_answers(self, deadline_s: float) -> None:
        """Wait until all peers have answered this rank's last refusal. Raise the group's error if it fails."""
        until = time.monotonic() + deadline_s
        with self._lock:
            while self._calls.unanswered > 0 and not self._word.value and (remaining := until - time.monotonic()) > 0:
                self._changed.wait(remaining)
        self.check()
        if self._calls.unanswered > 0:
            text = (
                f"rank {self.rank} refused a call, but not all peers acknowledged this within {deadline_s:g} s. "
                "Check that all ranks still run"
            )
            self.poison(text)
            raise DeadlineError(text)

    def _tell(self, message: bytes) -> None:
        for rank in self._peers:
            self._watchdog.send(rank, message, until=time.monotonic() + _CALL_S)

    def lose(self, rank: int | None, text: str) -> None:
        """Mark the group as failed because a peer was lost. rank: the lost peer; None for all peers."""
        self._fail(PeerLostError, text, _LOST + f"{'' if rank is None else rank} {text}".encode(), rank)

    def lose_who_left(self, ranks: list[int]) -> None:
        why = dict.fromkeys(self.gone[rank] for rank in ranks)
        whom = f"{and_list(map(self.name, ranks))} {'has' if len(ranks) == 1 else 'have'} left the group"
        self.lose(ranks[0] if len(ranks) == 1 else None, f"{whom} ({', '.join(why)})")

    def on_failure(self, callback: Callable[[], None]) -> Callable[[], None]:
        key = object()
        with self._lock:
            failed = self.failure is not None
            if not failed:
                self._callbacks[key] = callback
        if failed:
            callback()

        def take_back() -> None:
            self._callbacks.pop(key, None)

        return take_back

    def _fail(self, kind: type[WeftError], text: str, news: bytes = b"", lost: int | None = None) -> None:
        with self._lock:
            if self.failure is not None or self.closed:
                return
            self.failure, self._lost = (kind, text), lost
            self._tell_owner(PeerLostError(text, lost) if kind is PeerLostError else kind(text))
            self._word.value = 1
            self._changed.notify_all()
        for rank in self._peers if news else ():
            self._watchdog.send(rank, news)
        self._watchdog.rouse()

    # -- set-up collectives

    def all_gather(self, obj: Any, file: int | None, what: str, deadline_s: float) -> list[tuple[Any, int | None]]:
        """Return every rank's `obj` and file descriptor, by rank (`Communicator.all_gather`)."""
        self.check()
        until = time.monotonic() + deadline_s
        taken: list[tuple[Any, int | None]] = [(obj, file)] * self.world_size
        names = [what] * self.world_size
        received: list[int] = []
        try:
            with self._collective, self.whole(what):
                data = pickle.dumps((what, obj))
                *parts, last = [data[i : i + _PART_BYTES] for i in range(0, len(data), _PART_BYTES)]
                for rank in self._peers:
                    for part in parts:
                        self._watchdog.send(rank, _MORE + part, until=until)
                    passes = self._peers[rank].connection.passes_files
                    self._watchdog.send(rank, _DATA + last, file if passes else None, until)
                whose, more = f"in {what}", ": deadline_s or WEFT_SETUP_DEADLINE_S give more time"
                messages = self._take_all(self._inbox, "the part of", whose, until, deadline_s, more)
                received += [file for _, files in messages.values() for file in files]
                for rank, (data, files) in messages.items():
                    names[rank], value = pickle.loads(data)
                    taken[rank] = (value, files[0] if files else None)
            if len(set(names)) > 1:
                calls = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
                raise DisagreementError(
                    f"ranks made different calls: {calls}. Make the same calls in the same order on every rank"
                )
        except BaseException:
            for descriptor in received:
                os.close(descriptor)
            raise
        return taken

    @contextlib.contextmanager
    def whole(self, what: str) -> Iterator[None]:
        """Run the collective in the body of this context manager. If it raises, make the group fail, because this rank is
        then out of step with its peers.

        what: the name of the collective, for error texts.
        """
        try:
            yield
        except BaseException as error:  # for example Ctrl-C. No effect if the group has already failed
            self.poison(f"rank {self.rank}: {what}: {error!r}")
            raise

    def meet(self, payload: bytes, name: str, deadline_s: float) -> list[bytes]:
        """Return every rank's payload, by rank: an all-gather over the connections, like `weft.symm.exchange.Exchange`."""
        self.check()
        until = time.monotonic() + deadline_s
        found = [payload] * self.world_size
        with self.whole(name):
            for rank in self._peers:
                self._watchdog.send(rank, _MEETING + payload, until=until)
            for rank, theirs in self._take_all(self._met, f"{name} from", "", until, deadline_s).items():
                found[rank] = theirs
        return found

    def _take_all(
        self, inboxes: dict[int, deque[T]], before: str, after: str, until: float, deadline_s: float, more: str = ""
    ) -> dict[int, T]:
        """Wait until a message of every peer has arrived. Remove each peer's first message from its inbox, and return the
        messages by rank.

        inboxes: for each peer, the messages that have arrived and have not been taken yet.
        before, after: the words before and after the names of missing ranks in error texts.
        more: advice to append to the text of a `DeadlineError`.
        """
        has_looked_again = False
        with self._lock:
            while missing := [rank for rank in self._peers if not inboxes[rank]]:
                if not self._word.value and (left := [rank for rank in missing if rank in self.gone]):
                    self.lose_who_left(left)
                if refused := self._calls.refused():
                    self.poison(refused)
                whose = f"{before} {and_list(map(self.name, missing))}{after and ' '}{after}"
                if self._word.value:
                    raise self.error(f"; rank {self.rank} was waiting for {whose}")
                if has_looked_again:
                    text = (
                        f"rank {self.rank} waited {deadline_s:g} s for {whose}: wanted {self.world_size} ranks, "
                        f"found {self.world_size - len(missing)}{more}"
                    )
                    self.poison(text)
                    raise DeadlineError(text)
                remaining = until - time.monotonic()
                if remaining > 0:
                    self._changed.wait(remaining)
                    continue
                # If this process was stopped, the watchdog's sockets may have unread messages.
                self._changed.wait_for(lambda: all(inboxes.values()) or self._word.value, _LAST_LOOK_S)
                has_looked_again = True
            return {rank: inbox.popleft() for rank, inbox in inboxes.items()}

    # -- the end

    def close(self, why: str, until: float | None = None) -> bool:
        """Notify the peers that this rank leaves, and stop the watchdog. Return False if the control plane was already closed.

        why: the reason, which peers show in error texts.
        until: the end of the wait for running callbacks, as a time of `time.monotonic()`. Default: `CALLBACK_S` from now.
        """
        with self._lock:
            if self.closed:
                return False
            self.closed = why
            self._word.value = 1
            self._changed.notify_all()
            self._callbacks.clear()
        for rank in self._peers:
            self._watchdog.send(rank, _GOODBYE + why.encode())
        self._watchdog.stop(time.monotonic() + CALLBACK_S if until is None else until)
        return True

    def forked(self) -> None:
        """Reset the object in a forked child, which has no thread that could release its locks. `weft.symm.connections`
        closes the sockets.
        """
        self._lock, self._collective = threading.RLock(), threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.closed = forks.MAKE_ANOTHER
        self.failure = None
        self._word.value = 1
        self._watchdog.forked(self._lock)

    # -- what the watchdog calls

    def _look(self) -> None:
        self.health.looked_at = time.monotonic()
        self._compare_calls()
        if self.failure is not None:
            self._run_callbacks()

    def _compare_calls(self) -> None:
        """Send the peers a digest of this rank's calls, and compare it with theirs."""
        made = self._calls.made
        # A message may have woken this thread early.
        if self._word.value or self.health.looked_at < self._compared_at + TICK_S:
            return
        self._compared_at = self.health.looked_at
        if text := made.heard_early():
            self.poison(f"rank {self.rank}: {text}")
        elif news := made.news():
            for rank in self._peers:
                self._watchdog.send(rank, _MADE + news)

    def _release(self) -> None:
        self._watchdog.release()
        with self._lock:
            for inbox in self._inbox.values():
                for _, files in inbox:
                    for file in files:
                        os.close(file)
                inbox.clear()

    def _run_callbacks(self) -> None:
        with self._lock:
            callbacks = list(self._callbacks.values())
            self._callbacks.clear()
        for callback in callbacks:
            with logged(self.rank):
                callback()
        self._afterwards()

    def _end_of(self, rank: int, error: OSError | None) -> None:
        """Mark the group as failed, because the connection to `rank` has ended, unless the rank has left in an orderly way."""
        if rank in self.gone:
            return
        if error is None:
            self.ended[rank] = f"{self.name(rank)} died: its connection ended without a goodbye message"
            self.lose(rank, self.ended[rank])
        else:
            self.lose(rank, f"{self.name(rank)} is lost: its connection failed ({error.strerror or error})")

    def _read(self, rank: int, message: bytes, files: list[int]) -> None:
        """Handle a message of `rank`."""
        kind, body = message[:1], message[1:]
        if kind == _MORE:
            self._begun[rank] += body
        elif kind == _DATA:
            with self._lock:
                self._inbox[rank].append((self._begun[rank] + body, files))
                self._begun[rank] = b""
                self._changed.notify_all()
        elif kind == _MEETING:
            with self._lock:
                self._met[rank].append(body)
                self._changed.notify_all()
        elif kind == _PRESENT:
            self.rounds.hear(rank, body)
        elif kind == _GOODBYE:
            with self._lock:
                self.gone[rank] = body.decode()
                if self.gone[rank] == EXITING:
                    self.ended[rank] = f"{self.name(rank)} has left: {EXITING}"
                self._changed.notify_all()
        elif kind == _POISON:
            self._fail(PoisonedGroupError, body.decode(errors="replace"))  # the sender has notified every rank
        elif kind == _LOST:
            lost, _, text = body.decode().partition(" ")
            self.lose(int(lost) if lost else None, text)
        elif kind == _CALL:
            self._log.heard(rank, body)
        elif kind == _MADE:
            if text := self._calls.made.heard(rank, body):
                self.poison(f"rank {self.rank}: {text}")
        elif kind == _ANSWER:
            self._calls.answered(body)
            with self._lock:
                self._changed.notify_all()
        elif kind == _REFUSAL:
            if text := self._calls.heard(body):
                self.poison(text)
            elif (answer := self._calls.answer(body)) is not None:
                self._watchdog.send(rank, _ANSWER + answer, until=time.monotonic() + _CALL_S)
            with self._lock:
                self._changed.notify_all()  # ends a wait in the current call


def unusable(text: str, context: str = "") -> PoisonedGroupError:
    return PoisonedGroupError(f"this process group has failed before ({text}): make a new process group{context}")
