"""Replace each `Tiles` step by lanes with one tile each, so that checks need to handle only lanes and signals.

Tiles of a kernel run concurrently, like lanes. `forked` replaces a step of n tiles by signals `begin` and `end[0 .. n -
1]`:

    the step's lane      set begin; wait for end[0], ..., end[n - 1]
    n added lanes        wait for begin; the body of tile i; set end[i]

So `issue_order`, `happens_before` and `verify` can treat the result as an ordinary schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

from weft.schedule.expr import Index
from weft.schedule.schedule import Schedule
from weft.schedule.steps import Lane, Set, Signals, Step, Tiles, Wait

_BEGIN, _END = "begin of tiles ", "end of tiles "  # names of the signals of forked lanes


def forked(
    schedule: Schedule, most: int, ranks: Iterable[int] | None = None
) -> tuple[Schedule, list[tuple[Lane, ...]], set[str]]:
    """Replace the `Tiles` steps of `schedule` by lanes. Return (the schedule with added signals, the lanes of each rank
    with numbers in place of expressions, the names of the buffers that omitted tiles write).

    most: the maximum number of tiles of a step that become lanes. If a step has more tiles, the first, the last, every
        k-th tile between them, and their neighbours become lanes. The other tiles are omitted, and waits count only the
        sets of the remaining tiles.
    ranks: the ranks whose lanes are returned; None for all ranks.
    """
    ranks = range(schedule.world_size) if ranks is None else ranks
    forks = [_Fork(rank, schedule.of_rank(rank), most) for rank in ranks]
    dropped = sum((fork.dropped for fork in forks), Counter())
    lanes = [
        tuple(replace(lane, steps=tuple(_without(lane.steps, fork.rank, dropped))) for lane in fork.lanes)
        for fork in forks
    ]
    signals = {signal.name: signal for fork in forks for signal in fork.signals}
    left_out = {name for fork in forks for name in fork.left_out}
    return replace(schedule, signals=(*schedule.signals, *signals.values())), lanes, left_out


def step_number(lane: Lane, step: int) -> int:
    """Return the number, from 1, that a step of a forked lane has in the original lane or tile body, for error texts."""
    return sum(
        not (isinstance(s, Wait | Set) and s.signal.startswith(_END))
        and not (isinstance(s, Wait) and s.signal.startswith(_BEGIN))
        for s in lane.steps[: step + 1]
    )


class _Fork:
    """The lanes of one rank after its tiles have become lanes, and the added signals.

    dropped: for each counter, the number of times that omitted tiles would set it.
    left_out: the buffers that omitted tiles write.
    """

    def __init__(self, rank: int, lanes: tuple[Lane, ...], most: int) -> None:
        self.rank, self.most = rank, most
        self.signals: list[Signals] = []
        self.dropped: Counter[tuple[Index, str, Index]] = Counter()
        self.left_out: set[str] = set()
        self._more: list[Lane] = []
        steps = [[new for step in lane.steps for new in self._written_out(lane, step)] for lane in lanes]
        self.lanes = [replace(lane, steps=tuple(s)) for lane, s in zip(lanes, steps, strict=True)] + self._more

    def _written_out(self, lane: Lane, step: Step) -> list[Step]:
        if not isinstance(step, Tiles):
            return [step]
        extent = cast(int, step.extent)
        chosen = _sample(extent, self.most)
        name = f"{lane.name}/{step.kernel.name}/{len(self._more)}"
        # The number of `end` signals is `most` on all ranks, because signals have one size on all ranks.
        begin, end = Signals(_BEGIN + name, 1), Signals(_END + name, self.most)
        self.signals += [begin, end]
        for i, number in enumerate(chosen):
            body = (inner for inner in step.tile(number) if not inner.is_empty)
            steps = (Wait(begin.name), *body, Set(end.name, i, self.rank))
            self._more.append(Lane(f"{lane.name}, {step.kernel.name}, {step.index} = {number}", lane.resource, steps))
        if len(chosen) < extent:
            self._leave_out(step, chosen)
        return [Set(begin.name, 0, self.rank), *(Wait(end.name, i) for i in range(len(chosen)))]

    def _leave_out(self, tiles: Tiles, chosen: list[int]) -> None:
        for inner in tiles.body:
            self.left_out.update(access.region.buffer for access in inner.accesses() if access.writes)
        self.dropped.update(tiles.sets())
        for inner in (inner for number in chosen for inner in tiles.tile(number)):
            self.dropped.subtract(inner.sets())


def _sample(extent: int, most: int) -> list[int]:
    if extent <= most:
        return list(range(extent))
    stride = -(-(extent - 1) // (most // 2 - 1))
    return sorted({n for first in (*range(0, extent - 1, stride), extent - 2) for n in (first, first + 1)})


def _without(steps: tuple[Step, ...], rank: int, dropped: Counter[tuple[Index, str, Index]]) -> Iterator[Step]:
    for step in steps:
        if (wait := step.awaits) and (fewer := dropped[rank, wait.signal, wait.index]):
            if (count := cast(int, wait.count) - fewer) > 0:
                yield replace(cast(Wait, step), count=count)
        else:
            yield step
