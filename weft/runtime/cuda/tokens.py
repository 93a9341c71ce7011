"""Signals between ranks as tokens, so that a stream can wait for them in a captured graph: the same numbers in every run.

Each wait has a 64-bit word in its rank's symmetric memory. Its low half is 1 while a token lies there. A set puts tokens into
the words of all waits for its counter; a wait ends when its token has come, and the token is taken away before the next one
can come. (Counting runs up, as executors on CPU do, needs other numbers in every run. A graph repeats its own, and waiting in
kernels that read the count from memory would keep them from using a whole GPU: GEMMs that need all of it would wait too.)

    word    low half    1: a token lies there. Peers write 1, the rank itself writes 0
            high half   POISONED: the group has failed, and no wait is to last. Only the rank itself writes it

A wait for a signal of the previous run has its first token from the start.

Tiles of a kernel that set one counter many times put a token when the last of them has: the kernel counts, in memory of its own
device, and streams of its own rank wait for it as they wait for peers.

When a token is taken. It must be gone before the next one is put: else that one is lost. Writing is slow (a fence of the whole
system), so that a stream which takes a token does so where it writes anyway: with its next set for the rank that the token
is from, if that rank waits for this set before it puts the next token. Then

    rank b: wait W ... take W's token and set A, at once          rank a: wait for A ... set S, which puts W's next token

and S cannot come before the taking. If no set is like that, the token is taken right behind the wait, and it is looked at
whether the wait of one run is certain to be before the next set (`weft.schedule.happens`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from weft.errors import ScheduleError
from weft.kernels.signals import POISONED, TOKEN
from weft.schedule import Schedule, Set, Wait
from weft.schedule.happens import Happened
from weft.schedule.order import Lanes

Key: TypeAlias = tuple[str, int]
Place: TypeAlias = tuple[str, int]
"""A lane's name, and a step's place in the lane."""
AWAITED = TOKEN | POISONED
"""A wait ends when its word has one of these bits."""


@dataclass(frozen=True, slots=True)
class Token:
    """What one wait of a rank waits for. `word`: its number among the rank's; `carrier`: the place in its lane of the set with
    which a stream takes it; None: right behind the wait. `passed`: waits of the lane up to this one."""

    word: int
    key: Key
    setter: int
    previous: bool
    carrier: int | None
    passed: int


@lru_cache(maxsize=64)
def tokens_of(schedule: Schedule) -> tuple[dict[Place, Token], ...]:
    """Of each rank, by the place of the wait. `ScheduleError` if a counter is set twice in a run, or if a token could come while
    the last one lies there."""
    ranks = [schedule.of_rank(rank, expected=False) for rank in range(schedule.world_size)]
    crossing = _setters(schedule, ranks)
    found: list[dict[Place, Token]] = []
    for rank, lanes in enumerate(ranks):
        mine: dict[Place, Token] = {}
        for lane in lanes:
            passed = 0
            for at, step in enumerate(lane.steps):
                if not isinstance(step, Wait) or (key := (step.signal, int(step.index))) not in crossing[rank]:
                    continue
                passed += 1
                setter = crossing[rank][key]
                _require_all(schedule, rank, step, ranks[setter])
                carrier = _carrier(ranks, rank, lane.steps, at, setter)
                mine[lane.name, at] = Token(len(mine), key, setter, step.previous, carrier, passed)
        found.append(mine)
    _check(schedule, ranks, found)
    return tuple(found)


def _setters(schedule: Schedule, ranks: list[Lanes]) -> list[dict[Key, int]]:
    """Of each rank, the counters that another one sets, or tiles of its own, and whose they are."""
    sets = Counter[tuple[int, str, int]]()
    crossing: list[dict[Key, int]] = [{} for _ in ranks]
    for setter, lanes in enumerate(ranks):
        for step in (step for lane in lanes for step in lane.steps):
            for at, signal, index in step.sets():
                sets[int(at), signal, int(index)] += 1
                if at != setter or step.inner:
                    crossing[int(at)][signal, int(index)] = setter
    for (at, signal, index), count in sets.items():
        if count > 1:
            raise ScheduleError(
                f"schedule {schedule.name}: signal {signal}[{index}] of rank {at} is set {count} times in a run, and a stream "
                f"sets a word by writing it: give every setter an index of its own"
            )
    return crossing


def _require_all(schedule: Schedule, rank: int, wait: Wait, lanes: Lanes) -> None:
    """Tiles that set a counter many times put one token, when all of them have."""
    for step in (step for lane in lanes for step in lane.steps if step.inner):
        times = step.sets().get((rank, wait.signal, wait.index), 0)
        if times not in (0, wait.count):
            raise ScheduleError(
                f"schedule {schedule.name}: rank {rank} waits for {wait.count} of the {times} times that tiles set "
                f"{wait.signal}[{wait.index}], and kernels set a word once, when all of these have come: wait for all"
            )


def words_for(tokens: dict[Place, Token]) -> dict[Key, list[int]]:
    """The words into which a set of each counter puts its tokens."""
    words = defaultdict[Key, list[int]](list)
    for token in tokens.values():
        words[token.key].append(token.word)
    return words


def missing(tokens: dict[Place, Token], words: list[int], standing: int) -> list[tuple[str, Token]]:
    """What a run that does not get on may wait for: lanes and tokens, one for each rank; nothing if no run stands at a wait.

    words: what lies in the rank's words. standing: 1 + how many waits the run has passed, as far as it says so, or 0: then a
    run stands while the token of a wait for the previous run is missing, since that is the first to be taken in a run. A token
    that has been taken in this run is missing too, so that there may be several: this run's signals are likelier.
    """
    found = [(lane, t) for (lane, _), t in tokens.items() if words[t.word] == 0 and t.passed >= standing]
    if not standing and not any(token.previous for _, token in found):
        return []
    likelier = [wait for wait in found if not wait[1].previous] or found
    return list({token.setter: (lane, token) for lane, token in reversed(likelier)}.values())[::-1]


def _carrier(ranks: list[Lanes], rank: int, steps: tuple, at: int, setter: int) -> int | None:
    """The next set for the setter in the lane of a wait, if the setter waits for it before it sets the wait's counter again:
    in the same run if it is a wait for the previous run's set, in the next one otherwise."""
    wait = steps[at]
    for place in range(at + 1, len(steps)):
        step = steps[place]
        if not isinstance(step, Set) or step.at != setter:
            continue
        for lane in ranks[setter]:
            waited = False
            for other in lane.steps:
                if isinstance(other, Wait) and (other.signal, other.index) == (step.signal, step.index):
                    waited = waited or other.previous != wait.previous
                if (rank, wait.signal, wait.index) in other.sets():
                    return place if waited else None
        return None
    return None


def _check(schedule: Schedule, ranks: list[Lanes], tokens: list[dict[Place, Token]]) -> None:
    if all(token.carrier is not None for mine in tokens for token in mine.values()):
        return
    happened = Happened(ranks, runs=3)
    numbers: dict[tuple[int, int, str, int], int] = {}
    sets: dict[tuple[int, int, str, int], int] = {}
    for number, event in enumerate(happened.events):
        step = happened.step(event)
        lane = ranks[event.rank][event.lane].name
        if isinstance(step, Wait):
            numbers[event.run, event.rank, lane, event.step] = number
        for at, signal, index in step.sets():
            sets[event.run, int(at), signal, int(index)] = number
    for rank, mine in enumerate(tokens):
        for (lane, at), token in mine.items():
            wait, following = numbers[2, rank, lane, at], sets[2 if token.previous else 3, rank, *token.key]
            if token.carrier is None and not happened.before(wait, following):
                raise ScheduleError(
                    f"schedule {schedule.name}: rank {token.setter} may set {token.key[0]}[{token.key[1]}] of rank {rank} again "
                    f"before lane {lane!r} there has ended its wait for the last time, and streams do not count: have rank "
                    f"{token.setter} wait for a signal of rank {rank} first"
                )
