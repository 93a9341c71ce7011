"""Sums of all ranks' products: the rows of the sum are divided among ranks, and the owner of a row reduces it.

Reduce-scatter and all-reduce behind a GEMM share this file. A rank owns `m` rows; if the whole is not divisible, the last ranks
own fewer, or none. Rank r computes the rows of rank r + 1 first, then those of r + 2, ..., and its own last. So no two ranks send
to one, and the last of the others' rows travel behind the own GEMM.

Updates from peers are reduced in fp32, in the order of the ring behind the owner, and rounded once. The own product is rounded
before that; if a GEMM adds it (add=gemm), it is not. A slot is filled again when its reader has signaled that it has read all
chunks of it, since a run of other sizes may place its chunks differently.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 4.2 (track and trigger), 4.4
(staggered producers, stores into a peer's memory) and 7.1 (direct reduce-scatter).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Literal, TypeAlias

from weft.builders.operands import cut, peer
from weft.builders.problems.matmul_all_reduce import MatmulAllReduce
from weft.builders.problems.matmul_reduce_scatter import MatmulReduceScatter
from weft.builders.problems.scaled_matmul_reduce_scatter import ScaledMatmulReduceScatter
from weft.builders.registry import NotApplicableError
from weft.schedule.expr import RANK, Expr, Index, lookup
from weft.schedule.kernels import TrackedMatmul
from weft.schedule.schedule import Draft, LaneDraft
from weft.schedule.steps import Buffer, Compute, Region, Role, Set, Signals

By: TypeAlias = Literal["dma", "kernel", "store"]
Add: TypeAlias = Literal["gemm", "reduce"]
Chunk: TypeAlias = tuple[int, int]
"""(first, count) of the rows of a whole part; a smaller part has only some of them."""
GROUP = 8  # row tiles that a tracked GEMM computes column by column, so that their inputs stay in the cache
_TILE, _LEAST_TILE = (128, 256), 16  # rows and columns: fast if the product is at least as large


class PartialProducts:
    """The caller's x and w in a draft of `p`, with their scales if they are fp8.

    peers: the ranks whose rows are computed, in this order. sources: the ranks that compute this rank's rows, in the order of
    arrival."""

    def __init__(self, name: str, p: MatmulReduceScatter | MatmulAllReduce) -> None:
        self.d, self.p, self.m = Draft(name, p.world_size), p, -(-p.m // p.world_size)
        self.scaled = p if isinstance(p, ScaledMatmulReduceScatter) else None
        of_operands = p.dtype if self.scaled is None else "fp8"
        self.x = self.d.buffer("x", p.m, p.k, of_operands, "input")
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
        if p.world_size == 1:
            raise NotApplicableError("one rank has nothing to send")
        if not p.has_work:
            raise NotApplicableError("there is nothing to multiply")
        return cls(name, p)

    def chunks(self, count: int) -> list[Chunk]:
        return cut(self.m, count, what="rows of a rank's part")

    def parts(self, name: str, count: int, role: Role) -> Buffer:
        """Declare a buffer for products of the rows that `count` ranks own."""
        return self.d.buffer(name, count * self.m, self.p.n, self.p.dtype, role)

    def rows(self, owner: Index, chunk: Chunk | None = None) -> Index:
        """Return the number of rows of a chunk that `owner` has; without `chunk`, of all its rows."""
        first, count = chunk or (0, self.m)
        left = [self.p.m - (rank * self.m + first) for rank in range(self.p.world_size)]
        return lookup([max(0, min(count, rows)) for rows in left], owner)

    def part(self, parts: Buffer, number: Index, owner: Index, chunk: Chunk | None = None, at: Index = RANK) -> Region:
        """Return a chunk of the `number`-th part of a buffer, with rows of `owner`; without `chunk`, all of the part."""
        first = chunk[0] if chunk else 0
        return parts.part(rows=(number * self.m + first, self.rows(owner, chunk)), at=at)

    def following(self, rows: tuple[Index, Index]) -> list[Region]:
        """Return the regions that are added to these rows of the sum: bias and residual."""
        return [one.part(rows=rows if one.name == "residual" else None) for one in self._following]

    def following_part(self, chunk: Chunk | None) -> list[Region]:
        """Return the regions that are added to this rank's rows of a chunk."""
        return self.following((RANK * self.m + (chunk[0] if chunk else 0), self.rows(RANK, chunk)))

    def multiply(
        self, lane: LaneDraft, out: Region, owner: Index, chunk: Chunk | None = None, *, add: bool = False,
        to: Region | None = None,
    ) -> LaneDraft:  # fmt: skip
        """Compute this rank's product for these rows of `owner`; add: accumulate into `out`; to: add this region."""
        rows = (owner * self.m + (chunk[0] if chunk else 0), self.rows(owner, chunk))
        return self._multiply(lane, out, rows, add, to)

    def multiply_tracked(
        self, lane: LaneDraft, out: Region, owner: Index, chunk: Chunk, *told: Set, to: Region | None = None
    ) -> int:
        """Run `multiply` as one tracked GEMM, whose tiles each set `told`; return the number of tiles.

        All ranks must own equally many rows."""
        tiles = TrackedTiles(chunk[1], self.p.n, 1)
        rows, cols = tiles.rows, tiles.cols

        def of_tile(part: Region) -> Region:
            return replace(part, row=part.row + rows[0], rows=rows[1], col=cols[0], cols=cols[1])

        x = self.x.part(rows=(owner * self.m + chunk[0] + rows[0], rows[1]))
        inputs = (x, self.w.part(cols=cols)) if to is None else (x, self.w.part(cols=cols), of_tile(to))
        matmul = Compute("matmul" if to is None else "addmm", of_tile(out), inputs)
        lane.tiles(tiles.kernel, "t", tiles.of_rank, matmul, *told)
        return tiles.of_rank

    def multiply_all(self, lane: LaneDraft, out: Region) -> LaneDraft:
        """Compute this rank's product for all rows."""
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


