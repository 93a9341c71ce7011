"""A sort of a batch's ids by table and row on a GPU, for backward of embedding_all_to_all: a stable sort by torch
between kernels of `weft.kernels.embedding_runs`.

The CPU never waits for the device. The numbers of runs and of segments stay on the device, and arrays are allocated for
the largest possible numbers. Keys have 32 bits if this is enough for all rows of a rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.embedding import EmbeddingSharding, JaggedInput
from weft.embedding.forward_call import ForwardCall
from weft.kernels import embedding_runs as device_code
from weft.runtime.capture import is_captured, keep_for_graphs
from weft.runtime.cuda.direct import launch
from weft.runtime.cuda.tensor_maps import tma_and_multiprocessors
from weft.symm.lasting import lasting

SEGMENT = 128  # occurrences of an id that are summed together
_TILE = 1024  # elements that a program sums at once
_BLOCK = 1024  # ids or keys per program
_RUNS = 256  # runs per program of the search for long runs
_MOST_32 = 2**31  # smaller numbers fit into int32
_PROGRAMS_PER_SM = 32  # programs of one warp


class _Slots(NamedTuple):
    """This rank's slots, as tensors on the device.

    of_key: `[layers, blocks of offsets]`, the slot that reads each key, or -1. Several slots that read one key are in
        different layers.
    table: see `weft.kernels.embedding_runs.SLOT_FIELDS`.
    """

    of_key: torch.Tensor
    table: torch.Tensor


@dataclass(frozen=True)
class Shape:
    """Numbers that are the same for all calls of a plan.

    split: the largest number of slots of a table. rows: the number of rows of all tables of this rank. block_d, lanes:
        the size of a tile, which follows from the slots of all ranks, so that sums do not depend on the placement of
        tables. align: a divisor of all widths, at most 16 bytes. uniform: True if all widths are block_d.
    """

    split: int
    rows: int
    bases: tuple[int, ...]
    block_d: int
    lanes: int
    align: int
    uniform: bool
    any_mean: bool

    @property
    def key_dtype(self) -> torch.dtype:
        return torch.int32 if self.split * (self.rows + 1) < _MOST_32 else torch.int64

    @property
    def no_row(self) -> int:
        """The key of an id without a row. It is larger than all other keys."""
        return self.split * self.rows

    @property
    def warps(self) -> int:
        return max(1, min(8, self.lanes * self.block_d // 512))

    def programs(self, device: torch.device, most: int, warps: int | None = None) -> int:
        """Return the number of programs for at most `most` units of work."""
        count = tma_and_multiprocessors(device)[1]
        return max(1, min(most, count * _PROGRAMS_PER_SM // (warps or self.warps)))


class Occurrences(NamedTuple):
    """All ids of a batch, ordered by layer and position.

    keys: the row times `Shape.split`, plus the number of the slot. places: the offset of the gradient, in elements.
    scales: None if all are 1.
    """

    keys: torch.Tensor
    places: torch.Tensor
    scales: torch.Tensor | None
    over_length: torch.Tensor | None


@dataclass(frozen=True)
class Rows:
    """The runs of a batch. A run is all occurrences of one row.

    count: the number of all occurrences. starts, keys: one number per run. runs: the number of runs. places, scales:
        one number per occurrence, ordered by run. ends: for each block of occurrences, the number of runs that begin in
        this or an earlier block. For runs of more than SEGMENT occurrences: first_segment (of each run),
        run_of_segment, long_runs, and counters (the numbers of segments and of long runs).
    """

    shape: Shape
    count: int
    starts: torch.Tensor
    keys: torch.Tensor
    runs: torch.Tensor
    places: torch.Tensor
    scales: torch.Tensor | None
    first_segment: torch.Tensor
    run_of_segment: torch.Tensor
    long_runs: torch.Tensor
    counters: torch.Tensor
    ends: torch.Tensor


class SortedAhead:
    """Rows in memory of the stream `home`, computed by the stream `side`, and the event at the end of their
    computation.

    home, side: None for rows that the current stream computes.
    """

    def __init__(self, rows: Rows, home: torch.cuda.Stream | None, side: torch.cuda.Stream | None) -> None:
        self._rows, self._home, self._side, self._is_taken = rows, home, side, False
        self._done = None if side is None else side.record_event()

    def take(self) -> Rows:
        """Return the rows. Work on the current stream then waits for their computation."""
        self._is_taken = True
        if self._done is not None:
            here = torch.cuda.current_stream(self._rows.starts.device)
            here.wait_event(self._done)
            if here != self._home:
                self._note(here)
        return self._rows

    def __del__(self) -> None:
        """Keep the rows' memory from reuse until the rows are computed, unless a stream has waited for the rows."""
        if not self._is_taken and self._side is not None:
            self._note(self._side)

    def _note(self, stream: torch.cuda.Stream) -> None:
        for tensor in vars(self._rows).values():
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)


