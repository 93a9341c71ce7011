"""Binary flags, the signals between GPU ranks. A captured CUDA graph can wait for flags, since every replay waits for the
same value.

Each `Wait` step has a 64-bit word in its rank's symmetric memory. The flag is a 1 in the low half of the word. A `Set` step
raises the flags of all `Wait` steps with the same signal and index. A wait ends when its flag is raised.

Executors on CPU use counters, but streams cannot: a counter has another value in every run, and a replayed graph always waits
for the same value. Kernels that wait for a count in memory would occupy a part of the GPU, and delay GEMMs that need the whole
GPU.

    word    low half    1: the flag is raised. Peers write 1, the rank itself writes 0
            high half   POISONED: the group has failed, and every wait must end. Only the rank itself writes it

A wait with `previous=True` starts with its flag raised, because no run precedes the first.

The tiles of a kernel may set one counter (a signal and an index) many times. The kernel then counts the tiles in memory of
its own device, and raises the flag after the last tile. Streams of the kernel's own rank wait for this flag just like
streams of peers.

When to clear a flag. A flag must be clear before it is raised again, or the second signal is lost. A write by a stream is
slow, because it includes a system-scope fence. So a stream clears a flag in the same operation as another write, if
possible. Let W be a wait of rank b for a signal of rank a, and let A be the next `Set` step of rank b for rank a. One
operation clears W's flag and sets A. This is correct if rank a waits for A before its next step S that raises W's flag:

    rank b: wait W ... clear W's flag and set A                   rank a: wait for A ... set S, which raises W's flag again

Then S cannot precede the clear. If there is no such step A, the flag is cleared right after the wait. In this case
`flags_of` verifies that each wait is ordered before the next set of its flag (`weft.schedule.verify.happens_before`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from weft.errors import ScheduleError
from weft.kernels.signals import FLAG, POISONED
from weft.schedule import Schedule, Set
from weft.schedule.launches import Key, setters
from weft.schedule.steps import Awaited
from weft.schedule.verify.happens_before import HappensBefore
from weft.schedule.verify.issue_order import Lanes

StepPlace: TypeAlias = tuple[str, int]
"""A lane's name, and the index of a step in the lane."""
AWAITED = FLAG | POISONED
"""The bits that end a wait: FLAG or POISONED."""


@dataclass(frozen=True, slots=True)
class Flag:
    """The flag of one wait.

    word: the index of the flag's word in the rank's memory. key: the counter for which the lane waits: (signal, index).
    setter: the rank that raises the flag. previous: True if the wait is for a signal of the previous run.
    carrier: the index, in the lane, of a later `Set` step whose stream operation also clears the flag. None: the stream
        clears the flag right after the wait.
    passed: the number of the lane's waits up to and including this wait (see `RankSchedule.standing_word`).
    """

    word: int
    key: Key
    setter: int
    previous: bool
    carrier: int | None
    passed: int


@lru_cache(maxsize=64)
def flags_of(schedule: Schedule) -> tuple[dict[StepPlace, Flag], ...]:
    """Return the flags of each rank, by the place of the wait: (lane, index of the step).

    Raise `ScheduleError` if a flag cannot replace the counter (signal, index) for which a step waits. There are three
    reasons:

    - A run sets the counter twice.
    - The wait is for only some of the sets by a tile kernel.
    - The flag could be raised again before it is cleared.
    """
    ranks = [schedule.of_rank(rank, expected=False) for rank in range(schedule.world_size)]
    _require_set_once(schedule, ranks)
    crossing = setters(ranks)
    found: list[dict[StepPlace, Flag]] = []
    for rank, lanes in enumerate(ranks):
        mine: dict[StepPlace, Flag] = {}
        for lane in lanes:
            passed = 0
            for at, step in enumerate(lane.steps):
                if not (wait := step.awaits) or (key := (wait.signal, int(wait.index))) not in crossing[rank]:
                    continue
                passed += 1
                setter = crossing[rank][key]
                _require_all(schedule, rank, wait, ranks[setter])
                carrier = _carrier(ranks, rank, lane.steps, at, setter)
                mine[lane.name, at] = Flag(len(mine), key, setter, wait.previous, carrier, passed)
        found.append(mine)
    _check(schedule, ranks, found)
    return tuple(found)


def _require_set_once(schedule: Schedule, ranks: list[Lanes]) -> None:
    """Raise `ScheduleError` if two steps of a run set the same counter, which a binary flag cannot represent."""
    sets = Counter(counter for lanes in ranks for lane in lanes for step in lane.steps for counter in step.sets())
    for (at, signal, index), count in sets.items():
        if count > 1:
            raise ScheduleError(
                f"schedule {schedule.name}: signal {signal}[{index}] of rank {at} is set {count} times in a run, but on GPUs a "
                f"signal is a flag, not a counter: give every setter an index of its own"
            )


