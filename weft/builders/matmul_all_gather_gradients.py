"""Both gradients of GEMM + all-gather: a reduce-scatter of the result's gradient, overlapped with the GEMMs that use
its output.

    serial    if columns were concatenated, a copy that stacks them along rows; NCCL's reduce-scatter; then both GEMMs
    direct    each rank owns one part of the result's gradient, summed over all ranks. Copy engines of all ranks send their
              values of this part into slots of its owner, chunk by chunk. The owner then reduces and multiplies its part

`own` is this rank's part of the reduced gradient. It is cut by rows, because rows of x's gradient need only the same
rows of `own`. The weight's gradient needs all rows, and is computed by one GEMM when `own` is complete. Accumulating
over chunks would round the weight's gradient after every chunk.

While a chunk travels, the GEMMs of the previous chunks run. The transfer of the first chunk is exposed. When the last chunk has
arrived, two GEMMs remain, and no transfer is left to overlap with them: the last rows of x's gradient, and the weight's
gradient.

With last=columns, the last chunk is also cut by columns. A block of columns of the weight's gradient needs only the
same columns of `own`, so it is computed while later columns travel. This helps if sending takes longer than a GEMM, as
with many ranks.

Concatenated columns are sent without an intermediate copy. Parts are reduced in fp32 and rounded once: this rank's own
part first, then the others in ring order, starting with the rank before this rank.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 7.1 (direct
    reduce-scatter). In T3 the overlapped GEMM is before the reduce-scatter; here the GEMMs are after it.
"""

from __future__ import annotations

from typing import Literal

from weft.builders.operands import peer, split
from weft.builders.partial_products import Chunk
from weft.builders.problems.matmul_all_gather_gradients import MatmulAllGatherGradients
from weft.builders.registry import builder, require_products
from weft.schedule.expr import RANK, Expr, Index
from weft.schedule.kernels import Unpack
from weft.schedule.schedule import Draft, Schedule
from weft.schedule.steps import Copy, Region


class _ProductGradients:
    """A `Draft` (a schedule under construction) with the caller's tensors as buffers."""

    def __init__(self, name: str, p: MatmulAllGatherGradients) -> None:
        self.d, self.p = Draft(name, p.world_size), p
        buffer = self.d.buffer
        self.g = buffer("g", *p.shape, p.dtype, "input")
        self.xt = buffer("xt", p.k, p.m, p.dtype, "input")
        self.wt = buffer("wt", p.n, p.k, p.dtype, "input")
        self.grad_x = buffer("grad_x", p.m, p.k, p.dtype, "output")
        self.grad_w = buffer("grad_w", p.k, p.n, p.dtype, "output")

    def part(self, owner: Index, rows: Chunk, cols: Chunk) -> Region:
        """Return the region of g (the gradient of the gathered products) for one block of rank `owner`'s product.
        rows, cols: (first, count) of the block in that product.
        """
        if self.p.columns:
            return self.g.part(rows=rows, cols=(owner * self.p.n + cols[0], cols[1]))
        return self.g.part(rows=(owner * self.p.m + rows[0], rows[1]), cols=cols)


@builder(MatmulAllGatherGradients)
def serial(p: MatmulAllGatherGradients) -> Schedule:
    o = _ProductGradients("serial", p)
    lane, whole = o.d.lane("compute"), ((0, p.m), (0, p.n))
    own = o.part(RANK, *whole)
    if p.world_size > 1 and p.m * p.n:
        own, below = o.d.buffer("own", p.m, p.n, p.dtype, "scratch").part(), o.g
        if p.columns:
            below, owner = o.d.buffer("below", p.world_size * p.m, p.n, p.dtype, "scratch"), Expr("owner")
            packed = Copy(o.part(owner, *whole), below.part(rows=(owner * p.m, p.m)), "kernel")
            lane.tiles(Unpack(), "owner", p.world_size, packed)
        lane.reduce_scatter(below.part(), own)
    lane.matmul(o.grad_x.part(), own, o.wt.part()).matmul(o.grad_w.part(), o.xt.part(), own)
    return o.d.schedule()


@builder(MatmulAllGatherGradients, chunks=(1, 2, 4, 8), last=("rows", "columns"))
def direct(p: MatmulAllGatherGradients, *, chunks: int, last: Literal["rows", "columns"] = "rows") -> Schedule:
    """Reduce this rank's part of the gradient, and multiply it, chunk by chunk.

    chunks: the number of chunks of rows.
    last: "columns" to cut the last chunk into `chunks` blocks of columns, "rows" to leave it whole.
    """
    require_products(p)
    o = _ProductGradients("direct", p)
    d, peers = o.d, [peer(p.world_size, distance) for distance in range(1, p.world_size)]
    *before, tail = split(p.m, chunks, what="rows of a product")
    blocks = split(p.n, 1 if last == "rows" or chunks == 1 else ":".join("1" * chunks), what="columns of a product")
    pieces = [*((rows, (0, p.n)) for rows in before), *((tail, cols) for cols in blocks)]
    box = d.buffer("box", len(peers) * p.m, p.n, p.dtype, "symmetric")
    own = d.buffer("own", p.m, p.n, p.dtype, "scratch")
    credit, there = d.signals("credit", len(peers)), d.signals("there", len(peers) * len(pieces))
    compute, sender = d.lane("compute"), d.lane("to peers", "copy")

    def slot(i: int, rows: Chunk, cols: Chunk, at: Index = RANK) -> Region:
        return box.part(rows=(i * p.m + rows[0], rows[1]), cols=cols, at=at)

    for i in range(len(peers)):
        sender.wait(credit, i, previous=True)
    for c, piece in enumerate(pieces):
        for i, to in enumerate(peers):
            sender.copy(o.part(to, *piece), slot(i, *piece, at=to)).set(there, i * len(pieces) + c, at=to)
            compute.wait(there, i * len(pieces) + c)
        rows, cols = piece
        came = [slot(i, *piece) for i in range(len(peers))]
        compute.reduce(own.part(rows=rows, cols=cols), o.part(RANK, *piece), *came)
        if c < len(before):
            compute.matmul(o.grad_x.part(rows=rows), own.part(rows=rows), o.wt.part())
        else:
            compute.matmul(o.grad_w.part(cols=cols), o.xt.part(), own.part(cols=cols))
    for i in range(len(peers)):
        compute.set(credit, i, at=peer(p.world_size, -1 - i))
    compute.matmul(o.grad_x.part(rows=tail), own.part(rows=tail), o.wt.part())
    return d.schedule()
