"""A sort of a batch's ids by table and row on a GPU, for backward of embedding_all_to_all. Kernels of
`weft.kernels.embedding_runs` compute a sort key for each id, and torch sorts the keys. Other kernels find the runs in
the result. A run is all occurrences of one row. Long runs are cut into segments, which several programs sum.

The CPU never waits for the device: the numbers of runs and of segments stay on the device, and arrays are allocated for the
largest possible numbers. Keys have 32 bits if this is enough for all rows of a rank.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.embedding import EmbeddingSharding, JaggedInput
from weft.embedding.forward_call import ForwardCall
from weft.kernels import embedding_runs as device_code
from weft.runtime.capture import is_captured, keep_for_graphs
from weft.runtime.cuda.direct import Call, Kernel, alignments, launch_all
from weft.runtime.cuda.radix_sort import sort_pairs, sorts_pairs
from weft.runtime.cuda.sort_graphs import MOST, SortGraphs, sort_graphs
from weft.runtime.cuda.streams import current_stream
from weft.runtime.cuda.tensor_maps import tma_and_multiprocessors
from weft.symm.lasting import lasting

SEGMENT = 128  # occurrences of an id that are summed together
_TILE = 1024  # elements that a program sums at the same time
_BLOCK = 1024  # ids or keys per program
_RUNS = 256  # runs per program of the search for long runs
MOST_32 = 2**31  # smaller numbers fit into int32
_BY_INDEX, _READ, _WRITTEN = range(3)  # values of ORDER of `runs_kernel`
_PROGRAMS_PER_SM = 32  # programs of one warp
_GRAIN = (
    128  # arrays in one allocation have multiples of this many elements, so that all begin at multiples of 16 bytes
)


class _Slots(NamedTuple):
    """This rank's slots (features), as tensors on the device.

    of_key: the slot that reads each key of the jagged input, `[layers, keys]`. Several slots may read one key, so slots are
        divided into layers with at most one slot for each key. Entry [l, k] is the slot of layer l that reads key k, or -1.
    table: a row with the numbers that describe each slot, such as its table. The columns are listed at
        `weft.kernels.embedding_runs.SLOT_FIELDS`.
    """

    of_key: torch.Tensor
    table: torch.Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes that are equal in all calls of a plan. Rows are numbered across all tables of this rank.

    split: the largest number of slots (features) that read one table. A sort key is row * split + the slot's number among these
        (`Occurrences`).
    rows: the number of rows of all tables. bases: the number of each table's first row.
    block_d, lanes: the columns and rows of the tile in which a program sums gradients. They depend on the slots of all
        ranks, so that sums do not depend on the placement of tables.
    align: the alignment of slots in elements: a power of two that divides the widths of all slots, and at most 16 bytes.
    uniform: True if all slots are block_d columns wide.
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
        return torch.int32 if self.split * (self.rows + 1) < MOST_32 else torch.int64

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """The values on which the compiled kernels depend. They are a part of the key by which `launch_all` caches kernels."""
        return self.key_dtype, self.split, self.block_d, self.lanes, self.align, self.uniform, self.any_mean

    @property
    def no_row(self) -> int:
        """The sort key of an id that is out of range, larger than all other keys."""
        return self.split * self.rows

    @property
    def warps(self) -> int:
        return max(1, min(8, self.lanes * self.block_d // 512))

    def programs(
        self, device: torch.device, most: int, warps: int | None = None, per_sm: int = _PROGRAMS_PER_SM
    ) -> int:
        """Return the number of programs with which to launch a kernel that has at most `most` units of work.

        warps: the number of warps of a program. Default: as in the kernels that sum gradients.
        per_sm: the number of warps for each multiprocessor.
        """
        count = tma_and_multiprocessors(device)[1]
        return max(1, min(most, count * per_sm // (warps or self.warps)))


class Occurrences(NamedTuple):
    """All occurrences of ids in a batch, ordered by layer (see `_Slots`), then by position in the input. The fields have an
    element for each occurrence.

    keys: the sort key: row * `Shape.split` + the number of the slot among the slots of its table.
    places: the offset of the occurrence's gradient in the received gradients, in elements.
    scales: the factor of the gradient; None if all are 1.
    over_length: 1 / length of the bag; None if no slot has mean pooling.
    """

    keys: torch.Tensor
    places: torch.Tensor
    scales: torch.Tensor | None
    over_length: torch.Tensor | None


class RowArrays(NamedTuple):
    """The arrays of `Rows`, as tensors or as addresses. A run is all occurrences of one table row in a batch. A long run has
    more than SEGMENT occurrences, and is cut into segments.

    counters: three numbers: the number of segments, the number of long runs, and 1 if there are long runs, else 0.
    runs: the number of runs.
    ends: for each block of occurrences, the number of runs that begin in this or an earlier block.
    starts, keys: for each run, the index of its first occurrence, and its sort key.
    places, scales: for each occurrence, ordered by run, the offset of its gradient and the gradient's factor.
    first_segment, run_of_segment, long_runs: the first segment of each long run, the run of each segment, and the indices
        of the long runs.
    """

    counters: Any
    runs: Any
    ends: Any
    starts: Any
    keys: Any
    places: Any
    scales: Any
    first_segment: Any
    run_of_segment: Any
    long_runs: Any


class Rows:
    """The runs of a batch. A run is all occurrences of one row. The constructor makes one allocation for all arrays on
    the current stream, uninitialized.

    count: the number of occurrences in the batch. of_places: the dtype of `RowArrays.places`.
    is_scaled: True if gradients have factors (`RowArrays.scales`).
    """

    def __init__(self, shape: Shape, count: int, of_places: torch.dtype, is_scaled: bool, device: torch.device) -> None:
        self.shape, self.count, self.is_scaled = shape, count, is_scaled and count > 0
        self.ok: torch.Tensor | None = None
        """A flag on the device, int64 [1]: if it is 0, an update changes nothing. None: the update always runs."""
        self.of_starts, self.of_places = torch.int32 if count < MOST_32 else torch.int64, of_places
        self.segments = 2 * (count // SEGMENT) + 1  # a run is cut only if it is longer than a segment
        self.blocks = -(-count // _BLOCK)
        of_ids = (count // _GRAIN + 1) * _GRAIN  # at least one more than count, for the end of the last run
        of_segments, of_blocks = (self.segments // _GRAIN + 1) * _GRAIN, (self.blocks // _GRAIN + 1) * _GRAIN
        ends = 8 * _GRAIN
        starts = ends + 8 * of_blocks
        keys = starts + self.of_starts.itemsize * of_ids
        places = keys + shape.key_dtype.itemsize * of_ids
        scales = places + of_places.itemsize * of_ids
        first_segment = scales + 4 * of_ids * self.is_scaled
        run_of_segment = first_segment + 4 * of_ids
        long_runs = run_of_segment + 4 * of_segments
        make = torch.empty if count else torch.zeros
        self.buffer = make(long_runs + 4 * of_segments, dtype=torch.uint8, device=device)
        self._offsets = (
            32, 16, ends, starts, keys, places, scales, first_segment, run_of_segment, long_runs,
        )  # fmt: skip

    @property
    def addresses(self) -> RowArrays:
        base = self.buffer.data_ptr()
        return RowArrays._make([base + offset for offset in self._offsets])

    @cached_property
    def tensors(self) -> RowArrays:
        count, i32, i64 = self.count, torch.int32, torch.int64
        arrays = [
            (3, i64), (1, i64), (self.blocks, i64), (count + 1, self.of_starts), (count, self.shape.key_dtype),
            (count, self.of_places), (count * self.is_scaled, torch.float32), (count, i32), (self.segments, i32),
            (self.segments // 2 + 1, i32),
        ]  # fmt: skip
        return RowArrays._make(
            [
                self.buffer[offset : offset + size * dtype.itemsize].view(dtype)
                for offset, (size, dtype) in zip(self._offsets, arrays, strict=True)
            ]
        )


class SortedAhead:
    """The result of `sort_ahead`: ids that a separate stream sorts.

    rows: the sorted ids. Their memory was allocated on the stream `home`, and the stream `side` computes them. Both streams
        are None if the current stream computes the rows.
    read: the tensors that `side` reads, kept until a stream waits for the rows.
    """

    def __init__(
        self, rows: Rows, read: list[torch.Tensor], home: torch.cuda.Stream | None, side: torch.cuda.Stream | None
    ) -> None:
        self._rows, self._read, self._home, self._side, self._is_taken = rows, read, home, side, False
        self._done = None if side is None else side.record_event()

    def take(self) -> Rows:
        """Make the current stream wait for the sort of ids on the other stream. Return the sorted ids."""
        self._is_taken = True
        if self._done is not None:
            here = current_stream(self._rows.buffer.device)
            here.wait_event(self._done)
            if here != self._home:
                self._rows.buffer.record_stream(here)
                for tensor in self._read:
                    tensor.record_stream(here)
        self._read = []
        return self._rows

    def __del__(self) -> None:
        """Prevent torch from reusing the memory of the rows before the sort has ended, if no stream has waited for the sort."""
        if not self._is_taken and self._side is not None:
            for tensor in (self._rows.buffer, *self._read):
                tensor.record_stream(self._side)


def sort_ahead(of: ForwardCall, jagged: JaggedInput) -> None:
    """Sort the ids of a call on a separate stream, after all work that is enqueued on the current stream.

    The sort overlaps with later work, such as the dense part of the model. `sorted_rows` of the same call returns the
    result. While a graph is captured, this function does nothing.
    """
    device = jagged.values.device
    if of.sorted_ahead is not None or is_captured(device):
        return
    laid = _laid_out(of, jagged)
    rows = _rows_of(of, jagged, laid)  # on the current stream: the allocator needs events for memory of two streams
    if device.type != "cuda":
        _sort(of, jagged, rows, laid)
        of.sorted_ahead = SortedAhead(rows, [], None, None)
        return
    home, side = current_stream(device), _side_stream(device)
    graphs = sort_graphs(rows.shape.key_dtype, side, _sorts_pairs(rows)) if 0 < rows.count <= MOST else None
    torch.cuda.set_stream(side)
    try:
        with contextlib.nullcontext() if graphs is None else graphs.lock:
            _sort(of, jagged, rows, laid, home, graphs)
    finally:
        torch.cuda.set_stream(home)
    read = [jagged.values, jagged.offsets] + ([] if jagged.weights is None else [jagged.weights])
    of.sorted_ahead = SortedAhead(rows, read, home, side)


def _sorts_pairs(rows: Rows) -> bool:
    """True if the sort of a call's ids moves the places of their gradients. Otherwise it moves the indices of the ids."""
    is_narrow = rows.shape.key_dtype == rows.of_places == torch.int32 and rows.count < MOST_32
    return is_narrow and not rows.is_scaled and rows.buffer.device.type == "cuda" and sorts_pairs()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def sorted_rows(of: ForwardCall, jagged: JaggedInput) -> Rows:
    """Return all occurrences of ids of this rank's tables, sorted by table, row, feature, sample and position in the bag."""
    ahead, of.sorted_ahead = of.sorted_ahead, None
    if ahead is not None:
        taken: Rows = ahead.take()
        return taken
    laid = _laid_out(of, jagged)
    rows = _rows_of(of, jagged, laid)
    _sort(of, jagged, rows, laid)
    return rows