class Sums:
    """The place of this rank's rows of the sum: here its result, whose slots may be filled again once they have been read.

    gathered: True if all ranks wait in each run for each other's sums, chunk by chunk.
    """

    gathered = False

    def __init__(self, o: PartialProducts, to: Buffer) -> None:
        self.o, self.to = o, to

    @cached_property
    def _free(self) -> Signals:
        return self.o.d.signals("free", len(self.o.peers))

    def part(self, chunk: Chunk | None = None) -> Region:
        return self.o.part(self.to, 0, RANK, chunk)

    def wait_for_slot(self, lane: LaneDraft, number: int) -> None:
        """Wait until this rank may write to its slot at the `number`-th peer."""
        lane.wait(self._free, number, previous=True)

    def all_read(self, lane: LaneDraft) -> None:
        """Signal the sources that `lane` has read all slots."""
        for i, source in enumerate(self.o.sources):
            lane.set(self._free, i, at=source)

    def added(self, lane: LaneDraft, chunk: int) -> None:
        """Signal that `lane` has completed a chunk."""


def direct_sums(o: PartialProducts, sums: Sums, pieces: list[Chunk], *, by: By, add: Add) -> None:
    """Run a GEMM for each chunk of a peer's rows, and send the chunk to a slot of the peer.

    by store: the GEMM stores into the slot. add gemm: the own GEMM adds to the arrived chunks, chunk by chunk. add reduce: it
    does not wait, and a kernel reduces its product and the arrived chunks."""
    d, peers, chunks = o.d, len(o.peers), len(pieces)
    box = o.parts("box", peers, "symmetric")
    there, compute = d.signals("there", peers * chunks), d.lane("compute")
    if by == "store":
        for i, to in enumerate(o.peers):
            sums.wait_for_slot(compute, i)
            for c, chunk in enumerate(pieces):
                o.multiply(compute, o.part(box, i, to, chunk, at=to), to, chunk).set(there, i * chunks + c, at=to)
    else:
        made, computed = o.parts("made", peers, "scratch"), d.signals("computed", peers * chunks)
        sender = d.lane("to peers", "copy")
        for i, to in enumerate(o.peers):
            sums.wait_for_slot(sender, i)
            for c, chunk in enumerate(pieces):
                o.multiply(compute, o.part(made, i, to, chunk), to, chunk).set(computed, i * chunks + c)
                sender.wait(computed, i * chunks + c).copy(
                    o.part(made, i, to, chunk), o.part(box, i, to, chunk, at=to), by
                )
                sender.set(there, i * chunks + c, at=to)
    if add == "gemm" and peers == 1 and not o.following_part(None):
        sums.all_read(add_to_last(o, sums, box, there, pieces))
        return
    own = None
    if add == "reduce":
        own = o.parts("own", 1, "scratch") if sums.gathered else sums.to
        o.multiply(compute, o.part(own, 0, RANK), RANK)
    reduce(o, sums, box, there, pieces, own=own)


