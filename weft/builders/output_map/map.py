"""T3's output map: it lists the destination of each chunk of a GEMM's output. A schedule is built from the map.

The GEMM before a collective computes its output chunk by chunk. The map only lists destinations;
`weft.builders.output_map.steps` derives the waits, copies and sums. A map has three kinds of entries:

    local(c)                        chunk c stays on this rank
    remote_map(c, to=, op=)         the GEMM stores the chunk in the memory of rank `to`. If the map also has local(c), the
                                    GEMM stores it in the memory of this rank too
    dma_map(c, to=, op=, after=)    the chunk is stored locally. When it has been written or updated `after` times, by the GEMM
                                    and by peers, a copy engine sends it to rank `to`

op="update" adds to the peer's product for the same chunk. op="store" overwrites; the peer must not compute the chunk.
Chunks are numbered in the order in which a rank computes them. This order is staggered: rank r first computes the rows
of rank r + 1, then of rank r + 2, and so on, and its own rows last. The paper's ring reduce-scatter (section 4.4) on
four ranks is

    left = (RANK + 3) % 4
    ring = OutputMap(rows=M, chunks=4).remote_map(0, to=left, op="update")
    ring = ring.dma_map(1, to=left, op="update", after=2).dma_map(2, to=left, op="update", after=2).local(3)
    schedule = ring.schedule(MatmulReduceScatter(4, M, N, K, "bf16"))

One map describes all ranks, because it names ranks by expressions such as (RANK + 3) % 4. If ranks differ by more than their
position in the ring, write a map for each rank: `schedule_of([map_of(rank) for rank in range(4)], problem)`. The functions
below return the paper's maps and some others.

Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 4.4 (figures 11 and 12), 4.2
(triggers) and 7.1 (other collectives).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from weft.builders.output_map.routes import CollectiveName, Entry, StoreOp, routes_of
from weft.builders.output_map.steps import Gemm, write
from weft.builders.partial_products import Add, PartialProducts
from weft.builders.problems.matmul_all_gather import MatmulAllGather
from weft.builders.problems.matmul_reduce_scatter import MatmulReduceScatter
from weft.builders.problems.scaled_matmul_reduce_scatter import ScaledMatmulReduceScatter
from weft.builders.registry import NotApplicableError
from weft.integers import convert, integer
from weft.schedule.expr import RANK, Expr, Index
from weft.schedule.schedule import Schedule
from weft.schedule.steps import CopyBy
from weft.words import kind

Sender: TypeAlias = Literal["store", "dma"]
"""The sender of a chunk. "store": the GEMM stores it in the peer's memory (remote_map). "dma": a copy engine (dma_map)."""


@dataclass(frozen=True, slots=True)
class MatmulInto:
    """A problem for output maps of any collective: y = collective(x @ w).

        collective       rows of x      rows of y      result of rank r
        reduce_scatter   rows           rows / ranks   its rows of the sum of all ranks' products
        all_gather       rows / ranks   rows           all ranks' products, in rank order
        all_to_all       rows           rows           the r-th part of each rank's product, in rank order

    "rows" is `OutputMap.rows`. x has k columns, y has n columns, and w is [k, n].
    """

    collective: CollectiveName
    world_size: int
    n: int
    k: int
    dtype: str

    def __post_init__(self) -> None:
        if self.collective not in get_args(CollectiveName):
            raise ValueError(
                f"collective={self.collective!r} is not known: use one of {', '.join(get_args(CollectiveName))}"
            )
        convert(self, "world_size", "n", "k")
        if self.world_size < 1 or min(self.n, self.k) < 0:
            raise ValueError(
                f"world_size={self.world_size}, n={self.n}, k={self.k}: give at least 1 rank, and sizes of at least 0"
            )


Target: TypeAlias = MatmulReduceScatter | MatmulAllGather | MatmulInto


