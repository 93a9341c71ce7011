"""MoE dispatch + GEMM: tokens are sent to the ranks of their experts and multiplied there, with dynamic sizes.

    tokens   this rank's tokens, sorted by expert
    splits   the number of this rank's tokens for each expert of all ranks
    counts   the splits of all ranks, [ranks, experts of all ranks]. Each rank puts its own row into every rank's counts
    inbox    one slot (range of rows) for each peer, large enough for the most tokens that the peer may send

    to peers: read counts; put the tokens for each peer into this rank's slot of the peer's inbox; set `arrived` there
    compute:  exchange splits; read counts; multiply this rank's own tokens; then multiply each peer's tokens when they arrive

One grouped GEMM kernel has a group of rows for each (source rank, expert). It stores rows in the order of the result:
by expert, then by source rank. So tokens need no sorting (except in dispatch_sorted). Three orders of computation
overlap with the exchange:

    dispatch            source by source, the rank's own tokens first. Peers' tokens travel while the own tokens are multiplied
    dispatch_by_expert  expert by expert, a few experts at a time with the tokens of all sources. Every weight is read once
    dispatch_sorted     like dispatch_by_expert, but a copy first sorts the arrived tokens by expert. Then tokens of all sources
                        share tiles of an expert's GEMM, which is faster if each source sends few tokens for each expert

Copies by kernel read their sizes on the device. Copy engines get sizes from the CPU, which has to wait for the splits
before it can enqueue anything else. If the problem is `exact`, the result has exactly as many rows as arrive, so the
CPU always reads the sizes. With copies by kernel, the CPU reads them while the GEMMs run.

If nothing overlaps with the exchange, one launch sends the tokens together with the splits (`_is_one_exchange`). On two H100s,
this shortened a dispatch of 256 tokens x 576 x 640 with 4 experts from 34 us to 26 us.

No schedule pads the tokens for each peer to a fixed capacity. A capacity that never drops tokens would multiply the
sent data by the number of ranks. The benchmark of all_to_all_matmul has a variant `padded`, which uses NCCL with the
smallest capacity for the benchmark's tokens.

Sources: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", II-A and IV-B2 (all-to-all
    before the GEMMs of experts), III-C with figure 5 (asymmetric traffic). "T3: Transparent Tracking & Triggering for
    Fine-grained Overlap of Compute & Collectives", 7.1 and 7.2 (all-to-all, experts). T3 overlaps an all-to-all with
    the GEMM before it; these schedules overlap an all-to-all with the GEMMs after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from weft.builders.operands import peer, split
from weft.builders.problems.all_to_all_matmul import AllToAllMatmul
from weft.builders.registry import NotApplicableError, builder, require_peers
from weft.schedule.expr import RANK, Expr, Index, lookup, total
from weft.schedule.kernels import FEW_ROWS, GroupedMatmul, LibraryGroupedMatmul, Permute, SortedMatmul
from weft.schedule.schedule import Buffer, Draft, LaneDraft, Schedule
from weft.schedule.steps import Compute, Copy, CopyBy, Region

SendOrder: TypeAlias = Literal["in_turn", "at_once", "together"]
"""The order of sends. in_turn: one peer after the other, which is fastest for the first tokens on a switch. at_once: all peers
concurrently, on a lane for each peer, which uses all links of a mesh. together: all peers in one launch, so that few tokens do not
wait for launches."""
_SENDS = get_args(SendOrder)
Columns: TypeAlias = tuple[int, int]
"""A block of the k columns of tokens: (first, count)."""
_TILE = "t"


@builder(AllToAllMatmul)
def serial(p: AllToAllMatmul) -> Schedule:
    """Run NCCL's all-to-all, sort the tokens by expert, then run cuBLAS's GEMMs of the experts."""
    d, world, experts = _Dispatch("serial", p, "scratch"), p.world_size, p.experts
    room = sum(p.rows)
    unordered = d.x or d.buffer("unordered", room, p.k, p.dtype, "scratch")
    ordered = d.buffer("ordered", room, p.k, p.dtype, "scratch")
    lane = d.lane("compute").all_gather(d.splits.part(), d.counts.part()).read(d.counts, "host")
    to_each = tuple(d.sent(RANK, to) for to in range(world))
    from_each = tuple(d.sent(source, RANK) for source in range(world))
    lane.exchange(d.tokens.part(), unordered.part(rows=(0, d.arriving)), to_each, from_each)
    expert: Index = Expr(_TILE)
    begin: Index = 0
    for source in range(world):
        rows = d.rows(source, expert)
        arrived = unordered.part(rows=(begin + d.first_of_block(source, expert), rows))
        target = ordered.part(rows=(d.first_of_result(source, expert), rows))
        lane.tiles(Permute(), _TILE, experts, Copy(arrived, target, "kernel"))
        begin = begin + d.sent(source, RANK)
    of_expert = (d.first_of_result(0, expert), d.rows_of_expert(expert))
    gemm = d.matmul(of_expert, ordered.part(rows=of_expert), expert)
    lane.tiles(LibraryGroupedMatmul(), _TILE, experts, gemm)
    d.tell(lane)
    return d.schedule()


@builder(AllToAllMatmul, by=("dma", "kernel"), rest=("each", "together"), send=_SENDS)
def dispatch(
    p: AllToAllMatmul, *, by: CopyBy, rest: Literal["each", "together"], send: SendOrder = "in_turn"
) -> Schedule:
    """Multiply this rank's own tokens first, then the tokens of peers.

    by: send tokens with copy engines ("dma") or kernels ("kernel").
    rest: "each" launches a GEMM for each peer when its tokens have arrived. "together" launches one GEMM for all peers
        when all tokens have arrived.
    send: the order of sending. "in_turn": to one peer after the other. "at_once": to all peers concurrently, with a lane for
        each peer. "together": to all peers in one launch.
    """
    if rest == "together" and p.world_size == 2:
        raise NotApplicableError(
            "with 2 ranks there is only one peer, so rest=together would be the same as rest=each: use rest=each"
        )
    if rest == "each" and send == "together":
        raise NotApplicableError(
            "with send=together all tokens arrive at the same time, so a GEMM for each peer gains nothing: use rest=together"
        )
    d, world, experts = Sending("dispatch", p, by, send), p.world_size, p.experts
    d.send(0, experts)
    d.multiply([0], 0, experts)
    for distance in range(1, world):
        d.wait_for(distance)
        if rest == "each":
            d.multiply([distance], 0, experts)
    if rest == "together":
        d.multiply(list(range(1, world)), 0, experts)
    return d.done()


@builder(AllToAllMatmul, by=("dma", "kernel"), chunks=(1, 2, 4, 8), send=_SENDS)
def dispatch_by_expert(p: AllToAllMatmul, *, by: CopyBy, chunks: int, send: SendOrder = "in_turn") -> Schedule:
    """Multiply the tokens of all ranks, a few experts at a time.

    by: send tokens with copy engines ("dma") or kernels ("kernel").
    chunks: the number of groups into which a rank's experts are divided. With 1, nothing overlaps. Then kernels that send to
        all peers at the same time are one launch, in the lane of the GEMM.
    send: the order of sending. "in_turn": to one peer after the other. "at_once": to all peers concurrently, with a lane for
        each peer. "together": to all peers in one launch.
    """
    pieces = split(p.experts, chunks, what="experts of a rank")
    d = Sending("dispatch_by_expert", p, by, send, chunks, one_lane=_is_one_exchange(p, by, chunks, send))
    for c, piece in enumerate(pieces):
        d.send(*piece, chunk=c)
    for c, piece in enumerate(pieces):
        d.wait_for_all(c)
        d.multiply(list(range(p.world_size)), *piece)
    return d.done()


@builder(AllToAllMatmul, chunks=(1, 2, 4), send=_SENDS)
def dispatch_sorted(p: AllToAllMatmul, *, chunks: int, send: SendOrder = "in_turn") -> Schedule:
    """Multiply the tokens of all ranks, a few experts at a time, like `dispatch_by_expert`. Before the GEMM of a group
    of experts, sort the arrived tokens of this group by expert.

    chunks: the number of groups into which a rank's experts are divided.
    send: the order of sending. "in_turn": to one peer after the other. "at_once": to all peers concurrently, with a lane for
        each peer. "together": to all peers in one launch.
    """
    if sum(p.rows) > FEW_ROWS * p.world_size**2 * p.experts:
        raise NotApplicableError(
            f"a rank sends more than {FEW_ROWS} tokens to an expert on average, so sorting the tokens takes longer than "
            "it saves in the GEMMs: use dispatch_by_expert"
        )
    pieces = split(p.experts, chunks, what="experts of a rank")
    d = Sending("dispatch_sorted", p, "kernel", send, chunks, one_lane=_is_one_exchange(p, "kernel", chunks, send))
    for c, piece in enumerate(pieces):
        d.send(*piece, chunk=c)
    ordered = d.buffer("ordered", p.world_size * p.most, p.k, p.dtype, "scratch")
    for c, piece in enumerate(pieces):
        d.wait_for_all(c)
        d.sort_and_multiply(ordered, *piece)
    return d.done()


def _is_one_exchange(p: AllToAllMatmul, by: CopyBy, chunks: int, send: SendOrder) -> bool:
    """True if one launch may exchange all tokens: nothing overlaps with the exchange, and kernels copy to all peers at
    the same time.
    """
    return by == "kernel" and chunks == 1 and (p.world_size == 2 or send == "together")


class _Dispatch(Draft):
    """A `Draft` (a schedule under construction) with the caller's tensors as buffers, and expressions for dynamic
    sizes.

    counts: the kind of memory for the buffer `counts`: "symmetric" if peers write to it, otherwise "scratch".
    """

    def __init__(self, name: str, p: AllToAllMatmul, counts: Literal["scratch", "symmetric"]) -> None:
        super().__init__(name, p.world_size)
        self.p, self._all = p, p.world_size * p.experts
        self._before: dict[Index, Index] = {}  # local expert -> the first row in y of its tokens
        flat = [n for of_rank in p.splits for n in of_rank]
        self.counts = self.buffer("counts", p.world_size, self._all, "int64", counts)
        self.holds(self.counts, [flat] * p.world_size)
        self.arriving = self._of_all(lambda source: self.sent(source, RANK))
        self.tokens = self.buffer("tokens", self._between(RANK, 0, self._all), p.k, p.dtype, "input")
        self.splits = self.buffer("splits", 1, self._all, "int64", "input")
        self.weights = self.buffer("w", p.experts * p.k, p.n, p.dtype, "input")
        self.y = self.buffer("y", self.arriving, p.n, p.dtype, "output")
        self.received = self.buffer("received", p.world_size, p.experts, "int64", "output")
        self.x = self.buffer("x", self.arriving, p.k, p.dtype, "output") if p.return_x else None

    def rows(self, source: Index, expert: Index) -> Index:
        """Return an expression: the number of tokens that rank `source` sends to this rank's local expert `expert`."""
        first = self._mine(source) + expert
        return total("counts", first, first + 1)

    def rows_of_expert(self, expert: Index) -> Index:
        first = RANK * self.p.experts + expert
        return total("counts", first, self.p.world_size * self._all, self._all)

    def sent(self, source: Index, to: Index) -> Index:
        return self._between(source, to * self.p.experts, (to + 1) * self.p.experts)

    def first_of_block(self, source: Index, expert: Index) -> Index:
        """Return the index of the first token for local expert `expert`, among the tokens from rank `source`."""
        return total("counts", self._mine(source), self._mine(source) + expert)

    def first_of_result(self, source: Index, expert: Index) -> Index:
        """Return the first row of y for the tokens that `source` sends to local expert `expert`."""
        if (experts_before := self._before.get(expert)) is None:  # cached, because it does not depend on the source
            experts_before = self._of_all(lambda any_source: self.first_of_block(any_source, expert))
            self._before[expert] = experts_before
        first = RANK * self.p.experts + expert
        return experts_before + total("counts", first, source * self._all + first, self._all)

    def matmul(
        self, result: tuple[Index, Index], x: Region, expert: Index, columns: Columns | None = None, adds: bool = False
    ) -> Compute:
        first, count = columns or (0, self.p.k)
        weights = self.weights.part(rows=(expert * self.p.k + first, count))
        return Compute("matmul", self.y.part(rows=result), (x, weights), adds)

    def tell(self, lane: LaneDraft) -> None:
        """Append the copy of this rank's columns of `counts` (the numbers of arriving tokens) to the caller's buffer
        `received`.
        """
        block = self.counts.part(cols=(RANK * self.p.experts, self.p.experts))
        lane.copy(block, self.received.part(), "kernel")

    def _of_all(self, number_of: Callable[[int], Index]) -> Index:
        """Return `number_of(source)`, summed over all ranks."""
        result: Index = 0
        for source in range(self.p.world_size):
            result = result + number_of(source)
        return result

    def _between(self, source: Index, first: Index, end: Index) -> Index:
        row = source * self._all
        return total("counts", row + first, row + end)

    def _mine(self, source: Index) -> Index:
        """Return an index into the flattened `counts`: the element with the number of tokens that rank `source` sends
        to this rank's first expert.
        """
        return source * self._all + RANK * self.p.experts


