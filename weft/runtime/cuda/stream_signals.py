"""The signals of one rank's compiled schedule.

A signal between lanes of one rank is an event. A lane need not wait for its own rank's signals of the previous run, because a
run begins after the previous run of its rank has ended.

A signal between ranks is a flag that one stream writes, and for which another stream waits. These operations are the same
in every run (`weft.runtime.cuda.flags`), so that a CUDA graph can capture them. A kernel that copies includes the signals
around it (`kernel_arguments`).

A compute lane does not write signals to peers itself, because a write takes microseconds, and its next kernel would wait
for it. A separate stream, the monitor, writes them. Each run also writes a mark to memory when it begins, for the thread
that watches deadlines (`weft.runtime.cuda.watch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from weft import _core
from weft.runtime.cuda.context import Context
from weft.runtime.cuda.flags import AWAITED, FLAG, Flag, Key, words_for
from weft.runtime.cuda.regions import Regions
from weft.schedule import Set, Step, Wait
from weft.schedule.launches import Launch, crosses

SignalPart: TypeAlias = tuple[bool, int, int, int]
"""A stream operation on one flag: (True to wait for a value and False to write it, number of the base address, offset
in bytes, value). `_core.StreamProgram` issues several of them as one operation.
"""


class StreamSignals:
    """The events and flags of one rank's launches. Methods add operations to `program`.

    monitor: the number of the monitor's stream.
    monitored: True if the monitor writes the mark of a run and the standing word.
    has_aside: True if the monitor has written signals since the last join with the caller's stream.
    """

    def __init__(
        self, context: Context, regions: Regions, program: _core.StreamProgram, launches: Sequence[Launch]
    ) -> None:
        self.context, self.program, self.monitor = context, program, len(context.lanes)
        self.has_aside = False
        self._words, self._begun = regions.words, regions.begun
        self._events = 0
        self._event_of: dict[Key, int] = {}
        resources = {lane.name: lane.resource for lane in context.schedule.lanes}
        self._computes = [resources[name] == "compute" for name in context.lanes]
        self._flags = context.flags[context.rank]
        self._words_of = [words_for(flags) for flags in context.flags]
        self._awaited = {flag.key for flag in self._flags.values()}
        # By lane, without its copy kernels, which clear their own flags: the indices of the steps whose signals the lane's
        # stream writes, and the flags that the lane waits for. Compute lanes are omitted. They clear their flags right after
        # the wait, because the monitor writes their signals, possibly after the lane's next wait.
        self._carriers: dict[str, set[int | None]] = {name: set() for name in context.lanes}
        self._of_stream: dict[str, list[Flag]] = {name: [] for name in context.lanes}
        for launch in launches:
            if not (launch.copies or self._computes[launch.lane]):
                self._carriers[context.lanes[launch.lane]] |= set(range(launch.first, launch.last + 1))
                self._of_stream[context.lanes[launch.lane]] += self._flags_in(launch)
        # Choose what writes the two words for the watching thread: the mark of a run, and the standing word. If only kernels
        # on one stream wait, the first and the last of these kernels write both. Otherwise the wait of a suitable lane
        # writes the mark (`_tells`). If there is no such lane, the monitor writes both.
        waiting = [launch for launch in launches if self._flags_in(launch)]
        by_kernels = bool(waiting) and len(context.lanes) == 1 and all(launch.copies for launch in waiting)
        self._noting = (waiting[0], waiting[-1]) if by_kernels else None
        self._telling = next((launch for launch in waiting if self._tells(launch)), None)
        self.monitored = bool(waiting) and not self._noting and not self._telling

    def event(self) -> int:
        self._events += 1
        return self._events - 1

    def fork(self, others: Sequence[int]) -> None:
        """Let the streams `others` wait for the caller's stream."""
        fork = self.event()
        self.program.record(0, fork)
        for stream in others:
            self.program.wait_event(stream, fork)

    def begin(self) -> None:
        """Let the monitor write the mark of a run and the standing word."""
        self.program.signal(self.monitor, [self._note(self.context.standing_word, 1), (False, self._begun, 0, 1)])

    def end(self) -> None:
        """Let the monitor clear the standing word."""
        self._aside(0, [self._note(self.context.standing_word, 0)])

    def _tells(self, launch: Launch) -> bool:
        """True if the stream operation with the waits of `launch` can also write a mark to memory. The mark shows the watching
        thread that a run has begun.

        Two conditions must hold:
        - The launch is the first of a copy lane, and waits only for flags of the previous run.
        - A later step of the lane clears one of these flags, and the lane has only copies between the launch and this step.
        """
        if self._computes[launch.lane] or launch.copies or launch.first:
            return False
        name = self.context.lanes[launch.lane]
        steps = [step for lane, step in self.context.order if lane == name]

        def soon(flag: Flag) -> bool:
            behind = steps[launch.last + 1 : flag.carrier] if flag.carrier in self._carriers[name] else []
            return flag.previous and all(step.copies_by for step in behind)

        # All waits of a stream operation precede its clears. A wait for this run would delay the clear.
        mine = self._flags_in(launch)
        return all(flag.previous for flag in mine) and any(soon(flag) for flag in mine)

    def crosses(self, step: Step) -> bool:
        """True if `step` is a signal between ranks."""
        return crosses(step, self.context.rank, self._awaited)

    def between_lanes(self, lane: int, step: Set | Wait) -> None:
        """Add the stream operation for a signal between lanes of this rank: record an event for a `Set`, or let the stream wait
        for the event for a `Wait`.
        """
        key = (step.signal, int(step.index))
        if isinstance(step, Set):
            self._event_of[key] = self.event()
            self.program.record(lane, self._event_of[key])
        elif not step.previous:
            self.program.wait_event(lane, self._event_of[key])

    def between_ranks(self, launch: Launch) -> None:
        """Add a stream operation for the waits or sets of `launch`, which are signals between ranks. The same stream operation
        also clears flags (`weft.runtime.cuda.flags` explains which).
        """
        name, parts = self.context.lanes[launch.lane], list[SignalPart]()
        mine = self._flags_in(launch)
        if launch is self._telling:
            parts.append((False, self._begun, 0, 1))
        if mine:
            taken = [flag for flag in mine if flag.carrier not in self._carriers[name]]
            parts += [(True, self._words + self.context.rank, 8 * flag.word, AWAITED) for flag in mine]
        else:
            places = range(launch.first, launch.last + 1)
            taken = [t for t in self._of_stream[name] if t.carrier in places]
        parts += [self._note(flag.word, 0) for flag in taken]
        parts += [
            (False, self._words + int(at), 8 * word, FLAG)
            for step in launch.sets
            for at, signal, index in step.sets()
            for word in self._words_of[int(at)].get((signal, int(index)), [])
        ]
        if not parts:
            return  # no rank waits for this signal
        if self._computes[launch.lane] and not mine:
            # A write to a peer takes microseconds, and kernels need not wait for it, so write on the monitor.
            self._aside(launch.lane, parts)
        else:
            self.program.signal(launch.lane, parts)

    def _aside(self, lane: int, parts: list[SignalPart]) -> None:
        event = self.event()
        self.program.record(lane, event)
        self.program.wait_event(self.monitor, event)
        self.program.signal(self.monitor, parts)
        self.has_aside = True

    def _note(self, word: int, number: int) -> SignalPart:
        """Return the part of a stream operation that writes `number` to one of this rank's signal words. word: the index of the
        signal word.
        """
        return (False, self._words + self.context.rank, 8 * word, number)

    def addresses_set(self, at: int, signal: str, index: int) -> list[int]:
        """Return the addresses of the flag words that a `Set` of `signal[index]` writes in the memory of rank `at`."""
        return [self.context.words.address(at) + 8 * word for word in self._words_of[at].get((signal, index), [])]

    def _flags_in(self, launch: Launch) -> list[Flag]:
        name = self.context.lanes[launch.lane]
        found = [self._flags.get((name, at)) for at in range(launch.first, launch.last + 1)]
        return [flag for flag in found if flag is not None]

    def addresses_of(self, sets: Sequence[Step]) -> list[int]:
        """Return the addresses of all flag words that the steps `sets` write."""
        counters = [counter for step in sets for counter in step.sets()]
        return [a for at, signal, index in counters for a in self.addresses_set(int(at), signal, int(index))]

    def kernel_arguments(self, launch: Launch) -> dict[str, Any]:
        """Return arguments of a kernel that runs `launch`: the addresses of the flags for which the kernel waits, and the numbers
        that it stores for the thread that watches deadlines.
        """
        context = self.context
        own = context.words.address(context.rank)
        mine = self._flags_in(launch)
        before, after = mine[: len(launch.waits)], mine[len(launch.waits) :]
        standing = own + 8 * context.standing_word
        begins, passes, ends = list[tuple[int, int]](), list[tuple[int, int]](), list[tuple[int, int]]()
        if self._noting:
            begins = [(standing, 1), (context.begun_word.data_ptr(), 1)] if launch is self._noting[0] else []
            passes = [(standing, 1 + before[-1].passed)] if before else []
            ends = [(standing, 0)] if launch is self._noting[1] else []
        return {
            "waits": [own + 8 * flag.word for flag in before], "waits_after": [own + 8 * flag.word for flag in after],
            "begins": begins, "passes": passes, "ends": ends,
        }  # fmt: skip
