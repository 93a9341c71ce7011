"""Deadlines, timelines and, on CPU, a rendezvous before each collective, for unfused calls of NCCL, gloo and cuBLAS.

CPU ranks synchronise before each collective, as before every call (`weft.runtime.meeting`), which takes microseconds. If a
rank does not arrive, the rendezvous raises at the deadline. If a rank makes a different call, the error names the rank.

On one host the data travel with the rendezvous, through shared memory (`weft.runtime.shared_collectives`). Between hosts gloo
moves the data. Both errors are raised before gloo begins a collective: gloo cannot cancel a collective, and with different
calls it would abort, or compute on wrong bytes. The wait for the collective has the same deadline, and raises if the group
fails.

GPU ranks do not synchronise, because a rendezvous would take longer than the call. On GPUs a `Turn` only fills a timeline,
and NCCL's timeout and watchdog apply. A call without a timeline on GPUs, or on one rank, uses `STRAIGHT`, which adds
nothing.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weft import _core, symm
from weft.errors import OutOfSharedMemoryError, WeftError
from weft.runtime.collectives import finish, leave
from weft.runtime.meeting import NumberedTopic, Topic, meeting_of, number_of_collective, shown
from weft.runtime.opaque import opaque
from weft.runtime.rails import MOST_BYTES, Cargo, Rails
from weft.runtime.shared_collectives import shared_collective
from weft.symm import Communicator
from weft.timeline import Timeline

_NUMBER = struct.Struct("<qq")  # 16 bytes of a rendezvous; the second is unused

T = TypeVar("T")


class Turns:
    """The rendezvous before the collectives of one operator and shape, for CPU ranks. All ranks must construct this object. Each
    call has a `Turn`, which uses this object.

    what: the operator and shape, for error texts. details: further text that ranks compare, such as options.
    described: a function that returns the text of `details` for errors, if `details` is a digest.
    arguments: the user's argument for each buffer, by the buffer's name, for error texts.
    hint: advice for the error that ranks raise if only their sizes differ.
    number: a 64-bit hash of the call, if ranks compare it in place of the texts (`weft.runtime.meeting.NumberedTopic`).
    """

    def __init__(
        self, what: str, comm: Communicator, details: str = "", arguments: Mapping[str, str] | None = None,
        described: Callable[[], str] | None = None, hint: str = "", number: int | None = None,
    ) -> None:  # fmt: skip
        self.what, self.comm, self._details, self._arguments = what, comm, details, arguments or {}
        self._described, self._hint, self._number = described, hint, number
        self._meeting = meeting_of(comm)
        self._topics: dict[str, Topic] = {}

    def reserve(self, nbytes: int) -> None:
        """Reserve memory for collectives of up to `nbytes` bytes whose data are sent with the messages of a rendezvous
        (`weft.runtime.rails`). All ranks must make this call. Do nothing if there is no such rendezvous (`rails` is None), or
        if `nbytes` is too large.
        """
        if self.rails is not None and nbytes <= MOST_BYTES:
            with contextlib.suppress(OutOfSharedMemoryError):  # raised on every rank
                self.rails.reserve(nbytes)

    @opaque
    def begin(
        self, collective: str, function: Callable[..., dist.Work], arguments: tuple[Any, ...], group: dist.ProcessGroup,
        deadline_s: float, meets: bool = True,
    ) -> Pending:  # fmt: skip
        """Wait until all ranks have reached a collective, and begin it. Return a handle to wait for its end.

        collective: its name, for error texts. function, arguments: torch's collective, and its arguments.
        meets: False to omit the rendezvous, because all ranks are known to have reached the collective.

        On one host the collective is complete on return.
        """
        topic = self.topic(collective)
        try:
            if (native := self.native) is not None and (
                shared := shared_collective(native, function, arguments)
            ) is not None:
                self._meeting.meet(topic, deadline_s=deadline_s, collective=shared)
                return Pending([], self.comm, group, topic.text, deadline_s, ())
            if meets:
                self._meeting.meet(topic, deadline_s=deadline_s)
            work = function(*arguments, group=group, async_op=True)
        except WeftError:  # every rank raises this error, or the group has already failed
            raise
        except BaseException as error:  # the peers have begun the collective
            self.comm.poison(f"{topic.text}: {error!r}")
            raise
        return Pending([work], self.comm, group, topic.text, deadline_s, arguments)

    @property
    def native(self) -> _core.PayloadExchange | None:
        """The rendezvous of the ranks of one host, with which the data of collectives travel; None between hosts."""
        return None if self._meeting.exchange is None else self._meeting.exchange.native

    @opaque
    def carry(
        self, collective: str, shared: _core.SharedCollective, ready: Callable[[], None], deadline_s: float
    ) -> None:  # fmt: skip
        """Run a collective whose data travel with the rendezvous (`native`). It is complete on return.

        collective: its name, for error texts. ready: a function to call before the data of peers are read.
        """

        def placed(extras: list[bytes]) -> bool:
            ready()
            return True

        topic = self.topic(collective)
        try:
            self._meeting.meet(topic, deadline_s=deadline_s, collective=shared, ready=placed)
        except WeftError:
            raise
        except BaseException as error:
            self.comm.poison(f"{topic.text}: {error!r}")
            raise

    @property
    def rails(self) -> Rails | None:
        """The rendezvous of CPU ranks on several hosts, whose messages can carry the data of a small collective
        (`weft.runtime.rails`). None unless there are several hosts, each with the same number of consecutive ranks, at least
        two.
        """
        return self._meeting.rails

    @opaque
    def ride(self, collective: str, cargo: Cargo, deadline_s: float, number: int = 0) -> int:
        """Run `cargo`, a small collective whose data are sent with the messages of the rendezvous. The collective is complete
        on return. Return the largest `number` of all ranks.

        number: a number that may differ between ranks, such as the size of this rank's data.
        """
        topic = self.topic(collective)
        try:
            extras = self._meeting.meet(topic, deadline_s=deadline_s, cargo=cargo, extra=_NUMBER.pack(number, 0))
            return _largest(extras)
        except WeftError:
            raise
        except BaseException as error:
            self.comm.poison(f"{topic.text}: {error!r}")
            raise

    @opaque
    def meet(self, what: str, deadline_s: float) -> None:
        """Wait until all ranks have reached the call that the text `what` describes."""
        self._meeting.meet(self.topic(what), deadline_s=deadline_s)

    @opaque
    def largest(self, collective: str, number: int, deadline_s: float) -> int:
        """Wait until all ranks have reached a collective. Return the largest `number` of all ranks.

        number: a number that may differ between ranks, such as this rank's number of tokens.
        """
        extras = self._meeting.meet(self.topic(collective), deadline_s=deadline_s, extra=_NUMBER.pack(number, 0))
        return _largest(extras)

    def topic(self, collective: str) -> Topic:
        """Return the description of a collective that ranks compare. collective: its name."""
        topic = self._topics.get(collective)
        if topic is None:
            if self._number is None:
                topic = self._described_topic(collective)
            else:
                made = partial(self._described_topic, collective)
                topic = NumberedTopic(number_of_collective(collective), self._number, made)
            self._topics[collective] = topic
        return topic

    def _described_topic(self, collective: str) -> Topic:
        said = " ".join(self._arguments.get(word, word) for word in collective.split(" "))
        comm, described = self.comm, self._described
        difference = shown(comm, self._details) if described is None else lambda: shown(comm, described())()
        return Topic(f"{said} of {self.what}", self._details, difference=difference, hint=self._hint)


def _largest(extras: list[bytes]) -> int:
    return max(int(_NUMBER.unpack(extra)[0]) for extra in extras)


class Turn:
    """An object that runs the collectives of one call, or of its backward, with a deadline, a timeline and, on CPU, a
    rendezvous before each collective.

    turns: the rendezvous; None if ranks do not synchronise, as on GPUs.
    deadline_s: the longest wait for other ranks, in seconds.
    marks: records the times of steps for a timeline.
    """

    deadline_s: float | None
    _meets = True

    def __init__(self, turns: Turns | None, deadline_s: float | None, marks: Marks | None = None) -> None:
        self._turns, self._marks = turns, marks
        self.deadline_s = deadline_s or (None if turns is None else turns.comm.deadline_s)

    @property
    def wait_s(self) -> float:
        """The deadline in seconds. Only a call with a rendezvous always has one."""
        assert self.deadline_s is not None
        return self.deadline_s

    def begin(
        self, collective: str, function: Callable[..., dist.Work], *arguments: Any, group: dist.ProcessGroup
    ) -> Any:
        """Wait until all CPU ranks have reached a collective, then begin it: `function(*arguments, group=group)`. Return
        the work handle to wait for.
        """
        if self._turns is None:
            return function(*arguments, group=group, async_op=True)
        return self._turns.begin(collective, function, arguments, group, self.wait_s, self._meets)

    def rails_for(self, nbytes: int) -> Rails | None:
        """Return the rendezvous of CPU ranks on several hosts if its messages can carry the data of a collective of `nbytes`
        bytes (`weft.runtime.rails`). Otherwise return None.
        """
        rails = self.rails
        return rails if rails is not None and 0 < nbytes <= rails.most_bytes else None

    @property
    def rails(self) -> Rails | None:
        """The rendezvous of CPU ranks on several hosts, whose messages can carry the data of a small collective. None if there
        is no such rendezvous, or if ranks have already synchronised.
        """
        return None if self._turns is None or self.has_met else self._turns.rails

    @property
    def native(self) -> _core.PayloadExchange | None:
        """The rendezvous of CPU ranks on one host, with which the data of collectives travel, through shared memory. None if
        there is no such rendezvous.
        """
        return None if self._turns is None else self._turns.native

    @property
    def shares_memory(self) -> bool:
        """True if collectives of CPU ranks move their data through shared memory, because all ranks are on one host."""
        return self.native is not None

    def carry(self, collective: str, shared: _core.SharedCollective, ready: Callable[[], None]) -> None:
        """Run a collective whose data travel with the rendezvous `native`. It is complete on return.

        ready: a function that is called before the data of peers are read.
        """
        assert self._turns is not None
        self._turns.carry(collective, shared, ready, self.wait_s)

    def ride(self, collective: str, cargo: Cargo, number: int = 0) -> int:
        """Run `cargo`, a small collective whose data are sent with the messages of the rendezvous. The collective is complete
        on return. Return the largest `number` of all ranks.

        number: a number that may differ between ranks, such as the size of this rank's data.
        """
        assert self._turns is not None
        return self._turns.ride(collective, cargo, self.wait_s, number)

    @property
    def comm_between_hosts(self) -> Communicator | None:
        """The communicator, if it connects CPU ranks on several hosts; otherwise None."""
        return None if self._turns is None or self._turns.comm.all_mapped else self._turns.comm

    def largest(self, collective: str, number: int) -> int:
        """Wait until all CPU ranks have reached a collective. Return the largest `number` of all ranks. The caller then begins the
        collective by `self.met.begin`, which does not synchronise the ranks again.

        number: a number that may differ between ranks, such as this rank's number of tokens.
        """
        assert self._turns is not None
        return self._turns.largest(collective, number, self.wait_s)

    def meet(self, what: str) -> None:
        """Wait until all CPU ranks have reached a call without a collective, which `what` describes. GPU ranks do not wait."""
        if self._turns is not None:
            self._turns.meet(what, self.wait_s)

    @property
    def has_met(self) -> bool:
        """True if all ranks are known to have reached the next collective."""
        return not self._meets

    @property
    def met(self) -> Turn:
        """A copy of this object that begins collectives without a rendezvous. Use it for collectives that all ranks are known
        to have reached.
        """
        turn = Turn.__new__(type(self))  # copy.copy takes several times as long
        turn.__dict__.update(self.__dict__, _meets=False)
        return turn

    def run(self, collective: str, function: Callable[..., Any], *arguments: Any, group: dist.ProcessGroup) -> None:
        """Run a collective, `function(*arguments, group=group)`. On CPU it is complete on return. On GPUs it is enqueued on
        the current stream.
        """
        if self._turns is None:
            function(*arguments, group=group)
        else:
            self.begin(collective, function, *arguments, group=group).wait()

    def done(self, name: str, result: T, bytes: int = 0) -> T:
        """Record for the timeline that the step `name` of the call ends now, and has sent this number of `bytes`. Return
        `result` unchanged.
        """
        if self._marks is not None:
            self._marks.mark(name, bytes)
        return result

    def end(self) -> None:
        """Add the steps that `done` has recorded to the call's timeline, if there is one."""
        if self._marks is not None:
            self._marks.end()


