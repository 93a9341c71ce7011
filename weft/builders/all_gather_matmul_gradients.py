"""All gradients of all-gather + GEMM, with two overlapped exchanges.

The GEMMs of x's gradient overlap with a second all-gather of x, which the weights' gradients need. The GEMMs of the
weights' gradients overlap with the reduce-scatter of x's gradient.

    serial    NCCL's all-gather, the GEMMs of x's gradient, NCCL's reduce-scatter, the GEMMs of the weights' gradients
    direct    copy engines move the data of both exchanges. A rank computes its peers' rows of x's gradient, its own rows, and the
              weights' gradients, in this order, and reduces the arrived parts at the end. With add=gemm, which needs a
              single weight, a rank computes its own rows last, by a GEMM that accumulates into the arrived parts, so that
              no reduction kernel is needed

The rows of each rank have one GEMM: they are not cut into chunks. Each rank's rows of x's gradient are reduced as in a
reduce-scatter (`weft.builders.partial_products`).
"""

from __future__ import annotations

from typing import Literal

from weft.builders.operands import peer
from weft.builders.problems.all_gather_matmul_gradients import AllGatherMatmulGradients
from weft.builders.registry import NotApplicableError, builder, require_products
from weft.schedule.expr import RANK, Index
from weft.schedule.schedule import Draft, LaneDraft, Schedule
from weft.schedule.steps import Region


class _Gradients:
    def __init__(self, name: str, p: AllGatherMatmulGradients) -> None:
        self.d, self.p = Draft(name, p.world_size), p
        buffer, each = self.d.buffer, list(enumerate(p.n))
        self.x = buffer("x_shard", p.rows, p.k, p.dtype, "input")
        self.gs = [buffer(f"g{i}", p.m, n, p.dtype, "input") for i, n in each]
        self.gts = [buffer(f"gt{i}", n, p.m, p.dtype, "input") for i, n in each]
        self.wts = [buffer(f"wt{i}", n, p.k, p.dtype, "input") for i, n in each]
        self.grad_x = buffer("grad_x", p.rows, p.k, p.dtype, "output")
        self.grad_wts = [buffer(f"grad_wt{i}", n, p.k, p.dtype, "output") for i, n in each]

    def multiply_back(
        self, lane: LaneDraft, out: Region, rows: tuple[Index, Index] | None = None, *, add: bool = False
    ) -> LaneDraft:
        """Append the GEMMs that compute this rank's contribution to some rows of x's gradient. rows: (first, count);
        None for all rows.

        add: True to accumulate into `out`.
        """
        for i, (g, wt) in enumerate(zip(self.gs, self.wts, strict=True)):
            lane.matmul(out, g.part(rows=rows), wt.part(), accumulate=add or i > 0)
        return lane

    def multiply_weights(self, lane: LaneDraft, x: Region) -> None:
        for gt, grad_wt in zip(self.gts, self.grad_wts, strict=True):
            lane.matmul(grad_wt.part(), gt.part(), x)


@builder(AllGatherMatmulGradients)
def serial(p: AllGatherMatmulGradients) -> Schedule:
    o = _Gradients("serial", p)
    lane = o.d.lane("compute")
    whole = o.d.buffer("whole", p.m, p.k, p.dtype, "scratch")
    lane.all_gather(o.x.part(), whole.part())
    if p.world_size == 1:
        o.multiply_back(lane, o.grad_x.part())
    else:
        partial = o.d.buffer("partial", p.m, p.k, p.dtype, "scratch")
        o.multiply_back(lane, partial.part()).reduce_scatter(partial.part(), o.grad_x.part())
    o.multiply_weights(lane, whole.part())
    return o.d.schedule()


@builder(AllGatherMatmulGradients, add=("reduce", "gemm"))
def direct(p: AllGatherMatmulGradients, *, add: Literal["reduce", "gemm"] = "reduce") -> Schedule:
    require_products(p)
    world, m = p.world_size, p.rows
    if add == "gemm" and len(p.n) > 1:
        raise NotApplicableError(
            f"with {len(p.n)} weights, add=gemm would round the sum after each weight's GEMM: use add=reduce"
        )
    o = _Gradients("direct", p)
    d, peers = o.d, [peer(world, distance) for distance in range(1, world)]
    sources = [peer(world, -distance) for distance in range(1, world)]
    whole = d.buffer("whole", p.m, p.k, p.dtype, "symmetric")
    box = d.buffer("box", len(peers) * m, p.k, p.dtype, "symmetric")
    made = d.buffer("made", len(peers) * m, p.k, p.dtype, "scratch")
    # The last signal of `arrived` and of `credit` is for this rank's own shard.
    arrived, credit = d.signals("arrived", world), d.signals("credit", world)
    computed, there = d.signals("computed", len(peers)), d.signals("there", len(peers))
    compute, sender = d.lane("compute"), d.lane("to peers", "copy")
    own = (RANK * m, m)

    for i, to in enumerate(peers):
        sender.wait(credit, i, previous=True).copy(o.x.part(), whole.part(rows=own, at=to)).set(arrived, i, at=to)
    sender.wait(credit, len(peers), previous=True).copy(o.x.part(), whole.part(rows=own)).set(arrived, len(peers))
    for i, to in enumerate(peers):
        part = (i * m, m)
        o.multiply_back(compute, made.part(rows=part), (to * m, m)).set(computed, i)
        sender.wait(computed, i).copy(made.part(rows=part), box.part(rows=part, at=to)).set(there, i, at=to)
    if add == "reduce":
        o.multiply_back(compute, o.grad_x.part(), own)
    for i in range(world):
        compute.wait(arrived, i)
    o.multiply_weights(compute, whole.part())
    came = [box.part(rows=(i * m, m)) for i in range(len(peers))]
    if add == "gemm" and world == 2:  # a copy engine copies the peer's part while the weights' gradients are computed
        placed = d.signals("placed", 1)
        d.lane("to the sum", "copy").wait(there, 0).copy(came[0], o.grad_x.part()).set(placed, 0)
        compute.wait(placed, 0)
    else:
        for i in range(len(peers)):
            compute.wait(there, i)
        compute.reduce(o.grad_x.part(), *([o.grad_x.part()] if add == "reduce" else []), *came)
    if add == "gemm":
        o.multiply_back(compute, o.grad_x.part(), own, add=True)
    for i, source in enumerate(sources):
        compute.set(credit, i, at=source)
    compute.set(credit, len(peers))
    return d.schedule()
