"""Rewrites the tiles of persistent kernels as lanes, ordered by signals.

A kernel runs many of its n tiles at a time. Its steps have the same order as the steps of n lanes that wait for one signal at the
start, and each set a signal at the end. `forked` adds these lanes. Then all code for lanes and signals (`issue_order`,
`happens_before`, `verify`) handles tiles too:

    lane                             set begin, wait until end[0], ..., end[n - 1] are set
    n more lanes of one tile each    wait for begin, the tile's body, set its end
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
    """Return (`schedule` with the added signals, the lanes of all ranks or of `ranks` in numbers, buffers that omitted tiles
    write).

    At most `most` of a step's tiles become lanes: the first, the last, every k-th, and the neighbours of these. Waits then count
    without the omitted sets: a wait for T of N sets, D of them omitted, becomes a wait for T - D of N - D.
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
    """Return the number, from 1, of a forked lane's step in the schedule: in its lane, or in the body of its tile."""
    return sum(
        not (isinstance(s, Wait | Set) and s.signal.startswith(_END))
        and not (isinstance(s, Wait) and s.signal.startswith(_BEGIN))
        for s in lane.steps[: step + 1]
    )


class _Fork:
    """The lanes of one rank."""

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
        # The longest sample gives the number of signals, so that all ranks declare the same number.
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