class _Straight(Turn):
    """A `Turn` that runs collectives without a rendezvous, a deadline or a timeline: it only calls torch."""

    def __init__(self) -> None:
        self.deadline_s, self._turns = None, None

    def begin(
        self, collective: str, function: Callable[..., dist.Work], *arguments: Any, group: dist.ProcessGroup
    ) -> Any:
        return function(*arguments, group=group, async_op=True)

    def run(self, collective: str, function: Callable[..., Any], *arguments: Any, group: dist.ProcessGroup) -> None:
        function(*arguments, group=group)

    def done(self, name: str, result: T, bytes: int = 0) -> T:
        return result

    def end(self) -> None:
        return


STRAIGHT: Turn = _Straight()
"""The turn of calls that need no rendezvous and fill no timeline."""


def turn_on(
    group: dist.ProcessGroup, device: torch.device, what: str, deadline_s: float | None, details: str = "",
    described: Callable[[], str] | None = None,
) -> Turn:  # fmt: skip
    """Return a `Turn` for a call of an operator without its own `Turns`. On GPUs, and in a group of one rank, return
    `STRAIGHT`, which adds nothing to torch's calls.

    what: the call, for error texts. details, described: further text that ranks compare, as for `Turns`.
    """
    if device.type != "cpu" or group.size() == 1:
        return STRAIGHT
    with symm.set_up_within(deadline_s):
        return Turn(Turns(what, symm.communicator(group, device), details, described=described), deadline_s)