@dataclass(frozen=True, slots=True)
class OutputMap:
    """The destination of each chunk of a GEMM's output. Each method call returns a new map with one more entry.

        left = (RANK + 3) % 4
        ring = OutputMap(rows=M, chunks=4).remote_map(0, to=left, op="update")
        ring = ring.dma_map(1, to=left, op="update", after=2).dma_map(2, to=left, op="update", after=2).local(3)

    rows: the number of rows of the whole output, over all ranks.
    chunks: the number of chunks of these rows; a multiple of the world size.
    order: the chunks in the order in which a rank computes them, each given by its position in the whole output. With n chunks
        per rank, positions 0 .. n - 1 are rank 0's rows, positions n .. 2 n - 1 are rank 1's rows, and so on. The index of a
        chunk in this list is its number in the methods. The list has all chunks, including chunks that this rank does not compute.
        Default: the staggered order.
    entries: the entries that earlier method calls have added.

    The methods and `schedule` raise `ValueError` for impossible maps, with the chunk, the value and the fix.

    Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 4.4, figures 11
        and 12.
    """

    rows: int
    chunks: int
    order: tuple[Index, ...] | None = None
    entries: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        convert(self, "rows", "chunks")
        if self.chunks < 1 or self.rows < 0:
            raise ValueError(f"rows={self.rows}, chunks={self.chunks}: give at least 0 rows and 1 chunk")
        if self.order is not None and not isinstance(self.order, list | tuple):
            raise ValueError(
                f"order={self.order!r} is {kind(self.order)}: pass a list with the position of each chunk, or None"
            )
        if self.order is not None and len(self.order) != self.chunks:
            raise ValueError(
                f"order has {len(self.order)} entries but chunks={self.chunks}: give each chunk exactly one entry"
            )

    def local(self, chunk: int) -> OutputMap:
        """Keep the chunk on this rank, as a part of its result. Return the extended map.

        In a reduce-scatter, peers' products for the chunk are added to this rank's product.
        """
        return self._with(Entry("local", chunk))

    def remote_map(self, chunk: int, *, to: Index, op: StoreOp = "store") -> OutputMap:
        """Store the chunk in the memory of rank `to` by the GEMM itself. Return the extended map."""
        return self._with(Entry("remote_map", chunk, to, op))

    def dma_map(self, chunk: int, *, to: Index, op: StoreOp = "store", after: int = 1) -> OutputMap:
        """Send the chunk to rank `to` by copy engine when it has been written or updated `after` times. Return the
        extended map.

        after: the number of writes and updates to wait for. The chunk gets one update from this rank's GEMM, if the
            GEMM computes the chunk, and one from each rank that sends the chunk here.
        """
        after = integer(f"chunk {chunk}: after", after, "pass the number of writes and updates to wait for, an integer")
        if after < 1:
            raise ValueError(
                f"chunk {chunk}: after={after} must be at least 1, because a chunk must be written before it is sent"
            )
        return self._with(Entry("dma_map", chunk, to, op, after))

    def _with(self, entry: Entry) -> OutputMap:
        fix = f"use 0 to {self.chunks - 1}"
        chunk = integer("chunk", entry.chunk, fix)
        if not 0 <= chunk < self.chunks:
            raise ValueError(f"chunk {chunk} does not exist in a map of {self.chunks} chunks: {fix}")
        to = entry.to
        if not isinstance(to, Expr):
            to = integer(f"chunk {chunk}: to", to, "use the number of a rank, or an expression such as (RANK + 1) % 4")
        if entry.op not in get_args(StoreOp):
            raise ValueError(f"chunk {chunk}: op={entry.op!r} is not known: use 'store' or 'update'")
        return replace(self, entries=(*self.entries, replace(entry, chunk=chunk, to=to)))

    def schedule(
        self, problem: Target, *, gemm: Gemm = "chunks", add: Add | None = None,
        by: CopyBy = "dma", engines: int = 1, name: str = "output map",
    ) -> Schedule:  # fmt: skip
        """Return the schedule in which all ranks follow this map.

        Args:
            gemm: "chunks": a cuBLAS GEMM for each chunk. "tracked": one kernel, which sets signals when chunks are complete.
            add: how a reduce-scatter adds updates to a chunk. "gemm": the chunk's GEMM waits for them and accumulates
                into them. "reduce": a kernel adds them, and GEMMs do not wait; required for gemm="tracked".
            by: how chunks of `dma_map` are copied: by copy engine ("dma") or by kernel ("kernel").
            engines: the number of chunks that a rank sends concurrently, each to a different rank. On a switch, copies to one
                peer use the GPU's full bandwidth: use 1. On a mesh, which has a separate link to each peer, use world_size - 1.

        Raise `ValueError` for an impossible map. Raise `NotApplicableError` if there is nothing to compute, or there are fewer
        rows than chunks.
        """
        return schedule_of([self] * problem.world_size, problem, gemm=gemm, add=add, by=by, engines=engines, name=name)

    def __str__(self) -> str:
        return "\n".join([f"output of {self.rows} rows in {self.chunks} chunks", *(f"  {e}" for e in self.entries)])