class Sending(_Dispatch):
    """A `_Dispatch` that exchanges the splits, and puts tokens into the peers' inboxes.

    The compute lane exchanges the splits. Other lanes put the tokens: one lane for all peers, or a lane for each peer.
    The tokens for each peer are sent in `chunks` parts, each with a signal.

    one_lane: True to send the splits and the tokens of a single chunk together, in the compute lane, as one launch
        (`weft.schedule.launches.RoundTrip`). A rank finds the tokens that it sends by its own splits, so the tokens need not wait
        for the splits of peers.
    """

    def __init__(
        self, name: str, p: AllToAllMatmul, by: CopyBy, send: SendOrder, chunks: int = 1, *, one_lane: bool = False
    ) -> None:
        super().__init__(name, p, "symmetric")
        require_peers(p)
        world = p.world_size
        if by == "dma" and not p.exact:
            raise NotApplicableError(
                "the CPU must not wait for sizes in this call, but copy engines need sizes that the CPU knows: "
                "use by=kernel"
            )
        if send != "in_turn" and world == 2:
            raise NotApplicableError(
                f"with 2 ranks there is only one peer, so send={send} would be the same as send=in_turn: use send=in_turn"
            )
        if send == "together" and by == "dma":
            raise NotApplicableError("send=together is one launch of a copy kernel: use by=kernel")
        self._by, self._chunks, self._together = by, chunks, one_lane or send == "together"
        self._own_splits: Buffer | None = None
        self._segments: dict[tuple[int, Index], tuple[Index, Index, Index]] = {}
        self._inbox = self.buffer("inbox", (world - 1) * p.most, p.k, p.dtype, "symmetric")
        self._credit, self._arrived = self.signals("credit", world), self.signals("arrived", world * chunks)
        self.compute = self.lane("compute")
        if one_lane:
            self._senders, self._taken = [self.compute] * (world - 1), None
            self._send_splits()
            return
        names = [f"to +{distance}" if send == "at_once" else "to peers" for distance in range(1, world)]
        self._senders = [self.lane(name, "copy") for name in names]
        self._taken = self.signals("taken", world) if send == "at_once" else None
        self._exchange_splits()

    def _exchange_splits(self) -> None:
        """Append the exchange of the splits with all peers, and the reads of the sizes in all lanes."""
        world, own_row = self.world_size, (RANK, 1)
        known, told = self.signals("known", world), self.signals("told", 1)
        peers = [peer(world, distance) for distance in range(1, world)]
        for to in peers:
            self.compute.wait(self._credit, to, previous=True)
        for to in peers:
            self.compute.copy(self.splits.part(), self.counts.part(rows=own_row, at=to), "kernel")
            self.compute.set(known, RANK, at=to)
        self.compute.copy(self.splits.part(), self.counts.part(rows=own_row), "kernel")
        for distance in range(1, world):
            self.compute.wait(known, peer(world, -distance))
        self.compute.set(told)
        self.tell(self.compute)
        self._read_counts()
        for i, sender in enumerate(dict.fromkeys(self._senders)):
            sender.wait(told).read(self.counts, "host" if self._by == "dma" else "device")
            if self._taken:
                sender.set(self._taken, i)

    def _send_splits(self) -> None:
        """Append the read of this rank's own splits, and the beginning of the exchange: the copies of the splits to all ranks."""
        world = self.world_size
        self._own_splits = self.buffer("mine", 1, self._all, "int64", "scratch")
        self.holds(self._own_splits, self.p.splits)
        self.compute.copy(self.splits.part(), self._own_splits.part(), "kernel").read(self._own_splits, "device")
        for distance in range(1, world):
            self.compute.wait(self._credit, peer(world, distance), previous=True)
        for distance in range(world):
            to = peer(world, distance) if distance else RANK
            self.compute.copy(self._own_splits.part(), self.counts.part(rows=(RANK, 1), at=to), "kernel")

    def _read_counts(self) -> None:
        self.compute.read(self.counts, "device" if not self.p.exact else "host" if self._by == "dma" else "meanwhile")

    def send(self, first: int, count: int, columns: Columns | None = None, chunk: int = 0) -> None:
        """Append the puts of the tokens for experts first .. first + count - 1 of every peer.

        columns: send only these columns (first, count) of the tokens.
        chunk: the index, from 0, of this send among all sends to a peer. It selects the signal that is set after the
            puts.
        """
        for distance in range(1, self.world_size):
            to = peer(self.world_size, distance)
            begin = to * self.p.experts
            rows = self._given(begin + first, begin + first + count)
            mine = self.tokens.part(rows=(self._given(0, begin + first), rows), cols=columns)
            slot = self._slot(distance) + self._given(begin, begin + first)
            theirs = self._inbox.part(rows=(slot, rows), cols=columns, at=to)
            self._senders[distance - 1].copy(mine, theirs, self._by)
            if not self._together:
                self._arrive(distance, chunk)
        if self._together:
            for distance in range(1, self.world_size):
                self._arrive(distance, chunk)

    def _given(self, first: Index, end: Index) -> Index:
        """Return the number of this rank's tokens for the experts first .. end - 1 of all ranks."""
        return self._between(RANK, first, end) if self._own_splits is None else total(self._own_splits.name, first, end)

    def _arrive(self, distance: int, chunk: int) -> None:
        """Append the `Set` step that tells a peer that part `chunk` of its tokens has arrived.

        distance: the peer is `distance` places after this rank in the ring.
        """
        number, to = RANK * self._chunks + chunk, peer(self.world_size, distance)
        self._senders[distance - 1].set(self._arrived, number, at=to)

    def wait_for(self, distance: int, chunk: int = 0) -> None:
        self.compute.wait(self._arrived, peer(self.world_size, -distance) * self._chunks + chunk)

    def wait_for_all(self, chunk: int) -> None:
        """Append the waits for the tokens of all peers. With one lane, also append the read of the sizes that came with them."""
        for distance in range(1, self.world_size):
            self.wait_for(distance, chunk)
        if self._own_splits:
            self._read_counts()

    def multiply(
        self, distances: list[int], first: int, count: int, columns: Columns | None = None, adds: bool = False
    ) -> None:
        """Append a GEMM of the tokens for local experts first .. first + count - 1.

        distances: the source ranks, as distances before this rank in the ring; 0 is this rank.
        columns: multiply only these columns (first, count) of the tokens.
        adds: True to accumulate into y.
        """
        expert, k = Expr(_TILE) + first, columns or (0, self.p.k)
        kernel = GroupedMatmul(
            self.counts.name, self.tokens.name, self._inbox.name, self.weights.name, self.y.name, self.p.experts, self.p.most,
            min(-distance % self.world_size for distance in distances), len(distances), first, count, *k, adds,
        )  # fmt: skip
        self.compute.tiles(kernel, _TILE, count, *(self._segment(d, expert, k, adds) for d in distances))

    def sort_and_multiply(self, ordered: Buffer, first: int, count: int) -> None:
        """Append the copies that sort the tokens for local experts first .. first + count - 1 into `ordered`, and their
        GEMM.
        """
        expert = Expr(_TILE) + first
        copies = []
        for distance in range(self.world_size):
            source = peer(self.world_size, -distance) if distance else RANK
            rows, target = self.rows(source, expert), self.first_of_result(source, expert)
            arrived = self._arrived_tokens(distance, self.first_of_block(source, expert), rows)
            copies.append(Copy(arrived, ordered.part(rows=(target, rows)), "kernel"))
        self.compute.tiles(Permute(), _TILE, count, *copies)
        p = self.p
        kernel = SortedMatmul(self.counts.name, ordered.name, self.weights.name, self.y.name, p.experts, first, count)
        of_expert = (self.first_of_result(0, expert), self.rows_of_expert(expert))
        self.compute.tiles(kernel, _TILE, count, self.matmul(of_expert, ordered.part(rows=of_expert), expert))

    def done(self) -> Schedule:
        """Append the signals that allow peers to overwrite the inbox and `counts` in the next run. Return the schedule."""
        if self.x:
            for distance in range(self.world_size):
                source = peer(self.world_size, -distance) if distance else RANK
                rows = self.sent(source, RANK)
                target = self.x.part(rows=(self._first_in_x(source), rows))
                self.compute.copy(self._arrived_tokens(distance, 0, rows), target, "kernel")
        if self._taken:
            for i in range(len(self._senders)):
                self.compute.wait(self._taken, i)
        if self._own_splits:
            self.tell(self.compute)  # one launch with the signals
        for distance in range(1, self.world_size):
            self.compute.set(self._credit, RANK, at=peer(self.world_size, -distance))
        return self.schedule()

    def _segment(self, distance: int, expert: Index, columns: Columns, adds: bool) -> Compute:
        if (known := self._segments.get((distance, expert))) is None:  # all pieces of columns have the same rows
            source = peer(self.world_size, -distance) if distance else RANK
            rows, first = self.rows(source, expert), self.first_of_block(source, expert)
            known = self._segments[distance, expert] = first, rows, self.first_of_result(source, expert)
        first, rows, result = known
        return self.matmul((result, rows), self._arrived_tokens(distance, first, rows, columns), expert, columns, adds)

    def _arrived_tokens(self, distance: int, first: Index, rows: Index, columns: Columns | None = None) -> Region:
        """Return the region with rows first .. first + rows - 1 of the tokens from one source rank.

        distance: the source is `distance` places before this rank in the ring; 0 is this rank.
        """
        if distance:
            return self._inbox.part(rows=(self._slot(distance) + first, rows), cols=columns)
        return self.tokens.part(rows=(self._between(RANK, 0, RANK * self.p.experts) + first, rows), cols=columns)

    def _first_in_x(self, source: Index) -> Index:
        """Return the first row of the output buffer `x` (the arrived tokens, sorted by source rank) for the tokens from rank
        `source`.
        """
        begin: Index = 0
        for before in range(self.world_size - 1):
            counted = lookup([self.p.experts * (before < rank) for rank in range(self.world_size)], source)
            begin = begin + total("counts", self._mine(before), self._mine(before) + counted)
        return begin

    def _slot(self, distance: int) -> int:
        """Return the first row of the inbox slot of one source rank.

        distance: the source is `distance` places before the rank of the inbox in the ring.
        """
        return (self.world_size - 1 - distance) * self.p.most
