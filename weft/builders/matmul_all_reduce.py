"""GEMM + all-reduce: the sum of all ranks' products on every rank.

    serial     cuBLAS's GEMM, then NCCL's all-reduce, in place
    one_shot   every rank receives the products of all peers and reduces them itself. One exchange; for small M
    two_shot   a direct reduce-scatter, then an all-gather, both in chunks. Peers copy a reduced chunk while its owner reduces the
               next chunks
    chunked    a GEMM for each chunk of all rows. Every rank reduces a part of each chunk, and the others copy it, while later
               chunks are computed
    tracked    like two_shot, with one GEMM kernel for all rows. A chunk is sent when all its tiles are stored
    collective  a GEMM for each chunk of rows; NCCL or gloo reduces it while later chunks are computed. For ranks on several
                hosts, which cannot access each other's memory

The rank that reduces a row also adds the bias and the residual, before it rounds the row. If the problem has an
RMSNorm, every rank computes it itself. In one_shot the reducing kernel also computes the norm. In schedules that copy
sums, the norm runs after the GEMMs, chunk by chunk, while later chunks arrive.

All ranks get the same bits. In one_shot each rank rounds all products, including its own, and reduces them in rank
order. In the other schedules the owner of a row reduces the row (`weft.builders.partial_products`), and the others copy
the result (`weft.builders.fetched`).

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 2.3 (all-reduce as
reduce-scatter and all-gather), 7.1 (direct), 7.3 (small M, in generative inference), 7.6 (following operators).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from weft.builders.fetched import ChunkRegion, Fetched
from weft.builders.operands import offsets, split
from weft.builders.partial_products import Add, By, Chunk, PartialProducts
from weft.builders.partial_sums import direct_sums, tracked_sums
from weft.builders.problems.matmul_all_reduce import MatmulAllReduce
from weft.builders.registry import NotApplicableError, builder
from weft.schedule.expr import RANK, Index, lookup
from weft.schedule.schedule import Schedule
from weft.schedule.steps import ITEM_BYTES, Buffer, Norm, Region

_MOST_SLOTS = 256 << 20  # the largest symmetric memory of one_shot on each rank, in bytes; two_shot needs far less


class Result:
    """The buffer of the result y and, if the problem has a norm, the buffers of the norm's output and weight."""

    def __init__(self, o: PartialProducts, p: MatmulAllReduce) -> None:
        self.d, self._eps = o.d, p.eps
        if p.eps is not None:
            self._weight = o.d.buffer("norm", 1, p.n, p.dtype, "input")
            self._normed = o.d.buffer("normed", p.m, p.n, p.dtype, "output")
        self.y = o.d.buffer("y", p.m, p.n, p.dtype, "output")

    def norm(self, part: Region) -> Norm | None:
        """Return the `Norm` argument for a reduce step that writes region `part` of y; None if the problem has no norm."""
        if self._eps is None:
            return None
        return Norm(replace(part, buffer=self._normed.name), self._weight.part(), self._eps)

    def fetch(
        self, fetched: Fetched, source: ChunkRegion, target: ChunkRegion, by: Literal["dma", "kernel"],
        pieces: Callable[[int], list[Region]],
    ) -> Schedule:  # fmt: skip
        """Append the all-gather `fetched`, which copies all ranks' sums into y, then the norm of each chunk. Return the
        schedule.

        source, target: functions that return a chunk's region in its owner's memory, and in y.
        by: copy with copy engines ("dma") or kernels ("kernel").
        pieces: a function from a chunk's index to the regions of y that the chunk covers. Each region gets a step that
            computes its norm.
        """
        if self._eps is None:
            apart = by == "dma"  # copy kernels would compete for compute units
            fetched.fetch(source, target, by, apart=apart, joins=apart)
            return self.d.schedule()
        complete, compute = self.d.signals("complete", fetched.chunks), self.d.lane("compute")
        fetched.fetch(source, target, by, complete=complete)
        for c in range(fetched.chunks):
            compute.wait(complete, c)
            for piece in pieces(c):
                compute.reduce(piece, piece, norm=self.norm(piece))
        return self.d.schedule()


@builder(MatmulAllReduce)
def serial(p: MatmulAllReduce) -> Schedule:
    o = PartialProducts("serial", p)
    result = Result(o, p)
    y = result.y.part()
    lane = o.d.lane("compute").matmul(y, o.x.part(), o.w.part())
    if p.world_size > 1 and p.m * p.n:
        lane.all_reduce(y, y)
    if following := o.following((0, p.m)):
        lane.reduce(y, y, *following)
    if norm := result.norm(y):
        lane.reduce(y, y, norm=norm)
    return o.d.schedule()


