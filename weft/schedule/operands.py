"""What all schedules of an operator have in common: the caller's tensors, and how a shard is cut into chunks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, TypeAlias

from weft.schedule.builders import NotApplicableError
from weft.schedule.expr import RANK, Index, lookup
from weft.schedule.problems.all_gather_matmul import AllGatherMatmul
from weft.schedule.schedule import Draft, LaneDraft
from weft.schedule.steps import Buffer, Region, Role

Pieces: TypeAlias = int | str
"""How something is cut: into so many pieces, nearly equal, or in a proportion such as "2:1:1"."""
Part: TypeAlias = tuple[Region, ...]
"""Rows of x, and then, if each has a scale of its own, their scales."""
WHOLE_TILES = 128
"""Rows, or columns, of the larger tiles of GEMMs."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A buffer for rows of x, and one beside it for their scales, if each has its own: these go where the rows go."""

    data: Buffer
    scales: Buffer | None

    def part(self, rows: tuple[Index, Index] | None = None, at: Index = RANK) -> Part:
        """The region (first, count) of rows, of rank `at`; all of them where nothing is said."""
        data = self.data.part(rows=rows, at=at)
        return (data,) if self.scales is None else (data, self.scales.part(rows=rows, at=at))


class Operands:
    """The caller's tensors in a draft of `p`, and what schedules do with rows of x whether they have scales or not.

    x: the shard. ys: the results. gathered: the whole x, if the caller wants it.
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
        self._after: list[Part] = [()] * len(p.n)  # of each weight, what a GEMM takes after the scales of x
        if scaled:
            for i, n in enumerate(p.n):
                after = [buffer(f"w_scale{i}", 1, n if by_row else 1, "fp32", "input")]
                after += [buffer(f"bias{i}", 1, n, scaled.bias_dtype(out[i]), "input")] if scaled.biased[i] else []
                self._after[i] = tuple(one.part() for one in after)
        self.gathered = buffer("x", p.m, p.k, p.dtype, "output") if p.return_gathered else None

    def rows(self, name: str, count: int, role: Role, data: Buffer | None = None) -> Rows:
        """Room for `count` rows of x; data: what there is for the rows without their scales."""
        data = data or self.d.buffer(name, count, self.p.k, self.p.dtype, role)
        return Rows(data, self.d.buffer(f"{name}_scale", count, 1, "fp32", role) if self.x.scales else None)

    def results(self, count: int) -> list[Buffer]:
        """Scratch memory for `count` rows of each y."""
        return [self.d.buffer(f"rows{i}", count, y.cols, y.dtype, "scratch") for i, y in enumerate(self.ys)]

    def multiply(self, lane: LaneDraft, x: Part, i: int, y: Region) -> None:
        """Rows of y_i from these of x."""
        scaled, weights = self.p.scaled, self.ws[i].part()
        if scaled is None:
            lane.matmul(y, x[0], weights)
            return
        op = "scaled_matmul_fast" if scaled.fast[i] else "scaled_matmul"
        lane.compute(op, y, x[0], weights, *self._x_scale, *x[1:], *self._after[i])

    def multiply_all(self, lane: LaneDraft, x: Part, rows: tuple[Index, Index] | None = None) -> None:
        """These rows of every y, all of them where nothing is said, from as many of x."""
        for i, y in enumerate(self.ys):
            self.multiply(lane, x, i, y.part(rows=rows))


def carry(lane: LaneDraft, src: Part, dst: Part, by: Literal["dma", "kernel"] = "dma") -> LaneDraft:
    """Copy rows of x, with their scales."""
    for one, target in zip(src, dst, strict=True):
        lane.copy(one, target, by)
    return lane


def all_gather_matmul_operands(
    name: str, p: AllGatherMatmul
) -> tuple[Draft, Buffer, list[Buffer], list[Buffer], Buffer | None]:
    """(draft, x_shard, weights, outputs, the gathered x if the caller wants it), for schedules that know no scales."""
    if p.scaled is not None:
        raise NotApplicableError("it has no scaled GEMMs; schedules that are written with Operands have")
    found = Operands(name, p)
    return found.d, found.x.data, found.ws, found.ys, found.gathered


def cut(extent: int, pieces: Pieces, *, what: str) -> list[tuple[int, int]]:
    """(first, count) of each piece; of nearly equal ones the larger first. In a proportion, pieces that are large enough end at
    multiples of WHOLE_TILES: a GEMM of some rows more would take another wave of tiles for them."""
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
        raise NotApplicableError(f"{what}: {extent} cannot be cut {how}")
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


def starts(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where each rank's rows begin in the whole."""
    return tuple(sum(sizes[:i]) for i in range(len(sizes)))


def peer(world_size: int, distance: int) -> Index:
    """The rank `distance` places further in the ring, or back if it is negative."""
    return (RANK + distance % world_size) % world_size