def reduce(
    o: PartialProducts, sums: Sums, box: Buffer, there: Signals, pieces: list[Chunk], *, own: Buffer | None, number: int = 0
) -> None:  # fmt: skip
    """Reduce the updates that arrive in `box`, and the own product.

    The own product is the `number`-th part of `own`; if `own` is None, a GEMM adds it. If no rank waits for single chunks, one
    kernel reduces all."""
    peers, compute = len(o.peers), o.d.lane("compute")
    at_once = own is not None and not sums.gathered
    for c, chunk in enumerate(pieces):
        for i in range(peers):
            compute.wait(there, i * len(pieces) + c)
        if at_once and c + 1 < len(pieces):
            continue
        rows = None if at_once else chunk
        mine = [] if own is None else [o.part(own, number, RANK, rows)]
        came = [o.part(box, i, RANK, rows) for i in range(peers)]
        compute.reduce(sums.part(rows), *mine, *came, *o.following_part(rows))
        if own is None:
            o.multiply(compute, sums.part(rows), RANK, rows, add=True)
        sums.added(compute, c)
    sums.all_read(compute)


def add_to_last(o: PartialProducts, sums: Sums, box: Buffer, there: Signals, pieces: list[Chunk]) -> LaneDraft:
    """Add the own product to the chunks that arrive in the last part of `box`.

    Returns the lane that copies these chunks to the sums, beside the GEMMs."""
    receiver, placed, last = o.d.lane("to sums", "copy"), o.d.signals("placed", len(pieces)), len(o.peers) - 1
    compute = o.d.lane("compute")
    for c, chunk in enumerate(pieces):
        receiver.wait(there, last * len(pieces) + c)
        receiver.copy(o.part(box, last, RANK, chunk), sums.part(chunk)).set(placed, c)
        o.multiply(compute.wait(placed, c), sums.part(chunk), RANK, chunk, add=True)
        sums.added(compute, c)
    return receiver


