"""Messages: the sends of a schedule, as steps of the sender and of the receiver.

A send is one step of the sender's lane. `with_messages` splits it into two steps, so that checks and executors need to
handle only lanes and signals:

    the sender's lane   a `Post`: reads the rows, and passes the message to the process group
    the receiver        a lane for each lane that sends to it. A `Receive` waits for the message, and writes its rows

After a lane has sent rows to a rank, its later signals to this rank are messages too. The signal is set by the
`Receive` at the receiver. A lane's messages to one rank arrive in order, so a signal arrives after the rows that were
sent before it. Signals to ranks on other hosts are always messages.

`verify` checks the schedule with its messages. Each message has a counter at the receiver, which the `Post` sets and
the `Receive` waits for. Before a rank reads received rows, it must wait for a signal that the sending lane sent after
the rows. A signal of another lane, or a signal that a third rank passes on, may arrive before the rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.schedule.expr import Index, value
from weft.schedule.printing import describe
from weft.schedule.regions import Access, read, written
from weft.schedule.schedule import Schedule
from weft.schedule.steps import Awaited, CounterId, Lane, Send, Set, Step, of_kind, variables_of, walk


@dataclass(frozen=True, slots=True)
class Message(Step):
    """A message with rows or a signal: `Post` at the sender, `Receive` at the receiver, with equal fields.

    source, lane, to: the sender, the number of its lane, and the receiver.
    number: the index of the message among all messages of this lane to this receiver.
    joined: True for a signal that directly follows another message to the same receiver, and is sent with that message.
    """

    step: Send | Set
    source: int
    lane: int
    to: int
    number: int
    joined: bool

    @property
    def channel(self) -> tuple[int, int, int]:
        """The channel of the message: (sender, number of the sending lane, receiver). Messages of a channel arrive in order."""
        return self.source, self.lane, self.to

    @property
    def _counters(self) -> str:
        return f"messages of lane {self.lane} of rank {self.source}"


class Post(Message):
    """The sender's part of a message."""

    def accesses(self) -> tuple[Access, ...]:
        return (read(self.step.src),) if isinstance(self.step, Send) else ()

    def sets(self) -> Mapping[CounterId, int]:
        return {(self.to, self._counters, self.number): 1}

    @property
    def decisive(self) -> tuple[int, ...]:
        return ()

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return self.step.span(at, number)

    def __str__(self) -> str:
        return str(self.step)


class Receive(Message):
    """The receiver's part of a message."""

    def accesses(self) -> tuple[Access, ...]:
        return (written(self.step.dst),) if isinstance(self.step, Send) else ()

    def sets(self) -> Mapping[CounterId, int]:
        return self.step.sets()

    @property
    def awaits(self) -> Awaited:
        return Awaited(self._counters, self.number, 1, False)

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        what = self.step.dst.buffer if isinstance(self.step, Send) else self.step.signal
        return f"receive {what}"

    def __str__(self) -> str:
        step = self.step
        what = step.dst if isinstance(step, Send) else f"{step.signal}[{step.index}]"
        return f"receive {what} from rank {self.source}"


def with_messages(
    ranks: Sequence[Sequence[Lane]],
    is_far: Callable[[int, int], bool] = lambda source, to: False,
    awaited: Collection[CounterId] | None = None,
) -> list[tuple[Lane, ...]]:
    """Return the lanes of each rank, with each `Send` split into a step that sends a message, and a step of another lane
    that receives it. The lanes that receive messages come last in the list of a rank.

    ranks: the lanes of each rank, with numbers in place of expressions.
    is_far: a function that returns True for (a, b) if rank a cannot access memory of rank b.
    awaited: the counters for which a rank waits; None: all counters. Messages that would set other counters are omitted.
    """
    received: dict[int, list[Lane]] = defaultdict(list)
    sending = []
    for source, lanes in enumerate(ranks):
        mine = []
        for number, lane in enumerate(lanes):
            split = _Split(source, number, is_far, awaited)
            mine.append(Lane(lane.name, lane.resource, tuple(split.posts(lane.steps))))
            for to, receives in split.receives.items():
                received[to].append(Lane(f"{lane.name} of rank {source}", "copy", tuple(receives)))
        sending.append(mine)
    return [(*mine, *received[rank]) for rank, mine in enumerate(sending)]


class _Split:
    """The messages that one lane sends.

    receives: for each receiver, its `Receive` steps in order.
    """

    def __init__(
        self, source: int, lane: int, is_far: Callable[[int, int], bool], awaited: Collection[CounterId] | None
    ) -> None:
        self._source, self._lane, self._is_far, self._awaited = source, lane, is_far, awaited
        self.receives: defaultdict[int, list[Step]] = defaultdict(list)

    def posts(self, steps: Sequence[Step]) -> Iterator[Step]:
        last = None  # the receiver of the previous step, if it was a message
        for step in steps:
            to = self._receiver(step)
            if to is None or not isinstance(step, Send | Set):
                last = None
                yield step
            elif isinstance(step, Send) or self._awaited is None or next(iter(step.sets())) in self._awaited:
                joined = isinstance(step, Set) and to == last
                message = step, self._source, self._lane, to, len(self.receives[to]), joined
                self.receives[to].append(Receive(*message))
                last = to
                yield Post(*message)

    def _receiver(self, step: Step) -> int | None:
        """Return the rank to which `step` sends a message; None if it sends no message."""
        if isinstance(step, Send):
            return value(step.dst.at)
        if isinstance(step, Set) and (at := value(step.at)) != self._source:
            return at if at in self.receives or self._is_far(self._source, at) else None
        return None


def wrong_sends(schedule: Schedule) -> Iterator[str]:
    """Yield an error text for each send whose size the receiver cannot know."""
    held = {contents.buffer for contents in schedule.contents}
    for lane in schedule.lanes:
        for send in of_kind(walk(lane.steps), Send):
            if unknown := sorted(variables_of(send) & held):
                yield (
                    f"lane {lane.name}: {describe(send)}: its size depends on {', '.join(unknown)}, which the receiver does not "
                    "know: send a fixed number of rows"
                )


def has_sends(schedule: Schedule) -> bool:
    return any(isinstance(step, Send) for step in schedule.walk())
