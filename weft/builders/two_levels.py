"""Schedules in two levels, for ranks on several hosts: between hosts by messages, within a host by mapped memory.

A **rail** consists of the ranks with the same index on their hosts, one on each host. Only the ranks of a rail send to each
other. So each byte crosses the network once per host. With H hosts of L ranks:

    all-gather + GEMM

    rail        send this rank's rows in chunks along the rail, into slot h of the peer's `box`; h is this host
    near        copy this rank's rows into slot h of its own `box`, and signal the ranks of this host. Later, signal each chunk
                that has arrived along the rail
    compute     multiply this rank's rows; then the rows of the other ranks of this host, then the rows of other hosts, as they
                arrive. The GEMMs read rows in the `box` of the rank that received them. So no rank copies rows of other hosts

    GEMM + reduce-scatter

    compute     multiply the rows for other hosts, in chunks, then the rows for this host, into `products`
    rail        when all ranks of this host have multiplied a chunk: add their products for this rail, which are read in place, and
                send the sum along the rail
    compute     add the products of this host, and the sums of the other hosts

    GEMM + all-reduce, where rank i of each host owns the i-th part of each chunk of rows

    compute     multiply the rows in chunks, into `products`
    add         when all ranks of this host have multiplied a chunk: add their products of the part that this rank owns
    rail        with two hosts: send this sum along the rail. With more: cut it into a piece per host, and send each host its piece
    add         add the arrived sums or pieces, with bias and residual
    back, take  with more than two hosts: send the total of this host's piece along the rail; receive the totals of other pieces
    from peers  copy the parts that the other ranks of this host own

Sums are rounded to the result's dtype once per level.
Only CPU ranks run these schedules: GPUs have no messages (docs/hosts.md).

Sources: Cho et al., "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network hierarchy", 2019, section 3.
    "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", 3.2 (remote slices first).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.builders.fetched import Fetched
from weft.builders.matmul_all_reduce import Result
from weft.builders.operands import Operands, copy_rows, offsets, split
from weft.builders.partial_products import PartialProducts
from weft.builders.problems.all_gather_matmul import AllGatherMatmul
from weft.builders.problems.matmul_all_reduce import MatmulAllReduce
from weft.builders.problems.matmul_reduce_scatter import MatmulReduceScatter
from weft.builders.problems.scaled_matmul_reduce_scatter import ScaledMatmulReduceScatter
from weft.builders.registry import NotApplicableError, builder
from weft.schedule.expr import RANK, Index, lookup
from weft.schedule.schedule import Schedule
from weft.schedule.steps import Buffer, Region


@dataclass(frozen=True, slots=True)
class _Grid:
    """The division of the ranks into `hosts` hosts. Each host has `near` consecutive ranks.

    host: the index of this rank's host.
    others: the other hosts, in the order in which this rank sends to them.
    """

    hosts: int
    near: int

    @classmethod
    def of(cls, world: int, hosts: int) -> _Grid:
        if world % hosts or world == hosts:
            raise NotApplicableError(
                f"{world} ranks on {hosts} hosts: this schedule needs the same number of ranks on each host, at least 2"
            )
        return cls(hosts, world // hosts)

    @property
    def host(self) -> Index:
        return RANK // self.near

    @property
    def others(self) -> list[Index]:
        return [(self.host + distance) % self.hosts for distance in range(1, self.hosts)]

    @property
    def sources(self) -> list[Index]:
        """The other hosts, in the order in which their messages arrive."""
        return [(self.host + self.hosts - distance) % self.hosts for distance in range(1, self.hosts)]

    @property
    def peers(self) -> list[Index]:
        """The other ranks of this host."""
        return [self.rank(self.host, distance) for distance in range(1, self.near)]

    def near_rank(self, distance: int) -> Index:
        """Return the rank of this host that is `distance` places after this rank (before it, if negative)."""
        return self.rank(self.host, distance % self.near)

    def rank(self, host: Index, distance: int = 0) -> Index:
        """Return the rank on `host` whose index on its host is `distance` after this rank's index (modulo the number of
        ranks per host).
        """
        return host * self.near + (RANK % self.near + distance) % self.near


@builder(AllGatherMatmul, hosts=(2,), chunks=(1, 2, 4))
def two_levels(p: AllGatherMatmul, *, hosts: int, chunks: int) -> Schedule:
    """Return a schedule of all-gather + GEMM in two levels: between hosts by messages, within a host by shared memory.

    hosts: the number of hosts.
    chunks: the number of messages in which a rank sends its shard to another host, at most the number of rows of the shard.
    """
    grid = _Grid.of(p.world_size, hosts)
    if p.return_gathered:
        raise NotApplicableError("this schedule does not gather the rows in one matrix: use return_A=False")
    operands = Operands("two_levels", p)
    d, x, most, begins = operands.d, operands.x, max(p.rows), offsets(p.rows)
    box = operands.rows("box", hosts * most, "symmetric")
    came, ready = d.signals("came", hosts * chunks), d.signals("ready", p.world_size * chunks)
    free = d.signals("free", p.world_size)
    rail, near, compute = d.lane("rail", "copy"), d.lane("near", "copy"), d.lane("compute")

    def rows(owner: Index, chunk: int | None) -> tuple[Index, Index]:
        """Return the rows (first, count) of one chunk of the shard of rank `owner`. chunk: its number; None for the
        whole shard.
        """
        if chunk is None:
            return 0, lookup(p.rows, owner)
        ends = [[count * end // chunks for count in p.rows] for end in (chunk, chunk + 1)]
        return lookup(ends[0], owner), lookup([b - a for a, b in zip(*ends, strict=True)], owner)

    def multiply(owner: Index, chunk: int | None, at: Index) -> None:
        """Append the GEMMs of chunk number `chunk` of `owner`'s shard (None: the whole shard), read from `box` of rank
        `at`.
        """
        first, count = rows(owner, chunk)
        part = box.part(rows=(owner // grid.near * most + first, count), at=at)
        operands.multiply_all(compute, part, (lookup(begins, owner) + first, count))

    for other in grid.others:  # the ranks of other hosts that have read this rank's rows in the previous run
        for distance in range(1, grid.near):
            rail.wait(free, grid.rank(other, distance), previous=True)
    for peer in grid.peers:
        near.wait(free, peer, previous=True)
    for chunk in range(chunks):
        first, count = rows(RANK, chunk)
        for other in grid.others:
            to, slot = grid.rank(other), (grid.host * most + first, count)
            for part, target in zip(x.part(rows=(first, count)), box.part(rows=slot, at=to), strict=True):
                rail.send(part, target)
            rail.set(came, grid.host * chunks + chunk, at=to)
    copy_rows(near, x.part(), box.part(rows=(grid.host * most, lookup(p.rows, RANK))))
    for peer in grid.peers:
        near.set(ready, RANK * chunks, at=peer)
    operands.multiply_all(compute, x.part(), (lookup(begins, RANK), lookup(p.rows, RANK)))
    for peer in grid.peers:
        compute.wait(ready, peer * chunks)
        multiply(peer, None, at=peer)
    for chunk in range(chunks):
        for source in grid.sources:
            sender = grid.rank(source)
            near.wait(came, source * chunks + chunk)
            for peer in grid.peers:
                near.set(ready, sender * chunks + chunk, at=peer)
            compute.wait(came, source * chunks + chunk)
            multiply(sender, chunk, at=RANK)
            for distance in range(1, grid.near):
                owner = grid.rank(source, distance)
                compute.wait(ready, owner * chunks + chunk)
                multiply(owner, chunk, at=grid.rank(grid.host, distance))
    for host in (grid.host, *grid.others):
        for distance in range(1, grid.near):
            compute.set(free, RANK, at=grid.rank(host, distance))
    return d.schedule()


def _matmul_reduce_scatter(p: MatmulReduceScatter, *, hosts: int, chunks: int) -> Schedule:
    """Return a schedule of GEMM + reduce-scatter in two levels: within a host by shared memory, between hosts by messages.

    hosts: the number of hosts. chunks: the number of messages in which a rank sends its sums to another host.
    """
    grid, o = _Grid.of(p.world_size, hosts), PartialProducts.overlapped("two_levels", p)
    d, pieces, near = o.d, o.chunks(chunks), [RANK, *grid.peers]
    y = o.parts("y", 1, "output")
    products, sums = o.parts("products", p.world_size, "symmetric"), o.parts("sums", hosts, "scratch")
    arrived = o.parts("arrived", hosts, "symmetric")  # the sums of other hosts, by host
    made, came, free = (
        d.signals("made", hosts * chunks),
        d.signals("came", hosts * chunks),
        d.signals("free", 2 * p.world_size),
    )
    compute, rail = d.lane("compute"), d.lane("rail")
    for peer in grid.peers:
        for reader in range(2):
            compute.wait(free, 2 * peer + reader, previous=True)
    for host in (*grid.others, grid.host):
        for c, chunk in enumerate(pieces):
            if chunks == 1 and o.scaled is None:  # the rows of a host are adjacent
                whole = (host * (grid.near * o.m), grid.near * o.m)
                compute.matmul(products.part(rows=whole), o.x.part(rows=whole), o.w.part())
            else:
                for distance in range(grid.near):
                    owner = grid.rank(host, distance)
                    o.multiply(compute, o.part(products, owner, owner, chunk), owner, chunk)
            for peer in near:
                compute.set(made, host * chunks + c, at=peer)
    for host in grid.others:
        to = grid.rank(host)
        for c, chunk in enumerate(pieces):
            rail.wait(made, host * chunks + c, count=grid.near)
            total = o.part(sums, host, RANK, chunk)
            rail.reduce(total, *(o.part(products, to, to, chunk, at=peer) for peer in near))
            rail.send(total, o.part(arrived, grid.host, RANK, chunk, at=to)).set(came, grid.host * chunks + c, at=to)
    for c, chunk in enumerate(pieces):
        compute.wait(made, grid.host * chunks + c, count=grid.near)
        for source in grid.sources:
            compute.wait(came, source * chunks + c)
        parts = [o.part(products, RANK, RANK, chunk, at=peer) for peer in near]
        parts += [o.part(arrived, source, RANK, chunk) for source in grid.sources]
        compute.reduce(o.part(y, 0, RANK, chunk), *parts)
    for reader, lane in enumerate((rail, compute)):
        for peer in grid.peers:
            lane.set(free, 2 * RANK + reader, at=peer)
    return d.schedule()


_matmul_reduce_scatter.__name__ = "two_levels"
for _problem in (MatmulReduceScatter, ScaledMatmulReduceScatter):
    builder(_problem, hosts=(2,), chunks=(1, 2, 4))(_matmul_reduce_scatter)


class _Owned:
    """The division of an all-reduce's rows among ranks. Each rank owns a *part* of each chunk of rows. Each part is cut
    into `pieces` *pieces*. Ranks with the same index on their hosts own the same parts. The last parts of a chunk, and
    the last pieces of a part, may have fewer rows than the others.

    chunks: the rows of each chunk, as (first, count).
    rows: the number of rows of a buffer that holds one piece of each chunk.
    """

    def __init__(self, p: MatmulAllReduce, grid: _Grid, chunks: list[tuple[int, int]], pieces: int) -> None:
        self.chunks, self._pieces, self._near = chunks, pieces, grid.near
        self._sizes = tuple(-(-count // (grid.near * pieces)) for _, count in chunks)
        self._begins, self.rows = offsets(self._sizes), sum(self._sizes)

    def in_y(self, y: Buffer, c: int, owner: Index, at: Index = RANK) -> Region:
        """Return the part of rank `owner` in chunk c, as a region of the buffer y [m, n] on rank `at`."""
        return y.part(rows=(self._first(c, owner, 0), self._count(c, owner)), at=at)

    def part(self, buffer: Buffer, c: int, owner: Index) -> Region:
        """Return the part of rank `owner` in chunk c, as a region of the owner's `buffer`, [pieces * rows, n]."""
        return buffer.part(rows=(self._pieces * self._begins[c], self._count(c, owner)), at=owner)

    def piece(self, buffer: Buffer, c: int, number: Index, at: Index = RANK) -> Region:
        """Return piece `number` of this rank's part of chunk c, as a region of `buffer`, [pieces * rows, n] on rank
        `at`.
        """
        first = self._pieces * self._begins[c] + number * self._sizes[c]
        return buffer.part(rows=(first, self._count(c, RANK, number)), at=at)

    def received(self, buffer: Buffer, c: int, number: Index, host: Index, at: Index = RANK) -> Region:
        """Return the region into which `host` sends piece `number` of chunk c, in the buffer [hosts * rows, n] on rank
        `at`.
        """
        return buffer.part(rows=(host * self.rows + self._begins[c], self._count(c, RANK, number)), at=at)

    def following(self, o: PartialProducts, c: int, number: Index) -> list[Region]:
        """Return the regions of bias and residual for piece `number` of this rank's part of chunk c."""
        return o.following((self._first(c, RANK, number), self._count(c, RANK, number)))

    def _first(self, c: int, owner: Index, number: Index) -> Index:
        return self.chunks[c][0] + (owner % self._near * self._pieces + number) * self._sizes[c]

    def _count(self, c: int, owner: Index, number: Index | None = None) -> Index:
        """Return the number of rows of the part of rank `owner` in chunk c, or of one piece of this part. number: the
        index of the piece; None for the whole part.
        """
        size, count, pieces = self._sizes[c], self.chunks[c][1], 1
        if number is None:
            size, number = size * self._pieces, 0
        else:
            pieces = self._pieces
        left = [count - place * size for place in range(self._near * pieces)]
        return lookup([max(0, min(size, rows)) for rows in left], owner % self._near * pieces + number)