class Pending:
    """A collective on CPU that has begun. Its method `wait` works like that of torch's `Work`."""

    def __init__(
        self, works: Sequence[dist.Work], comm: Communicator, groups: object, name: str, deadline_s: float, arguments: tuple[Any,
        ...]
    ) -> None:  # fmt: skip
        self._works, self._comm, self._groups, self._name, self._deadline_s = works, comm, groups, name, deadline_s
        self._arguments, self._waited = arguments, False

    @opaque
    def wait(self) -> None:
        self._waited = True
        for work in self._works:
            finish(work, self._comm, self._name, self._deadline_s, self._arguments, self._groups, self._works)

    def __del__(self) -> None:
        """Never free the tensors of a collective for which no caller has waited: gloo may still use them."""
        if not self._waited and not all(work.is_completed() for work in self._works):
            leave(self._groups, self._works, self._arguments)


class Marks:
    """A recorder of times: when each step of a call ends, on the caller's thread or stream. It uses the same clock as the
    timelines of executors.

    Each step begins when the previous step ends. `end` adds the steps to the timeline as spans of the lane `compute`.
    """

    def __init__(self, timeline: Timeline, rank: int, device: torch.device) -> None:
        self._timeline, self._rank, self._device = timeline, rank, device
        self._names: list[tuple[str, int]] = []
        self._times_ns: list[int] = []
        self._stamps: list[Any] = []  # only on a GPU
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise ValueError("a captured call cannot fill a timeline: pass timeline only outside of graph capture")
            torch.cuda.synchronize(device)  # loading a kernel while a stream waits can hang the device
        self._stamp()

    def mark(self, name: str, bytes: int) -> None:
        self._names.append((name, bytes))
        self._stamp()

    def _stamp(self) -> None:
        if self._device.type != "cuda":
            self._times_ns.append(time.monotonic_ns())
            return
        from weft.runtime.cuda.move import Stamps  # needs Triton, which a CPU machine may lack

        self._stamps.append(Stamps(self._device, 1))
        self._stamps[-1].launch(0, torch.cuda.current_stream(self._device).cuda_stream)

    def end(self) -> None:
        times_ns = self._times_ns + [int(stamp.times.item()) for stamp in self._stamps]  # waits for the device
        for (name, bytes), (start, end) in zip(self._names, pairwise(times_ns), strict=True):
            self._timeline.add(self._rank, "compute", name, start / 1e3, max(start, end) / 1e3, bytes)