def schedule_of(
    maps: Sequence[OutputMap], problem: Target, *, gemm: Gemm = "chunks",
    add: Add | None = None, by: CopyBy = "dma", engines: int = 1, name: str = "output map",
) -> Schedule:  # fmt: skip
    """Return the schedule in which rank r follows `maps[r]`. The other arguments are as for `OutputMap.schedule`."""
    p, wanted = (problem, None) if isinstance(problem, MatmulInto) else _as_matmul_into(problem)
    add = add or ("reduce" if gemm == "tracked" else "gemm")
    for key, value, known in (("gemm", gemm, Gemm), ("add", add, Add), ("by", by, CopyBy)):
        if value not in get_args(known):
            raise ValueError(f"{key}={value!r} is unknown: use one of {', '.join(get_args(known))}")
    if gemm == "tracked" and add == "gemm":
        raise ValueError(
            "add='gemm' with gemm='tracked': a tracked GEMM computes all chunks in one kernel, so "
            "it cannot add to arriving chunks. Use add='reduce'"
        )
    fix = "pass the number of chunks to send concurrently, an integer of at least 1"
    engines = integer("engines", engines, fix)
    if engines < 1:
        raise ValueError(f"engines={engines}: {fix}")
    if len(maps) != p.world_size:
        raise ValueError(f"{len(maps)} maps were given for world_size={p.world_size}: give one map for each rank")
    first = maps[0]
    for rank, one in enumerate(maps):
        if (one.rows, one.chunks) != (first.rows, first.chunks):
            raise ValueError(
                f"rank {rank} maps {one.rows} rows in {one.chunks} chunks, but rank 0 maps {first.rows} rows in "
                f"{first.chunks} chunks: use the same numbers on every rank"
            )
    rows = first.rows
    if wanted not in (rows, None):
        raise ValueError(
            f"the map has {rows} rows, but the problem's output has {wanted}: use OutputMap(rows={wanted}, ...)"
        )
    if rows % p.world_size:
        raise ValueError(
            f"rows={rows} must be divisible by world_size={p.world_size}: pad to {-(-rows // p.world_size) * p.world_size}"
        )
    if not rows * p.n * p.k:
        raise NotApplicableError(
            f"a size is 0 (rows={rows}, n={p.n}, k={p.k}), so there is nothing to multiply: give at least 1 each"
        )
    if gemm == "tracked":
        _require_tracked(maps, p)
    plain = [(one.order, one.entries) for one in maps]
    same = all(one is first for one in maps)
    routes = routes_of(p.collective, p.world_size, first.chunks, tuple(plain[:1] if same else plain))
    product = MatmulReduceScatter(p.world_size, rows, p.n, p.k, p.dtype)
    o = PartialProducts(name, product, own_rows=p.collective == "all_gather")
    y = o.parts("y", 1 if p.collective == "reduce_scatter" else p.world_size, "output")
    write(o, routes, y, gemm=gemm, add=add, by=by, engines=engines)
    return o.d.schedule()


def _require_tracked(maps: Sequence[OutputMap], p: MatmulInto) -> None:
    if p.world_size == 1:
        raise NotApplicableError("there is only one rank, so there is nothing to send: use gemm='chunks'")
    for rank, one in enumerate(maps):
        if p.collective == "all_gather" and (e := next((e for e in one.entries if e.how == "remote_map"), None)):
            raise ValueError(
                f"chunk {e.chunk} of rank {rank}: remote_map cannot be used here, because a tracked GEMM stores "
                f"each chunk only once, in this rank's memory. Use dma_map({e.chunk}, to={e.to}, after=1)"
            )


def _as_matmul_into(p: MatmulReduceScatter | MatmulAllGather) -> tuple[MatmulInto, int]:
    """Return two values: the operator's problem as a `MatmulInto`, and the number of rows of the whole output."""
    if isinstance(p, ScaledMatmulReduceScatter):
        raise NotApplicableError("output maps do not support scaled (fp8) GEMMs: use another schedule")
    if isinstance(p, MatmulReduceScatter):
        return MatmulInto("reduce_scatter", p.world_size, p.n, p.k, p.dtype), p.m
    if p.columns:
        raise NotApplicableError(
            "an output map describes rows, but gather_dim=-1 concatenates columns: use gather_dim=0"
        )
    return MatmulInto("all_gather", p.world_size, p.n, p.k, p.dtype), p.world_size * p.m


# --- Maps. per_rank: the number of chunks of each rank's rows. rank: a number, to return the map of this rank only ---


