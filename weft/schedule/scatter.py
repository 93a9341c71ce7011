"""GEMM + reduce-scatter: products leave for the rank whose rows they are while the GEMM goes on with other rows.

Rank r computes the rows of rank r + 1 first, then those of r + 2 ..., and its own last: so no two ranks send to one, and what is
left when the others' rows have been sent is the own GEMM, behind which the last of them travel.

    serial    the library's GEMM, then its reduce-scatter
    scatter   the GEMM whole, then every rank stores its peers' rows where these add them up: no overlap, and few launches
    direct    a GEMM for each chunk of a peer's rows, which are then sent to a slot of the peer's
    tracked   one kernel for all rows; what a chunk's tiles have set signals for is sent while it goes on with others
    ring      partial sums go around: each rank adds its own product to what its left neighbour sent, and sends that on

What peers have sent is added up in fp32, in the order of the ring behind the reader, and rounded once; the own product is rounded
before that, or if a GEMM adds it (add=gemm) not at all. A slot is filled again when its reader has said that it has read all of it:
of all chunks together, since a run of other sizes may have its chunks elsewhere.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 4.2 (track and trigger), 4.4
(staggered producers, stores into a peer's memory) and 7.1 (direct reduce-scatter).
"""

from __future__ import annotations

from typing import Literal

from weft.schedule.builders import NotApplicableError, builder
from weft.schedule.expr import RANK, Expr, Index, lookup
from weft.schedule.kernels import TrackedMatmul
from weft.schedule.operands import cut, peer
from weft.schedule.problems.matmul_reduce_scatter import MatmulReduceScatter
from weft.schedule.schedule import Draft, LaneDraft, Schedule
from weft.schedule.steps import Buffer, Compute, Region, Set, Signals

_GROUP = 8  # row tiles that a tracked GEMM does column by column, so that what they read stays in the cache
_TILE, _LEAST_TILE = (128, 256), 16  # rows and columns: fast where there are so many


class _Operands:
    """The caller's tensors in a draft of `p`. m: rows of a rank's part. peers: the ranks whose rows are computed, in this order."""

    def __init__(self, name: str, p: MatmulReduceScatter) -> None:
        self.d, self.p, self.m = Draft(name, p.world_size), p, p.rows
        self.x = self.d.buffer("x", p.m, p.k, p.dtype, "input")
        self.w = self.d.buffer("w", p.k, p.n, p.dtype, "input")
        self.y = self.d.buffer("y", p.rows, p.n, p.dtype, "output")
        self.peers = [peer(p.world_size, distance) for distance in range(1, p.world_size)]
        self.sources = [peer(p.world_size, -distance) for distance in range(1, p.world_size)]

    def parts(self, name: str, count: int, role: Literal["symmetric", "scratch"]) -> Buffer:
        """Room for products of as many rows as `count` ranks get."""
        return self.d.buffer(name, count * self.m, self.p.n, self.p.dtype, role)

    def part(self, parts: Buffer, number: int, rows: tuple[int, int] | None = None, at: Index = RANK) -> Region:
        """Of the `number`-th rank's rows there these, all of them where nothing is said."""
        first, count = rows or (0, self.m)
        return parts.part(rows=(number * self.m + first, count), at=at)

    def multiply(
        self, lane: LaneDraft, out: Region, owner: Index, rows: tuple[int, int] | None = None, *, add: bool = False
    ) -> LaneDraft:
        """This rank's product for these rows of `owner`."""
        first, count = rows or (0, self.m)
        return lane.matmul(out, self.x.part(rows=(owner * self.m + first, count)), self.w.part(), accumulate=add)


def _overlapped(name: str, p: MatmulReduceScatter) -> _Operands:
    if p.world_size == 1:
        raise NotApplicableError("one rank has nothing to scatter")
    if not p.has_work:
        raise NotApplicableError("there is nothing to multiply")
    return _Operands(name, p)


@builder(MatmulReduceScatter)
def serial(p: MatmulReduceScatter) -> Schedule:
    o = _Operands("serial", p)
    lane = o.d.lane("compute")
    if p.world_size == 1 or not p.m * p.n:  # nothing to send
        o.multiply(lane, o.y.part(), RANK)
    else:
        whole = o.parts("whole", p.world_size, "scratch")
        lane.matmul(whole.part(), o.x.part(), o.w.part()).reduce_scatter(whole.part(), o.y.part())
    return o.d.schedule()


