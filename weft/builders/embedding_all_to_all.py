"""Embedding pooling + all-to-all: one persistent kernel pools vectors and sends them, slice by slice.

A slice is at most `slice_size` pooled vectors of adjacent tables for one sample.

    direct   the kernel stores each slice into the output of the rank that owns the sample, and signals all peers at the end
    put      the kernel pools each slice into a staging area, sends it as one copy, and increments a counter of the receiver
    serial   no overlap: pool everything, NCCL's all-to-all, permute the columns

A rank stores into a peer's output only after the peer has begun its run (signal `ready`). Before that, the peer's
caller may still read the previous result. With order="remote_first" a rank pools the samples of the next rank first,
then continues around the ring; its own samples are last. "natural" is the order of the batch.

One program (thread block) of the kernel pools a slice. In the paper, several work-groups pool a slice, which has
vectors of one table for several samples. These schedules cannot express such slices.

Sources: "GPU-initiated Fine-grained Overlap of Collective Communication with Computation", 3.2 and 3.3 (other slices, flags,
remote samples first). "Accelerating Multi-GPU Embedding Retrieval with PGAS-Style Communication for Deep Learning Recommendation
Systems", III-B (stores by the pooling kernel).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from weft.builders.operands import offsets, peer
from weft.builders.problems.embedding_all_to_all import EmbeddingAllToAll
from weft.builders.registry import builder
from weft.schedule.expr import RANK, Expr, Index, lookup
from weft.schedule.kernels import PooledBags, PooledSlices, SliceOrder, Unpack
from weft.schedule.schedule import Draft, LaneDraft, Schedule
from weft.schedule.steps import ITEM_BYTES, Compute, Copy, Region, Set, Signals, Wait

_ORDERS, _SLICES, _TILE = ("remote_first", "natural"), (None, 1, 8, 32), "t"


@dataclass(frozen=True, slots=True)
class Unit:
    """The tables and output columns that form one slice of every sample.

    The slice has the pooled vectors of the rank's tables first .. end - 1, in output columns column .. column + width -
    1.
    """

    first: int
    end: int
    column: int
    width: int


def units_of(slots: Sequence[tuple[int, int]], slice_size: int) -> tuple[Unit, ...]:
    """Return the slices (`Unit`) into which a rank divides the pooled vectors of each sample. Tables share a slice if
    their output columns are adjacent.

    slots: the output columns of each of the rank's tables, as (first column, number of columns).
    slice_size: the largest number of tables, and so of pooled vectors, in a slice.
    """
    units: list[Unit] = []
    for number, (column, dim) in enumerate(slots):
        last = units[-1] if units else None
        if last and last.column + last.width == column and last.end - last.first < slice_size:
            units[-1] = Unit(last.first, number + 1, last.column, last.width + dim)
        else:
            units.append(Unit(number, number + 1, column, dim))
    return tuple(units)


def usual_slice_size(p: EmbeddingAllToAll) -> int:
    """Return the default number of vectors per slice: about 2 KiB, but at least 4 and at most 32 vectors.

    On H200s this was the fastest size in four configurations (benchmarks/results/h200-tuning.json).
    """
    mean_dim = p.columns / sum(map(len, p.slots))
    return max(4, min(32, round(2048 / (mean_dim * ITEM_BYTES[p.dtype]))))


@builder(EmbeddingAllToAll)
def serial(p: EmbeddingAllToAll) -> Schedule:
    d = _Slices("serial", p, sys.maxsize)
    total, most = sum(p.batch_sizes), max(p.batch_sizes)
    widths = tuple(sum(dim for _, dim in slots) for slots in p.slots)
    pooled = d.buffer("pooled", total, max(widths), p.dtype, "scratch")
    received = d.buffer("received", lookup(p.batch_sizes, RANK), p.columns, p.dtype, "scratch")
    out = d.buffer("out", most, p.columns, p.dtype, "symmetric")
    local = d.of_unit([[sum(u.width for u in units[:i]) for i in range(len(units))] for units in d.units])
    samples = (d.sample, 1)
    lane = d.lane("pool")
    lane.tiles(
        PooledBags(p.found_in_cache),
        _TILE,
        d.extent(total),
        d.pool(0, pooled.part(rows=samples, cols=(local, d.width))),
    )
    lane.all_to_all(pooled.part(cols=(0, lookup(widths, RANK))), received.part())
    runs = [
        (offsets(widths)[rank] + sum(before.width for before in units[:i]), unit.column, unit.width)
        for rank, units in enumerate(d.units) for i, unit in enumerate(units)
    ]  # fmt: skip
    source, column, width = (_formula([list(numbers)], RANK, Expr(_TILE)) for numbers in zip(*runs, strict=True))
    rows = (0, lookup(p.batch_sizes, RANK))
    unpack = Copy(received.part(rows=rows, cols=(source, width)), out.part(rows=rows, cols=(column, width)), "kernel")
    lane.tiles(Unpack(), _TILE, len(runs), unpack)
    return d.schedule()


@builder(EmbeddingAllToAll, slice_size=_SLICES, order=_ORDERS)
def direct(p: EmbeddingAllToAll, *, slice_size: int | None = None, order: SliceOrder = "remote_first") -> Schedule:
    """Pool slices and store them directly in the outputs of the ranks that own the samples.

    slice_size: the maximum number of vectors of a slice. Default: `usual_slice_size`.
    order: "remote_first" pools the samples of other ranks first, "natural" follows the order of the batch.
    """
    d = _Slices("direct", p, usual_slice_size(p) if slice_size is None else slice_size)
    kernel = PooledSlices("direct", order, d.slice_size, p.found_in_cache)
    out = d.buffer("out", max(p.batch_sizes), p.columns, p.dtype, "symmetric")
    ready, done = (d.signals(name, p.world_size) for name in ("ready", "done"))
    lane = d.begin(ready, order)
    for to in d.targets(order):
        d.wait_for(ready, to)
        place = out.part(rows=(d.sample, 1), cols=(d.column, d.width), at=to)
        lane.tiles(kernel, _TILE, d.extent(lookup(p.batch_sizes, to)), d.pool(d.first_of(to), place))
    for distance in range(1, p.world_size):
        lane.set(done, RANK, at=peer(p.world_size, distance))
    for distance in range(1, p.world_size):
        lane.wait(done, peer(p.world_size, -distance))
    return d.schedule()


@builder(EmbeddingAllToAll, slice_size=_SLICES, order=_ORDERS)
def put(p: EmbeddingAllToAll, *, slice_size: int | None = None, order: SliceOrder = "remote_first") -> Schedule:
    """Pool slices into staging areas, and copy them from there to peers. The arguments are as for `direct`.

    The schedule declares a staging area for each slice, but the GPU kernel allocates only as many as its programs use
    at the same time.
    """
    d, world = _Slices("put", p, usual_slice_size(p) if slice_size is None else slice_size), p.world_size
    kernel = PooledSlices("put", order, d.slice_size, p.found_in_cache)
    out = d.buffer("out", max(p.batch_sizes), p.columns, p.dtype, "symmetric")
    staged = d.buffer("staged", sum(p.batch_sizes), p.columns, p.dtype, "scratch")
    ready, arrived = (d.signals(name, world) for name in ("ready", "arrived"))
    lane = d.begin(ready, order)
    for to in d.targets(order):
        d.wait_for(ready, to)
        batch, cols, first = lookup(p.batch_sizes, to), (d.column, d.width), d.first_of(to)
        place, stage = (
            out.part(rows=(d.sample, 1), cols=cols, at=to),
            staged.part(rows=(first + d.sample, 1), cols=cols),
        )
        sending = d.pool(first, stage), Copy(stage, place, "kernel"), Set(arrived.name, RANK, to)
        for body, is_own in ((sending, False), ((d.pool(first, place),), True)):  # own samples need no staging
            if isinstance(to, int):
                lane.tiles(kernel, _TILE, d.extent(batch) * d.at_ranks(to, is_own), *body)
            elif is_own == (to is RANK):
                lane.tiles(kernel, _TILE, d.extent(batch), *body)
    for distance in range(1, world):
        source = peer(world, -distance)
        counts = tuple(d.counts[rank - distance] * batch for rank, batch in enumerate(p.batch_sizes))
        if min(counts) > 0:
            lane.wait(arrived, source, lookup(counts, RANK))
        else:  # ranks without samples get no sets, and do not wait
            some = lookup(tuple(int(count > 0) for count in counts), RANK)
            lane.repeat("once", some, Wait(arrived.name, source, lookup(counts, RANK)))
    return d.schedule()


class _Slices(Draft):
    """A `Draft` (a schedule under construction) whose tiles are the slices of all samples.

    Expressions of a tile's index `t` give the slice that the tile pools: its sample, tables and columns.
    """

    def __init__(self, name: str, p: EmbeddingAllToAll, slice_size: int) -> None:
        super().__init__(name, p.world_size)
        if slice_size < 1:
            raise ValueError(f"slice_size={slice_size} must be at least 1 pooled vector")
        self.p, self.slice_size = p, slice_size
        self.units = [units_of(slots, slice_size) for slots in p.slots]
        self.counts = tuple(len(units) for units in self.units)
        per_sample = lookup(tuple(max(1, count) for count in self.counts), RANK)
        self._unit, self.sample = Expr(_TILE) % per_sample, Expr(_TILE) // per_sample
        self.column = self.of_unit([[u.column for u in units] for units in self.units])
        self.width = self.of_unit([[u.width for u in units] for units in self.units])
        numbers = {column: i for i, (column, _) in enumerate(sorted(slot for slots in p.slots for slot in slots))}
        self._slot = self.of_unit([[numbers[u.column] for u in units] for units in self.units])
        self._slots = self.of_unit([[u.end - u.first for u in units] for units in self.units])
        rows = [[self._rows_read(rank, u) for u in units] for rank, units in enumerate(self.units)]
        self._rows = self.of_unit(rows)
        self._bags = self.buffer("bags", sum(p.batch_sizes), len(numbers), "int64", "input")
        self._tables = self.buffer("tables", max(map(max, filter(None, rows))), p.columns, p.dtype, "input")

    def of_unit(self, numbers: list[list[int]]) -> Index:
        """Return an expression of the tile's index `t`, for a property of the slice that the tile pools, such as its
        first column. `numbers[rank][i]` is the value for slice i of every sample on `rank`.
        """
        # Ranks without tables have no tiles, but their steps must have values too, because the CPU issues the steps.
        return _formula([of_rank or [0] for of_rank in numbers], RANK, self._unit)

    def pool(self, first: Index, out: Region) -> Compute:
        """Return the step with which tile `t` pools the bags of its slice into `out`.

        first: the index of the sample to which tile 0 belongs.
        """
        bags = self._bags.part(rows=(first + self.sample, 1), cols=(self._slot, self._slots))
        return Compute(
            "embedding_bag", out, (bags, self._tables.part(rows=(0, self._rows), cols=(self.column, self.width)))
        )

    def extent(self, batch: Index) -> Index:
        return lookup(self.counts, RANK) * batch

    def first_of(self, rank: Index) -> Index:
        sizes = self.p.batch_sizes
        return rank * sizes[0] if len(set(sizes)) == 1 else lookup(offsets(sizes), rank)

    def targets(self, order: SliceOrder) -> list[Index]:
        if order == "natural":
            return list(range(self.world_size))
        return [*(peer(self.world_size, distance) for distance in range(1, self.world_size)), RANK]

    def begin(self, ready: Signals, order: SliceOrder) -> LaneDraft:
        """Create the schedule's only lane, and append the steps that set the signals `ready`. These signals allow other
        ranks to write to this rank's output. Return the lane.
        """
        lane = self.lane("pool")
        for distance in range(order == "remote_first", self.world_size):
            lane.set(ready, RANK, at=peer(self.world_size, distance) if distance else RANK)
        return lane

    def wait_for(self, ready: Signals, rank: Index) -> None:
        if rank is not RANK:
            self.lane("pool").wait(ready, rank)

    def at_ranks(self, rank: int, own: bool) -> Index:
        """Return an expression that is 1 on `rank` and 0 elsewhere; with own=False, 0 on `rank` and 1 elsewhere."""
        return lookup(tuple(int((r == rank) == own) for r in range(self.world_size)), RANK)

    def _rows_read(self, rank: int, unit: Unit) -> int:
        """Return the number of table rows that a bag of slice `unit` reads, on average over the slice's tables, at least 1. A
        table counts in proportion to its number of columns.
        """
        if not self.p.rows_read:
            return 1
        slots = zip(self.p.slots[rank], self.p.rows_read[rank], strict=True)
        total = sum(dim * rows for (_, dim), rows in list(slots)[unit.first : unit.end])
        return max(1, round(total / unit.width))


def _formula(numbers: list[list[int]], rank: Index, unit: Index) -> Index:
    """Return `numbers[rank][unit]` as an expression: a linear formula in `rank` and `unit` if the numbers allow it,
    otherwise a lookup table.
    """
    counts = {len(of_rank) for of_rank in numbers}
    flat = tuple(n for of_rank in numbers for n in of_rank)
    if len(counts) == 1 and flat:
        base = numbers[0][0]
        by_rank = numbers[1][0] - base if len(numbers) > 1 else 0
        by_unit = numbers[0][1] - base if len(numbers[0]) > 1 else 0
        if all(
            n == base + r * by_rank + u * by_unit for r, of_rank in enumerate(numbers) for u, n in enumerate(of_rank)
        ):
            return rank * by_rank + unit * by_unit + base
    return lookup(flat, lookup(offsets(tuple(map(len, numbers))), rank) + unit)
