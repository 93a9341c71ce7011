"""Helpers of builders: buffers for the caller's tensors of all-gather + GEMM, and the division of sizes into chunks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, TypeAlias

from weft.builders.problems.all_gather_matmul import AllGatherMatmul
from weft.builders.registry import NotApplicableError
from weft.schedule.expr import RANK, Index, lookup
from weft.schedule.schedule import Draft, LaneDraft
from weft.schedule.steps import Buffer, Region, Role

Pieces: TypeAlias = int | str
"""A number of nearly equal pieces, or the proportion of their sizes, such as "2:1:1"."""
Part: TypeAlias = tuple[Region, ...]
"""(rows of x,), or (rows of x, their scales) if each row has its own scale."""
WHOLE_TILES = 128
"""The number of rows, or of columns, of a large GEMM tile."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A buffer for rows of x, and if each row has its own scale, a buffer for these scales."""

    data: Buffer
    scales: Buffer | None

    def part(self, rows: tuple[Index, Index] | None = None, at: Index = RANK) -> Part:
        """Return two regions on rank `at`: some rows of the buffer, and the scales of these rows. rows: (first, count);
        None for all rows.
        """
        data = self.data.part(rows=rows, at=at)
        return (data,) if self.scales is None else (data, self.scales.part(rows=rows, at=at))


class Operands:
    """A `Draft` (a schedule under construction) with the caller's tensors as buffers, and their scales if they are fp8.

    x: the buffer of this rank's shard.
    ys: the buffers of the results.
    gathered: the buffer for the gathered x; None if the caller does not need it.
    """

    def __init__(self, name: str, p: AllGatherMatmul) -> None:
        self.d, self.p, own = Draft(name, p.world_size), p, lookup(p.rows, RANK)
        scaled, buffer = p.scaled, self.d.buffer
        by_row = scaled is not None and scaled.by == "row"
        data = buffer("x_shard", own, p.k, p.dtype, "input")
        scale = buffer("x_scale", own if by_row else 1, 1, "fp32", "input") if scaled else None
        self.x = Rows(data, scale if by_row else None)
        self._x_scale = () if scale is None or by_row else (scale.part(),)
        self.ws = [buffer(f"w{i}", p.k, n, p.dtype, "input") for i, n in enumerate(p.n)]
        out = scaled.out if scaled else (p.dtype,) * len(p.n)
        self.ys = [buffer(f"y{i}", p.m, n, out[i], "output") for i, n in enumerate(p.n)]
        self._after: list[Part] = [()] * len(p.n)  # for each weight, its scale and bias: the last inputs of its GEMM
        if scaled:
            for i, n in enumerate(p.n):
                after = [buffer(f"w_scale{i}", 1, n if by_row else 1, "fp32", "input")]
                after += [buffer(f"bias{i}", 1, n, scaled.bias_dtype(out[i]), "input")] if scaled.biased[i] else []
                self._after[i] = tuple(one.part() for one in after)
        self.gathered = buffer("x", p.m, p.k, p.dtype, "output") if p.return_gathered else None

    def rows(self, name: str, count: int, role: Role, data: Buffer | None = None) -> Rows:
        """Declare buffers for `count` rows of x and their scales. data: an existing buffer to use for the rows."""
        data = data or self.d.buffer(name, count, self.p.k, self.p.dtype, role)
        return Rows(data, self.d.buffer(f"{name}_scale", count, 1, "fp32", role) if self.x.scales else None)

    def results(self, count: int) -> list[Buffer]:
        """Declare a scratch buffer with `count` rows for each result."""
        return [self.d.buffer(f"rows{i}", count, y.cols, y.dtype, "scratch") for i, y in enumerate(self.ys)]

    def multiply(self, lane: LaneDraft, x: Part, i: int, y: Region) -> None:
        """Append the GEMM y = x @ ws[i], with scales and bias if the problem has them."""
        scaled, weights = self.p.scaled, self.ws[i].part()
        if scaled is None:
            lane.matmul(y, x[0], weights)
            return
        op = "scaled_matmul_fast" if scaled.fast[i] else "scaled_matmul"
        lane.compute(op, y, x[0], weights, *self._x_scale, *x[1:], *self._after[i])

    def multiply_all(self, lane: LaneDraft, x: Part, rows: tuple[Index, Index] | None = None) -> None:
        """Append the GEMMs ys[i][rows] = x @ ws[i], one for each weight.

        rows: the rows of ys[i] to compute, as (first, count); None for all rows.
        """
        for i, y in enumerate(self.ys):
            self.multiply(lane, x, i, y.part(rows=rows))


def copy_rows(lane: LaneDraft, src: Part, dst: Part, by: Literal["dma", "kernel"] = "dma") -> LaneDraft:
    """Append the copies of rows of x, and of their scales if there are any."""
    for one, target in zip(src, dst, strict=True):
        lane.copy(one, target, by)
    return lane


def all_gather_matmul_operands(
    name: str, p: AllGatherMatmul
) -> tuple[Draft, Buffer, list[Buffer], list[Buffer], Buffer | None]:
    """Return (draft, x_shard, weights, outputs, gathered x or None) for builders that do not support scales.

    Raise `NotApplicableError` if the problem has scales."""
    if p.scaled is not None:
        raise NotApplicableError(
            "this schedule does not support scaled (fp8) GEMMs: use serial, gather, shard or ficco_1d"
        )
    found = Operands(name, p)
    return found.d, found.x.data, found.ws, found.ys, found.gathered


def split(extent: int, pieces: Pieces, *, what: str) -> list[tuple[int, int]]:
    """Cut `extent` into pieces. Return (first, count) of each. Raise `NotApplicableError` if a piece would be empty.

    pieces: the number of nearly equal pieces, larger pieces first; or a proportion such as "2:1:1". If possible, pieces
        of a proportion end at multiples of 128, which fill whole GEMM tiles.
    what: the name of `extent` in the error.
    """
    if isinstance(pieces, str):
        parts = [*itertools.accumulate(map(int, pieces.split(":")), initial=0)]
        unit = WHOLE_TILES if extent >= WHOLE_TILES * parts[-1] else 1
        ends = [extent * part // (parts[-1] * unit) * unit for part in parts[:-1]] + [extent]
        possible = all(a < b for a, b in itertools.pairwise(ends))
    else:
        if pieces < 1:
            raise NotApplicableError(f"the number of pieces of {what} is {pieces}: it must be at least 1")
        small, more = divmod(extent, pieces)
        ends = [i * small + min(i, more) for i in range(pieces + 1)]
        possible = pieces <= max(1, extent)
    if not possible:
        how = f"as {pieces}" if isinstance(pieces, str) else f"into {pieces} pieces"
        raise NotApplicableError(f"{what} ({extent}) cannot be cut {how}: a piece would be empty")
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


def offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the exclusive prefix sums of `sizes`."""
    return tuple(sum(sizes[:i]) for i in range(len(sizes)))


def peer(world_size: int, distance: int) -> Index:
    """Return the rank `distance` places after this rank in the ring (before it, if negative), as an expression."""
    return (RANK + distance % world_size) % world_size
