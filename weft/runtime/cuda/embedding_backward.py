"""The part of embedding_all_to_all's backward that a GPU computes: a stable sort of ids by torch, and the kernels of
`weft.kernels.embedding_backward`.

The host never waits for the device, except for sparse gradients, whose sizes it needs. The numbers of runs and of segments stay on
the device; arrays have room for the most that there can be.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton

from weft.embedding import EmbeddingSharding, JaggedInput
from weft.embedding.forward_call import ForwardCall, Tables
from weft.embedding.hashing import rows_of_hashes
from weft.kernels import embedding_backward as device_code
from weft.runtime.cuda.tensor_maps import TRITON_TYPE
from weft.symm.lasting import lasting

SEGMENT = 512  # occurrences
_TILE = 1024  # elements that a program sums at once
_GRADIENT, _SQUARES = 0, 6  # the rules that write gradients, and sums of their squares
_PROGRAMS_PER_SM = 32  # of one warp
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


class _Slots(NamedTuple):
    """This rank's slots, as tensors on the device.

    of_key: for each layer, the slot that reads each key, or -1; a key that several slots read is in several layers. table, rows,
    base (first linear row of the table), turn (number of the slot among its table's), column, mean: of each slot.
    """

    of_key: list[torch.Tensor]
    table: torch.Tensor
    rows: torch.Tensor
    base: torch.Tensor
    turn: torch.Tensor
    column: torch.Tensor
    mean: torch.Tensor


@dataclass(frozen=True)
class _Shape:
    """Numbers that are the same for all calls of a plan.

    split: the most slots of a table. rows: of all tables of this rank. block_d, lanes: of a tile. They follow from the slots of all
    ranks, so that sums do not depend on the placement.
    """

    split: int
    rows: int
    bases: tuple[int, ...]
    block_d: int
    lanes: int
    any_mean: bool

    @property
    def key_dtype(self) -> torch.dtype:
        return torch.int32 if self.split * (self.rows + 1) < 2**31 else torch.int64

    @property
    def no_row(self) -> int:
        """The key of an id without a row: above all others."""
        return self.split * self.rows

    @property
    def warps(self) -> int:
        return max(1, min(8, self.lanes * self.block_d // 512))

    def programs(self, device: torch.device, most: int) -> int:
        count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        return max(1, min(most, count * _PROGRAMS_PER_SM // self.warps))


class _Occurrences(NamedTuple):
    """All ids of a batch, in the order of layers and positions. scales: None if all are 1.

    keys: of the row, `_Shape.split` times, plus the number of the slot. places: of the gradient, in elements.
    """

    keys: torch.Tensor
    places: torch.Tensor
    tables: torch.Tensor
    scales: torch.Tensor | None
    over_length: torch.Tensor | None


@dataclass(frozen=True)
class Rows:
    """The occurrences of a batch sorted by row, and their runs. first_segment: of each run among the segments of long runs."""

    shape: _Shape
    ids: _Occurrences
    keys: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor
    runs: torch.Tensor
    first_segment: torch.Tensor
    run_of_segment: torch.Tensor
    segments: torch.Tensor


def sorted_rows(of: ForwardCall, jagged: JaggedInput) -> Rows:
    """Return the ids of this rank's tables, sorted by table, row, slot, sample and place in the bag."""
    shape = _shape_of(of.plan.sharding, of.rank)
    ids = _occurrences(of, jagged)
    keys, order = torch.sort(ids.keys, stable=True)
    count, device = keys.numel(), keys.device
    numbers = torch.arange(count, device=device)
    rows = keys if shape.split == 1 else keys // shape.split
    known = keys < shape.no_row
    begins = known.clone()
    begins[1:] &= rows[1:] != rows[:-1]
    run_of = begins.cumsum(0) - 1
    runs = begins.sum()
    # Elements after the last run are for all that begins no run.
    starts = torch.zeros(count + 2, dtype=torch.int64, device=device)
    starts.scatter_(0, torch.where(begins, run_of, count + 1), numbers)
    starts.scatter_(0, runs.view(1), known.sum().view(1))
    lengths = torch.where(numbers < runs, starts[1 : count + 1] - starts[:count], 0)
    segments_of = torch.where(lengths > SEGMENT, (lengths + SEGMENT - 1) // SEGMENT, 0)
    ends = segments_of.cumsum(0)
    most = 2 * count // SEGMENT + 1  # a run is cut only if it is longer than a segment
    run_of_segment = torch.zeros(most + 1, dtype=torch.int64, device=device)
    run_of_segment.scatter_(0, torch.where(segments_of > 0, ends - segments_of, most), numbers)
    filled = run_of_segment[:most].cummax(0).values
    total = ends[-1:] if count else ends.new_zeros(1)
    return Rows(shape, ids, keys, order, starts, runs.view(1), ends - segments_of, filled, total)


def update(
    of: ForwardCall, tables: Tables, rows: Rows, received: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Update each row that occurs. Return how many were skipped, on the device.

    scale: a number on the device, times every gradient."""
    optimizer, dtype, seed = tables.optimizer, of.plan.sharding.dtype, None
    numbers, table = _numbers(of, tables), _table_of_update(of, tables, rows, received.device)
    if scale is not None:
        numbers[device_code.FACTOR] *= scale
    if optimizer.rounding == "stochastic" and dtype != torch.float32:
        seed = (tables.step * _GOLDEN + optimizer.seed).view(1)  # wraps around as `seed_of_update` does
    skip = optimizer.nonfinite == "skip"
    skipped = _launched(rows, received, table, numbers, optimizer.rule, False, skip, dtype, seed)
    for changed in (*tables.weights, *(state for states in tables.states for state in states)):
        torch.autograd.graph.increment_version(changed)
    return skipped


def sum_of_squares(of: ForwardCall, tables: Tables, rows: Rows, received: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of all gradients that an update would use, float64 [], on the device."""
    device = received.device
    squares = torch.zeros(rows.keys.numel(), dtype=torch.float32, device=device)
    # The update's own table of tables: a graph's capture cannot copy another one from the host.
    table, skip = _table_of_update(of, tables, rows, device), tables.optimizer.nonfinite == "skip"
    numbers, dtype = _numbers_of_gradients(of, device), of.plan.sharding.dtype
    _launched(rows, received, table, numbers, _SQUARES, False, skip, dtype, squares=squares)
    return squares.sum(dtype=torch.float64)


def _table_of_update(of: ForwardCall, tables: Tables, rows: Rows, device: torch.device) -> torch.Tensor:
    lines = []
    number_of = of.plan.sharding.local_tables(of.rank)
    for base, weight, states, number in zip(rows.shape.bases, tables.weights, tables.states, number_of, strict=True):
        addresses = [state.data_ptr() for state in states] + [0] * (2 - len(states))
        lines.append([weight.data_ptr(), *addresses, 0, base, weight.shape[1], 0, number])
    return _device_table(lines, device)


def gradients_of_tables(
    of: ForwardCall, rows: Rows, received: torch.Tensor, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the gradient of each table: dense, or a coalesced sparse COO tensor. For sparse gradients it waits for the device.

    dtype: other than the tables'."""
    sharding, device, shape = of.plan.sharding, received.device, rows.shape
    tables = [sharding.tables[index] for index in sharding.local_tables(of.rank)]
    first_runs, sizes = [0] * len(tables), [table.num_embeddings for table in tables]
    linear = rows.keys[:0].to(torch.int64)
    if of.sparse:
        linear = rows.keys[rows.starts[: int(rows.runs)]].to(torch.int64) // shape.split
        edges = torch.tensor([*shape.bases, shape.rows], device=device)
        at: list[int] = torch.searchsorted(linear, edges).tolist()
        first_runs, sizes = at[:-1], [end - begin for begin, end in pairwise(at)]
    make = torch.empty if of.sparse else torch.zeros
    values = [
        make(size, table.embedding_dim, dtype=dtype or table.dtype, device=device)
        for size, table in zip(sizes, tables, strict=True)
    ]
    lines = [
        [0, 0, 0, value.data_ptr(), base, value.shape[1], first, 0]
        for value, base, first in zip(values, shape.bases, first_runs, strict=True)
    ]
    numbers = _numbers_of_gradients(of, device)
    _launched(
        rows, received, _device_table(lines, device), numbers, _GRADIENT, of.sparse, False, dtype or sharding.dtype
    )
    if not of.sparse:
        return values
    return [
        torch.sparse_coo_tensor(
            (linear[first : first + len(value)] - base)[None], value, (table.num_embeddings, table.embedding_dim),
            is_coalesced=True, check_invariants=False,
        )
        for table, value, base, first in zip(tables, values, shape.bases, first_runs, strict=True)
    ]  # fmt: skip


def gradients_of_weights(
    of: ForwardCall, jagged: JaggedInput, weights: Sequence[torch.Tensor], received: torch.Tensor
) -> torch.Tensor:
    """Return the gradients of per-sample weights, float32 [number of ids]."""
    shape, ids, count = _shape_of(of.plan.sharding, of.rank), _occurrences(of, jagged), jagged.values.numel()
    total = torch.zeros(count, dtype=torch.float32, device=received.device)
    if not count or not len(weights):
        return total
    lines = [[w.data_ptr(), 0, 0, 0, base, w.shape[1], 0, 0] for base, w in zip(shape.bases, weights, strict=True)]
    out = torch.empty(ids.keys.numel(), dtype=torch.float32, device=received.device)
    grid = shape.programs(received.device, -(-len(out) // shape.lanes))
    device_code.gradients_of_weights_kernel[grid, 1, 1](
        ids.keys, ids.places, received, ids.tables, _device_table(lines, received.device), out, len(out),
        ROWS=shape.lanes, BLOCK_D=shape.block_d, SPLIT=shape.split, DTYPE=TRITON_TYPE[received.dtype], NO_ROW=shape.no_row,
        num_warps=shape.warps,
    )  # fmt: skip
    if ids.over_length is not None:
        out = out * ids.over_length
    for layer in out.view(-1, count):  # slots that read the same id, one after the other
        total += layer
    return total


def _launched(
    rows: Rows, received: torch.Tensor, tables: torch.Tensor, numbers: torch.Tensor, rule: int, sparse: bool, skip: bool,
    dtype: torch.dtype, seed: torch.Tensor | None = None, squares: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Launch the kernels. Return how many rows were skipped, on the device.

    dtype: of tables, and of gradients that are written. seed: of random bits, or None to round to nearest.
    squares: the output of rule 6."""
    shape, ids, device, count = rows.shape, rows.ids, received.device, rows.keys.numel()
    skipped = torch.zeros(1, dtype=torch.int64, device=device)
    if not count:
        return skipped
    most = len(rows.run_of_segment)
    partials = torch.empty(most, shape.block_d, dtype=torch.float32, device=device)
    scales = partials if ids.scales is None else ids.scales
    extra = seed if seed is not None else squares if squares is not None else skipped
    of_tile: dict[str, Any] = {
        "ROWS": shape.lanes, "BLOCK_D": shape.block_d, "SCALED": ids.scales is not None, "SEGMENT": SEGMENT,
        "num_warps": shape.warps,
    }  # fmt: skip
    if count > SEGMENT:
        device_code.segment_sums_kernel[shape.programs(device, most), 1, 1](
            rows.order, ids.places, scales, received, rows.starts, rows.run_of_segment, rows.first_segment, rows.segments,
            ids.tables, tables, partials, **of_tile,
        )  # fmt: skip
    device_code.update_rows_kernel[shape.programs(device, count), 1, 1](
        rows.keys, rows.order, ids.places, scales, received, rows.starts, rows.runs, rows.first_segment, partials, ids.tables,
        tables, numbers, extra, skipped, SPLIT=shape.split, DTYPE=TRITON_TYPE[dtype], RULE=rule,
        SPARSE=sparse, SKIP=skip, STOCHASTIC=seed is not None, **of_tile,
    )  # fmt: skip
    return skipped


def _occurrences(of: ForwardCall, jagged: JaggedInput) -> _Occurrences:
    shape, device = _shape_of(of.plan.sharding, of.rank), jagged.values.device
    batch, bags, count = of.checked.global_batch, jagged.offsets.numel() - 1, jagged.values.numel()
    local = of.plan.sharding.local_slots(of.rank)
    if not count or bags <= 0 or not local:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return _Occurrences(none.to(shape.key_dtype), none, none, None, None)
    slots = _slots_of(of.plan.sharding, of.rank, of.checked.key_of_slot, bags // batch, device)
    stride = sum(slot.dim for slot in local)
    offsets, at = jagged.offsets.to(torch.int64), torch.arange(count, device=device)
    bag = torch.searchsorted(offsets, at, right=True) - 1
    in_bag = (bag >= 0) & (bag < bags)  # values before the first offset and after the last are of no bag
    bag = bag.clamp(0, bags - 1)
    key, sample = bag // batch, bag % batch
    lengths = (offsets[bag + 1] - offsets[bag]).clamp(min=1) if shape.any_mean else None
    layers = []
    for slot_of_key in slots.of_key:
        slot = slot_of_key[key]
        read, slot = in_bag & (slot >= 0), slot.clamp(min=0)
        rows = slots.rows[slot]
        row = rows_of_hashes(jagged.values, rows) if of.plan.options.hash else jagged.values.to(torch.int64)
        read &= (row >= 0) & (row < rows)
        keys = torch.where(read, (slots.base[slot] + row) * shape.split + slots.turn[slot], shape.no_row)
        over = None if lengths is None else torch.where(slots.mean[slot], 1 / lengths.to(torch.float32), 1.0)
        scales = jagged.weights if over is None else over if jagged.weights is None else jagged.weights * over
        layers.append((keys.to(shape.key_dtype), sample * stride + slots.column[slot], slots.table[slot], scales, over))
    parts: list[Any] = [
        one[0] if one[0] is None or len(layers) == 1 else torch.cat(one) for one in zip(*layers, strict=True)
    ]
    return _Occurrences(*parts)


@functools.lru_cache(maxsize=64)
def _shape_of(sharding: EmbeddingSharding, rank: int) -> _Shape:
    slots, tables = sharding.local_slots(rank), sharding.local_tables(rank)
    bases = [0]
    for index in tables:
        bases.append(bases[-1] + sharding.tables[index].num_embeddings)
    block_d = max(16, triton.next_power_of_2(max(slot.dim for slot in sharding.slots)))
    # Not of this rank's slots alone: with other tiles sums would have other bits on another rank.
    lanes = max(1, min(16, _TILE // block_d))
    split = max((len(sharding.tables[index].feature_names) for index in tables), default=1)
    any_mean = any(sharding.tables[slot.table].pooling == "mean" for slot in slots)
    return _Shape(split, bases[-1], tuple(bases[:-1]), block_d, lanes, any_mean)


@functools.lru_cache(maxsize=64)
def _slots_of(
    sharding: EmbeddingSharding, rank: int, key_of_slot: tuple[int, ...], keys: int, device: torch.device
) -> _Slots:
    """Return the layout of the rank's slots in tables on the device. keys: the number of blocks of offsets."""
    local = {index: number for number, index in enumerate(sharding.local_tables(rank))}
    shape, slots = _shape_of(sharding, rank), sharding.local_slots(rank)
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
        of_key = [torch.tensor(layer, device=device) for layer in layers]
        by_slot = torch.tensor(fields, dtype=torch.int64, device=device).reshape(-1, 6)
        table, rows, base, turn, column, mean = by_slot.t().contiguous().unbind()
        return _Slots(of_key, table, rows, base, turn, column, mean.bool())

    return lasting(device, made)


@functools.lru_cache(maxsize=64)
def _fixed_numbers(
    written: str, numbers: tuple[tuple[str, float], ...], factor: float, clip: float, device: torch.device
) -> torch.Tensor:
    of = dict(numbers)
    beta1, beta2 = of.get("beta1", 0.0), of.get("beta2", 0.0)
    values = [0.0, factor, of.get("eps", 0.0), of["weight_decay"], beta1, beta2, 1 - beta1, 1 - beta2, 1.0, 1.0, clip]
    return lasting(device, lambda: torch.tensor(values, dtype=torch.float32, device=device))


def _numbers_of_gradients(of: ForwardCall, device: torch.device) -> torch.Tensor:
    """Return the numbers of a rule that updates nothing."""
    numbers = torch.zeros(device_code.NUMBERS, dtype=torch.float32, device=device)
    for place, value in ((device_code.FACTOR, of.factor), (device_code.CLIP, math.inf)):
        numbers[place].fill_(value)  # an assignment would copy from the host, which a captured graph cannot
    return numbers


def _numbers(of: ForwardCall, tables: Tables) -> torch.Tensor:
    """Return the rule's numbers. The learning rate and the number of updates are read on the device."""
    optimizer, device = tables.optimizer, tables.learning_rate.device
    clip = optimizer.clip_value or math.inf
    numbers = _fixed_numbers(optimizer.written, tuple(optimizer.numbers.items()), of.factor, clip, device).clone()
    numbers[device_code.RATE] = tables.learning_rate
    if optimizer.counts:
        step = tables.step.to(torch.float64)
        for place, beta in ((device_code.CORRECTION1, "beta1"), (device_code.CORRECTION2, "beta2")):
            numbers[place] = 1 / (1 - optimizer.numbers[beta] ** step)
    return numbers


_device_tables: dict[tuple[Any, ...], torch.Tensor] = {}


def _device_table(lines: list[list[int]], device: torch.device) -> torch.Tensor:
    """Return the table of tables. Copying it takes the host longer than a launch, and an optimizer's tables stay where they are."""
    key = device, tuple(map(tuple, lines))
    table = _device_tables.get(key)
    if table is None:
        if len(_device_tables) >= 64:
            _device_tables.clear()
        rows = lines or [[0] * device_code.TABLE_FIELDS]
        table = _device_tables[key] = lasting(device, lambda: torch.tensor(rows, dtype=torch.int64, device=device))
    return table
