"""Buffers, regions of buffers, and the accesses of steps to regions.

Buffers are two-dimensional: rows x columns. A region is a rectangle of a buffer, in the memory of the step's own rank
or of the rank `at`. The buffer of another rank must be symmetric. All numbers may be expressions of the rank. Sizes and
offsets may also depend on contents of buffers (`weft.schedule.expr`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from weft.integers import is_real
from weft.schedule.expr import RANK, Expr, Index

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp64": 8, "fp8": 1, "int64": 8, "int32": 4}
SUMMED = ("fp32", "bf16", "fp16", "fp64")
"""The dtypes that can be reduced. fp64 is reduced in fp64, the others in fp32."""
Role: TypeAlias = Literal["input", "output", "symmetric", "scratch"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A matrix of rows x cols on every rank.

    role:
        input, output  the caller's tensor, which may change from run to run. Only its own rank can access it
        symmetric      persistent memory with the same size on all ranks. All ranks can access it
        scratch        persistent memory that only its own rank can access
    """

    name: str
    rows: Index
    cols: int
    dtype: str
    role: Role

    def part(
        self, *, rows: tuple[Index, Index] | None = None, cols: tuple[Index, Index] | None = None, at: Index = RANK
    ) -> Region:
        """Return a region of this buffer on rank `at`. rows, cols: (first, count); all rows or columns if omitted."""
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
    """Rows row .. row + rows - 1 and columns col .. col + cols - 1 of a buffer of rank `at`."""

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
    """An RMSNorm of the rows that a step writes: out = row / sqrt(mean(row^2) + eps) * weight.

    out: the region into which the norm is stored.
    weight: the factor of each column, `[1, cols]`.

    The norm reads the rows after they are rounded to their buffer's dtype. It computes in fp32 (fp64 for fp64), and
    rounds the result once. Raises `ValueError` unless eps is finite and at least 0.
    """

    out: Region
    weight: Region
    eps: float

    def __post_init__(self) -> None:
        if type(self.eps) is not float or not 0 <= self.eps < math.inf:
            object.__setattr__(self, "eps", checked_eps(self.eps))

    def text_of(self, total: Region) -> str:
        return f"{self.out} = rms_norm({total}) * {self.weight}, eps {self.eps:g}"


def checked_eps(eps: Any) -> float:
    """Return the eps of a norm as a float. Raise `ValueError` unless it is finite and at least 0."""
    if type(eps) is float and 0 <= eps < math.inf:
        return eps
    if is_real(eps):
        with contextlib.suppress(OverflowError):  # integers beyond the range of float
            if 0 <= float(eps) < math.inf:
                return float(eps)
    raise ValueError(f"eps={eps!r} must be a finite number of at least 0: it is added to the mean of a row's squares")


@dataclass(frozen=True, slots=True)
class Contents:
    """The expected contents of a buffer that determines sizes at run time: for each rank, its numbers row by row.

    Simulation, verification and printing use them in place of the actual contents.
    """

    buffer: str
    expected: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Signals:
    """An array of `count` counters on every rank. Each `Set` adds one to a counter. Counters are never reset: run n
    starts with the values at which run n - 1 ended.
    """

    name: str
    count: int


class Access(NamedTuple):
    """An access of a step to a region.

    updates: True if the step adds to the elements atomically. Several steps may update an element concurrently, but
        reads and other writes of the element must be ordered with every update.
    """

    region: Region
    reads: bool
    writes: bool
    updates: bool = False


def undeclared(buffer: str) -> str:
    """Return the error text for a name that no buffer has."""
    return f"buffer {buffer!r} does not exist: declare it with Draft.buffer"


def read(region: Region) -> Access:
    return Access(region, True, False)


def written(region: Region, update: bool = False) -> Access:
    return Access(region, update, True, update)


class Declared(NamedTuple):
    """The names to which a step of `rank` may refer.

    buffers: for each rank, its buffers by name, with numbers as sizes.
    signals: the number of counters of each array of signals, by the array's name.
    held: the names of the buffers whose contents determine sizes (`Contents`).
    """

    rank: int
    buffers: Sequence[Mapping[str, Buffer]]
    signals: Mapping[str, int]
    held: Collection[str]

    def dtype(self, region: Region) -> str:
        return self.buffers[self.rank][region.buffer].dtype


Box: TypeAlias = tuple[int, int, int, int]
"""(first row, end row, first column, end column); the ends are exclusive."""


def box_of(region: Region) -> Box:
    row, col = cast(int, region.row), cast(int, region.col)
    return row, row + cast(int, region.rows), col, col + cast(int, region.cols)


def overlap(a: Box, b: Box) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1]) and max(a[2], b[2]) < min(a[3], b[3])


def is_empty(region: Region) -> bool:
    return 0 in (region.rows, region.cols)


def at_text(at: Index) -> str:
    """Return the rank `at` as a suffix, such as "@1" or "@(rank + 1)"; "" for the step's own rank."""
    return "" if at == RANK else f"@({at})" if isinstance(at, Expr) else f"@{at}"
