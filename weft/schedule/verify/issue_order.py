"""The order in which one host thread may issue a rank's steps, over all its lanes.

Streams of a GPU may share a hardware queue (with CUDA_DEVICE_MAX_CONNECTIONS=1 they all do). A wait then blocks everything issued
after it, on any lane. If rank 0 issues a wait for rank 1 before a set for rank 1, and rank 1 does the same, both hang, though
each lane alone is right.

So all ranks are simulated at once, in rounds, with steps that take no time. A step is issued in the first round in
which all sets that it waits for have been made. Other ranks have made them in earlier rounds, or its own rank before
it. Sorted by round, the steps of all ranks are one sequence in which every wait follows its sets, and each rank's order
is its part of the sequence. So everything that a queue blocks comes after what it waits for, on all ranks together.
Steps never hinder one another, so if a lane gets stuck here, no other order helps.

In a round lanes alternate, copy lanes first; a lane issues one copy or GEMM at a time, with its waits and sets. First chunks
leave for all peers before second chunks, and kernels that need nothing from others are not queued after all copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

from weft.errors import ScheduleError
from weft.schedule.expr import Index
from weft.schedule.printing import describe
from weft.schedule.schedule import Schedule
from weft.schedule.steps import Awaited, Counters, Lane, Set, Step
from weft.schedule.verify.forked_tiles import step_number

Lanes: TypeAlias = tuple[Lane, ...]
Counted: TypeAlias = tuple[Index, str, Index]
"""A counter: the rank that owns it, its signals' name, its index."""
CollectiveId: TypeAlias = tuple[int, int, int]
"""A collective on all ranks: run, lane, its number on that lane."""


class Event(NamedTuple):
    """One execution of a step: `lane` and `step` are its places among the rank's lanes and in that lane; runs count from 1."""

    run: int
    rank: int
    lane: int
    step: int


def issue_order(schedule: Schedule) -> dict[int, list[tuple[str, Step]]]:
    """Return for each rank (lane, step) in an order that is safe for one in-order queue a rank.

    Raises `ScheduleError` with the waits that never end if there is no such order. Waits for the previous run count as done: all
    steps of that run are in the queues already.
    """
    # Expected contents must not decide which steps there are.
    ranks = [schedule.of_rank(rank, expected=False) for rank in range(schedule.world_size)]
    events, stuck = play(ranks)
    if stuck:
        raise ScheduleError(
            f"schedule {schedule.name} deadlocks; these lanes wait forever (add or correct the set of each signal):\n"
            + "\n".join(explain(ranks, stuck))
        )
    order: dict[int, list[tuple[str, Step]]] = {rank: [] for rank in range(schedule.world_size)}
    for event in events:
        lane = ranks[event.rank][event.lane]
        order[event.rank].append((lane.name, lane.steps[event.step]))
    return order


class Move(NamedTuple):
    """The properties of a step that its order depends on, looked up once."""

    wait: Awaited | None
    counter: Counted | None
    """The counter that it waits for."""
    sets: tuple[tuple[Counted, int], ...]
    """(counter, number of sets)"""
    nth: int | None
    """The number of a collective on its lane; None for other steps."""
    occupies: bool
    is_set: bool


class Moves:
    """The moves of all ranks, by rank, lane and step, and the number of sets of each counter in a run."""

    def __init__(self, ranks: Sequence[Lanes]) -> None:
        self.of_ranks = [[_moves(rank, lane) for lane in lanes] for rank, lanes in enumerate(ranks)]
        self.per_run: Counters = Counter()
        for move in (move for lanes in self.of_ranks for lane in lanes for move in lane):
            for counter, times in move.sets:
                self.per_run[counter] += times


def _moves(rank: int, lane: Lane) -> list[Move]:
    found, met = [], 0
    for step in lane.steps:
        wait = step.awaits
        counter = (rank, wait.signal, wait.index) if wait else None
        nth = met if step.meets else None
        met += step.meets
        found.append(Move(wait, counter, tuple(step.sets().items()), nth, step.occupies, isinstance(step, Set)))
    return found


def play(ranks: Sequence[Lanes], runs: int = 1, moves: Moves | None = None) -> tuple[list[Event], dict[Event, int]]:
    """Return (all events of `runs` runs, in a possible order; {event at which a lane is stuck: sets of its counter}).

    moves: the moves of these ranks, if computed already."""
    game = _Play(ranks, moves or Moves(ranks), runs)
    while game.round():
        pass
    return game.events, game.stuck()


