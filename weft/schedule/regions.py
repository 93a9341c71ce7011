"""Where steps read and write: buffers, regions of them, and how a step accesses a region.

Numbers may be expressions of the rank, and sizes and places also of what a buffer holds (`weft.schedule.expr`). Buffers are
two-dimensional, rows x columns; a chunk is a region of one. Regions are of this rank's buffer unless they say `at` which
rank's: then the buffer must be symmetric.
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
"""What is added up: fp64 in itself, the others in fp32."""
Role: TypeAlias = Literal["input", "output", "symmetric", "scratch"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """rows x cols of one dtype on every rank.

    input, output: the caller's tensors, new ones at every run; only their own rank sees them. symmetric: kept by the
    executor, of one size on all ranks, visible to all. scratch: kept by the executor, private to its rank.
    """

    name: str
    rows: Index
    cols: int
    dtype: str
    role: Role

    def part(
        self, *, rows: tuple[Index, Index] | None = None, cols: tuple[Index, Index] | None = None, at: Index = RANK
    ) -> Region:
        """The region (first, count) in rows and columns, of rank `at`; all of them where nothing is said."""
        try:
            row, n_rows = rows or (0, self.rows)
            col, n_cols = cols or (0, self.cols)
        except (TypeError, ValueError):
            raise TypeError(
                f"{self.name}.part(rows={rows}, cols={cols}): say each as (first, count), or leave it out"
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
    """The RMSNorm of rows that a step has made: in `out`, row / sqrt(the mean of its squares + eps) * weight, a weight of one row.
    Computed in fp32 (fp64 in itself) of what the rows were rounded to, and rounded once. `ValueError` for an eps that is no finite
    number from 0 on."""

    out: Region
    weight: Region
    eps: float

    def __post_init__(self) -> None:
        if type(self.eps) is not float or not 0 <= self.eps < math.inf:
            object.__setattr__(self, "eps", checked_eps(self.eps))

    def text_of(self, total: Region) -> str:
        return f"{self.out} = rms_norm({total}) * {self.weight}, eps {self.eps:g}"


def checked_eps(eps: Any) -> float:
    """What a norm adds to the mean of squares."""
    if type(eps) is float and 0 <= eps < math.inf:
        return eps
    if isinstance(eps, numbers.Real) and not isinstance(eps, bool):
        with contextlib.suppress(OverflowError):  # of whole numbers beyond float's
            if 0 <= float(eps) < math.inf:
                return float(eps)
    raise ValueError(f"eps={eps!r} must be a finite number from 0 on: it is added to the mean of a row's squares")


@dataclass(frozen=True, slots=True)
class Contents:
    """What `buffer` is expected to hold on each rank when it is read, row by row: what is not known before a run is simulated,
    verified and shown with these numbers."""

    buffer: str
    expected: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Signals:
    """`count` counters on every rank. They only grow: each Set adds one, so that run n starts where run n - 1 ended."""

    name: str
    count: int


class Access(NamedTuple):
    """updates: what is there is added to, element by element and each in one piece. Two steps that update one place may do so
    in any order and at once; a read or a write of it may not come between them unordered."""

    region: Region
    reads: bool
    writes: bool
    updates: bool = False


def read(region: Region) -> Access:
    return Access(region, True, False)


def written(region: Region, update: bool = False) -> Access:
    return Access(region, update, True, update)


class Declared(NamedTuple):
    """What a step of `rank` may refer to. buffers: by name, of each rank, with sizes in numbers. held: buffers of which a
    schedule says what they hold."""

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
    """At which rank, in texts; nothing for a step's own rank."""
    return "" if at == RANK else f"@({at})" if isinstance(at, Expr) else f"@{at}"
