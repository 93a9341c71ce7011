"""The happens-before relation of steps, valid for any speed of ranks, links and lanes.

Step a happens before step b if b cannot begin without a. A step begins when the previous step of its lane has ended, and

    the first step of a lane  when all lanes of its rank have ended the previous run
    a wait for T sets         when T sets of its counter have happened. The sets may belong to any run: a fast rank's
                              set of the second run may count in place of a slow rank's set of the first run
    a collective              when all ranks have reached it

The ancestors of a step are the step itself and all steps that happen before it:

    ancestors(step) = {step} + ancestors(previous step of the lane)
                      + if the step waits for T of the n sets of a counter: each step without which fewer than T sets can happen.
                        Such a step is an ancestor of at least n - T + 1 of the sets, so only T - 1 can happen without it
                      + if it is a collective: the ancestors of the collective on all ranks

The solution is the greatest fixed point: the computation starts with all steps as ancestors, and applies the equation,
which removes steps, until nothing changes. A set of steps is a Python integer with a bit for each step.
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
    """The happens-before relation of all steps in several runs.

    events: the executed steps, in an order in which they may run.
    """

    def __init__(self, ranks: Sequence[Lanes], runs: int, moves: Moves | None = None) -> None:
        """Compute the relation.

        ranks: the lanes of each rank.
        moves: `Moves(ranks)`, if the caller has it already.
        """
        self.ranks = ranks
        moves = moves or Moves(ranks)
        self.events, stuck = play(ranks, runs, moves)
        if stuck:
            raise ValueError(
                "the schedule hangs: call weft.schedule.verify.verify, whose error lists the waits that never end"
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
        """Return the bit set of event `number` and all events that happen before it."""
        return self._ancestors[number]

    def before(self, first: int, second: int) -> bool:
        """True if event number `first` happens before event number `second` in every execution."""
        return first != second and bool(self._ancestors[second] >> first & 1)

    def each_before(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return a bool array: element i is `before(first[i], second[i])`."""
        found: np.ndarray = (first != second) & (self._bits[second, first >> 3] >> (first & 7) & 1).astype(bool)
        return found

    @cached_property
    def _bits(self) -> np.ndarray:
        """The ancestors of all events as bit sets: uint8, [events, ceil(events / 8)]."""
        width = -(-len(self.events) // 8)
        whole = b"".join([steps.to_bytes(width, "little") for steps in self._ancestors])
        return np.frombuffer(whole, np.uint8).reshape(len(self.events), width)

    def _narrow(self) -> bool:
        """Apply the equation at the top of this file to all events once. Return True if anything changed."""
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
                if here not in met:  # all ranks have reached the collective, and no rank has passed it
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
            return 0  # the wait needs no set
        if count == len(sets):
            return reduce(and_, [self._ancestors[number] for number in sets])
        if count == 1:
            return _union([self._ancestors[number] for number in sets])
        # in_some[k]: the steps that are ancestors of at least k of the sets that the loop has visited
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
