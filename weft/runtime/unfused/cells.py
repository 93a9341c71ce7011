"""Rows of experts, addressed by the rank and the expert to which they belong.

A **cell** is the rows that one rank dispatches to one expert. A table of cells, int64 [ranks, experts], has one number
for each cell, such as its number of rows. In messages, cells are ordered by rank, then by expert. In GEMMs, they are
ordered by expert, then by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

Cells: TypeAlias = np.ndarray[Any, Any]


def run(steps: Iterator[None]) -> None:
    """Run all steps of an iterator that does one step of work for each item."""
    for _ in steps:
        pass


def by_rank(table: Cells) -> Cells:
    """Return the index of the first row for each (rank, expert), [ranks, experts], if rows are ordered by rank, then by expert.

    table: the number of rows for each (rank, expert), [ranks, experts].
    """
    flat = table.ravel()
    return (flat.cumsum() - flat).reshape(table.shape)  # type: ignore[no-any-return]


def by_expert(table: Cells) -> Cells:
    """Return the index of the first row for each (rank, expert), [ranks, experts], if rows are ordered by expert, then by rank.

    table: the number of rows for each (rank, expert), [ranks, experts].
    """
    return by_rank(table.T).T


def runs(starts: Cells, counts: Cells) -> list[slice]:
    """Return slices that select the rows of some cells, one cell after the other. A cell is the rows of one rank for one
    expert. Adjacent cells share a slice.

    starts: the index of each cell's first row. counts: the number of rows of each cell.
    """
    return _merged(starts.ravel().tolist(), counts.ravel().tolist())


def _merged(starts: list[int], counts: list[int]) -> list[slice]:
    found: list[slice] = []
    for start, count in zip(starts, counts, strict=True):
        if found and found[-1].stop == start:
            found[-1] = slice(found[-1].start, start + count)
        elif count:
            found.append(slice(start, start + count))
    return found


def take(rows: torch.Tensor, of: list[slice]) -> torch.Tensor:
    """Return the rows that the slices `of` select, one slice after the other. With a single slice, the result is a view."""
    return rows[of[0]] if len(of) == 1 else torch.cat([rows[one] for one in of]) if of else rows[:0]


def put(out: torch.Tensor, rows: torch.Tensor, to: list[slice]) -> None:
    """Copy `rows` into the slices `to` of `out`, one slice after the other."""
    at = 0
    for one in to:
        count = one.stop - one.start
        out[one].copy_(rows[at : at + count])
        at += count


def multiply(
    x: torch.Tensor, x_at: Cells, counts: Cells, w: torch.Tensor, out: torch.Tensor, out_at: Cells
) -> Iterator[None]:  # fmt: skip
    """Multiply the rows of each expert in `x` by the expert's weights, and write the products to `out`. Yield after each
    expert.

    w: the weights of the experts.
    counts: the number of rows of each rank for each expert, [ranks, experts].
    x_at, out_at: the index, in x and in `out`, of the first row of each rank for each expert, [ranks, experts].
    """
    tables = (table.T.tolist() for table in (x_at, counts, out_at))
    for weights, starts, of, to in zip(w, *tables, strict=True):
        if not any(of):
            continue
        rows, places = take(x, _merged(starts, of)), _merged(to, of)
        if len(places) == 1:
            torch.mm(rows, weights, out=out[places[0]])
        else:
            put(out, torch.mm(rows, weights), places)
        yield
