"""Boxes of rows and columns: which boxes overlap, and which part of a box no other box covers.

A box is a rectangle with at least one element: (first row, row after the last, first column, column after the last). An
array of n boxes is int [n, 4].

The search for overlaps sorts the boxes by their first row or by their first column, whichever leaves fewer candidates. If
each box overlaps with few others, the time is O(n log n).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.schedule.regions import Box

_ROWS, _COLS = 0, 2  # index of the first row and of the first column in a box
_PAIRS = 1 << 20  # candidates in one step, so that they need little memory


class _Candidates(NamedTuple):
    """Candidates for overlaps: box i may overlap with the boxes order[first[i]], ..., order[first[i] + counts[i] - 1]."""

    first: np.ndarray
    counts: np.ndarray
    order: np.ndarray


def overlapping(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of arrays (i, j): box a[i[k]] and box b[j[k]] have a common element. Yield each pair of boxes once."""
    along_axes = [(_beginning_in(a, b, axis, "left"), _beginning_in(b, a, axis, "right")) for axis in (_ROWS, _COLS)]
    in_a, in_b = min(along_axes, key=lambda both: sum(int(one.counts.sum()) for one in both))
    for i, j in _pairs(in_a):
        meets = _overlap(a[i], b[j])
        yield i[meets], j[meets]
    for j, i in _pairs(in_b):
        meets = _overlap(a[i], b[j])
        yield i[meets], j[meets]


def _beginning_in(boxes: np.ndarray, others: np.ndarray, axis: int, side: str) -> _Candidates:
    """Return the candidates for overlaps with each box: the boxes in `others` that begin inside it along `axis`.

    side: "left" includes others that begin where the box begins; "right" does not.
    """
    order = np.argsort(others[:, axis], kind="stable")
    begins = others[order, axis]
    first = np.searchsorted(begins, boxes[:, axis], side)  # type: ignore[call-overload]
    return _Candidates(first, np.searchsorted(begins, boxes[:, axis + 1]) - first, order)


def _pairs(candidates: _Candidates) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the indices of all pairs (box, candidate), as two arrays of about `_PAIRS` elements at a time."""
    first, counts, order = candidates
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(counts):
        done = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + _PAIRS, "right")))
        here = counts[begin:end]
        box = np.repeat(np.arange(begin, end), here)
        nth = np.arange(len(box)) - np.repeat(ends[begin:end] - here - done, here)
        yield box, order[first[box] + nth]
        begin = end


def _overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    begins, ends = [0, 2], [1, 3]
    return np.logical_and((a[:, begins] < b[:, ends]).all(1), (b[:, begins] < a[:, ends]).all(1))


def inside(inner: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """Return a bool array [n]: True where box inner[i] is inside box outer[i]. An array with one box applies to all i."""
    begins, ends = [0, 2], [1, 3]
    return np.logical_and((outer[:, begins] <= inner[:, begins]).all(1), (inner[:, ends] <= outer[:, ends]).all(1))


def hole(whole: Box, boxes: np.ndarray) -> Box | None:
    """Return a rectangle of `whole` that no box covers; None if the boxes cover `whole`."""
    table = np.array([whole])
    if inside(table, boxes).any():
        return None
    table = np.concatenate([table, boxes])
    rows = np.unique(np.clip(table[:, :2], whole[0], whole[1]))
    cols = np.unique(np.clip(table[:, 2:], whole[2], whole[3]))
    free = np.ones((len(rows) - 1, len(cols) - 1), bool)
    corners = np.concatenate([np.searchsorted(rows, boxes[:, :2]), np.searchsorted(cols, boxes[:, 2:])], 1)
    for row, end_row, col, end_col in corners.tolist():
        free[row:end_row, col:end_col] = False
    if not free.any():
        return None
    i, j = np.argwhere(free)[0]
    return int(rows[i]), int(rows[i + 1]), int(cols[j]), int(cols[j + 1])
