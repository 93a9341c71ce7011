"""Buffers, regions of buffers, and the kinds of access to a region.

Numbers may be expressions of the rank; sizes and places may also depend on contents of buffers (`weft.schedule.expr`). Buffers
are two-dimensional, rows x columns; a chunk is a region of one. Regions are of this rank's buffer unless `at` names another rank:
then the buffer must be symmetric.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from weft.schedule.expr import RANK, Expr, Index

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp64": 8, "fp8": 1, "int64": 8, "int32": 4}
SUMMED = ("fp32", "bf16", "fp16", "fp64")
"""The dtypes that are reduced: fp64 in fp64, the others in fp32."""
Role: TypeAlias = Literal["input", "output", "symmetric", "scratch"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A matrix of rows x cols of one dtype on every rank.

    input, output: the caller's tensors, new at every run; only their own rank sees them. symmetric: kept by the executor, of one
    size on all ranks, visible to all. scratch: kept by the executor, private to its rank.
    """

    name: str
    rows: Index
    cols: int
    dtype: str
    role: Role

    def part(
        self, *, rows: tuple[Index, Index] | None = None, cols: tuple[Index, Index] | None = None, at: Index = RANK
    ) -> Region:
        """Return the region (first, count) in rows and columns, of rank `at`; an omitted extent is whole."""
        try:
            row, n_rows = rows or (0, self.rows)
            col, n_cols = cols or (0, self.cols)
        except (TypeError, ValueError):
            raise TypeError(
                f"{self.name}.part(rows={rows}, cols={cols}): give each as (first, count), or omit it"
            ) from None
        return Region(self.name, row, n_rows, col, n_cols, at)


@dataclass(frozen=True, slots=True)
class Region:
    buffer: str
    row: Index
    rows: Index
    col: Index
    cols: Index
    at: Index = RANK

    def __str__(self) -> str:
        return f"{self.buffer}{at_text(self.at)}[{self.row}:+{self.rows}, {self.col}:+{self.cols}]"


@dataclass(frozen=True, slots=True)
class Norm:
    """The RMSNorm of rows that a step has made: out = row / sqrt(the mean of its squares + eps) * weight, a weight of one row.

    It is computed in fp32 (fp64 in fp64) from the rounded rows, and rounded once. Raises `ValueError` unless eps is finite and at
    least 0."""

    out: Region
    weight: Region
    eps: float

    def __post_init__(self) -> None:
        if type(self.eps) is not float or not 0 <= self.eps < math.inf:
            object.__setattr__(self, "eps", checked_eps(self.eps))

    def text_of(self, total: Region) -> str:
        return f"{self.out} = rms_norm({total}) * {self.weight}, eps {self.eps:g}"


def checked_eps(eps: Any) -> float:
    """Return eps, which a norm adds to the mean of squares, as a float; raise `ValueError` unless it is finite and at least 0."""
    if type(eps) is float and 0 <= eps < math.inf:
        return eps
    if isinstance(eps, numbers.Real) and not isinstance(eps, bool):
        with contextlib.suppress(OverflowError):  # integers beyond the range of float
            if 0 <= float(eps) < math.inf:
                return float(eps)
    raise ValueError(f"eps={eps!r} must be a finite number of at least 0: it is added to the mean of a row's squares")


@dataclass(frozen=True, slots=True)
class Contents:
    """The expected contents of `buffer` on each rank when it is read, row by row.

    Sizes that are not known before a run are simulated, verified and shown with these numbers."""

    buffer: str
    expected: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Signals:
    """`count` counters on every rank. They only grow: each Set adds one, so run n starts where run n - 1 ended."""

    name: str
    count: int


class Access(NamedTuple):
    """An access to a region.

    updates: adds to the contents, element by element, each addition atomic. Two steps may update one place in any order and
    concurrently; a read or a write of it must be ordered with them."""

    region: Region
    reads: bool
    writes: bool
    updates: bool = False


def read(region: Region) -> Access:
    return Access(region, True, False)


def written(region: Region, update: bool = False) -> Access:
    return Access(region, update, True, update)


class Declared(NamedTuple):
    """The names that a step of `rank` may refer to.

    buffers: the buffers by name, for each rank, with sizes in numbers. held: buffers with declared contents."""

    rank: int
    buffers: Sequence[Mapping[str, Buffer]]
    signals: Mapping[str, int]
    held: Collection[str]

    def dtype(self, region: Region) -> str:
        return self.buffers[self.rank][region.buffer].dtype


Box: TypeAlias = tuple[int, int, int, int]
"""(first row, end row, first column, end column)"""


def box_of(region: Region) -> Box:
    row, col = cast(int, region.row), cast(int, region.col)
    return row, row + cast(int, region.rows), col, col + cast(int, region.cols)


def overlap(a: Box, b: Box) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1]) and max(a[2], b[2]) < min(a[3], b[3])


def is_empty(region: Region) -> bool:
    return 0 in (region.rows, region.cols)


def at_text(at: Index) -> str:
    """Return the rank of a region as text; empty for a step's own rank."""
    return "" if at == RANK else f"@({at})" if isinstance(at, Expr) else f"@{at}"
