"""The happens-before relation of steps, valid for any speed of ranks, links and lanes.

Step a happens before step b if b cannot begin without a. A step begins when the previous step of its lane has ended. In
addition, these steps wait:

    the first step of a lane  until all lanes of its rank have ended the previous run
    a wait for T sets         until T sets of its counter have happened. The sets may belong to any run: a fast rank's
                              set of the second run may count in place of a slow rank's set of the first run
    a collective              until all ranks have reached it

The ancestors of a step are the step itself and all steps that happen before it:

    ancestors(step) = {step} + ancestors(previous step of the lane)
                      + if the step waits for T of the n sets of a counter: each step without which fewer than T sets can happen.
                        Such a step is an ancestor of at least n - T + 1 of the sets, so only T - 1 can happen without it
                      + if it is a collective: the ancestors of the collective on all ranks

The solution is the greatest fixed point: the computation starts with all steps as ancestors, and applies the equation,
which removes steps, until nothing changes.

If a step is an ancestor, so are all earlier steps of its lane. So ancestors are stored as a vector clock: for each lane
of all ranks, the number of its steps that are ancestors, counted over all runs. The ancestors of either of two steps
are the maximum of both clocks, lane by lane. Given the clocks of several steps, the k-th largest number of each lane
gives the ancestors of at least k of these steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

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
        begins = list(accumulate(map(len, ranks), initial=0))
        lane_of = [begins[event.rank] + event.lane for event in self.events]
        nth_of, lengths = [], [0] * begins[-1]
        for lane in lane_of:
            nth_of.append(lengths[lane])
            lengths[lane] += 1
        self._lane = np.array(lane_of, np.int64)  # among the lanes of all ranks
        self._nth = np.array(nth_of, np.int64)  # the number of earlier events of the lane
        self._sets: dict[Counted, list[int]] = defaultdict(list)
        for number, move in enumerate(self._moves):
            for counter, times in move.sets:
                self._sets[counter] += [number] * times
        self._of_one_lane = {counter: len({lane_of[n] for n in sets}) == 1 for counter, sets in self._sets.items()}
        longest = np.min_scalar_type(max(lengths, default=0))
        self._clocks = np.tile(np.array(lengths, longest), (len(self.events), 1))
        while self._narrow():
            pass

    def step(self, event: Event) -> Step:
        return self.ranks[event.rank][event.lane].steps[event.step]

    def before(self, first: int, second: int) -> bool:
        """True if event number `first` happens before event number `second` in every execution."""
        return first != second and bool(self._clocks[second, self._lane[first]] > self._nth[first])

    def each_before(self, first: np.ndarray | int, second: np.ndarray | int) -> np.ndarray:
        """Return a bool array: element i is `before(first[i], second[i])`. A number applies to all i."""
        found: np.ndarray = (first != second) & (self._clocks[second, self._lane[first]] > self._nth[first])
        return found

    def _narrow(self) -> bool:
        """Apply the equation at the top of this file to all events once. Return True if anything changed."""
        total = int(self._clocks.sum(dtype=np.int64))
        # The clock of each lane's latest step.
        now = [np.zeros((len(lanes), self._clocks.shape[1]), self._clocks.dtype) for lanes in self.ranks]
        run = [1] * len(self.ranks)
        met: dict[tuple[int, int, int], np.ndarray] = {}

        def begin(rank: int, in_run: int) -> None:
            if in_run > run[rank]:
                now[rank][:] = now[rank].max(0)
                run[rank] = in_run

        places = zip(self._lane.tolist(), self._nth.tolist(), strict=True)
        for number, (event, move, (lane, nth)) in enumerate(zip(self.events, self._moves, places, strict=True)):
            begin(event.rank, event.run)
            clock = now[event.rank][event.lane]
            if move.counter:
                if (of_wait := self._clock_of_wait(event, move)) is not None:
                    np.maximum(clock, of_wait, out=clock)
            elif move.nth is not None:
                here = (event.run, event.lane, move.nth)
                if here not in met:  # all ranks have reached the collective, and no rank has passed it
                    for rank in range(len(self.ranks)):
                        begin(rank, event.run)
                    met[here] = np.max([lanes[event.lane] for lanes in now], 0)
                np.maximum(clock, met[here], out=clock)
            clock[lane] = nth + 1
            self._clocks[number] = clock
        return int(self._clocks.sum(dtype=np.int64)) < total

    def _clock_of_wait(self, event: Event, move: Move) -> np.ndarray | None:
        """Return the steps without which a wait cannot end, as a vector clock; None if the wait needs no `Set`."""
        assert move.counter
        assert move.wait
        sets = self._sets[move.counter]
        wanted = needed(event.run, move.wait, self._per_run[move.counter])
        if wanted <= 0:
            return None
        if self._of_one_lane[move.counter]:  # the clocks of its steps rise
            return self._clocks[sets[wanted - 1]]
        return np.partition(self._clocks[sets], wanted - 1, 0)[wanted - 1]