def tracked_sums(o: PartialProducts, sums: Sums, *, chunks: int, to: Literal["dma", "store"]) -> list[Chunk]:
    """Run one tracked GEMM for all rows; return the chunks, which consist of whole tiles.

    to dma: copy engines send a chunk's rows when all its tiles are stored. to store: tiles are stored in the owner's slot."""
    d, p, peers = o.d, o.p, len(o.peers)
    if o.scaled is not None:
        raise NotApplicableError("its kernel does not support fp8: use direct[...] or scatter")
    if to == "store" and chunks > 1:
        raise NotApplicableError("tiles go to their owner one by one, not in chunks: use chunks=1")
    if p.m % p.world_size:
        raise NotApplicableError(f"m={p.m} must be divisible by world_size={p.world_size}: use another schedule")
    tiles = TrackedTiles(o.m, p.n, chunks)
    compute, done = d.lane("compute"), d.signals("done", p.world_size * chunks)
    slots = p.world_size if to == "store" else peers  # the last is this rank's own
    box = o.parts("box", slots, "symmetric")
    made = box if to == "store" else o.parts("made", p.world_size, "scratch")
    owner = (RANK + 1 + tiles.turn) % p.world_size
    at = owner if to == "store" else RANK
    target = made.part(rows=(tiles.turn * o.m + tiles.rows[0], tiles.rows[1]), cols=tiles.cols, at=at)
    own_rows = o.x.part(rows=(owner * o.m + tiles.rows[0], tiles.rows[1]))
    matmul = Compute("matmul", target, (own_rows, o.w.part(cols=tiles.cols)))
    if to == "store":
        for i in range(peers):
            sums.wait_for_slot(compute, i)
    compute.tiles(
        tiles.kernel, "t", p.world_size * tiles.of_rank, matmul, Set(done.name, tiles.turn * chunks + tiles.chunk, at)
    )
    pieces = [rows for rows, _ in tiles.chunks]
    if to == "store":
        for i in range(peers):
            compute.wait(done, i, count=tiles.of_rank)
        came = [o.part(box, i, RANK) for i in range(peers)]
        compute.reduce(sums.part(), o.part(made, peers, RANK), *came, *o.following_part(None))
        sums.added(compute, 0)
        sums.all_read(compute)
    else:
        there, sender = d.signals("there", peers * chunks), d.lane("to peers", "copy")
        for i, receiver in enumerate(o.peers):
            sums.wait_for_slot(sender, i)
            for c, (rows, count) in enumerate(tiles.chunks):
                sender.wait(done, i * chunks + c, count=count)
                sender.copy(o.part(made, i, receiver, rows), o.part(box, i, receiver, rows, at=receiver))
                sender.set(there, i * chunks + c, at=receiver)
        reduce(o, sums, box, there, pieces, own=made, number=peers)
    return pieces


class TrackedTiles:
    """Tile t of a tracked GEMM whose result is the parts of several ranks, m x n each.

    Tiles go chunk by chunk of each part, and in a chunk `GROUP` row tiles at a time, column by column. turn: the number of the
    part. rows, cols: (first, count), relative to the part's rows. of_rank: number of tiles of a part. chunks: for each chunk of a
    part ((first row, rows), tiles)."""

    def __init__(self, m: int, n: int, chunks: int) -> None:
        height, width = (
            min(most, max(_LEAST_TILE, 1 << (size - 1).bit_length())) for most, size in zip(_TILE, (m, n), strict=True)
        )
        self.kernel = TrackedMatmul(height, width)
        down, across = -(-m // height), -(-n // width)
        pieces = cut(down, chunks, what="row tiles of a rank's result")
        self.of_rank = down * across
        self.chunks = [((height * i, min(m - height * i, height * count)), count * across) for i, count in pieces]
        groups = [
            (i, min(GROUP, first + count - i)) for first, count in pieces for i in range(first, first + count, GROUP)
        ]
        # Indexed by tile // across: each row tile counts as `across` tiles.
        firsts, counts = zip(*((first, count) for first, count in groups for _ in range(count)), strict=True)
        t = Expr("t")
        self.turn, in_rank = t // self.of_rank, t % self.of_rank
        place = in_rank // across
        first, count = lookup(firsts, place), lookup(counts, place)
        in_group = in_rank - first * across
        i, j = first + in_group % count, in_group // count  # type: ignore[operator]  # numbers: all entries are equal
        self.chunk = lookup([c for c, (_, count) in enumerate(pieces) for _ in range(count)], place)
        self.rows = height * i, lookup([min(height, m - height * i) for i in range(down)], i)
        self.cols = width * j, lookup([min(width, n - width * j) for j in range(across)], j)
