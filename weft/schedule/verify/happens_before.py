"""The happens-before relation of steps, for any speed of ranks, links and lanes.

A step is before another if the other can never begin without it. A step begins when the step before it on its lane has happened,
and besides

    first step of a lane    when all lanes of its rank have ended the previous run
    wait for a count of T   when T of the sets of that counter have happened: of any run, so that a fast rank's second set may stand
                            in for a slow rank's first
    collective              when all ranks have reached it

Hence, for the set `ancestors` of all steps that are before a step, itself among them (its ancestors):

    ancestors(step) = step + ancestors(predecessor) + for a wait with n sets on its counter: all steps in n - T + 1 of the sets'
                      ancestors

(without one of those, fewer than T sets can happen). The solution is the greatest fixed point: it leaves out only the steps that
some execution can do without. Start with all steps, and apply the equation until nothing changes. Sets are bits; a Python
integer holds one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, reduce
from operator import and_

import numpy as np

from weft.schedule.steps import Step
from weft.schedule.verify.issue_order import Counted, Event, Lanes, Move, Moves, needed, play


class HappensBefore:
    """All steps of some runs, in a possible order, and their happens-before relation."""

    def __init__(self, ranks: Sequence[Lanes], runs: int, moves: Moves | None = None) -> None:
        """Record the order of these ranks. moves: their moves, if computed already."""
        self.ranks = ranks
        moves = moves or Moves(ranks)
        self.events, stuck = play(ranks, runs, moves)
        if stuck:
            raise ValueError(
                "the schedule hangs: weft.schedule.verify.issue_order.issue_order names the waits that never end"
            )
        self._moves = [moves.of_ranks[event.rank][event.lane][event.step] for event in self.events]
        self._per_run = moves.per_run
        self._sets: dict[Counted, list[int]] = defaultdict(list)
        for number, move in enumerate(self._moves):
            for counter, times in move.sets:
                self._sets[counter] += [number] * times
        self._ancestors = [(1 << len(self.events)) - 1] * len(self.events)
        while self._narrow():
            pass

    def step(self, event: Event) -> Step:
        return self.ranks[event.rank][event.lane].steps[event.step]

    def ancestors(self, number: int) -> int:
        """Return the bit set of all events that are certain to happen before event `number`, and of itself."""
        return self._ancestors[number]

    def before(self, first: int, second: int) -> bool:
        """True if event number `first` is certain to happen before event number `second`."""
        return first != second and bool(self._ancestors[second] >> first & 1)

    def each_before(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return `before` for many pairs of numbers at once."""
        found: np.ndarray = (first != second) & (self._bits[second, first >> 3] >> (first & 7) & 1).astype(bool)
        return found

    @cached_property
    def _bits(self) -> np.ndarray:
        """All ancestors as an array [events, bytes]."""
        width = -(-len(self.events) // 8)
        whole = b"".join([steps.to_bytes(width, "little") for steps in self._ancestors])
        return np.frombuffer(whole, np.uint8).reshape(len(self.events), width)

    def _narrow(self) -> bool:
        """Apply the equation to all events once; return True if anything changed."""
        changed = False
        now = [[0] * len(lanes) for lanes in self.ranks]  # the ancestors of each lane's latest step
        run = [1] * len(self.ranks)
        met: dict[tuple[int, int, int], int] = {}

        def begin(rank: int, in_run: int) -> None:
            if in_run > run[rank]:
                now[rank] = [_union(now[rank])] * len(now[rank])
                run[rank] = in_run

        for number, (event, move) in enumerate(zip(self.events, self._moves, strict=True)):
            begin(event.rank, event.run)
            past = now[event.rank][event.lane] | 1 << number
            if move.counter:
                past |= self._ancestors_of_wait(event, move)
            elif move.nth is not None:
                here = (event.run, event.lane, move.nth)
                if here not in met:  # all ranks have reached it, and none has gone on
                    for rank in range(len(self.ranks)):
                        begin(rank, event.run)
                    met[here] = _union([lanes[event.lane] for lanes in now])
                past |= met[here]
            changed |= past != self._ancestors[number]
            self._ancestors[number] = now[event.rank][event.lane] = past
        return changed

    def _ancestors_of_wait(self, event: Event, move: Move) -> int:
        assert move.counter
        assert move.wait
        sets = self._sets[move.counter]
        count = len(sets) - needed(event.run, move.wait, self._per_run[move.counter]) + 1
        if count > len(sets):
            return 0  # it waits for nothing
        if count == len(sets):
            return reduce(and_, [self._ancestors[number] for number in sets])
        if count == 1:
            return _union([self._ancestors[number] for number in sets])
        # in_some[k]: the steps that are in at least k of the pasts seen so far
        in_some = [(1 << len(self.events)) - 1] + [0] * count
        for number in sets:
            for k in range(count, 0, -1):
                in_some[k] |= in_some[k - 1] & self._ancestors[number]
        return in_some[count]


def _union(pasts: Sequence[int]) -> int:
    result = 0
    for past in pasts:
        result |= past
    return result
