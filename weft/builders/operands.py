"""Shared parts of an operator's schedules: the caller's tensors, and the division of shards into chunks."""

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
"""A number of nearly equal pieces, or a proportion such as "2:1:1"."""
Part: TypeAlias = tuple[Region, ...]
"""Rows of x, then their scales if each row has its own."""
WHOLE_TILES = 128
"""The rows, or columns, of the larger tiles of GEMMs."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A buffer for rows of x, and one for their scales if each row has its own: scales travel with their rows."""

    data: Buffer
    scales: Buffer | None

    def part(self, rows: tuple[Index, Index] | None = None, at: Index = RANK) -> Part:
        """Return the region (first, count) of rows, of rank `at`; without `rows`, all of them."""
        data = self.data.part(rows=rows, at=at)
        return (data,) if self.scales is None else (data, self.scales.part(rows=rows, at=at))


class Operands:
    """The caller's tensors in a draft of `p`, with methods for rows of x with or without scales.

    x: the shard. ys: the results. gathered: the whole x, if the caller asked for it.
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
        self._after: list[Part] = [()] * len(p.n)  # for each weight, the inputs of its GEMM after the scales of x
        if scaled:
            for i, n in enumerate(p.n):
                after = [buffer(f"w_scale{i}", 1, n if by_row else 1, "fp32", "input")]
                after += [buffer(f"bias{i}", 1, n, scaled.bias_dtype(out[i]), "input")] if scaled.biased[i] else []
                self._after[i] = tuple(one.part() for one in after)
        self.gathered = buffer("x", p.m, p.k, p.dtype, "output") if p.return_gathered else None

    def rows(self, name: str, count: int, role: Role, data: Buffer | None = None) -> Rows:
        """Declare a buffer for `count` rows of x and their scales; data: an existing buffer for the rows themselves."""
        data = data or self.d.buffer(name, count, self.p.k, self.p.dtype, role)
        return Rows(data, self.d.buffer(f"{name}_scale", count, 1, "fp32", role) if self.x.scales else None)

    def results(self, count: int) -> list[Buffer]:
        """Declare scratch memory for `count` rows of each y."""
        return [self.d.buffer(f"rows{i}", count, y.cols, y.dtype, "scratch") for i, y in enumerate(self.ys)]

    def multiply(self, lane: LaneDraft, x: Part, i: int, y: Region) -> None:
        """Compute rows of y_i from these rows of x."""
        scaled, weights = self.p.scaled, self.ws[i].part()
        if scaled is None:
            lane.matmul(y, x[0], weights)
            return
        op = "scaled_matmul_fast" if scaled.fast[i] else "scaled_matmul"
        lane.compute(op, y, x[0], weights, *self._x_scale, *x[1:], *self._after[i])

    def multiply_all(self, lane: LaneDraft, x: Part, rows: tuple[Index, Index] | None = None) -> None:
        """Compute these rows of every y (without `rows`, all) from the same number of rows of x."""
        for i, y in enumerate(self.ys):
            self.multiply(lane, x, i, y.part(rows=rows))


def copy_rows(lane: LaneDraft, src: Part, dst: Part, by: Literal["dma", "kernel"] = "dma") -> LaneDraft:
    """Copy rows of x, with their scales."""
    for one, target in zip(src, dst, strict=True):
        lane.copy(one, target, by)
    return lane


def all_gather_matmul_operands(
    name: str, p: AllGatherMatmul
) -> tuple[Draft, Buffer, list[Buffer], list[Buffer], Buffer | None]:
    """Return (draft, x_shard, weights, outputs, gathered x or None), for schedules that do not support scales."""
    if p.scaled is not None:
        raise NotApplicableError(
            "this builder does not support scaled (fp8) GEMMs: use a builder that is written with Operands"
        )
    found = Operands(name, p)
    return found.d, found.x.data, found.ws, found.ys, found.gathered


def split(extent: int, pieces: Pieces, *, what: str) -> list[tuple[int, int]]:
    """Return (first, count) of each piece. Nearly equal pieces are ordered from larger to smaller.

    In a proportion, pieces that are large enough end at multiples of WHOLE_TILES: a GEMM with a few more rows would need another
    wave of tiles for them."""
    if isinstance(pieces, str):
        parts = [*itertools.accumulate(map(int, pieces.split(":")), initial=0)]
        unit = WHOLE_TILES if extent >= WHOLE_TILES * parts[-1] else 1
        ends = [extent * part // (parts[-1] * unit) * unit for part in parts[:-1]] + [extent]
        possible = all(a < b for a, b in itertools.pairwise(ends))
    else:
        small, more = divmod(extent, max(1, pieces))
        ends = [i * small + min(i, more) for i in range(pieces + 1)]
        possible = 1 <= pieces <= max(1, extent)
    if not possible:
        how = f"as {pieces}" if isinstance(pieces, str) else f"into {pieces} pieces"
        raise NotApplicableError(f"{what} ({extent}) cannot be cut {how}")
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


def offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the offset of each part in the whole."""
    return tuple(sum(sizes[:i]) for i in range(len(sizes)))


def peer(world_size: int, distance: int) -> Index:
    """Return the rank `distance` places ahead in the ring, or before this one if it is negative."""
    return (RANK + distance % world_size) % world_size