def _require_all(schedule: Schedule, rank: int, wait: Awaited, lanes: Lanes) -> None:
    """Raise `ScheduleError` if a step waits for only some of the tiles of a kernel that set its counter. On GPUs a tile kernel
    raises a flag once, after its last tile.
    """
    for step in (step for lane in lanes for step in lane.steps if step.inner):
        times = step.sets().get((rank, wait.signal, wait.index), 0)
        if times not in (0, wait.count):
            raise ScheduleError(
                f"schedule {schedule.name}: rank {rank} waits for {wait.count} of the {times} times that tiles set "
                f"{wait.signal}[{wait.index}], but a kernel raises the flag once, after all of them: wait for all {times}"
            )


def words_for(flags: dict[StepPlace, Flag]) -> dict[Key, list[int]]:
    """Return, for each counter (signal, index), the word indices of all flags that a set of this counter raises."""
    words = defaultdict[Key, list[int]](list)
    for flag in flags.values():
        words[flag.key].append(flag.word)
    return words


def missing(flags: dict[StepPlace, Flag], words: list[int], standing: int) -> list[tuple[str, Flag]]:
    """Return the waits by which the last run may be blocked, as (lane, flag): at most one for each rank that sets signals. The
    list is empty if the last run is not blocked.

    A flag that this run has already cleared looks like a flag that was never raised, so some of these waits may have ended.
    Waits for signals of the previous run are listed only if there are no others.

    words: the contents of the rank's signal words, which include the flags.
    standing: the contents of the standing word (`RankSchedule.standing_word`). A run clears the flags of its
        waits for the previous run at its beginning. So if the word is 0 and all these flags are raised, no run is blocked.
    """
    found = [(lane, t) for (lane, _), t in flags.items() if words[t.word] == 0 and t.passed >= standing]
    if not standing and not any(flag.previous for _, flag in found):
        return []
    likelier = [wait for wait in found if not wait[1].previous] or found
    return list({flag.setter: (lane, flag) for lane, flag in reversed(likelier)}.values())[::-1]


def _carrier(ranks: list[Lanes], rank: int, steps: tuple, at: int, setter: int) -> int | None:
    """Return the index of a `Set` step whose stream operation can also clear the flag of the wait at index `at`, or None.

    The candidate is the lane's next `Set` step for rank `setter`. The candidate is suitable if `setter` waits for the
    candidate's signal before it raises the flag again. `setter` raises the flag again in this run if the wait is for the
    previous run, otherwise in the next run.
    """
    wait = steps[at]
    for place in range(at + 1, len(steps)):
        step = steps[place]
        if not isinstance(step, Set) or step.at != setter:
            continue
        for lane in ranks[setter]:
            waited = False
            for other in lane.steps:
                if (heard := other.awaits) and (heard.signal, heard.index) == (step.signal, step.index):
                    waited = waited or heard.previous != wait.previous
                if (rank, wait.signal, wait.index) in other.sets():
                    return place if waited else None
        return None
    return None


def _check(schedule: Schedule, ranks: list[Lanes], flags: list[dict[StepPlace, Flag]]) -> None:
    if all(flag.carrier is not None for mine in flags for flag in mine.values()):
        return
    happened = HappensBefore(ranks, runs=3)
    numbers: dict[tuple[int, int, str, int], int] = {}
    sets: dict[tuple[int, int, str, int], int] = {}
    for number, event in enumerate(happened.events):
        step = happened.step(event)
        lane = ranks[event.rank][event.lane].name
        if step.awaits:
            numbers[event.run, event.rank, lane, event.step] = number
        for at, signal, index in step.sets():
            sets[event.run, int(at), signal, int(index)] = number
    for rank, mine in enumerate(flags):
        for (lane, at), flag in mine.items():
            wait, following = numbers[2, rank, lane, at], sets[2 if flag.previous else 3, rank, *flag.key]
            if flag.carrier is None and not happened.before(wait, following):
                raise ScheduleError(
                    f"schedule {schedule.name}: rank {flag.setter} may set {flag.key[0]}[{flag.key[1]}] of rank {rank} again "
                    f"before lane {lane!r} there has ended its previous wait, but on GPUs a signal is a flag, not a counter: have "
                    f"rank {flag.setter} wait for a signal of rank {rank} first"
                )
