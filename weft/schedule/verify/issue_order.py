"""A deadlock-free order in which one CPU thread issues the steps of all lanes of a rank.

Streams of a GPU may share a hardware queue (with CUDA_DEVICE_MAX_CONNECTIONS=1 they all do). A wait then blocks
everything that is issued after it, on any lane. Suppose that two ranks each issue a wait for the other's set before
their own set. Then both hang, even if wait and set are on different lanes.

To find a safe order, all ranks are simulated together in rounds, with steps that take no time. A step is issued in the
first round in which all sets that it waits for have been made. A set for the same rank takes effect immediately; a set
for another rank takes effect in the next round.

If each rank issues its steps by round, every wait is issued after the sets that it needs. So a wait at the head of a
queue never blocks a set that it needs. In the simulation, issuing a step never prevents another step from being issued.
So if a lane gets stuck here, every order hangs.

Within a round lanes alternate, copy lanes first. A lane issues one copy or GEMM at a time, with its waits and sets.
This way the first chunks are sent to all peers before any second chunk, and kernels without waits are not queued behind
all copies.
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
from weft.words import counted

Lanes: TypeAlias = tuple[Lane, ...]
Counted: TypeAlias = tuple[Index, str, Index]
"""A counter: (rank that owns it, name of its signals, index)."""
CollectiveId: TypeAlias = tuple[int, int, int]
"""A collective on all ranks: (run, lane, its number among the collectives of the lane)."""


class Event(NamedTuple):
    """One execution of a step.

    run: the number of the run, from 1.
    lane: the index of the step's lane among the rank's lanes.
    step: the index of the step in its lane.
    """

    run: int
    rank: int
    lane: int
    step: int


def issue_order(schedule: Schedule) -> dict[int, list[tuple[str, Step]]]:
    """Return {rank: [(lane, step), ...]}: an order without deadlock, even if each rank has only one in-order queue.

    Waits with `previous` count as satisfied, because all steps of the previous run have been issued before.

    Raise `ScheduleError` with the waits that never end if no such order exists.
    """
    # Do not use the expected sizes: a step that is empty for them would be missing if the actual size differs.
    ranks = [schedule.of_rank(rank, expected=False) for rank in range(schedule.world_size)]
    events, stuck = play(ranks)
    if stuck:
        raise ScheduleError(
            f"schedule {schedule.name} deadlocks. These lanes wait forever. Add or correct the steps that set their signals:\n"
            + "\n".join(explain(ranks, stuck))
        )
    order: dict[int, list[tuple[str, Step]]] = {rank: [] for rank in range(schedule.world_size)}
    for event in events:
        lane = ranks[event.rank][event.lane]
        order[event.rank].append((lane.name, lane.steps[event.step]))
    return order


class Move(NamedTuple):
    """The properties of one step that determine when the step may be issued."""

    wait: Awaited | None
    counter: Counted | None
    """The counter that the step waits for."""
    sets: tuple[tuple[Counted, int], ...]
    """(counter, how often the step sets it)"""
    nth: int | None
    """The number of a collective on its lane; None for other steps."""
    occupies: bool
    is_set: bool


class Moves:
    """The `Move` of each step of all ranks.

    of_ranks: the moves, with indices [rank][lane][step].
    per_run: {counter: number of its sets in one run}.
    """

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
    """Simulate `runs` runs in which steps take no time. Return (events, stuck).

    events: all issued events, in a possible order.
    stuck: {event at which a lane waits forever: progress}. If the event is a wait, its progress is the number of times
        that its counter has been set. If it is a collective, its progress is the number of ranks that have reached it.
    moves: `Moves(ranks)`, if the caller has it already.
    """
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


def too_few_sets(wanted: int, made: int) -> str:
    """Return the error text for a wait that needs `wanted` sets of its signal, if a run makes only `made` sets."""
    if not made:
        return "it waits for its signal, but no step of a run sets the signal: add a step that does"
    return (
        f"it waits until its signal is set {counted(wanted, 'time')}, but a run sets the signal {counted(made, 'time')}: wait "
        f"for at most {made}, or add a step that sets it"
    )


def explain(ranks: Sequence[Lanes], stuck: dict[Event, int]) -> list[str]:
    """Return a line of text for each stuck lane, with the signal that it waits for. stuck: the second result of `play`."""
    per_run = sets_per_run(ranks)
    lines = []
    for event, count in stuck.items():
        lane = ranks[event.rank][event.lane]
        step = lane.steps[event.step]
        if wait := step.awaits:
            total = per_run[event.rank, wait.signal, wait.index]
            found = (
                f"only {count} of the {total} steps that set its signal can run" if total else "its signal is never set"
            )
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
        """Simulate one round. Return True if a step was issued or a rank reached a collective."""
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
        """Issue the next steps of lane `i` that may be issued: waits, one step with work (`Step.occupies`), then sets.

        Return True if a step was issued.
        """
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
    """Return the value that a counter must reach for `wait` to end in run number `run`, counted from 1.

    per_run: the number of sets of the counter in each run. Counters are never reset.
    """
    before = run - 2 if wait.previous else run - 1
    return 0 if before < 0 else before * per_run + cast(int, wait.count)
