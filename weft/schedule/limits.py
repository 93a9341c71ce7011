"""Limits on the numbers of a schedule from a file, so that a bad file cannot use up memory or time.

| number | limit |
|---|---|
| size, offset, extent, count | 0 to 2^40 |
| ranks | at most 4096 |
| steps of one rank after unrolling loops; a `Tiles` step of any extent is one step | at most 100,000 |
| steps and buffer sizes that depend on the rank, counted over all ranks | at most 2^19 together |
"""

from __future__ import annotations

from weft.schedule.expr import Expr, Index, Values
from weft.schedule.schedule import Schedule
from weft.schedule.steps import For, Step, Tiles, substitute, variables_of, walk

MOST = 1 << 40
MOST_RANKS = 1 << 12
MOST_STEPS = 100_000
MOST_ON_ALL = 1 << 19


def check_number(number: int, where: str, most: int = MOST) -> int:
    if not 0 <= number <= most:
        raise ValueError(f"{where} is {number}: it must be between 0 and {most}")
    return number


def check_sizes(schedule: Schedule) -> None:
    """Raise `ValueError` for the first number of the schedule that exceeds its limit (see the top of this file).

    Expressions without a value are not checked here, because `verify` reports them.
    """
    check_number(schedule.world_size, "schedule.world_size", MOST_RANKS)
    for i, held in enumerate(schedule.contents):
        if len(held.expected) != schedule.world_size:
            raise ValueError(
                f"schedule.contents[{i}].expected has entries for {len(held.expected)} ranks, but the schedule has "
                f"{schedule.world_size} ranks: give one entry for each"
            )
    alike = all(isinstance(step.extent, int) for step in schedule.walk() if isinstance(step, For | Tiles))
    formulas = [(i, buffer.rows) for i, buffer in enumerate(schedule.buffers) if isinstance(buffer.rows, Expr)]
    on_all = 0
    for rank in range(schedule.world_size if formulas or not alike else min(1, schedule.world_size)):
        values = schedule.values(rank)
        for i, rows in formulas:
            _number(rows, values, f"schedule.buffers[{i}].rows at rank {rank}")
        on_all += len(formulas)
        if rank == 0 or not alike:
            steps = sum(_steps(lane.steps, values, f"schedule.lanes[{i}]") for i, lane in enumerate(schedule.lanes))
            _check_steps(steps, f"schedule at rank {rank}")
            on_all += steps
        if on_all > MOST_ON_ALL:
            raise ValueError(
                f"the schedule's steps and sizes differ between ranks, and ranks 0 to {rank} together have more than "
                f"{MOST_ON_ALL} of them: use fewer ranks"
            )


def _steps(steps: tuple[Step, ...], values: Values, where: str) -> int:
    """Return the number of steps after unrolling loops. Each loop counts as a step too, and so does each iteration without
    steps.

    where: the place of the steps in the schedule, for error texts.
    """
    count = 0
    for i, step in enumerate(steps):
        count += 1
        if not isinstance(step, For | Tiles):
            continue
        here = f"{where}.steps[{i}]"
        extent = _number(step.extent, values, f"{here}.extent")
        if isinstance(step, Tiles):
            continue
        loops = (inner for inner in walk(step.body) if isinstance(inner, For | Tiles))
        if any(step.index in variables_of(inner.extent) for inner in loops):
            for turn in range(extent):
                count += max(1, _steps(step.body, {**values, step.index: turn}, here))
                _check_steps(count, here)
        elif extent:
            count += extent * max(1, _steps(step.body, {**values, step.index: 0}, here))
        _check_steps(count, here)
    return count


def _check_steps(count: int, where: str) -> None:
    if count > MOST_STEPS:
        raise ValueError(
            f"{where} has {count} steps or more after unrolling loops, but at most {MOST_STEPS} are allowed: use fewer chunks"
        )


def _number(index: Index, values: Values, where: str) -> int:
    try:
        number = substitute(index, values)
    except ValueError:
        return 0
    return check_number(number, where)
