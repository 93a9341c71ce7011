"""GEMM + reduce-scatter: finished rows are sent to the rank that owns them while the GEMM computes other rows.

    serial    cuBLAS's GEMM, then NCCL's reduce-scatter
    scatter   the whole GEMM, then one kernel stores each peer's rows in that peer's memory. No overlap, but few launches
    direct    a GEMM for each chunk of a peer's rows. The chunk is then sent to a slot on the peer
    tracked   one kernel for all rows. A chunk is sent when all its tiles are stored, while the kernel continues
    ring      partial sums go around the ring: each rank adds its product to the sum from the left, and sends the sum to the right
    pulled    a ring without copies: each GEMM reads the sum from the left neighbour's memory, adds its product, and stores locally
    collective  a GEMM for each chunk of all ranks' rows; NCCL or gloo reduces and scatters it while later chunks are computed.
              For ranks on several hosts, which cannot access each other's memory

fp8 operands with scales (`ScaledMatmulReduceScatter`) support only the schedules serial, scatter, direct with add=reduce,
and two_levels (`weft.builders.two_levels`). Products are sent and reduced in the result's dtype.

direct, tracked and ring are built from output maps (`weft.builders.output_map`), which list the destination of each
chunk. `weft.builders.partial_products` describes the order of computation and of reduction.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives". Sections 4.2 (track
    and trigger), 4.4 (staggered producers, stores into a peer's memory), 7.1 (direct reduce-scatter) and 7.4
    (reductions that are not near memory).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from weft.builders.operands import peer
from weft.builders.output_map.map import ring_reduce_scatter
from weft.builders.partial_products import Add, By, PartialProducts
from weft.builders.partial_sums import direct_sums, mapped_sums, tracked_sums
from weft.builders.problems.matmul_reduce_scatter import MatmulReduceScatter
from weft.builders.problems.scaled_matmul_reduce_scatter import ScaledMatmulReduceScatter
from weft.builders.registry import NotApplicableError, builder
from weft.schedule.expr import RANK
from weft.schedule.schedule import Schedule
from weft.schedule.steps import Buffer, Set

_TOGETHER = 8
"""The largest number of ranks for which one launch of `scatter` stores the rows of all peers. A launch signals one peer after the
other, which the model does not count: with 4 H200s, 500x1408x1600 took 6 to 7 us longer than predicted
(benchmarks/results/h200-4-ranks-never-slower.jsonl)."""


def _builder(**parameters: tuple[Any, ...]) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Return a decorator that registers a builder for MatmulReduceScatter and ScaledMatmulReduceScatter.

    parameters: as for `weft.builders.registry.builder`.
    """

    def register(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
        for problem in (MatmulReduceScatter, ScaledMatmulReduceScatter):
            builder(problem, **parameters)(function)
        return function

    return register


def _result(o: PartialProducts) -> Buffer:
    return o.parts("y", 1, "output")


@_builder()
def serial(p: MatmulReduceScatter) -> Schedule:
    o = PartialProducts("serial", p)
    y, lane = _result(o), o.d.lane("compute")
    if p.world_size == 1 or not p.m * p.n:  # nothing to send
        o.multiply(lane, y.part(), RANK)
    else:
        whole = o.parts("whole", p.world_size, "scratch")
        o.multiply_all(lane, whole.part()).reduce_scatter(whole.part(), y.part())
    return o.d.schedule()


@_builder()
def scatter(p: MatmulReduceScatter) -> Schedule:
    """Run the GEMM, then store each peer's rows in a slot on the peer, all on one lane.

    With up to 8 ranks, one launch stores the rows of all peers.
    """
    o = PartialProducts.overlapped("scatter", p)
    d, y, peers = o.d, _result(o), len(o.peers)
    together = p.world_size <= _TOGETHER
    whole, box = o.parts("whole", p.world_size, "scratch"), o.parts("box", peers, "symmetric")
    credit, there = d.signals("credit", peers), d.signals("there", peers)
    lane = o.multiply_all(d.lane("compute"), whole.part())
    for i, source in enumerate(o.sources):
        lane.set(credit, i, at=source)
    for i in range(peers):
        lane.wait(credit, i)
    for i, to in enumerate(o.peers):
        lane.copy(o.part(whole, to, to), o.part(box, i, to, at=to), "kernel")
        if not together:
            lane.set(there, i, at=to)
    for i, to in enumerate(o.peers if together else ()):
        lane.set(there, i, at=to)
    for i in range(peers):
        lane.wait(there, i)
    lane.reduce(y.part(), o.part(whole, RANK, RANK), *(o.part(box, i, RANK) for i in range(peers)))
    return d.schedule()


@_builder(chunks=(1, 2, 4), by=("dma", "kernel", "store"), add=("gemm", "reduce"))
def direct(p: MatmulReduceScatter, *, chunks: int, by: By, add: Add) -> Schedule:
    """Send each chunk to the rank that owns its rows.

    by: how chunks are sent. "store": the GEMM stores them in the owner's slot. "dma" or "kernel": a copy engine or a
        kernel copies them after the GEMM.
    add: how the owner sums. "gemm": the owner's GEMM waits for each chunk and accumulates into this chunk. "reduce":
        its GEMM does not wait; a kernel then sums the GEMM's output and the arrived chunks.
    """
    o = PartialProducts.overlapped("direct", p)
    direct_sums(o, _result(o), chunks=chunks, by=by, add=add)
    return o.d.schedule()


@builder(MatmulReduceScatter, chunks=(1, 2, 4))
def collective(p: MatmulReduceScatter, *, chunks: int) -> Schedule:
    """Reduce and scatter each chunk with one collective, concurrently with the GEMMs of later chunks.

    chunks: the number of chunks of each rank's rows.
    """
    o = PartialProducts.overlapped("collective", p)
    d, y, pieces = o.d, _result(o), o.chunks(chunks)
    made, compute, library = d.signals("made", len(pieces)), d.lane("compute"), d.lane("library")
    for c, (first, count) in enumerate(pieces):
        products = d.buffer(f"products{c}", p.world_size * count, p.n, p.dtype, "scratch")
        for owner in range(p.world_size):
            o.multiply(compute, products.part(rows=(owner * count, count)), owner, (first, count))
        compute.set(made, c)
        library.wait(made, c).reduce_scatter(products.part(), y.part(rows=(first, count)))
    return d.schedule()


@_builder(chunks=(2, 4), by=("dma", "kernel"))
def ring(p: MatmulReduceScatter, *, chunks: int, by: Literal["dma", "kernel"]) -> Schedule:
    """Send sums around the ring in chunks. A chunk travels while the next chunk is computed.

    Each rank rounds the sum before sending, as in NCCL's ring.

    by: copy with copy engines ("dma") or kernels ("kernel").
    """
    if p.world_size < 3:
        raise NotApplicableError("a ring needs at least three ranks: use direct")
    o = PartialProducts.overlapped("ring", p)
    out = ring_reduce_scatter(p.m, p.world_size, per_rank=chunks, first="dma", to="right")
    mapped_sums(o, out, _result(o), add="gemm", by=by, sender="to the right")
    return o.d.schedule()


@_builder(chunks=(1, 2, 4), by=("gemm", "tracked"))
def pulled(p: MatmulReduceScatter, *, chunks: int, by: Literal["gemm", "tracked"]) -> Schedule:
    """Run a ring without copies: each GEMM reads the sum from the left neighbour's memory, and stores the new sum
    locally.

    For each rank's rows, the ring ends at the owner of the rows, which stores the sum in its result. Each rank rounds
    the sum.

    by: "gemm" is cuBLAS, which first copies the old sum into its output. "tracked" is weft's kernel, launched per chunk. It
        multiplies a tile, then reads the same tile of the old sum and adds it.
    """
    o, left, right = PartialProducts.overlapped("pulled", p), peer(p.world_size, -1), peer(p.world_size, 1)
    if o.scaled is not None:
        raise NotApplicableError("an fp8 GEMM with scales cannot accumulate: use direct[...] with add=reduce")
    d, last, pieces, compute = o.d, len(o.peers), o.chunks(chunks), o.d.lane("compute")
    sums, y = o.parts("sums", last, "symmetric"), _result(o)
    credit, there = d.signals("credit", 1), d.signals("there", last * chunks)
    compute.wait(credit, previous=True)
    tiles = [1] * chunks  # the number of sets of each chunk's signal: one per tile, or one
    for step, owner in enumerate([*o.sources, RANK]):
        for c, chunk in enumerate(pieces):
            out = o.part(sums, step, owner, chunk) if step < last else o.part(y, 0, RANK, chunk)
            told = [Set(there.name, step * chunks + c, right)] if step < last else []
            before = o.part(sums, step - 1, owner, chunk, at=left) if step else None
            if step:
                compute.wait(there, (step - 1) * chunks + c, count=tiles[c])
            if by == "tracked":
                tiles[c] = o.multiply_tracked(compute, out, owner, chunk, *told, to=before)
                continue
            o.multiply(compute, out, owner, chunk, to=before)
            for one in told:
                compute.then(one)
    compute.set(credit, at=left)
    return d.schedule()


@_builder(chunks=(1, 2, 4), to=("dma", "store"))
def tracked(p: MatmulReduceScatter, *, chunks: int, to: Literal["dma", "store"]) -> Schedule:
    """Run one tracked GEMM for all rows, which signals finished tiles.

    chunks: the number of chunks of each rank's rows.
    to: "dma" sends a chunk by copy engine when all its tiles are stored. "store" lets the GEMM store tiles in the
        owner's slot.
    """
    o = PartialProducts.overlapped("tracked", p)
    tracked_sums(o, _result(o), chunks=chunks, to=to)
    return o.d.schedule()
