"""Messages between CPU ranks, by gloo: the sends of a schedule (`weft.schedule.messages`).

A channel carries the messages from one lane to one other rank. It is a gloo group of the sending and the receiving rank.
A message is a broadcast in this group. gloo's threads run the broadcast, so a wait for it can have a deadline. Messages do not
use gloo's send and receive, because a receive that times out closes all connections of its group. Each direction has its own
group, because in a single group gloo may run two directions one after the other.

A run begins after ranks have synchronised. The receiver then immediately begins to receive all messages of the run, so
a sender never waits for a receiver that is not ready. Messages arrive in separate memory and are then copied to the
schedule's buffers. Otherwise a message that arrives after an error could overwrite memory of other calls, because gloo
cannot cancel a receive.

Memory order. gloo's thread writes the message and ends the broadcast. The receiving lane waits for this end, copies the rows to
their buffer, then adds to the signal's counter with release order. A lane that has waited for the signal sees the rows.

Deadlines. A sender waits at most the call's deadline for each message. A receiver's deadline begins when a lane waits for a
signal that the message carries, or when all other lanes of the rank have ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias, cast

import torch
import torch.distributed as dist

from weft import _core
from weft.errors import DeadlineError, WeftError
from weft.runtime.collectives import completed, leave
from weft.runtime.cpu.places import Places
from weft.runtime.cpu.run import Run
from weft.runtime.cpu.steps import bind
from weft.runtime.gloo_groups import Membership, gloo_groups
from weft.runtime.per_communicator import of_communicator
from weft.schedule import Send, Set
from weft.schedule.messages import Post, Receive
from weft.schedule.printing import describe
from weft.symm import Communicator

Channel: TypeAlias = tuple[int, int, int]
"""A channel between two ranks: (sender, number of its lane, receiver)."""
_LOOK_S = 0.1  # interval at which a wait checks the group
_CAUSE_S = 2.0  # time for the watchdog to find that a peer is lost


class Channels:
    """The gloo groups for messages between CPU ranks of `comm`, one for each channel. A channel carries the messages from one
    lane to one other rank. Its key is (sending rank, index of the sending lane, receiving rank).
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.groups: dict[Channel, dist.ProcessGroup] = {}
        self._known: set[Channel] = set()  # of all ranks
        comm._holders.add(self)

    def connect(self, channels: Iterable[Channel]) -> None:
        """Make a gloo group for each of `channels` that has none yet. All ranks must make this call, with the same channels.

        Raise `DeadlineError` on every rank if ranks cannot connect.
        """
        new = sorted(set(channels) - self._known)
        if not new:
            return
        mine = [channel for channel in new if self.comm.rank in (channel[0], channel[2])]
        places = [Membership(int(self.comm.rank == channel[2]), 2, ".".join(map(str, channel))) for channel in mine]
        self.groups.update(
            zip(mine, gloo_groups(self.comm, "the ranks with which it exchanges messages", places), strict=True)
        )
        self._known.update(new)

    def close(self) -> None:
        """Drop the gloo groups of all channels. The communicator calls this method when it closes."""
        _channels.pop(self.comm, None)

    def begin(self, channel: Channel, data: torch.Tensor) -> dist.Work:
        """Begin a message on `channel`: send the contiguous tensor `data` if this rank is the sender, else receive into it."""
        return self.groups[channel].broadcast(data.view(-1).view(torch.uint8), 0)

    def finish(self, work: dist.Work, is_late: Callable[[], bool], text: str, *held: object) -> None:
        """Wait until a message has been sent or received. If the wait fails, make the group fail.

        is_late: a function that returns True when the deadline has passed.
        text: words for error texts that name the deadline and the message.
        held: objects that gloo's threads may use. After an error they are never freed.
        """
        try:
            while not _is_done(work, self.comm, text):
                self.comm.check()
                if is_late():
                    raise DeadlineError(f"rank {self.comm.rank} waited {text}. Check that all ranks made the same call")
        except BaseException as error:
            self.comm.poison(str(error) if isinstance(error, WeftError) else f"{text}: {error!r}")
            leave(self.groups, work, held)
            raise


