"""GEMM + all-gather: finished rows of a GEMM are copied to all ranks while the GEMM computes other rows.

    serial    cuBLAS's GEMM, then NCCL's all-gather, and a copy if columns are concatenated
    direct    a GEMM for each chunk of rows; all ranks copy a chunk when its GEMM has ended
    tracked   one kernel for all rows; all ranks copy a chunk when all its tiles are stored, while the kernel continues

Each rank computes its product in symmetric memory. Every rank copies all products, including its own, into its result
(`weft.builders.fetched`). The copies also concatenate columns, so no permutation follows. All ranks get the same bits.
In T3 the GEMM stores into a peer's memory. Here it does not, because a GEMM has only one destination, and every rank
needs the product.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 7.1: an all-gather is
    configured like a reduce-scatter, without updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from weft.builders.fetched import Fetched
from weft.builders.operands import split
from weft.builders.partial_products import Chunk
from weft.builders.problems.matmul_all_gather import MatmulAllGather
from weft.builders.registry import builder, require_products
from weft.builders.tracked_tiles import TrackedTiles
from weft.schedule.expr import RANK, Expr, Index
from weft.schedule.kernels import Unpack
from weft.schedule.schedule import Draft, Schedule
from weft.schedule.steps import Compute, Copy, Region


class _Product:
    """A `Draft` (a schedule under construction) with the caller's tensors as buffers."""

    def __init__(self, name: str, p: MatmulAllGather) -> None:
        self.d, self.p = Draft(name, p.world_size), p
        self.x = self.d.buffer("x", p.m, p.k, p.dtype, "input")
        self.w = self.d.buffer("w", p.k, p.n, p.dtype, "input")
        self.y = self.d.buffer("y", *p.shape, p.dtype, "output")

    def place(self, owner: Index, chunk: Chunk) -> Region:
        """Return the region of the result that stores rows `chunk` (first, count) of rank `owner`'s product."""
        first, count = chunk
        if self.p.columns:
            return self.y.part(rows=chunk, cols=(owner * self.p.n, self.p.n))
        return self.y.part(rows=(owner * self.p.m + first, count))


@builder(MatmulAllGather)
def serial(p: MatmulAllGather) -> Schedule:
    o = _Product("serial", p)
    lane = o.d.lane("compute")
    if p.world_size == 1 or not p.m * p.n:  # nothing to send
        lane.matmul(o.place(RANK, (0, p.m)), o.x.part(), o.w.part())
        return o.d.schedule()
    own = o.d.buffer("own", p.m, p.n, p.dtype, "scratch")
    lane.matmul(own.part(), o.x.part(), o.w.part())
    if not p.columns:
        lane.all_gather(own.part(), o.y.part())
        return o.d.schedule()
    below = o.d.buffer("below", p.world_size * p.m, p.n, p.dtype, "scratch")
    owner = Expr("owner")
    beside = Copy(below.part(rows=(owner * p.m, p.m)), o.place(owner, (0, p.m)), "kernel")
    lane.all_gather(own.part(), below.part()).tiles(Unpack(), "owner", p.world_size, beside)
    return o.d.schedule()


class _Sent(_Product):
    """A `_Product` in which the all-gather overlaps with the GEMM.

    made: the symmetric buffer of this rank's product, from which all ranks copy.
    """

    def __init__(self, name: str, p: MatmulAllGather, chunks: int) -> None:
        require_products(p)
        super().__init__(name, p)
        self.made = self.d.buffer("made", p.m, p.n, p.dtype, "symmetric")
        self.fetched, self.compute = Fetched(self.d, p.world_size, chunks), self.d.lane("compute")
        for i in range(p.world_size - 1):
            self.fetched.wait_for(self.compute, i)

    def fetch(self, chunks: list[Chunk], by: Literal["dma", "kernel"], counts: Sequence[int] = ()) -> Schedule:
        self.fetched.fetch(
            lambda owner, c: self.made.part(rows=chunks[c], at=owner),
            lambda owner, c: self.place(owner, chunks[c]),
            by,
            counts,
            apart=by == "dma",  # copy kernels would compete for compute units
        )
        return self.d.schedule()


@builder(MatmulAllGather, chunks=(1, 2, 4, 8), by=("dma", "kernel"))
def direct(p: MatmulAllGather, *, chunks: int, by: Literal["dma", "kernel"]) -> Schedule:
    """Run a GEMM for each chunk of rows. All ranks copy a chunk when its GEMM has ended.

    chunks: the number of chunks.
    by: copy with copy engines ("dma") or kernels ("kernel").
    """
    o, pieces = _Sent("direct", p, chunks), split(p.m, chunks, what="rows of a product")
    for c, rows in enumerate(pieces):
        o.compute.matmul(o.made.part(rows=rows), o.x.part(rows=rows), o.w.part())
        o.fetched.tell(o.compute, c)
    return o.fetch(pieces, by)


@builder(MatmulAllGather, chunks=(1, 2, 4, 8))
def tracked(p: MatmulAllGather, *, chunks: int) -> Schedule:
    """Run one tracked GEMM, which signals finished tiles. Copy engines copy a chunk of rows when all its tiles are stored.

    chunks: the number of chunks into which the rows of the product are cut.
    """
    o, tiles = _Sent("tracked", p, chunks), TrackedTiles(p.m, p.n, chunks)
    product = Compute(
        "matmul", o.made.part(rows=tiles.rows, cols=tiles.cols), (o.x.part(rows=tiles.rows), o.w.part(cols=tiles.cols))
    )
    o.compute.tiles(tiles.kernel, "t", tiles.extent, product, *o.fetched.told(tiles.by_chunk(range(chunks))))
    return o.fetch(tiles.pieces, "dma", tiles.counts)