def _matmul_all_reduce(p: MatmulAllReduce, *, hosts: int, chunks: int) -> Schedule:
    """Return a schedule of GEMM + all-reduce in two levels: within a host by shared memory, between hosts by messages.

    chunks: the number of GEMMs, and of messages to each peer. With more than two hosts, there are twice as many
        messages.

    With two hosts, both ranks of a rail add the same two sums, so they get the same bits. With more hosts, each rank of
    a rail reduces one piece and sends the result.
    """
    grid, o = _Grid.of(p.world_size, hosts), PartialProducts.overlapped("two_levels", p)
    d, result, pieces = o.d, Result(o, p), 1 if hosts == 2 else hosts
    own, mine = _Owned(p, grid, split(p.m, chunks, what="rows of a product"), pieces), grid.host if pieces > 1 else 0
    products = d.buffer("products", p.m, p.n, p.dtype, "symmetric")
    total = d.buffer("total", pieces * own.rows, p.n, p.dtype, "scratch")  # the sum of this host
    arrived = d.buffer("arrived", hosts * own.rows, p.n, p.dtype, "symmetric")  # the sums of other hosts, by host
    sums = d.buffer("sums", pieces * own.rows, p.n, p.dtype, "symmetric")
    made, added, came = d.signals("made", chunks), d.signals("added", chunks), d.signals("came", hosts * chunks)
    compute, add, rail = d.lane("compute"), d.lane("add"), d.lane("rail", "copy")
    fetched, near = Fetched(d, grid.near, chunks, grid.near_rank), [RANK, *grid.peers]
    for number in range(grid.near - 1):
        fetched.wait_for(compute, number)
    for c, rows in enumerate(own.chunks):
        compute.matmul(products.part(rows=rows), o.x.part(rows=rows), o.w.part())
        for peer in near:
            compute.set(made, c, at=peer)
    for c in range(chunks):
        rail.wait(added, c)
        for other in grid.others:
            to, piece = grid.rank(other), other if pieces > 1 else 0
            rail.send(own.piece(total, c, piece), own.received(arrived, c, piece, grid.host, at=to))
            rail.set(came, grid.host * chunks + c, at=to)
    if pieces == 1:

        def reduced(c: int) -> None:
            fetched.tell(add, c)
    else:
        # Messages must not arrive in `sums`, because ranks of this host may still read the sums of the previous run.
        done = d.buffer("done", pieces * own.rows, p.n, p.dtype, "symmetric")
        of_piece, returned = d.signals("reduced", chunks), d.signals("returned", hosts * chunks)
        back, take = d.lane("back", "copy"), d.lane("take", "copy")

        def reduced(c: int) -> None:
            add.set(of_piece, c)
            back.wait(of_piece, c)
            for other in grid.others:
                to = grid.rank(other)
                back.send(own.piece(sums, c, grid.host), own.piece(done, c, grid.host, at=to))
                back.set(returned, grid.host * chunks + c, at=to)
            for source in grid.sources:
                take.wait(returned, source * chunks + c)
                take.copy(own.piece(done, c, source), own.piece(sums, c, source))
            take.wait(of_piece, c)
            fetched.tell(take, c)

    for c in range(chunks + 1):  # add the products of a chunk while the sums of the previous chunk travel
        if c < chunks:
            add.wait(made, c, count=grid.near)
            add.reduce(own.part(total, c, RANK), *(own.in_y(products, c, RANK, at=peer) for peer in near)).set(added, c)
        if c:
            for source in grid.sources:
                add.wait(came, source * chunks + c - 1)
            parts = [own.received(arrived, c - 1, mine, source) for source in grid.sources]
            parts = [own.piece(total, c - 1, mine), *parts, *own.following(o, c - 1, mine)]
            add.reduce(own.piece(sums, c - 1, mine), *parts)
            reduced(c - 1)
    return result.fetch(
        fetched, lambda owner, c: own.part(sums, c, owner), lambda owner, c: own.in_y(result.y, c, owner), "dma",
        lambda c: [result.y.part(rows=own.chunks[c])],
    )  # fmt: skip


_matmul_all_reduce.__name__ = "two_levels"
builder(MatmulAllReduce, hosts=(2,), chunks=(1, 2, 4))(_matmul_all_reduce)
