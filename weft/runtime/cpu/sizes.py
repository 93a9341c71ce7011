"""Evaluation of steps whose sizes are known only during a run. numpy evaluates all tiles of a step in one operation,
since there may be thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from weft.errors import ScheduleError
from weft.schedule import Compute, Copy, Expr, Index, Region, Schedule, Set, Step, Tiles, value
from weft.schedule.expr import Values
from weft.schedule.regions import box_of
from weft.schedule.steps import substitute, variables_of
from weft.words import and_list

Place = tuple[str, int]
"""A buffer on a rank: (buffer, rank)."""

_MOST_ROWS = 1 << 47
"""The largest allowed sum of dynamic sizes. Processors address fewer bytes than this, and sums in int64 do not overflow."""


Parts: TypeAlias = Sequence[tuple[Step, tuple[Region, ...]]]
"""The steps of a tile, or the step itself, each with its regions."""


def parts_of(step: Step) -> Parts:
    return [(inner, inner.regions) for inner in step.inner or (step,)]


def numbered(step: Step, parts: Parts, values: Values, size_of: Callable[[Place], tuple[int, int]]) -> Iterator[Step]:
    """Yield a step with numbers in place of its expressions. For a tile kernel, yield the steps of all its tiles, in order.
    Omit steps on empty regions. Raise `ValueError` for a region outside its buffer.

    parts: the step itself, or the steps of a tile, each with its regions (from `parts_of`).
    values: the dynamic sizes that the step's lane has read, by the name of their buffer.
    size_of: a function that returns (rows, columns) of a buffer, given as (buffer, rank).
    """
    if not isinstance(step, Tiles | Copy | Compute):
        yield substitute(step, values)
        return
    count, within = 1, cast(Mapping[str, Any], values)
    if isinstance(step, Tiles):
        count = substitute(step.extent, values)
        within = {**values, step.index: np.arange(count)}
    columns: list[tuple[Any, list[list[Any]]]] = [
        (inner, [_numbers(count, within, cast(Set, inner).index, cast(Set, inner).at).tolist()])
        if inner.is_signal
        else (inner, [_table(region, within, count, size_of) for region in regions])
        for inner, regions in parts
    ]
    for i in range(count):
        for inner, tables in columns:
            operands = [table[i] for table in tables]
            if inner.is_signal:
                yield Set(inner.signal, *operands[0])
            elif 0 not in (operands[-1].rows, operands[-1].cols):
                yield inner.on(operands)


def require_sizes(schedule: Schedule, rank: int, buffer: str, read: Sequence[int]) -> None:
    """Raise `ScheduleError` if a size in `read` is negative, or if the sum of all sizes is too large. The text names the
    ranks that have written the wrong size.

    read: the sizes that `rank` has read from its buffer `buffer`.
    """
    if min(read, default=0) >= 0 and sum(read) <= _MOST_ROWS:
        return
    place = read.index(min(read) if min(read) < 0 else max(read))
    row, col = divmod(place, schedule.buffer(buffer).cols)
    writers = [r for r in range(schedule.world_size) if _writes(schedule, r, buffer, rank, row, col)]
    by = f", written by rank {and_list(map(str, writers))}" if writers else ""
    raise ScheduleError(
        f"schedule {schedule.name}: {buffer}[{row}, {col}] of rank {rank} is {read[place]}{by}: sizes must be at least 0, "
        f"and together at most {_MOST_ROWS}"
    )


def _writes(schedule: Schedule, writer: int, buffer: str, rank: int, row: int, col: int) -> bool:
    """True if a step of rank `writer` writes element [row, col] of `rank`'s buffer. Steps with dynamic sizes are ignored."""
    for lane in schedule.of_rank(writer, expected=False):
        for step in lane.steps:
            for access in () if variables_of(step) else step.accesses():
                region = access.region
                if access.writes and (region.buffer, value(region.at)) == (buffer, rank):
                    first_row, end_row, first_col, end_col = box_of(region)
                    if first_row <= row < end_row and first_col <= col < end_col:
                        return True
    return False


def _numbers(count: int, values: Mapping[str, Any], *indices: Index) -> np.ndarray:
    """Evaluate the expressions `indices` for each of `count` tiles. Return an array [tiles, indices].

    values: for each variable in the expressions, its value: a number, or an array with a number for each tile.
    """
    found = [n.evaluated_over(values) if isinstance(n, Expr) else n for n in indices]
    return np.stack(np.broadcast_arrays(np.zeros(count, np.int64), *found)[1:], axis=1)


def _table(
    region: Region, values: Mapping[str, Any], count: int, size_of: Callable[[Place], tuple[int, int]]
) -> list[Region]:
    """Evaluate the expressions in `region` for each of `count` tiles. Return the region of each tile. Raise `ValueError` for a
    region outside its buffer.
    """
    rows = _numbers(count, values, region.row, region.rows, region.col, region.cols, region.at)
    for at in np.unique(rows[:, 4]).tolist():
        here = rows[rows[:, 4] == at]
        most = size_of((region.buffer, at))
        wrong = (here[:, :4] < 0).any(1) | (here[:, 0] + here[:, 1] > most[0]) | (here[:, 2] + here[:, 3] > most[1])
        if wrong.any():
            row, n_rows, col, n_cols, _ = here[wrong][0].tolist()
            raise ValueError(
                f"with the sizes of this run, {region.buffer}@{at}[{row}:+{n_rows}, {col}:+{n_cols}] is outside buffer "
                f"{region.buffer} of {most[0]} x {most[1]}: correct the sizes, or declare a larger buffer"
            )
    return [Region(region.buffer, *numbers) for numbers in rows.tolist()]
