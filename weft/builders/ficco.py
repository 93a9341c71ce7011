"""FiCCO for all-gather + GEMM: each step sends one chunk of a shard to all peers at the same time, and multiplies the
chunks of all peers.

A shard is cut into `steps` chunks. In step s every rank puts its chunk s into all peers' memory. The copies to each peer have
their own lane (stream), so all links of a full mesh are busy. The rank then multiplies the chunks s of all ranks. Three choices
make eight schedules:

    1D | 2D           chunks are rows of the shard, or columns. With columns, steps accumulate: y += x[:, chunk] @ w[chunk, :]
    uniform | hetero  each step includes this rank's own chunk; or the rank's own shard is multiplied as a whole before the first
                      step, while chunks are travelling
    fused | unfused   each step has one GEMM for the chunks of all ranks, or one GEMM per rank

Chunks arrive where the GEMM of their step reads them, so no received chunk is copied. In the paper, uniform fused steps
copy all chunks while other work runs. So the paper's uniform schedules lose more time to contention (V-B) than these.

A fused GEMM stores directly into y only in uniform 2D schedules. In the others, a kernel copies its output into y. Each
step of a 2D schedule rounds y to its dtype, so with 16-bit dtypes more steps reduce accuracy. Scaled GEMMs have 1D
schedules only.

In the `_collective` builders, one NCCL all-gather per step moves the chunks, like the paper's variant with RCCL. The
all-gather needs contiguous input, so chunks of columns are first copied to a contiguous buffer. The output of the
all-gather is in rank order and includes this rank's own chunk, which a hetero schedule skips. So the fused GEMM of a
hetero step becomes two GEMMs: one for the lower ranks, and one for the higher ranks.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", V-A and figure 11.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from weft.builders.operands import Operands, all_gather_matmul_operands, copy_rows, peer, split
from weft.builders.problems.all_gather_matmul import AllGatherMatmul
from weft.builders.registry import NotApplicableError, builder, require_peers
from weft.schedule.expr import RANK, Index
from weft.schedule.schedule import Draft, LaneDraft, Schedule
from weft.schedule.steps import Signals

By = Literal["dma", "kernel"]
Start = Literal["uniform", "hetero"]
Gemms = Literal["fused", "unfused"]
Piece = tuple[int, int]
_STARTS, _GEMMS, _BY = ("uniform", "hetero"), ("fused", "unfused"), ("dma", "kernel")


@builder(AllGatherMatmul, start=_STARTS, gemms=_GEMMS, steps=(0, 2, 4), by=_BY)
def ficco_1d(p: AllGatherMatmul, *, start: Start, gemms: Gemms, steps: int, by: By) -> Schedule:
    """Cut shards by rows.

    start: "uniform" or "hetero", as at the top of this file.
    gemms: "fused" or "unfused", as at the top of this file.
    steps: the number of chunks of a shard; 0 stands for the number of ranks.
    by: copy with copy engines ("dma") or kernels ("kernel").
    """
    world, m, pieces = _pieces(p, p.rows[0], steps)
    o = Operands(f"{start}-{gemms}-1D", p)
    uniform, fused = start == "uniform", gemms == "fused"
    # The box has the chunks of a step in ring order, from the rank before this rank to this rank itself.
    places = world if uniform and fused else world - 1
    d, x, box = o.d, o.x, o.rows("box", places * m, "symmetric")
    rows = o.results(places * pieces[0][1]) if fused else []
    lane, (arrived, credit) = d.lane("compute"), _signals(d, world, pieces)
    if not uniform:
        o.multiply_all(lane, x.part(), (RANK * m, m))
    for sender, distance, to in _senders(d, world, credit):
        for s, (first, count) in enumerate(pieces):
            target = box.part((places * first + (distance - 1) * count, count), at=to)
            copy_rows(sender, x.part((first, count)), target, by).set(arrived, RANK * len(pieces) + s, at=to)
    for s, (first, count) in enumerate(pieces):
        own, sources = x.part((first, count)), [peer(world, -i) for i in range(1, world)]
        if uniform and fused:
            copy_rows(lane, own, box.part((places * first + (world - 1) * count, count)), "kernel")
        if uniform and not fused:
            o.multiply_all(lane, own, (RANK * m + first, count))
        for place, source in enumerate(sources):
            lane.wait(arrived, source * len(pieces) + s)
            if not fused:
                chunk = box.part((places * first + place * count, count))
                o.multiply_all(lane, chunk, (source * m + first, count))
        for i, out in enumerate(rows):
            o.multiply(lane, box.part((places * first, places * count)), i, out.part(rows=(0, places * count)))
            for place, source in enumerate([*sources, RANK][:places]):
                y = o.ys[i].part(rows=(source * m + first, count))
                lane.copy(out.part(rows=(place * count, count)), y, "kernel")
    return _released(d, world, credit)


@builder(AllGatherMatmul, start=_STARTS, gemms=_GEMMS, steps=(0, 2, 4), by=_BY)
def ficco_2d(p: AllGatherMatmul, *, start: Start, gemms: Gemms, steps: int, by: By) -> Schedule:
    """Cut shards by columns. Each chunk is one 2D copy.

    The arguments are as for `ficco_1d`.
    """
    world, m, pieces = _pieces(p, p.k, steps)
    d, x, ws, ys, _ = all_gather_matmul_operands(f"{start}-{gemms}-2D", p)
    uniform, fused = start == "uniform", gemms == "fused"
    # uniform: the box has the rows in the order of y. hetero: the box has only peers' rows, contiguous, in ring order
    #     from the rank before this rank.
    box = d.buffer("box", p.m if uniform else (world - 1) * m, p.k, p.dtype, "symmetric")
    scattered = fused and not uniform
    rows = [d.buffer(f"rows{i}", (world - 1) * m, y.cols, p.dtype, "scratch") for i, y in enumerate(ys) if scattered]
    lane, (arrived, credit) = d.lane("compute"), _signals(d, world, pieces)
    if not uniform:
        for w, y in zip(ws, ys, strict=True):
            lane.matmul(y.part(rows=(RANK * m, m)), x.part(), w.part())
    for sender, distance, to in _senders(d, world, credit):
        begin: Index = RANK * m if uniform else (distance - 1) * m
        for s, chunk in enumerate(pieces):
            target = box.part(rows=(begin, m), cols=chunk, at=to)
            sender.copy(x.part(cols=chunk), target, by).set(arrived, RANK * len(pieces) + s, at=to)
    for s, chunk in enumerate(pieces):
        own, add = x.part(cols=chunk), s > 0
        if uniform and fused:
            lane.copy(own, box.part(rows=(RANK * m, m), cols=chunk), "kernel")
        if uniform and not fused:
            for w, y in zip(ws, ys, strict=True):
                lane.matmul(y.part(rows=(RANK * m, m)), own, w.part(rows=chunk), add)
        for place in range(world - 1):
            source = peer(world, -place - 1)
            lane.wait(arrived, source * len(pieces) + s)
            if not fused:
                part = box.part(rows=(source * m if uniform else place * m, m), cols=chunk)
                for w, y in zip(ws, ys, strict=True):
                    lane.matmul(y.part(rows=(source * m, m)), part, w.part(rows=chunk), add)
        if fused:
            for w, out in zip(ws, rows or ys, strict=True):
                lane.matmul(out.part(), box.part(cols=chunk), w.part(rows=chunk), add)
    for y, out in zip(ys, rows, strict=False):
        for place in range(world - 1):
            target = y.part(rows=(peer(world, -place - 1) * m, m))
            lane.copy(out.part(rows=(place * m, m)), target, "kernel")
    return _released(d, world, credit)


@builder(AllGatherMatmul, start=_STARTS, gemms=_GEMMS, steps=(0, 2, 4))
def ficco_1d_collective(p: AllGatherMatmul, *, start: Start, gemms: Gemms, steps: int) -> Schedule:
    world, m, pieces = _pieces(p, p.rows[0], steps)
    uniform, fused = start == "uniform", gemms == "fused"
    o = Operands(f"{start}-{gemms}-1D-collective", p)
    d, gathered = o.d, o.rows("gathered", p.m, "scratch")
    rows = o.results(world * pieces[0][1]) if fused else []
    came, library, lane = d.signals("came", len(pieces)), d.lane("library"), d.lane("compute")
    for s, (first, count) in enumerate(pieces):
        for src, dst in zip(o.x.part((first, count)), gathered.part((world * first, world * count)), strict=True):
            library.all_gather(src, dst)
        library.set(came, s)
    if not uniform:
        o.multiply_all(lane, o.x.part(), (RANK * m, m))
    for s, (first, count) in enumerate(pieces):
        lane.wait(came, s)
        for i, out in enumerate(rows):
            for begin, n in _blocks(world, count, start, "fused"):
                o.multiply(lane, gathered.part((world * first + begin, n)), i, out.part(rows=(begin, n)))
        for source in _sources(world, start):
            part = (world * first + source * count, count)
            for i, y in enumerate(o.ys):
                target = y.part(rows=(source * m + first, count))
                if fused:
                    lane.copy(rows[i].part(rows=(source * count, count)), target, "kernel")
                else:
                    o.multiply(lane, gathered.part(part), i, target)
    return d.schedule()


@builder(AllGatherMatmul, start=_STARTS, gemms=_GEMMS, steps=(0,))
def ficco_2d_collective(p: AllGatherMatmul, *, start: Start, gemms: Gemms, steps: int) -> Schedule:
    world, m, pieces = _pieces(p, p.k, steps)
    d, x, ws, ys, _ = all_gather_matmul_operands(f"{start}-{gemms}-2D-collective", p)
    came, library, lane = d.signals("came", len(pieces)), d.lane("library"), d.lane("compute")
    if start == "hetero":
        for w, y in zip(ws, ys, strict=True):
            lane.matmul(y.part(rows=(RANK * m, m)), x.part(), w.part())
    for s, chunk in enumerate(pieces):
        packed = d.buffer(f"packed{s}", m, chunk[1], p.dtype, "scratch")
        gathered = d.buffer(f"gathered{s}", p.m, chunk[1], p.dtype, "scratch")
        library.copy(x.part(cols=chunk), packed.part(), "kernel").all_gather(packed.part(), gathered.part()).set(
            came, s
        )
        lane.wait(came, s)
        for block in _blocks(world, m, start, gemms):
            for w, y in zip(ws, ys, strict=True):
                lane.matmul(y.part(rows=block), gathered.part(rows=block), w.part(rows=chunk), s > 0)
    return d.schedule()


def _sources(world: int, start: Start) -> list[Index]:
    """Return the ranks whose chunks a step multiplies: all ranks, or only the peers if start="hetero"."""
    return list(range(world)) if start == "uniform" else [peer(world, -distance) for distance in range(1, world)]


def _blocks(world: int, rows: int, start: Start, gemms: Gemms) -> list[tuple[Index, Index]]:
    """Return (first row, number of rows) for each GEMM of a step. The GEMM reads these rows of a buffer with the chunks
    of all ranks, one below the other in rank order. With gemms="unfused" there is a GEMM for each rank's chunk. A fused
    step has one GEMM, or with start="hetero" one for the lower and one for the higher ranks.

    rows: the number of rows of a chunk.
    """
    if gemms == "unfused":
        return [(source * rows, rows) for source in _sources(world, start)]
    if start == "uniform":
        return [(0, world * rows)]
    return [(0, RANK * rows), ((RANK + 1) * rows, (world - 1 - RANK) * rows)]


def _pieces(p: AllGatherMatmul, extent: int, steps: int) -> tuple[int, int, list[Piece]]:
    """Return (world size, rows of a shard, the chunks as ranges (first, count)).

    extent: the number of rows (1D) or columns (2D) of a shard, which is cut into chunks.
    steps: the number of chunks; 0 stands for the number of ranks.

    Raise NotApplicableError if FiCCO does not support the problem.
    """
    require_peers(p)
    if len(set(p.rows)) > 1:
        nearest = " or ".join(map(str, dict.fromkeys((p.m // p.world_size, -(-p.m // p.world_size)))))
        raise NotApplicableError(
            f"shards of {p.rows} rows cannot be cut into equal chunks: give every rank {nearest} rows, or use "
            'the schedule "shard" or "gather"'
        )
    if p.return_gathered:
        raise NotApplicableError(
            "chunks arrive in another order than the rows of the gathered input: call with return_A=False, "
            'or use the schedule "shard" or "gather"'
        )
    return p.world_size, p.rows[0], split(extent, steps or p.world_size, what="a shard")


def _signals(d: Draft, world: int, pieces: list[Piece]) -> tuple[Signals, Signals]:
    """Declare and return the signals `arrived` (a chunk is in this rank's buffer) and `credit` (a peer's buffer may be
    overwritten).
    """
    return d.signals("arrived", world * len(pieces)), d.signals("credit", world)


def _senders(d: Draft, world: int, credit: Signals) -> Iterator[tuple[LaneDraft, int, Index]]:
    """Yield (lane for copies to the peer, distance of the peer in the ring, rank of the peer) for each peer.

    Each lane begins with a wait for the signal `credit`: the peer's buffer is free.
    """
    for distance in range(1, world):
        to = peer(world, distance)
        yield d.lane(f"to +{distance}", "copy").wait(credit, to, previous=True), distance, to


def _released(d: Draft, world: int, credit: Signals) -> Schedule:
    for distance in range(1, world):
        d.lane("compute").set(credit, RANK, at=peer(world, -distance))
    return d.schedule()