def sets_per_run(ranks: Sequence[Lanes]) -> Counters:
    total: Counters = Counter()
    for step in (step for lanes in ranks for lane in lanes for step in lane.steps):
        for counter, times in step.sets().items():
            total[counter] += times
    return total


def explain(ranks: Sequence[Lanes], stuck: dict[Event, int]) -> list[str]:
    """Return one line for each stuck lane, with the signal that it waits for."""
    per_run = sets_per_run(ranks)
    lines = []
    for event, count in stuck.items():
        lane = ranks[event.rank][event.lane]
        step = lane.steps[event.step]
        if wait := step.awaits:
            total = per_run[event.rank, wait.signal, wait.index]
            found = f"only {count} of {total} sets come before it" if total else "it is never set"
        else:
            found = f"only {count} of {len(ranks)} ranks reach it"
        lines.append(
            f"rank {event.rank}, lane {lane.name}, step {step_number(lane, event.step)}: {describe(step, event.rank)}: {found}"
        )
    return lines


class _Play:
    def __init__(self, ranks: Sequence[Lanes], moves: Moves, runs: int) -> None:
        self.runs = runs
        self.events: list[Event] = []
        self._moves, self._per_run = moves.of_ranks, moves.per_run
        self._turns = [sorted(range(len(lanes)), key=lambda i: lanes[i].resource != "copy") for lanes in ranks]
        self._at = [[0] * len(lanes) for lanes in ranks]
        self._run = [1] * len(ranks)
        self._sets: Counters = Counter()
        self._new_sets: Counters = Counter()
        # The ranks that have reached each collective.
        self._come: dict[CollectiveId, set[int]] = {}
        self._new_come: list[tuple[CollectiveId, int]] = []

    def round(self) -> bool:
        """Play one round; return True if anything happened."""
        before = len(self.events)
        for rank, turns in enumerate(self._turns):
            while sum([self._turn(rank, lane) for lane in turns]) or self._next_run(rank):
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
        for rank, lanes in enumerate(self._moves):
            for i, moves in enumerate(lanes):
                event = Event(self._run[rank], rank, i, self._at[rank][i])
                if event.step == len(moves):
                    continue
                move = moves[event.step]
                if move.counter:
                    found[event] = self._sets[move.counter]
                else:
                    found[event] = len(self._come[event.run, i, cast(int, move.nth)])
        return found

    def _turn(self, rank: int, i: int) -> bool:
        """Issue as many of the lane's next steps as possible: waits; one copy, GEMM or host wait; then sets.

        Return True if any step was issued."""
        moves, run = self._moves[rank][i], self._run[rank]
        first = at = self._at[rank][i]
        worked = False
        while at < len(moves):
            move = moves[at]
            if (worked and not move.is_set) or not self._may(run, rank, i, move):
                break
            for counter, times in move.sets:
                (self._sets if counter[0] == rank else self._new_sets)[counter] += times
            worked = worked or move.occupies
            self.events.append(Event(run, rank, i, at))
            at += 1
        self._at[rank][i] = at
        return at > first

    def _may(self, run: int, rank: int, lane: int, move: Move) -> bool:
        if move.wait and move.counter:
            return self._sets[move.counter] >= needed(run, move.wait, self._per_run[move.counter])
        if move.nth is not None:
            here = (run, lane, move.nth)
            come = self._come.get(here, set())
            if rank not in come and (here, rank) not in self._new_come:
                self._new_come.append((here, rank))
            return len(come) == len(self._moves)
        return True

    def _next_run(self, rank: int) -> bool:
        done = all(at == len(moves) for at, moves in zip(self._at[rank], self._moves[rank], strict=True))
        if not done or self._run[rank] == self.runs:
            return False
        self._run[rank] += 1
        self._at[rank] = [0] * len(self._moves[rank])
        return True


def needed(run: int, wait: Awaited, per_run: int) -> int:
    """Return the count that a counter with `per_run` sets in every run must reach for `wait` to end in this run."""
    before = run - 2 if wait.previous else run - 1
    return 0 if before < 0 else before * per_run + cast(int, wait.count)