def _is_done(work: dist.Work, comm: Communicator, text: str) -> bool:
    try:
        return completed(work, _LOOK_S)
    except RuntimeError as error:
        until = time.monotonic() + _CAUSE_S
        while time.monotonic() < until:  # gloo may detect a lost peer before weft's watchdog does
            comm.check()
            time.sleep(_LOOK_S)
        raise WeftError(f"rank {comm.rank}: gloo failed while the rank waited up to {text}: {error}") from error


_channels: dict[Communicator, Channels] = {}


def channels_of(comm: Communicator) -> Channels:
    return of_communicator(_channels, comm, Channels)


class Arrival:
    """A message that this rank receives in each run of a schedule. `begin` begins to receive it. A call of this object waits
    for it.
    """

    def __init__(self, step: Receive, run: Run, target: torch.Tensor | None, counter: int) -> None:
        """target: the tensor for the received rows; None for a message that only carries a signal.
        counter: the address of the signal's counter; 0 if the message carries no signal.
        """
        self._run, self._target, self._counter, self._channels = run, target, counter, channels_of(run.comm)
        self._source, self._joined, self._channel = step.source, step.joined, step.channel
        self._what = _described(step.step, run.comm.rank)
        self._data: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Begin to receive the message. Do nothing for a signal that arrives with the previous message of the channel."""
        if not self._joined:
            target = torch.empty(1, dtype=torch.uint8, device="cpu") if self._target is None else self._target
            self._data = target.new_empty(target.shape)
            self._work = self._channels.begin(self._channel, self._data)

    def __call__(self) -> None:
        work, data, run, target = self._work, self._data, self._run, self._target
        if work is not None:
            text = f"{run.deadline_s:g} s for {self._what} of schedule {run.name} from {run.comm.name(self._source)}"
            self._channels.finish(work, partial(run.is_late, self._source), text, data, run.tensors)
            if target is not None:
                target.copy_(cast(torch.Tensor, data))
            self._work = self._data = None
        if self._counter:
            _core.signal_add(self._counter, 1)

    def abandon(self) -> None:
        """Keep the memory into which gloo receives this message until the process ends. The message may still arrive after an
        error.
        """
        if self._work is not None and not self._work.is_completed():
            leave(self._channels.groups, self._work, self._data)
        self._work = self._data = None


@bind.register
def _receive(step: Receive, places: Places, rows: tuple[int, ...]) -> Arrival:
    if isinstance(step.step, Send):
        return Arrival(step, places.run, places.view(step.step.dst), 0)
    return Arrival(step, places.run, None, places.counter(step.step.signal, step.step.index, places.rank))


@bind.register
def _post(step: Post, places: Places, rows: tuple[int, ...]) -> Callable[[], object]:
    if step.joined:
        return _nothing
    data = (
        places.view(step.step.src) if isinstance(step.step, Send) else torch.zeros(1, dtype=torch.uint8, device="cpu")
    )
    what = _described(step.step, step.to)
    return partial(_send, channels_of(places.run.comm), step.channel, data, places.run, what)


def _send(channels: Channels, channel: Channel, data: torch.Tensor, run: Run, what: str) -> None:
    until, data = time.monotonic() + run.deadline_s, data.contiguous()
    text = f"{run.deadline_s:g} s to send {what} of schedule {run.name} to {run.comm.name(channel[2])}"
    work = channels.begin(channel, data)
    try:
        channels.finish(work, lambda: time.monotonic() >= until, text, data, run.tensors)
    except BaseException:
        run.is_sending = run.is_sending or not work.is_completed()
        raise


def _described(step: Send | Set, receiver: int) -> str:
    """Describe the contents of a message to `receiver`, its rows or its signal, for error texts."""
    return describe(step.dst, receiver) if isinstance(step, Send) else f"{step.signal}[{step.index}]"


def _nothing() -> None:
    """Do nothing. This function stands for a signal that needs no message of its own, because the previous message carries it."""
