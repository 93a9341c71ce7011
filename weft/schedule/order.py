"""In which order one host thread may issue a rank's steps, over all its lanes.

Streams of a GPU may share a hardware queue (with CUDA_DEVICE_MAX_CONNECTIONS=1 they all do), and then a wait holds up all
that was issued behind it, on whatever lane. If rank 0 issues a wait for rank 1 in front of a set for rank 1, and rank 1 does
the same, both stand still, though each lane alone is right.

So all ranks are played at once, in rounds, everything taking no time: a step is issued in the round in which all that it
waits for was set by others in rounds before, or by its own rank before it. Sorted by round, the steps of all ranks are one
line in which every wait stands behind its sets, and each rank's order is the part of the line that is the rank's: what a
queue holds up is always behind what it waits for, on all ranks together. Steps never hinder one another, so that if a lane
gets stuck here no other order helps.

Within a round lanes take turns, copy lanes first; a turn is one copy or GEMM with its waits and sets. First chunks leave
for all peers before second ones, and the kernels that need nothing from others do not stand behind all copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

from weft.errors import ScheduleError
from weft.schedule.printing import describe
from weft.schedule.schedule import Schedule
from weft.schedule.steps import Awaited, Counters, Lane, Set, Step
from weft.schedule.tiles import step_number

Lanes: TypeAlias = tuple[Lane, ...]
Meeting: TypeAlias = tuple[int, int, int]


class Event(NamedTuple):
    """A step done once: `lane` and `step` are its places among the rank's lanes and in that lane; runs count from 1."""

    run: int
    rank: int
    lane: int
    step: int


def issue_order(schedule: Schedule) -> dict[int, list[tuple[str, Step]]]:
    """For each rank, (lane, step) in an order that is safe for one in-order queue a rank.

    `ScheduleError` with the waits that never end, if there is no such order. Waits for the previous run count as done: all
    of that run stands in the queues already.
    """
    # Which steps there are may not depend on what is only expected.
    ranks = [schedule.of_rank(rank, expected=False) for rank in range(schedule.world_size)]
    events, stuck = play(ranks)
    if stuck:
        raise ScheduleError(f"schedule {schedule.name} never ends:\n" + "\n".join(explain(ranks, stuck)))
    order: dict[int, list[tuple[str, Step]]] = {rank: [] for rank in range(schedule.world_size)}
    for event in events:
        lane = ranks[event.rank][event.lane]
        order[event.rank].append((lane.name, lane.steps[event.step]))
    return order


def play(ranks: Sequence[Lanes], runs: int = 1) -> tuple[list[Event], dict[Event, int]]:
    """(all that can happen in so many runs, in a possible order; {where a lane then stands: sets of its counter})."""
    game = _Play(ranks, runs)
    while game.round():
        pass
    return game.events, game.stuck()


def meeting(ranks: Sequence[Lanes], event: Event) -> Meeting:
    """Which collective it is, on all ranks: in its run and lane, the n-th one."""
    steps = ranks[event.rank][event.lane].steps[: event.step]
    return event.run, event.lane, sum(step.meets for step in steps)


def sets_per_run(ranks: Sequence[Lanes]) -> Counters:
    total: Counters = Counter()
    for step in (step for lanes in ranks for lane in lanes for step in lane.steps):
        total.update(step.sets())
    return total


def explain(ranks: Sequence[Lanes], stuck: dict[Event, int]) -> list[str]:
    """One line for each lane that stands, about what it waits for."""
    per_run = sets_per_run(ranks)
    lines = []
    for event, count in stuck.items():
        lane = ranks[event.rank][event.lane]
        step = lane.steps[event.step]
        if wait := step.awaits:
            total = per_run[event.rank, wait.signal, wait.index]
            found = f"{count} of {total} sets come before it" if total else "it is never set"
        else:
            found = f"{count} of {len(ranks)} ranks come to it"
        lines.append(
            f"rank {event.rank}, lane {lane.name}, step {step_number(lane, event.step)}: {describe(step, event.rank)}: {found}"
        )
    return lines


class _Play:
    def __init__(self, ranks: Sequence[Lanes], runs: int) -> None:
        self.ranks, self.runs = ranks, runs
        self.events: list[Event] = []
        self._per_run = sets_per_run(ranks)
        self._turns = [sorted(range(len(lanes)), key=lambda i: lanes[i].resource != "copy") for lanes in ranks]
        self._at = [[0] * len(lanes) for lanes in ranks]
        self._run = [1] * len(ranks)
        self._sets: Counters = Counter()
        self._new_sets: Counters = Counter()
        # Who has come to which collective.
        self._come: dict[Meeting, set[int]] = {}
        self._new_come: list[tuple[Meeting, int]] = []

    def round(self) -> bool:
        """One round; whether anything happened."""
        before = len(self.events)
        for rank in range(len(self.ranks)):
            while sum(self._turn(rank, lane) for lane in self._turns[rank]) or self._next_run(rank):
                pass
        moved = len(self.events) > before or bool(self._new_come)
        self._sets.update(self._new_sets)
        self._new_sets.clear()
        for here, rank in self._new_come:
            self._come.setdefault(here, set()).add(rank)
        self._new_come.clear()
        return moved

    def stuck(self) -> dict[Event, int]:
        found = {}
        for rank, lanes in enumerate(self.ranks):
            for i, lane in enumerate(lanes):
                event = Event(self._run[rank], rank, i, self._at[rank][i])
                if event.step == len(lane.steps):
                    continue
                step = lane.steps[event.step]
                if wait := step.awaits:
                    found[event] = self._sets[rank, wait.signal, wait.index]
                else:
                    found[event] = len(self._come[meeting(self.ranks, event)])
        return found

    def _turn(self, rank: int, i: int) -> bool:
        """Issue the lane's waits, then one copy, GEMM or wait of the host, then sets, as far as they go."""
        steps = self.ranks[rank][i].steps
        worked = moved = False
        while self._at[rank][i] < len(steps):
            event = Event(self._run[rank], rank, i, self._at[rank][i])
            step = steps[event.step]
            if (worked and not isinstance(step, Set)) or not self._may(event, step):
                break
            for counter, times in step.sets().items():
                (self._sets if counter[0] == rank else self._new_sets)[counter] += times
            worked = worked or step.occupies
            self.events.append(event)
            self._at[rank][i] += 1
            moved = True
        return moved

    def _may(self, event: Event, step: Step) -> bool:
        if wait := step.awaits:
            counter = (event.rank, wait.signal, wait.index)
            return self._sets[counter] >= needed(event.run, wait, self._per_run[counter])
        if step.meets:
            here = meeting(self.ranks, event)
            come = self._come.get(here, set())
            if event.rank not in come and (here, event.rank) not in self._new_come:
                self._new_come.append((here, event.rank))
            return len(come) == len(self.ranks)
        return True

    def _next_run(self, rank: int) -> bool:
        done = all(at == len(lane.steps) for at, lane in zip(self._at[rank], self.ranks[rank], strict=True))
        if not done or self._run[rank] == self.runs:
            return False
        self._run[rank] += 1
        self._at[rank] = [0] * len(self.ranks[rank])
        return True


def needed(run: int, wait: Awaited, per_run: int) -> int:
    """What a counter that is set `per_run` times in every run must have reached when `wait` ends in this run."""
    before = run - 2 if wait.previous else run - 1
    return 0 if before < 0 else before * per_run + cast(int, wait.count)