def sort_ahead(of: ForwardCall, jagged: JaggedInput) -> None:
    """Sort the ids of a call on a separate stream, after all work that is enqueued on the current stream.

    The sort runs concurrently with later work, such as the dense part of the model. `sorted_rows` of the same call
    returns the result. While a graph is captured, this function does nothing.
    """
    device = jagged.values.device
    if of.sorted_ahead is not None or is_captured(device):
        return
    room = _room_for(of, jagged)  # on the current stream: the allocator needs events for memory of two streams
    if device.type != "cuda":
        of.sorted_ahead = SortedAhead(_sorted(of, jagged, room), None, None)
        return
    home, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(home)
    with torch.cuda.stream(side):
        of.sorted_ahead = SortedAhead(_sorted(of, jagged, room), home, side)
    for given in (jagged.values, jagged.offsets, jagged.weights):
        if given is not None:
            given.record_stream(side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def sorted_rows(of: ForwardCall, jagged: JaggedInput) -> Rows:
    """Return the ids of this rank's tables, sorted by table, row, slot, sample and place in the bag."""
    ahead, of.sorted_ahead = of.sorted_ahead, None
    return _sorted(of, jagged) if ahead is None else ahead.take()


def _room_for(of: ForwardCall, jagged: JaggedInput) -> Rows:
    """Allocate the runs of a call, uninitialized."""
    shape, device = shape_of(of.plan.sharding, of.rank), jagged.values.device
    laid = _laid_out(of, jagged)
    count = laid.layers * jagged.values.numel()

    def new(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    at = torch.int32 if count < _MOST_32 else torch.int64
    most_long = count // SEGMENT  # a run is cut only if it is longer than a segment
    blocks = -(-count // _BLOCK)
    ends = new(blocks, torch.int64) if count else torch.zeros(1, dtype=torch.int64, device=device)
    return Rows(
        shape, count, new(count + 1, at), new(count, shape.key_dtype), ends[-1:], new(count, laid.of_places),
        new(count, torch.float32) if count and (shape.any_mean or jagged.weights is not None) else None,
        new(count), new(2 * most_long + 1), new(most_long + 1), torch.zeros(2, dtype=torch.int64, device=device),
        ends,
    )  # fmt: skip


def _sorted(of: ForwardCall, jagged: JaggedInput, room: Rows | None = None) -> Rows:
    """Sort the ids of a call into `room`, or into new memory. New memory is allocated last, when the sort's temporary
    memory is free.
    """
    ids = occurrences(of, jagged)
    count, device = ids.keys.numel(), ids.keys.device
    if not count:
        return room or _room_for(of, jagged)
    ordered, order = torch.sort(ids.keys, stable=True)
    rows = room or _room_for(of, jagged)
    shape, ends, scales = rows.shape, rows.ends, rows.scales
    blocks = len(ends)
    counts = torch.empty_like(ends)
    launch(
        device_code.count_runs_kernel,
        (blocks, 1),
        (ordered, counts, count, shape.no_row),
        BLOCK=_BLOCK,
        SPLIT=shape.split,
    )
    torch.cumsum(counts, 0, out=ends)
    unused = ordered if scales is None else scales
    given = (
        ordered, order, ids.places, unused if ids.scales is None else ids.scales, ends, rows.starts, rows.keys, rows.places,
        unused, count, shape.no_row,
    )  # fmt: skip
    scaled = scales is not None
    launch(device_code.runs_kernel, (blocks, 1), given, BLOCK=_BLOCK, SPLIT=shape.split, SCALED=scaled)
    if count >= SEGMENT:
        programs = shape.programs(device, -(-count // _RUNS), 4)
        long = rows.starts, rows.runs, rows.counters, rows.first_segment, rows.run_of_segment, rows.long_runs
        launch(device_code.long_runs_kernel, (programs, 1), long, BLOCK=_RUNS, SEGMENT=SEGMENT)
    return rows


def occurrences(of: ForwardCall, jagged: JaggedInput) -> Occurrences:
    """Return all ids of this rank's slots, with keys and places."""
    shape, device = shape_of(of.plan.sharding, of.rank), jagged.values.device
    batch, bags, count = of.checked.global_batch, jagged.offsets.numel() - 1, jagged.values.numel()
    slots, stride, layers, of_places = _laid_out(of, jagged)
    if slots is None:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return Occurrences(nothing.to(shape.key_dtype), nothing.to(of_places), None, None)
    size = layers * count
    keys = torch.empty(size, dtype=shape.key_dtype, device=device)
    places = torch.empty(size, dtype=of_places, device=device)
    over = torch.empty(size, dtype=torch.float32, device=device) if shape.any_mean else None
    weights = jagged.weights
    scales = over if weights is None else torch.empty(size, dtype=torch.float32, device=device)
    given = (
        jagged.values, jagged.offsets, places if weights is None else weights, slots.of_key, slots.table, keys, places,
        places if scales is None else scales, places if over is None else over,
        count, bags, batch, slots.of_key.shape[1], stride, shape.no_row,
    )  # fmt: skip
    launch(
        device_code.occurrences_kernel, (-(-count // _BLOCK), layers), given,
        BLOCK=_BLOCK, SPLIT=shape.split, HASH=of.plan.options.hash, WEIGHTED=weights is not None, ANY_MEAN=shape.any_mean,
        BAG=tl.int32 if bags < _MOST_32 // 2 else tl.int64,
    )  # fmt: skip
    return Occurrences(keys, places, scales, over)


class _LaidOut(NamedTuple):
    """The layout of a call's occurrences: slots (None if there are none), columns of the gradients of a sample, layers
    of slots, and the dtype of places.
    """

    slots: _Slots | None
    stride: int
    layers: int
    of_places: torch.dtype


def _laid_out(of: ForwardCall, jagged: JaggedInput) -> _LaidOut:
    batch, bags, count = of.checked.global_batch, jagged.offsets.numel() - 1, jagged.values.numel()
    stride = of.plan.sharding.columns_of_ranks[of.rank]
    of_places = torch.int32 if batch * stride < _MOST_32 else torch.int64
    if not count or bags <= 0 or not of.plan.sharding.local_slots(of.rank):
        return _LaidOut(None, stride, 0, of_places)
    key_of_slot, keys = of.checked.key_of_slot, bags // batch
    slots = _slots_of(of.plan.sharding, of.rank, key_of_slot, keys, jagged.values.device)
    keep_for_graphs(slots.of_key)
    keep_for_graphs(slots.table)
    return _LaidOut(slots, stride, len(slots.of_key), of_places)


@functools.lru_cache(maxsize=64)
def shape_of(sharding: EmbeddingSharding, rank: int) -> Shape:
    """Return the shape of a rank's part of a sharding."""
    slots, tables = sharding.local_slots(rank), sharding.local_tables(rank)
    bases = [0]
    for index in tables:
        bases.append(bases[-1] + sharding.tables[index].num_embeddings)
    widths = {slot.dim for slot in sharding.slots}
    block_d = max(16, triton.next_power_of_2(max(widths)))
    # Use the slots of all ranks: with other tiles, sums would have other bits on another rank.
    lanes = max(1, min(16, _TILE // block_d))
    align = 16 // sharding.dtype.itemsize
    while any(width % align for width in widths):
        align //= 2
    split = max((len(sharding.tables[index].feature_names) for index in tables), default=1)
    any_mean = any(sharding.tables[slot.table].pooling == "mean" for slot in slots)
    return Shape(split, bases[-1], tuple(bases[:-1]), block_d, lanes, align, widths == {block_d}, any_mean)


@functools.lru_cache(maxsize=64)
def _slots_of(
    sharding: EmbeddingSharding, rank: int, key_of_slot: tuple[int, ...], keys: int, device: torch.device
) -> _Slots:
    """Return the layout of the rank's slots, as tensors on the device. keys: the number of blocks of offsets."""
    local = {index: number for number, index in enumerate(sharding.local_tables(rank))}
    shape, slots = shape_of(sharding, rank), sharding.local_slots(rank)
    turns, columns = dict.fromkeys(local, 0), 0
    layers: list[list[int]] = []
    fields: list[list[int]] = []
    for number, (slot, key) in enumerate(zip(slots, key_of_slot, strict=True)):
        layer = next((one for one in layers if one[key] < 0), None)
        if layer is None:
            layers.append(layer := [-1] * keys)
        layer[key] = number
        table = sharding.tables[slot.table]
        of_table = local[slot.table]
        mean = table.pooling == "mean"
        fields.append([of_table, table.num_embeddings, shape.bases[of_table], turns[slot.table], columns, mean])
        turns[slot.table] += 1
        columns += slot.dim

    def made() -> _Slots:
        return _Slots(torch.tensor(layers, device=device), torch.tensor(fields, dtype=torch.int64, device=device))

    return lasting(device, made)
