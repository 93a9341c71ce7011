"""Groups of steps that become one operation on their lane's stream.

A copy by kernel is one launch together with the signals between ranks around it: sets before it, waits, the copy, further copies
of the same source, sets, waits. Elsewhere, neighbouring waits are one operation, and so are neighbouring sets. Every other step
is a group of its own.

A group is issued at the place of one of its steps in the order of issue (`weft.schedule.verify.issue_order`). A launch is
issued at its last copy or wait, because then all steps that it waits for have been issued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from weft.runtime.cuda.flags import Flag, StepPlace
from weft.runtime.cuda.sizes import is_dynamic
from weft.schedule import Copy, Region, Set, Step, Wait


class Group(NamedTuple):
    """Neighbouring steps of a lane. first: the place of the first step."""

    lane: int
    first: int
    steps: tuple[Step, ...]
    anchor: int  # the place of the step at which the group is issued

    @property
    def moves(self) -> bool:
        """True if the group is a launch that copies."""
        return any(isinstance(step, Copy) and step.by == "kernel" for step in self.steps)

    @property
    def last(self) -> int:
        return self.first + len(self.steps) - 1


class Grouping:
    """The grouping of one rank's steps.

    tokens: the flags of its waits for other ranks. pitch_of: the row pitch in bytes of a region in the schedule's own memory;
    None for the caller's tensors.
    """

    def __init__(
        self,
        rank: int,
        lanes: list[str],
        order: list[tuple[str, Step]],
        flags: dict[StepPlace, Flag],
        pitch_of: Callable[[Region], int | None],
    ) -> None:
        self._rank, self._lanes, self._order, self._pitch_of = rank, lanes, order, pitch_of
        self._crossing = {flag.key for flag in flags.values()}
        self._at: dict[tuple[int, int], int] = {}  # the place of each lane's steps in the order
        done = Counter[str]()
        for place, (name, _) in enumerate(order):
            self._at[lanes.index(name), done[name]] = place
            done[name] += 1

    def groups(self) -> list[Group]:
        """Return the groups of all lanes in the order of issue."""
        number = {name: i for i, name in enumerate(self._lanes)}
        of_lane: dict[int, list[Step]] = {i: [] for i in number.values()}
        for name, step in self._order:
            of_lane[number[name]].append(step)
        anchors = {(g.lane, g.anchor): g for lane, steps in of_lane.items() for g in self._of_lane(lane, steps)}
        ordered, at = [], Counter[int]()
        for name, _ in self._order:
            lane = number[name]
            if group := anchors.get((lane, at[lane])):
                ordered.append(group)
            at[lane] += 1
        return ordered

    def _of_lane(self, lane: int, steps: list[Step]) -> list[Group]:
        groups: list[Group] = []
        at = 0
        while at < len(steps):
            # Sets may be delayed until the waits behind them can end, but only if no other lane can block these waits.
            sets = self._while(steps, at, Set) if len(self._lanes) == 1 else at
            copy = self._while(steps, sets, Wait)
            if copy < len(steps) and isinstance(first := steps[copy], Copy) and first.by == "kernel":
                end = self._end_of_move(lane, steps, copy, first)
                anchor = max(k for k in range(at, end) if not isinstance(steps[k], Set))
            else:
                end = max(self._while(steps, at, Wait), self._while(steps, at, Set), at + 1)
                anchor = end - 1 if isinstance(steps[at], Wait) else at
            groups.append(Group(lane, at, tuple(steps[at:end]), anchor))
            at = end
        return groups

    def _end_of_move(self, lane: int, steps: list[Step], at: int, first: Copy) -> int:
        """Return the end of the launch that begins with the copy `first` at place `at`.

        It includes the copy's signals. If the copy writes to fixed places only, it includes further copies of the same region
        with their signals, and then waits.
        """
        end = self._while(steps, at + 1, Set)
        pitch = self._pitch_of(first.dst)
        if pitch is None or is_dynamic(first):
            return end
        while end < len(steps):
            more = steps[end]
            if (
                not (isinstance(more, Copy) and more.by == "kernel" and more.src == first.src)
                or more.accumulate != first.accumulate
                or is_dynamic(more)
                or self._pitch_of(more.dst) != pitch
            ):
                break
            end = self._while(steps, end + 1, Set)
        answered = self._while(steps, end, Wait)
        return answered if self._may_put_off(lane, steps, at, answered) else end

    def _may_put_off(self, lane: int, steps: list[Step], at: int, end: int) -> bool:
        """True if the sets among the steps [at, end) may be issued at the last of these steps.

        False if another lane's wait for a peer is issued before that. In one hardware queue the sets would be queued behind
        that wait, and the peer would wait for the sets.
        """
        sets = [place for place in range(at, end) if isinstance(steps[place], Set)]
        if not sets:
            return True
        between = self._order[self._at[lane, sets[0]] : self._at[lane, end - 1]]
        return not any(
            isinstance(step, Wait) and self.crosses(step) for name, step in between if name != self._lanes[lane]
        )

    def _while(self, steps: list[Step], at: int, kind: type) -> int:
        """Return the first place from `at` on whose step is not a signal between ranks of this kind."""
        while at < len(steps) and isinstance(steps[at], kind) and self.crosses(steps[at]):
            at += 1
        return at

    def crosses(self, step: Step) -> bool:
        """True if the step is a signal between ranks."""
        if isinstance(step, Set):
            return step.at != self._rank
        return isinstance(step, Wait) and (step.signal, int(step.index)) in self._crossing