def ring_reduce_scatter(
    rows: int, world: int, *, per_rank: int = 1, first: Sender = "store", to: Literal["left", "right"] = "left",
    rank: Index = RANK,
) -> OutputMap:  # fmt: skip
    """Return the map of a ring reduce-scatter (figures 7, 11 and 12): sums travel around the ring, and each rank adds its product.

    rows, world: the number of rows of all ranks together, and the number of ranks.
    per_rank: the number of chunks of each rank's rows.
    rank: the rank that follows the map. Default: an expression, so that one map describes all ranks.
    to: the rank to which a rank sends sums. "left": rank - 1, as in the paper. "right": rank + 1.
    first: the sender of the first chunk, which gets no updates. "store": the GEMM stores it in the neighbour's memory.
        "dma": a copy engine sends it, like the other chunks.
    """
    made, neighbour = OutputMap(rows, world * per_rank), (rank + world - 1) % world
    if to == "right":
        owners = [(rank + world - distance) % world for distance in range(1, world + 1)]
        order = tuple(owner * per_rank + piece for owner in owners for piece in range(per_rank))
        made, neighbour = replace(made, order=order), (rank + 1) % world
    for chunk in range(world * per_rank):
        distance = chunk // per_rank
        if distance == world - 1:
            made = made.local(chunk)
        elif distance or first == "dma":
            made = made.dma_map(chunk, to=neighbour, op="update", after=2 if distance else 1)
        else:
            made = made.remote_map(chunk, to=neighbour, op="update")
    return made


def direct_reduce_scatter(
    rows: int, world: int, *, per_rank: int = 1, by: Sender = "store", sliced: bool = False, rank: Index = RANK
) -> OutputMap:
    """Return the map of a direct reduce-scatter (section 7.1): each chunk is sent to the rank that owns its rows.

    by: the sender of the chunks: "store" (the GEMM stores them at the peer) or "dma" (a copy engine).
    rows, world: the number of rows of all ranks together, and the number of ranks.
    per_rank: the number of chunks of each rank's rows.
    rank: the rank that follows the map. Default: an expression, so that one map describes all ranks.
    sliced: True to compute one chunk for every peer, then the next chunk for every peer, so that all links are busy
        from the start. False to compute all rows for one peer before the rows for the next peer.
    """
    return _to_owners(rows, world, per_rank, by, "update", sliced, rank)


def all_to_all(
    rows: int, world: int, *, per_rank: int = 1, by: Sender = "store", sliced: bool = False, rank: Index = RANK
) -> OutputMap:
    """Return the map of an all-to-all (section 7.1): `direct_reduce_scatter` with stores in place of updates. The
    arguments are the same.
    """
    return _to_owners(rows, world, per_rank, by, "store", sliced, rank)


def ring_all_gather(
    rows: int, world: int, *, per_rank: int = 1, first: Sender = "dma", rank: Index = RANK
) -> OutputMap:
    """Return the map of a ring all-gather (section 7.1): the map of the ring reduce-scatter, with stores in place of
    updates.

    Each rank keeps its own chunks and sends them to the left. It forwards chunks from the right, except the chunks that
    the left neighbour has computed. With first="store" a kernel stores this rank's chunks in the left neighbour's
    memory after the GEMM.
    """
    made, left = OutputMap(rows, world * per_rank), (rank + world - 1) % world
    for chunk in range(world * per_rank):
        distance = chunk // per_rank
        if distance == world - 1:
            made = made.local(chunk)
            if world > 1:
                made = _send(made, chunk, left, first, "store")
        elif distance < world - 2:
            made = made.dma_map(chunk, to=left, after=1)
    return made


def direct_all_gather(rows: int, world: int, *, per_rank: int = 1, by: Sender = "dma", rank: Index = RANK) -> OutputMap:
    """Return the map of a direct all-gather (section 7.1): this rank's chunks stay and are sent to every peer.

    The arguments are as for `direct_reduce_scatter`.
    """
    made = OutputMap(rows, world * per_rank)
    for chunk in range((world - 1) * per_rank, world * per_rank):
        made = made.local(chunk)
        for distance in range(1, world):
            made = _send(made, chunk, (rank + distance) % world, by, "store")
    return made


def _to_owners(rows: int, world: int, per_rank: int, by: Sender, op: StoreOp, sliced: bool, rank: Index) -> OutputMap:
    pieces, peers = range(per_rank), range(1, world)
    if sliced:
        chunks = [(distance, piece) for piece in pieces for distance in peers]
    else:
        chunks = [(distance, piece) for distance in peers for piece in pieces]
    chunks += [(world, piece) for piece in pieces]
    order = tuple((rank + distance) % world * per_rank + piece for distance, piece in chunks)
    made = OutputMap(rows, world * per_rank, order if sliced else None)
    for chunk, (distance, _) in enumerate(chunks):
        made = made.local(chunk) if distance == world else _send(made, chunk, (rank + distance) % world, by, op)
    return made


def _send(made: OutputMap, chunk: int, to: Index, by: Sender, op: StoreOp) -> OutputMap:
    return made.remote_map(chunk, to=to, op=op) if by == "store" else made.dma_map(chunk, to=to, op=op, after=1)
