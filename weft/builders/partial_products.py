"""Helpers of reduce-scatter and all-reduce after a GEMM. The rows of the sum are divided among ranks, and their owner
reduces them.

A rank owns `m` rows of the sum. If the number of rows is not divisible by the world size, the last ranks own fewer
rows, or none. Rank r computes the rows of rank r + 1 first, then the rows of rank r + 2, and so on. Its own rows are
last. In the schedules ring and pulled, the order is r - 1, r - 2 and so on. With both orders, no two ranks send to the
same rank at the same time. The last rows for peers travel while the rank computes its own rows.

In ring and pulled, every rank rounds the sum that it passes on. In the other schedules, the owner reduces all products
in fp32 and rounds once, in ring order, starting with the rank before the owner. The owner's own product is rounded
before the reduction, unless a GEMM accumulates it (add=gemm).

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 4.2 (track and
    trigger), 4.4 (staggered producers, stores into a peer's memory) and 7.1 (direct reduce-scatter).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

from weft.builders.operands import peer, split
from weft.builders.problems.matmul_all_reduce import MatmulAllReduce
from weft.builders.problems.matmul_reduce_scatter import MatmulReduceScatter
from weft.builders.problems.scaled_matmul_reduce_scatter import ScaledMatmulReduceScatter
from weft.builders.registry import NotApplicableError, require_products
from weft.builders.tracked_tiles import TrackedTiles
from weft.schedule.expr import RANK, Index, lookup
from weft.schedule.schedule import Draft, LaneDraft
from weft.schedule.steps import Buffer, Compute, Region, Role, Set

By: TypeAlias = Literal["dma", "kernel", "store"]
Add: TypeAlias = Literal["gemm", "reduce"]
Chunk: TypeAlias = tuple[int, int]
"""A chunk of the rows that a rank owns: (first row, number of rows). All ranks have the same chunks, namely the chunks
of a rank with the most rows. On a rank with fewer rows, a chunk has fewer rows.
"""


class PartialProducts:
    """A `Draft` (a schedule under construction) with buffers for x and w, and for their scales if they are fp8.

    own_rows: True if x has only the rows that this rank owns.
    peers: the peers in the order in which this rank computes their rows.
    sources: the peers in the order in which their products for this rank's rows arrive.
    """

    def __init__(self, name: str, p: MatmulReduceScatter | MatmulAllReduce, *, own_rows: bool = False) -> None:
        self.d, self.p, self.m = Draft(name, p.world_size), p, -(-p.m // p.world_size)
        self._own_rows = own_rows
        self.scaled = p if isinstance(p, ScaledMatmulReduceScatter) else None
        of_operands = p.dtype if self.scaled is None else "fp8"
        self.x = self.d.buffer("x", self.m if own_rows else p.m, p.k, of_operands, "input")
        self.w = self.d.buffer("w", p.k, p.n, of_operands, "input")
        if self.scaled is not None:
            by_row = self.scaled.by == "row"
            self._x_scale = self.d.buffer("x_scale", p.m if by_row else 1, 1, "fp32", "input")
            self._w_scale = self.d.buffer("w_scale", 1, p.n if by_row else 1, "fp32", "input")
            self._bias = [self.d.buffer("bias", 1, p.n, p.dtype, "input")] if self.scaled.biased else []
        following = [name for name in ("bias", "residual") if isinstance(p, MatmulAllReduce) and getattr(p, name)]
        self._following = [
            self.d.buffer(name, p.m if name == "residual" else 1, p.n, p.dtype, "input") for name in following
        ]
        self.peers = [peer(p.world_size, distance) for distance in range(1, p.world_size)]
        self.sources = [peer(p.world_size, -distance) for distance in range(1, p.world_size)]

    @classmethod
    def overlapped(cls, name: str, p: MatmulReduceScatter | MatmulAllReduce) -> PartialProducts:
        require_products(p)
        return cls(name, p)

    def chunks(self, count: int) -> list[Chunk]:
        return split(self.m, count, what="rows of a rank's part")

    def parts(self, name: str, count: int, role: Role) -> Buffer:
        """Declare the buffer `name`, [count * m, n], and return it. It has `count` parts of `m` rows each, where `m` is
        the number of rows that a rank owns.

        role: the kind of memory, such as "symmetric".
        """
        return self.d.buffer(name, count * self.m, self.p.n, self.p.dtype, role)

    def rows(self, owner: Index, chunk: Chunk | None = None) -> Index:
        """Return the number of rows in a chunk of rank `owner`'s rows. chunk: (first, count); None for all of the
        owner's rows. The last ranks may own fewer rows, and then have fewer rows in a chunk, or none.
        """
        first, count = chunk or (0, self.m)
        if self.m * self.p.world_size == self.p.m:
            return count
        left = [self.p.m - (rank * self.m + first) for rank in range(self.p.world_size)]
        return lookup([max(0, min(count, rows)) for rows in left], owner)

    def first_row(self, owner: Index, chunk: tuple[Index, Index] | None = None) -> Index:
        """Return the index of the first row of x that contributes to `chunk` (first, count) of rank `owner`'s rows. If
        `chunk` is None, return the first row that contributes to any of these rows.
        """
        first = chunk[0] if chunk else 0
        return first if self._own_rows else owner * self.m + first

    def part(self, parts: Buffer, number: Index, owner: Index, chunk: Chunk | None = None, at: Index = RANK) -> Region:
        """Return rows `chunk` of part `number` in the buffer `parts` on rank `at`; the whole part if `chunk` is None.

        owner: the rank that owns the part's rows. The last ranks may own fewer rows.
        """
        first = chunk[0] if chunk else 0
        return parts.part(rows=(number * self.m + first, self.rows(owner, chunk)), at=at)

    def following(self, rows: tuple[Index, Index]) -> list[Region]:
        """Return the regions of bias and residual to add to these rows of the sum. If the problem has neither, return
        [].
        """
        return [one.part(rows=rows if one.name == "residual" else None) for one in self._following]

    def following_part(self, chunk: Chunk | None) -> list[Region]:
        """Return the regions of bias and residual to add to the sum. If the problem has neither, return [].

        chunk: the rows of this rank; None for all its rows.
        """
        return self.following((RANK * self.m + (chunk[0] if chunk else 0), self.rows(RANK, chunk)))

    def multiply(
        self, lane: LaneDraft, out: Region, owner: Index, chunk: Chunk | None = None, *, add: bool = False,
        to: Region | None = None,
    ) -> LaneDraft:  # fmt: skip
        """Append to `lane` the GEMM that computes this rank's contribution to rows of rank `owner`, into `out`.

        chunk: the rows (first, count) of `owner`; None for all its rows.
        add: True to add the product to the present contents of `out`.
        to: another region to add to the product before it is stored in `out`; None to add nothing.
        """
        return self._multiply(lane, out, (self.first_row(owner, chunk), self.rows(owner, chunk)), add, to)

    def multiply_tracked(
        self, lane: LaneDraft, out: Region, owner: Index, chunk: Chunk, *told: Set, to: Region | None = None
    ) -> int:
        """Append the GEMM of `multiply` as one tracked GEMM, which signals finished tiles. Return its number of tiles.
        All ranks must own equal numbers of rows.

        told: the `Set` steps that each finished tile runs.
        """
        tiles = TrackedTiles(chunk[1], self.p.n, 1)
        rows, cols = tiles.rows, tiles.cols

        def of_tile(part: Region) -> Region:
            return replace(part, row=part.row + rows[0], rows=rows[1], col=cols[0], cols=cols[1])

        x = self.x.part(rows=(owner * self.m + chunk[0] + rows[0], rows[1]))
        inputs = (x, self.w.part(cols=cols)) if to is None else (x, self.w.part(cols=cols), of_tile(to))
        matmul = Compute("matmul" if to is None else "addmm", of_tile(out), inputs)
        lane.tiles(tiles.kernel, "t", tiles.extent, matmul, *told)
        return tiles.extent

    def multiply_all(self, lane: LaneDraft, out: Region) -> LaneDraft:
        """Append the GEMM that computes this rank's contribution to the rows of all ranks."""
        return self._multiply(lane, out, None)

    def _multiply(
        self,
        lane: LaneDraft,
        out: Region,
        rows: tuple[Index, Index] | None,
        add: bool = False,
        to: Region | None = None,
    ) -> LaneDraft:
        x, w = self.x.part(rows=rows), self.w.part()
        if self.scaled is None:
            return lane.matmul(out, x, w, accumulate=add) if to is None else lane.compute("addmm", out, x, w, to)
        if add or to is not None:
            raise NotApplicableError("an fp8 GEMM with scales cannot accumulate: use add=reduce")
        op = "scaled_matmul_fast" if self.scaled.fast else "scaled_matmul"
        x_scale = self._x_scale.part(rows=rows if self.scaled.by == "row" else None)
        return lane.compute(op, out, x, w, x_scale, self._w_scale.part(), *(bias.part() for bias in self._bias))
