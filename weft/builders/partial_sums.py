"""Reduce-scatters of partial products, built from output maps (`weft.builders.output_map`)."""

from __future__ import annotations

from weft.builders.fetched import Fetched
from weft.builders.output_map.map import OutputMap, Sender, direct_reduce_scatter
from weft.builders.output_map.routes import routes_of
from weft.builders.output_map.steps import Gemm, write
from weft.builders.partial_products import Add, By, Chunk, PartialProducts
from weft.builders.registry import NotApplicableError
from weft.schedule.steps import Buffer, CopyBy


def mapped_sums(
    o: PartialProducts, out: OutputMap, y: Buffer, *, gemm: Gemm = "chunks", add: Add = "reduce", by: CopyBy = "dma",
    sender: str = "to peers", fetched: Fetched | None = None,
) -> list[Chunk]:  # fmt: skip
    """Append to the draft `o` the reduce-scatter that the output map `out` describes.

    Return (first row, number of rows) of each chunk of a rank's rows.

    y: the buffer of this rank's rows of the sum.
    gemm, add, by, sender, fetched: as in `weft.builders.output_map.steps.write`.
    """
    routes = routes_of("reduce_scatter", o.p.world_size, out.chunks, ((out.order, out.entries),))
    return write(o, routes, y, gemm=gemm, add=add, by=by, sender=sender, fetched=fetched)


def direct_sums(
    o: PartialProducts, y: Buffer, *, chunks: int, by: By, add: Add, fetched: Fetched | None = None
) -> list[Chunk]:
    """Append to the draft `o` a direct reduce-scatter with a GEMM for each chunk. Return (first row, number of rows) of
    each chunk of a rank's rows.

    y: the buffer of this rank's rows of the sum.
    by, add: how chunks are sent, and how they are summed, as in `weft.builders.matmul_reduce_scatter.direct`.
    fetched: the all-gather by which all ranks copy the sums (for an all-reduce), or None.
    """
    sender: Sender = "store" if by == "store" else "dma"
    out = direct_reduce_scatter(o.m * o.p.world_size, o.p.world_size, per_rank=chunks, by=sender)
    return mapped_sums(o, out, y, add=add, by="kernel" if by == "kernel" else "dma", fetched=fetched)


def tracked_sums(
    o: PartialProducts, y: Buffer, *, chunks: int, to: Sender, fetched: Fetched | None = None
) -> list[Chunk]:
    """Append to the draft `o` a direct reduce-scatter: one tracked GEMM signals its finished tiles, and each chunk is
    sent straight to the owner of its rows. Return (first row, number of rows) of each chunk of a rank's rows.

    y: the buffer of this rank's rows of the sum.
    chunks: the number of chunks of each rank's rows.
    to: how chunks are sent, as in `weft.builders.matmul_reduce_scatter.tracked`.
    fetched: the all-gather by which all ranks copy the sums (for an all-reduce), or None.
    """
    if o.scaled is not None:
        raise NotApplicableError("the tracked GEMM does not support fp8: use direct[...] or scatter")
    if to == "store" and chunks > 1:
        raise NotApplicableError(f"chunks={chunks}, but with to=store each tile is sent by itself: use chunks=1")
    if o.p.m % o.p.world_size:
        raise NotApplicableError(f"m={o.p.m} must be divisible by world_size={o.p.world_size}: use another schedule")
    out = direct_reduce_scatter(o.p.m, o.p.world_size, per_rank=chunks, by=to)
    return mapped_sums(o, out, y, gemm="tracked", fetched=fetched)