def _rows_of(of: ForwardCall, jagged: JaggedInput, laid: _LaidOut) -> Rows:
    """Allocate `Rows`, without values, that are large enough for the ids of a call.

    laid: the layout of the call's occurrences.
    """
    shape = shape_of(of.plan.sharding, of.rank)
    count = laid.layers * jagged.values.numel()
    is_scaled = shape.any_mean or jagged.weights is not None
    return Rows(shape, count, laid.of_places, is_scaled, jagged.values.device)


def _sort(
    of: ForwardCall, jagged: JaggedInput, rows: Rows, laid: _LaidOut, after: torch.cuda.Stream | None = None,
    graphs: SortGraphs | None = None,
) -> None:  # fmt: skip
    """Sort the ids of a call into `rows`, on the current stream, after the work enqueued on the stream `after`.

    graphs: sorts of keys on the current stream, whose lock the caller holds; None to sort without a graph.
    """
    shape, count, device = rows.shape, rows.count, rows.buffer.device
    if not count:
        return
    ids = occurrences(of, jagged, after, laid, *((None, None) if graphs is None else graphs.memory(count)))
    if graphs is not None:
        how = _READ if graphs.pairs else _BY_INDEX
        ordered, order = graphs.sort(count, shape.no_row)
    elif _sorts_pairs(rows):
        how, ordered, order = _WRITTEN, torch.empty_like(ids.keys), rows.tensors.places
        sort_pairs(ids.keys, ids.places, ordered, order, shape.no_row.bit_length())
    else:
        how, (ordered, order) = _BY_INDEX, torch.sort(ids.keys, stable=True)
    scaled, cuts = rows.is_scaled, count >= SEGMENT
    unused = ordered if ids.scales is None else ids.scales

    def kernels() -> list[Kernel]:
        of_keys = {"BLOCK": _BLOCK, "SPLIT": shape.split}
        found = [
            Kernel(device_code.count_runs_kernel, 4, of_keys),
            Kernel(device_code.sum_runs_kernel, 4, {"BLOCK": _BLOCK}),
            Kernel(device_code.runs_kernel, 4, of_keys | {"SCALED": scaled, "SEGMENT": SEGMENT, "ORDER": how}),
            Kernel(device_code.long_runs_kernel, 4, {"BLOCK": _RUNS, "SEGMENT": SEGMENT}),
        ]
        return found if cuts else found[:3]

    def calls(are_tensors: bool) -> list[Call]:
        to, given = rows.tensors if are_tensors else rows.addresses, [ordered, order, ids.places, unused]
        keys, numbers, places, scales = given if are_tensors else [tensor.data_ptr() for tensor in given]
        of_runs = (
            keys, numbers, places, scales, to.ends, to.starts, to.keys, to.places, to.scales if scaled else scales,
            to.counters, count, shape.no_row,
        )  # fmt: skip
        found: list[Call] = [
            ((rows.blocks, 1), (keys, to.ends, count, shape.no_row)),
            ((1, 1), (to.ends, to.counters, to.runs, rows.blocks)),
            ((rows.blocks, 1), of_runs),
        ]
        if cuts:
            programs = shape.programs(device, -(-count // _RUNS), 4)
            long = to.starts, to.runs, to.counters, to.first_segment, to.run_of_segment, to.long_runs
            found.append(((programs, 1), long))
        return found

    key = ("runs", how, shape.kind, rows.of_places, scaled, cuts, _BLOCK, _RUNS, SEGMENT)
    launch_all(key if max(count, shape.no_row) < MOST_32 else None, kernels, calls)


def occurrences(
    of: ForwardCall, jagged: JaggedInput, after: torch.cuda.Stream | None = None, laid: _LaidOut | None = None,
    keys: torch.Tensor | None = None, places: torch.Tensor | None = None,
) -> Occurrences:  # fmt: skip
    """Compute, for each occurrence of an id of this rank's tables, the key by which it is sorted and the offset of its
    gradient.

    after: a stream; the kernels run after the work that is now enqueued on it.
    laid: the layout of the occurrences; None to compute it.
    keys, places: the memory for the results; None to allocate it.
    """
    shape, device = shape_of(of.plan.sharding, of.rank), jagged.values.device
    batch, bags, count = of.checked.global_batch, jagged.offsets.numel() - 1, jagged.values.numel()
    slots, stride, layers, of_places = _laid_out(of, jagged) if laid is None else laid
    if slots is None:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return Occurrences(nothing.to(shape.key_dtype), nothing.to(of_places), None, None)
    size, any_mean, weights = layers * count, shape.any_mean, jagged.weights
    keys = torch.empty(size, dtype=shape.key_dtype, device=device) if keys is None else keys
    places = torch.empty(size, dtype=of_places, device=device) if places is None else places
    over = torch.empty(size, dtype=torch.float32, device=device) if any_mean else None
    scales = over if weights is None else torch.empty(size, dtype=torch.float32, device=device)
    given = [
        jagged.values, jagged.offsets, places if weights is None else weights, slots.of_key, slots.table, keys, places,
        places if scales is None else scales, places if over is None else over,
    ]  # fmt: skip
    addresses = [tensor.data_ptr() for tensor in given]
    numbers = count, bags, batch, slots.of_key.shape[1], stride, shape.no_row
    is_small = bags < MOST_32 // 2

    def kernels() -> list[Kernel]:
        constants = {
            "BLOCK": _BLOCK, "SPLIT": shape.split, "HASH": of.plan.options.hash, "WEIGHTED": weights is not None,
            "ANY_MEAN": any_mean, "BAG": tl.int32 if is_small else tl.int64,
        }  # fmt: skip
        return [Kernel(device_code.occurrences_kernel, 4, constants)]

    def calls(are_tensors: bool) -> list[Call]:
        return [((-(-count // _BLOCK), layers), (*(given if are_tensors else addresses), *numbers))]

    of_input = jagged.values.dtype, jagged.offsets.dtype, weights is None
    key = "ids", shape.kind, of.plan.options.hash, *of_input, of_places, _BLOCK, alignments(addresses)
    launch_all(key if is_small and max(numbers) < MOST_32 else None, kernels, calls, after)
    return Occurrences(keys, places, scales, over)


class _LaidOut(NamedTuple):
    """The sizes and tensors that describe the ids of a call.

    slots: this rank's slots; None if there are no occurrences. stride: the number of columns of the received gradients.
    layers: the number of layers (see `_Slots`). of_places: the dtype of `Occurrences.places`.
    """

    slots: _Slots | None
    stride: int
    layers: int
    of_places: torch.dtype


def _laid_out(of: ForwardCall, jagged: JaggedInput) -> _LaidOut:
    batch, bags, count = of.checked.global_batch, jagged.offsets.numel() - 1, jagged.values.numel()
    stride = of.plan.sharding.columns_of_ranks[of.rank]
    of_places = torch.int32 if batch * stride < MOST_32 else torch.int64
    if not count or bags <= 0 or not of.plan.sharding.local_slots(of.rank):
        return _LaidOut(None, stride, 0, of_places)
    key_of_slot, keys = of.checked.key_of_slot, bags // batch
    slots = _slots_of(of.plan.sharding, of.rank, key_of_slot, keys, jagged.values.device)
    keep_for_graphs(slots.of_key)
    keep_for_graphs(slots.table)
    return _LaidOut(slots, stride, len(slots.of_key), of_places)


@functools.lru_cache(maxsize=64)
def shape_of(sharding: EmbeddingSharding, rank: int) -> Shape:
    """Return the sizes (`Shape`) of the tables that `rank` stores."""
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
    """Return the features (slots) of the rank's tables as tensors on the device. keys: the number of keys of the jagged input."""
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