@builder(MatmulAllReduce, by=("dma", "kernel", "load"))
def one_shot(p: MatmulAllReduce, *, by: Literal["dma", "kernel", "load"]) -> Schedule:
    """Send every rank's whole product to all ranks. Each rank reduces all products itself.

    by: how a rank gets the products of its peers. "dma", "kernel": copy engines or kernels of the peers copy them into its
        memory. "load": the reducing kernel reads them in the peers' memory.
    """
    o = PartialProducts.overlapped("one_shot", p)
    slots = 1 if by == "load" else p.world_size
    if slots * p.m * p.n * ITEM_BYTES[p.dtype] > _MOST_SLOTS:
        raise NotApplicableError(
            f"one_shot would need memory for {slots} whole products, more than {_MOST_SLOTS >> 20} MiB: use two_shot"
        )
    d, result, peers = o.d, Result(o, p), len(o.peers)
    box = d.buffer("box", slots * p.m, p.n, p.dtype, "symmetric")
    credit, there = d.signals("credit", peers), d.signals("there", peers)
    compute, product = d.lane("compute"), (o.x.part(), o.w.part())
    if by == "load":
        for i in range(peers):
            compute.wait(credit, i, previous=True)
        compute.matmul(box.part(), *product)
        for i, to in enumerate(o.peers):
            compute.set(there, i, at=to)
        parts = [box.part(at=rank) for rank in range(p.world_size)]
    else:
        parts = [box.part(rows=(rank * p.m, p.m)) for rank in range(p.world_size)]
        own = (RANK * p.m, p.m)  # in every rank's box
        compute.matmul(box.part(rows=own), *product)
        if by == "dma":
            made = d.signals("made", 1)
            compute.set(made)
            sender = d.lane("to peers", "copy").wait(made)
            for i, to in enumerate(o.peers):
                sender.wait(credit, i, previous=True).copy(box.part(rows=own), box.part(rows=own, at=to))
                sender.set(there, i, at=to)
        else:
            for i, source in enumerate(o.sources):
                compute.set(credit, i, at=source)
            for i in range(peers):
                compute.wait(credit, i)
            for to in o.peers:
                compute.copy(box.part(rows=own), box.part(rows=own, at=to), "kernel")
            for i, to in enumerate(o.peers):
                compute.set(there, i, at=to)
    for i in range(peers):
        compute.wait(there, i)
    y = result.y.part()
    compute.reduce(y, *parts, *o.following((0, p.m)), norm=result.norm(y))
    if by != "kernel":
        for i, source in enumerate(o.sources):
            compute.set(credit, i, at=source)
    return d.schedule()


@builder(MatmulAllReduce, chunks=(1, 2, 4))
def collective(p: MatmulAllReduce, *, chunks: int) -> Schedule:
    """Reduce each chunk of rows with one all-reduce, concurrently with the GEMMs of later chunks.

    chunks: the number of chunks into which the rows of the product are cut.
    """
    o = PartialProducts.overlapped("collective", p)
    d, result, pieces = o.d, Result(o, p), split(p.m, chunks, what="rows of a product")
    made, summed = d.signals("made", len(pieces)), d.signals("summed", len(pieces))
    compute, library = d.lane("compute"), d.lane("library")
    for c, rows in enumerate(pieces):
        y = result.y.part(rows=rows)
        compute.matmul(y, o.x.part(rows=rows), o.w.part()).set(made, c)
        library.wait(made, c).all_reduce(y, y).set(summed, c)
    for c, rows in enumerate(pieces):
        y = result.y.part(rows=rows)
        compute.wait(summed, c)
        if following := o.following(rows):
            compute.reduce(y, y, *following)
        if norm := result.norm(y):
            compute.reduce(y, y, norm=norm)
    return d.schedule()


class _Gathered:
    """A `Draft` (a schedule under construction) in which each rank computes its part of the sums in symmetric memory,
    chunk by chunk, and all ranks copy the sums from there.

    Before the owner of some rows reduces them, it waits for the products of all peers. A peer sends its products only
    after it has copied the previous run's sums. So the owner may then overwrite the previous sums.
    """

    def __init__(self, o: PartialProducts, p: MatmulAllReduce, chunks: int) -> None:
        self.o, self.sums = o, o.parts("sums", 1, "symmetric")
        self.result, self.fetched = Result(o, p), Fetched(o.d, p.world_size, chunks)

    def fetch(self, pieces: list[Chunk], by: Literal["dma", "kernel"]) -> Schedule:
        o, y, ranks = self.o, self.result.y, range(self.o.p.world_size)

        def in_y(owner: Index, c: int) -> Region:
            return o.part(y, owner, owner, pieces[c])

        def source(owner: Index, c: int) -> Region:
            return o.part(self.sums, 0, owner, pieces[c], at=owner)

        def come(c: int) -> list[Region]:
            return [y.part()] if len(pieces) == 1 else [in_y(owner, c) for owner in ranks]

        return self.result.fetch(self.fetched, source, in_y, by, come)