@builder(MatmulReduceScatter)
def scatter(p: MatmulReduceScatter) -> Schedule:
    """All on one lane. Room for a run's rows is told behind its GEMM, by the launch that stores rows in peers' memory."""
    o = _overlapped("scatter", p)
    d, peers = o.d, len(o.peers)
    whole, box = o.parts("whole", p.world_size, "scratch"), o.parts("box", peers, "symmetric")
    room, there = d.signals("room", peers), d.signals("there", peers)
    lane = d.lane("compute").matmul(whole.part(), o.x.part(), o.w.part())
    for i, source in enumerate(o.sources):
        lane.set(room, i, at=source)
    for i in range(peers):
        lane.wait(room, i)
    for i, to in enumerate(o.peers):
        lane.copy(whole.part(rows=(to * o.m, o.m)), o.part(box, i, at=to), "kernel").set(there, i, at=to)
    for i in range(peers):
        lane.wait(there, i)
    lane.reduce(o.y.part(), whole.part(rows=(RANK * o.m, o.m)), *(o.part(box, i) for i in range(peers)))
    return d.schedule()


@builder(MatmulReduceScatter, chunks=(1, 2, 4), by=("dma", "kernel", "store"), add=("gemm", "reduce"))
def direct(
    p: MatmulReduceScatter, *, chunks: int, by: Literal["dma", "kernel", "store"], add: Literal["gemm", "reduce"]
) -> Schedule:
    """by store: GEMMs store into the peer's slot. add gemm: the own GEMM adds to what came, chunk by chunk; reduce: it does not
    wait, and a kernel adds its product and what came."""
    o = _overlapped("direct", p)
    d, peers, pieces = o.d, len(o.peers), cut(o.m, chunks, what="rows of a rank's result")
    box = o.parts("box", peers, "symmetric")
    free, there = d.signals("free", peers), d.signals("there", peers * chunks)
    compute = d.lane("compute")
    if by == "store":
        for i, to in enumerate(o.peers):
            compute.wait(free, i, previous=True)
            for c, rows in enumerate(pieces):
                o.multiply(compute, o.part(box, i, rows, at=to), to, rows).set(there, i * chunks + c, at=to)
    else:
        made, computed = o.parts("made", peers, "scratch"), d.signals("computed", peers * chunks)
        sender = d.lane("to peers", "copy")
        for i, to in enumerate(o.peers):
            sender.wait(free, i, previous=True)
            for c, rows in enumerate(pieces):
                o.multiply(compute, o.part(made, i, rows), to, rows).set(computed, i * chunks + c)
                sender.wait(computed, i * chunks + c).copy(o.part(made, i, rows), o.part(box, i, rows, at=to), by)
                sender.set(there, i * chunks + c, at=to)
    if add == "reduce":
        o.multiply(compute, o.y.part(), RANK)
        for number in range(peers * chunks):
            compute.wait(there, number)
        reader = compute.reduce(o.y.part(), o.y.part(), *(o.part(box, i) for i in range(peers)))
    elif peers == 1:
        reader = _add_to_last(o, compute, box, there, pieces)
    else:
        reader = compute
        for c, rows in enumerate(pieces):
            for i in range(peers):
                compute.wait(there, i * chunks + c)
            compute.reduce(o.y.part(rows=rows), *(o.part(box, i, rows) for i in range(peers)))
            o.multiply(compute, o.y.part(rows=rows), RANK, rows, add=True)
    for i, source in enumerate(o.sources):
        reader.set(free, i, at=source)
    return d.schedule()


def _add_to_last(
    o: _Operands, compute: LaneDraft, box: Buffer, there: Signals, pieces: list[tuple[int, int]]
) -> LaneDraft:
    """The own product, added to what came into the last part of `box`; the lane that brings that to y, beside GEMMs."""
    receiver, placed, last = o.d.lane("to y", "copy"), o.d.signals("placed", len(pieces)), len(o.peers) - 1
    for c, rows in enumerate(pieces):
        receiver.wait(there, last * len(pieces) + c).copy(o.part(box, last, rows), o.y.part(rows=rows)).set(placed, c)
        o.multiply(compute.wait(placed, c), o.y.part(rows=rows), RANK, rows, add=True)
    return receiver


@builder(MatmulReduceScatter, chunks=(2, 4), by=("dma", "kernel"))
def ring(p: MatmulReduceScatter, *, chunks: int, by: Literal["dma", "kernel"]) -> Schedule:
    """In chunks, so that one travels while the next is computed. What travels is rounded at each rank, as in a library's ring."""
    if p.world_size < 3:
        raise NotApplicableError("a ring is of three ranks at least: take direct")
    o, left, right = _overlapped("ring", p), peer(p.world_size, -1), peer(p.world_size, 1)
    d, steps, pieces = o.d, len(o.peers), cut(o.m, chunks, what="rows of a rank's result")
    first, box = o.parts("first", 1, "scratch"), o.parts("box", steps, "symmetric")
    free, there, summed = d.signals("free", 2), d.signals("there", steps * chunks), d.signals("summed", steps * chunks)
    compute, sender = d.lane("compute"), d.lane("to the right", "copy")
    sender.wait(free, 0, previous=True).wait(free, 1, previous=True)
    for step, owner in enumerate(o.sources):  # who gets these rows is that far behind, and they have come as far
        for c, rows in enumerate(pieces):
            out = o.part(box, step - 1, rows) if step else o.part(first, 0, rows)
            if step:
                compute.wait(there, (step - 1) * chunks + c)
            o.multiply(compute, out, owner, rows, add=step > 0).set(summed, step * chunks + c)
            sender.wait(summed, step * chunks + c).copy(out, o.part(box, step, rows, at=right), by)
            sender.set(there, step * chunks + c, at=right)
    _add_to_last(o, compute, box, there, pieces).set(free, 0, at=left)
    sender.set(free, 1, at=left)
    return d.schedule()