@builder(MatmulAllReduce, chunks=(1, 2, 4), by=("dma", "kernel", "store"), add=("gemm", "reduce"))
def two_shot(p: MatmulAllReduce, *, chunks: int, by: By, add: Add) -> Schedule:
    """Run a direct reduce-scatter with a GEMM for each chunk, then let all ranks copy the sums.

    by: how chunks of products are sent to the owners of their rows: "store", "dma" or "kernel". With "kernel", kernels
        also copy the sums; otherwise copy engines do.
    chunks, add: as in `weft.builders.matmul_reduce_scatter.direct`.
    """
    o = PartialProducts.overlapped("two_shot", p)
    gathered = _Gathered(o, p, chunks)
    pieces = direct_sums(o, gathered.sums, chunks=chunks, by=by, add=add, fetched=gathered.fetched)
    return gathered.fetch(pieces, "kernel" if by == "kernel" else "dma")


@builder(MatmulAllReduce, chunks=(2, 4, 8), by=("dma", "kernel"))
def chunked(p: MatmulAllReduce, *, chunks: int, by: Literal["dma", "kernel"]) -> Schedule:
    """Divide the rows of each chunk among the ranks: every rank reduces its rows of each chunk.

    The peers' products for a chunk arrive during the GEMM of the next chunk, and are reduced after that GEMM. So the
    sums of the first chunk are complete long before the last GEMM ends.

    by: copy with copy engines ("dma") or kernels ("kernel").
    """
    o, world = PartialProducts.overlapped("chunked", p), p.world_size
    result, peers, pieces = Result(o, p), len(o.peers), split(p.m, chunks, what="rows of a product")
    d, y = o.d, result.y
    parts = [-(-count // world) for _, count in pieces]
    begins, rows = (
        offsets(tuple(parts)),
        sum(parts),
    )  # for the rows that a rank reduces: the first row of each chunk's part, and the total number of rows

    counts = [
        [max(0, min(part, count - rank * part)) for rank in range(world)]
        for (_, count), part in zip(pieces, parts, strict=True)
    ]

    def count(owner: Index, c: int) -> Index:
        return lookup(counts[c], owner)

    def in_whole(buffer: Buffer, owner: Index, c: int) -> Region:
        return buffer.part(rows=(pieces[c][0] + owner * parts[c], count(owner, c)))

    def of_owner(buffer: Buffer, slot: int, owner: Index, c: int, at: Index = RANK) -> Region:
        return buffer.part(rows=(slot * rows + begins[c], count(owner, c)), at=at)

    made = d.buffer("made", p.m, p.n, p.dtype, "scratch")
    box, sums = (d.buffer(name, n * rows, p.n, p.dtype, "symmetric") for name, n in (("box", peers), ("sums", 1)))
    computed, there = d.signals("computed", chunks), d.signals("there", peers * chunks)
    compute, sender, fetched = d.lane("compute"), d.lane("to peers", "copy"), Fetched(d, world, chunks)
    for i in range(peers):
        fetched.wait_for(sender, i)

    def add_up(c: int) -> None:
        for i in range(peers):
            compute.wait(there, i * chunks + c)
        came = [of_owner(box, i, RANK, c) for i in range(peers)]
        following = o.following((pieces[c][0] + RANK * parts[c], count(RANK, c)))
        compute.reduce(of_owner(sums, 0, RANK, c), in_whole(made, RANK, c), *came, *following)
        fetched.tell(compute, c)

    for c, piece in enumerate(pieces):
        compute.matmul(made.part(rows=piece), o.x.part(rows=piece), o.w.part()).set(computed, c)
        sender.wait(computed, c)
        for i, to in enumerate(o.peers):
            sender.copy(in_whole(made, to, c), of_owner(box, i, to, c, at=to), by).set(there, i * chunks + c, at=to)
        if c:
            add_up(c - 1)
    add_up(chunks - 1)

    def source(owner: Index, c: int) -> Region:
        return of_owner(sums, 0, owner, c, at=owner)

    return result.fetch(fetched, source, lambda owner, c: in_whole(y, owner, c), by, lambda c: [y.part(rows=pieces[c])])


@builder(MatmulAllReduce, chunks=(1, 2, 4), to=("dma", "store"))
def tracked(p: MatmulAllReduce, *, chunks: int, to: Literal["dma", "store"]) -> Schedule:
    """Run a direct reduce-scatter with one tracked GEMM, which signals finished tiles. Then let copy engines of all ranks copy
    the sums.

    The arguments are as for `tracked` in `weft.builders.matmul_reduce_scatter`.
    """
    o = PartialProducts.overlapped("tracked", p)
    gathered = _Gathered(o, p, chunks)
    return gathered.fetch(tracked_sums(o, gathered.sums, chunks=chunks, to=to, fetched=gathered.fetched), "dma")