@builder(MatmulReduceScatter, chunks=(1, 2, 4), to=("dma", "store"))
def tracked(p: MatmulReduceScatter, *, chunks: int, to: Literal["dma", "store"]) -> Schedule:
    """to dma: copy engines send a chunk's rows when all its tiles are stored; store: tiles are stored in the owner's slot."""
    o = _overlapped("tracked", p)
    if to == "store" and chunks > 1:
        raise NotApplicableError("tiles go to their owner one by one, and not in chunks: take chunks=1")
    d, peers, tiles = o.d, len(o.peers), _Tiles(p, chunks)
    compute, done = d.lane("compute"), d.signals("done", p.world_size * chunks)
    slots = p.world_size if to == "store" else peers  # the last is the own one
    box, free = o.parts("box", slots, "symmetric"), d.signals("free", peers)
    made = box if to == "store" else o.parts("made", p.world_size, "scratch")
    owner = (RANK + 1 + tiles.turn) % p.world_size
    target = made.part(
        rows=(tiles.turn * o.m + tiles.rows[0], tiles.rows[1]), cols=tiles.cols, at=owner if to == "store" else RANK
    )
    own_rows = o.x.part(rows=(owner * o.m + tiles.rows[0], tiles.rows[1]))
    matmul = Compute("matmul", target, (own_rows, o.w.part(cols=tiles.cols)))
    told = Set(done.name, tiles.turn * chunks + tiles.chunk, owner if to == "store" else RANK)
    if to == "store":
        for i in range(peers):
            compute.wait(free, i, previous=True)
    compute.tiles(tiles.kernel, "t", p.world_size * tiles.of_rank, matmul, told)
    if to == "store":
        for i in range(peers):
            compute.wait(done, i, count=tiles.of_rank)
    else:
        there, sender = d.signals("there", peers * chunks), d.lane("to peers", "copy")
        for i, receiver in enumerate(o.peers):
            sender.wait(free, i, previous=True)
            for c, (rows, count) in enumerate(tiles.chunks):
                sender.wait(done, i * chunks + c, count=count)
                sender.copy(o.part(made, i, rows), o.part(box, i, rows, at=receiver))
                sender.set(there, i * chunks + c, at=receiver)
        for number in range(peers * chunks):
            compute.wait(there, number)
    compute.reduce(o.y.part(), o.part(made, peers), *(o.part(box, i) for i in range(peers)))
    for i, source in enumerate(o.sources):
        compute.set(free, i, at=source)
    return d.schedule()


class _Tiles:
    """Of a tracked GEMM, tile t: chunk by chunk of each rank's rows, and of a chunk `_GROUP` row tiles at a time, column by column.

    turn: which rank's rows, of those after this one. rows, cols: (first, count), rows of its rank's. of_rank: tiles of a rank.
    chunks: of a rank's, ((first row, rows), tiles) of each."""

    def __init__(self, p: MatmulReduceScatter, chunks: int) -> None:
        m, n = p.rows, p.n
        height, width = (
            min(most, max(_LEAST_TILE, 1 << (size - 1).bit_length())) for most, size in zip(_TILE, (m, n), strict=True)
        )
        self.kernel = TrackedMatmul(height, width)
        down, across = -(-m // height), -(-n // width)
        pieces = cut(down, chunks, what="row tiles of a rank's result")
        self.of_rank = down * across
        self.chunks = [((height * i, min(m - height * i, height * count)), count * across) for i, count in pieces]
        groups = [
            (i, min(_GROUP, first + count - i)) for first, count in pieces for i in range(first, first + count, _GROUP)
        ]
        # By the row tile at which one would be if each took as many tiles as there are columns.
        firsts, counts = zip(*((first, count) for first, count in groups for _ in range(count)), strict=True)
        t = Expr("t")
        self.turn, in_rank = t // self.of_rank, t % self.of_rank
        place = in_rank // across
        first, count = lookup(firsts, place), lookup(counts, place)
        in_group = in_rank - first * across
        i, j = first + in_group % count, in_group // count  # type: ignore[operator]  # of one tile all are numbers
        self.chunk = lookup([c for c, (_, count) in enumerate(pieces) for _ in range(count)], place)
        self.rows = height * i, lookup([min(height, m - height * i) for i in range(down)], i)
        self.cols = width * j, lookup([min(width, n - width * j) for j in range(across)], j)
