"""The local computation of embedding_all_to_all's backward on a GPU, with the kernels of
`weft.kernels.embedding_backward`.

The CPU never waits for the device, except to read the sizes of sparse gradients. Ids are sorted by
`weft.runtime.cuda.embedding_runs`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from weft.embedding import EmbeddingSharding, JaggedInput
from weft.embedding.forward_call import ForwardCall, Tables
from weft.embedding.tables import column_runs
from weft.kernels import embedding_backward as device_code
from weft.runtime.capture import keep_for_graphs
from weft.runtime.cuda.direct import Call, Kernel, alignments, launch, launch_all
from weft.runtime.cuda.embedding_runs import (
    MOST_32,
    SEGMENT,
    Rows,
    Shape,
    occurrences,
    shape_of,
    sort_ahead,
    sorted_rows,
)
from weft.runtime.cuda.tensor_maps import TRITON_TYPE
from weft.symm.lasting import lasting

__all__ = [
    "add_each",
    "by_owner",
    "gradients_in",
    "gradients_of_tables",
    "gradients_of_weights",
    "rows_read",
    "sort_ahead",
    "sorted_rows",
    "sum_of_squares",
    "update",
]

_OWNER_ROWS, _OWNER_TILE = 16, 128  # samples and columns that a program permutes
_GROUP = 512  # elements of the rows that a warp updates at the same time
_UPDATES_PER_SM = 16  # warps of the update that a multiprocessor runs at the same time. On H100, more warps are slower
_REGISTERS = 128  # per thread of the update, of which a multiprocessor has enough for these warps
_ROWS = 8192  # elements of partial sums of long runs that a program adds at the same time
_GRADIENT, _SQUARES = 0, 6  # the rules that write gradients, and the sums of squares of gradients
_AFTER_LAST = [0, 0, 0, 0, 2**63 - 1, 0, 0, 0]  # the line behind those of the tables
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def update(
    of: ForwardCall, tables: Tables, rows: Rows, received: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Update each row whose id occurs in the batch. Return the number of rows skipped for an infinite or NaN gradient, as a
    device tensor.

    of: the forward call. tables: this rank's tables and optimizer states. rows: the call's ids, from `sorted_rows`.
    received: the gradients of the vectors that this rank pooled, [global batch, columns of this rank's tables].
    scale: a device tensor that multiplies every gradient.
    """
    optimizer, dtype, seed = tables.optimizer, of.plan.sharding.dtype, None
    numbers, table = _numbers(of, tables, scale), _table_of_update(of, tables, rows.shape, received.device)
    if optimizer.rounding == "stochastic" and dtype != torch.float32:
        seed = (tables.step * _GOLDEN + optimizer.seed).view(1)  # wraps around like `seed_of_update`
    skip = optimizer.nonfinite == "skip"
    rate = tables.learning_rate
    changes = optimizer.clip_value is not None, optimizer.numbers.get("weight_decay", 0.0) != 0
    skipped = _launched(rows, received, table, numbers, optimizer.rule, False, skip, dtype, seed, None, rate, changes)
    torch.autograd.graph.increment_version(tables.tensors)
    return skipped


def add_each(
    of: ForwardCall, tables: Tables, jagged: JaggedInput, received: torch.Tensor, ok: torch.Tensor | None = None
) -> None:
    """Apply SGD to fp32 tables without sorting the ids. For each occurrence of an id, add an update to the table row, with
    atomic additions.

    received: the gradients, [global batch, columns of this rank's tables].
    ok: a device tensor, 0 if gradients have not arrived. The tables then stay unchanged.
    """
    shape, ids, device = shape_of(of.plan.sharding, of.rank), occurrences(of, jagged), received.device
    count = ids.keys.numel()
    if count:
        table = _table_of_update(of, tables, shape, device)
        is_aligned = table.is_aligned and received.data_ptr() % 16 == 0
        given = (
            ids.keys, ids.places, received if ids.scales is None else ids.scales, received, table.lines,
            _fixed_numbers((), of.factor, math.inf, device), tables.learning_rate, _one(device) if ok is None else ok, count,
            shape.no_row, table.size,
        )  # fmt: skip
        launch(
            device_code.add_each_kernel, (shape.programs(device, -(-count // shape.lanes)), 1), given, warps=shape.warps,
            ROWS=shape.lanes, BLOCK_D=shape.block_d, UNIFORM=shape.uniform, ALIGN=shape.align if is_aligned else 1,
            SCALED=ids.scales is not None, SPLIT=shape.split, STEPS=_steps(table.size),
        )  # fmt: skip
    torch.autograd.graph.increment_version(tables.weights)


def sum_of_squares(of: ForwardCall, tables: Tables, rows: Rows, received: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of the row gradients that `update` would apply, as float64 [] on the device."""
    device = received.device
    squares = torch.zeros(rows.count, dtype=torch.float32, device=device)
    # Use the update's device table: a graph capture cannot copy another table from the CPU.
    table, skip = _table_of_update(of, tables, rows.shape, device), tables.optimizer.nonfinite == "skip"
    numbers, dtype = _fixed_numbers((), of.factor, math.inf, device), of.plan.sharding.dtype
    _launched(rows, received, table, numbers, _SQUARES, False, skip, dtype, squares=squares)
    return squares.sum(dtype=torch.float64)


def _table_of_update(of: ForwardCall, tables: Tables, shape: Shape, device: torch.device) -> _DeviceTable:
    """Return the addresses and sizes of the tables to update, on the device. The result is cached."""
    key = device, of.plan, of.rank, of.layout
    if of.layout is not None and (known := _device_tables.get(key)) is not None:
        keep_for_graphs(known.lines)
        return known
    lines = []
    number_of = of.plan.sharding.local_tables(of.rank)
    for base, weight, states, number in zip(shape.bases, tables.weights, tables.states, number_of, strict=True):
        addresses = [state.data_ptr() for state in states] + [0] * (2 - len(states))
        lines.append([weight.data_ptr(), *addresses, 0, base, weight.shape[1], 0, number])
    table = _device_table(lines, device)
    if of.layout is not None:
        _device_tables[key] = table
    return table


def gradients_of_tables(
    of: ForwardCall, rows: Rows, received: torch.Tensor, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the gradient of each table, [rows, columns]: dense, or with `of.sparse` a coalesced sparse COO tensor, for which
    the CPU waits for the device.

    dtype: the dtype of the gradients; by default the tables' dtype.
    """
    sharding, device, shape = of.plan.sharding, received.device, rows.shape
    tables = [sharding.tables[index] for index in sharding.local_tables(of.rank)]
    first_runs, sizes = [0] * len(tables), [table.num_embeddings for table in tables]
    linear = rows.tensors.keys[:0].to(torch.int64)
    if of.sparse:
        linear = rows.tensors.keys[: int(rows.tensors.runs)].to(torch.int64) // shape.split
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
    numbers = _fixed_numbers((), of.factor, math.inf, device)
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


def gradients_in(of: ForwardCall, rows: Rows, received: torch.Tensor, flat: torch.Tensor) -> None:
    """Write the gradients of this rank's tables to `flat`, one table after the other.

    flat: the tensor to write to. It has zeros in float32, at least as many as all tables have elements.
    """
    device = received.device
    made, is_address, size, is_aligned = _tables_in_flat(of.plan.sharding, of.rank, device)
    # A kernel adds the address of `flat` in stream order: a copy from the CPU would wait for the device.
    lines = torch.add(keep_for_graphs(made), keep_for_graphs(is_address), alpha=flat.data_ptr())
    table = _DeviceTable(lines, size, is_aligned and flat.data_ptr() % 16 == 0)
    numbers = _fixed_numbers((), of.factor, math.inf, device)
    _launched(rows, received, table, numbers, _GRADIENT, False, False, torch.float32)


@functools.lru_cache(maxsize=64)
def _tables_in_flat(
    sharding: EmbeddingSharding, rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
    """Describe the gradients of this rank's tables in a flat float32 tensor, one table after the other. Return four values:

    - lines: the field `lines` of a `_DeviceTable`, with addresses relative to the beginning of the flat tensor
    - mask: a tensor of the same shape, with a 1 for each address, else 0. `lines + mask * address of the flat tensor` has
      absolute addresses
    - the number of lines
    - True if all addresses are multiples of 16

    Consecutive tables with the same number of columns are described as one table.
    """
    lines, at = list[list[int]](), 0
    for index, base in zip(sharding.local_tables(rank), shape_of(sharding, rank).bases, strict=True):
        rows, columns = sharding.tables[index].num_embeddings, sharding.tables[index].embedding_dim
        if not lines or lines[-1][5] != columns:
            lines.append([0, 0, 0, at, base, columns, 0, 0])
        at += rows * columns * torch.float32.itemsize
    lines = lines or [[0] * device_code.TABLE_FIELDS]
    is_aligned, has_address = all(line[3] % 16 == 0 for line in lines), [0, 0, 0, 1, 0, 0, 0, 0]
    masks = _on_device([*[has_address] * len(lines), [0] * device_code.TABLE_FIELDS], device)
    return _on_device([*lines, _AFTER_LAST], device), masks, len(lines), is_aligned


def _on_device(lines: list[list[int]], device: torch.device) -> torch.Tensor:
    return lasting(device, lambda: torch.tensor(lines, dtype=torch.int64, device=device))


def rows_read(of: ForwardCall, rows: Rows) -> torch.Tensor:
    """Return a float32 tensor with an element for each row of this rank's tables, one table after the other: 1 if the batch
    reads the row, else 0.
    """
    shape, arrays, device = rows.shape, rows.tensors, rows.buffer.device
    is_run = torch.arange(rows.count, device=device) < arrays.runs
    row = torch.where(is_run, arrays.keys.to(torch.int64) // shape.split, shape.rows)
    read = torch.zeros(shape.rows + 1, dtype=torch.float32, device=device)  # the last flag is for ids out of range
    return read.index_fill_(0, row, 1.0)[:-1]


def gradients_of_weights(
    of: ForwardCall, jagged: JaggedInput, weights: Sequence[torch.Tensor], received: torch.Tensor
) -> torch.Tensor:
    """Return the gradients of per-sample weights, float32 [number of ids]."""
    shape, ids, count = shape_of(of.plan.sharding, of.rank), occurrences(of, jagged), jagged.values.numel()
    total = torch.zeros(count, dtype=torch.float32, device=received.device)
    if not count or not len(weights):
        return total
    lines = [[w.data_ptr(), 0, 0, 0, base, w.shape[1], 0, 0] for base, w in zip(shape.bases, weights, strict=True)]
    out = torch.empty(ids.keys.numel(), dtype=torch.float32, device=received.device)
    grid, table = shape.programs(received.device, -(-len(out) // shape.lanes)), _device_table(lines, received.device)
    launch(
        device_code.gradients_of_weights_kernel, (grid, 1),
        (ids.keys, ids.places, received, table.lines, out, len(out), shape.no_row, table.size), warps=shape.warps,
        ROWS=shape.lanes, BLOCK_D=shape.block_d, SPLIT=shape.split, STEPS=_steps(table.size), DTYPE=TRITON_TYPE[received.dtype],
    )  # fmt: skip
    if ids.over_length is not None:
        out = out * ids.over_length
    for layer in out.view(-1, count):  # slots that read the same id, one after the other
        total += layer
    return total


def _launched(
    rows: Rows, received: torch.Tensor, tables: _DeviceTable, numbers: torch.Tensor, rule: int, sparse: bool, skip: bool,
    dtype: torch.dtype, seed: torch.Tensor | None = None, squares: torch.Tensor | None = None,
    rate: torch.Tensor | None = None, changes: tuple[bool, bool] = (False, False),
) -> torch.Tensor:  # fmt: skip
    """Launch the kernels that sum the gradients of each row and apply `rule` to the sums. Return the number of skipped
    rows, as a device tensor.

    tables: the addresses and sizes of the tables. numbers: the constants of the rule. Both are on the device.
    rule: the number of an optimizer's update rule, `_GRADIENT` to write the sums, or `_SQUARES` to write their sums of
        squares.
    sparse: True to write the gradients of the batch's rows only. skip: True to skip rows with an infinite or NaN gradient.
    dtype: the dtype of the tables, and of written gradients.
    seed: the seed of stochastic rounding; None to round to nearest.
    squares: the output of the rule `_SQUARES`, one sum per row. rate: the learning rate of an update.
    changes: True if the update clips elements of gradients, and True if it has weight decay.
    """
    shape, device, count = rows.shape, received.device, rows.count
    skipped = torch.zeros(1, dtype=torch.int64, device=device) if skip else _none_skipped(device)
    if not count:
        return skipped
    is_aligned = tables.is_aligned and received.data_ptr() % 16 == 0
    is_scaled, has_segments = rows.is_scaled, count > SEGMENT
    group = max(1, _GROUP // shape.block_d)
    of_group = max(1, min(8, group * shape.block_d // _GROUP))
    programs = shape.programs(device, -(-count // group), of_group, _UPDATES_PER_SM)
    partials = torch.empty(rows.segments if has_segments else 1, shape.block_d, dtype=torch.float32, device=device)
    extra = seed if seed is not None else squares if squares is not None else skipped
    ok = _one(device) if rows.ok is None else rows.ok
    given = [received, partials, tables.lines, numbers, numbers if rate is None else rate, extra, skipped, ok]
    addresses = [tensor.data_ptr() for tensor in given]

    def kernels() -> list[Kernel]:
        of_tile: dict[str, Any] = {
            "BLOCK_D": shape.block_d, "UNIFORM": shape.uniform, "ALIGN": shape.align if is_aligned else 1, "SCALED": is_scaled,
            "SEGMENT": SEGMENT, "SPLIT": shape.split, "STEPS": _steps(tables.size),
        }  # fmt: skip
        of_sums = {"ROWS": max(1, _ROWS // shape.block_d), "BLOCK_D": shape.block_d, "SEGMENT": SEGMENT}
        rules = {"RULE": rule, "SPARSE": sparse, "SKIP": skip, "STOCHASTIC": seed is not None}
        rules |= {"GROUP": group, "DTYPE": TRITON_TYPE[dtype], "ITEM_BYTES": dtype.itemsize}
        on_nvidia = device.type == "cuda" and torch.version.hip is None
        rules |= {"CLIPS": changes[0], "DECAYS": changes[1], "PTX": on_nvidia}
        if on_nvidia:
            rules["maxnreg"] = _REGISTERS
        found = [
            Kernel(device_code.segment_sums_kernel, shape.warps, {"ROWS": shape.lanes, **of_tile}),
            Kernel(device_code.run_sums_kernel, 8, of_sums),
            Kernel(device_code.update_rows_kernel, of_group, rules | of_tile),
        ]
        return found if has_segments else found[2:]

    def calls(are_tensors: bool) -> list[Call]:
        of = rows.tensors if are_tensors else rows.addresses
        grads, sums, lines, of_rule, lr, more, skips, runs_if = given if are_tensors else addresses
        scales, found = of.scales if is_scaled else sums, list[Call]()
        if has_segments:
            segments, most_long = rows.segments, rows.segments // 2 + 1
            of_segments = (
                of.keys, of.places, scales, grads, of.starts, of.run_of_segment, of.first_segment, of.counters, lines, sums,
                tables.size,
            )  # fmt: skip
            found.append(((shape.programs(device, segments), 1), of_segments))
            of_runs = of.starts, of.long_runs, of.first_segment, of.counters, sums
            found.append(((shape.programs(device, most_long, 8), 1), of_runs))
        of_rows = (
            of.keys, of.places, scales, grads, of.starts, of.runs, runs_if, of.first_segment, sums, lines, of_rule, lr, more,
            skips, tables.size,
        )  # fmt: skip
        found.append(((programs, 1), of_rows))
        return found

    key = (
        "update", shape.kind, received.dtype, rows.of_starts, rows.of_places, extra.dtype, is_aligned, is_scaled, has_segments,
        tables.size, rule, sparse, skip, changes, dtype, seed is None, SEGMENT, _GROUP, _ROWS, alignments(addresses),
    )  # fmt: skip
    launch_all(key, kernels, calls)
    return skipped


def by_owner(grad: torch.Tensor, sharding: EmbeddingSharding, dtype: torch.dtype) -> torch.Tensor:
    """Reorder the columns of `grad` by the rank that owns their table, and convert to `dtype`, in one launch. Return a flat
    tensor: for each rank, the matrix [samples, columns of its tables].

    grad: the gradient of this rank's output, [samples, columns of all tables].
    """
    width, table = _columns_by_owner(sharding, grad.device)
    samples, columns = grad.shape
    if grad.stride(1) != 1 or grad.stride(0) % width:
        grad = grad.contiguous()
    send = torch.empty(samples * columns, dtype=dtype, device=grad.device)
    if send.numel():
        chunks = len(table)
        of_tile = max(1, _OWNER_TILE // width)
        grid = -(-samples // _OWNER_ROWS), -(-chunks // of_tile)
        given = grad, send, keep_for_graphs(table)
        numbers = samples, grad.stride(0) // width, chunks
        addresses = [tensor.data_ptr() for tensor in given]
        constants = {"WIDTH": width, "ROWS": _OWNER_ROWS, "CHUNKS": of_tile}
        key = "by owner", grad.dtype, dtype, width, of_tile, alignments(addresses)
        launch_all(
            key if max(numbers) < MOST_32 else None,
            lambda: [Kernel(device_code.by_owner_kernel, 4, constants)],
            lambda are_tensors: [(grid, (*(given if are_tensors else addresses), *numbers))],
        )
    return send


@functools.lru_cache(maxsize=64)
def _columns_by_owner(sharding: EmbeddingSharding, device: torch.device) -> tuple[int, torch.Tensor]:
    """Return the arguments WIDTH and `table` of `by_owner_kernel`, which reorders columns in chunks of equal width: the width
    of a chunk, and a row that describes each chunk.
    """
    runs, counts = column_runs(sharding), sharding.columns_of_ranks
    width = math.gcd(16 // sharding.dtype.itemsize, *(slot.dim for slot in sharding.slots))
    before = [0, *itertools.accumulate(counts)]
    lines, column = list[list[int]](), 0
    for rank, begin, end in runs:
        lines += [[column + at - begin, before[rank], counts[rank], at] for at in range(begin, end, width)]
        column += end - begin
    lines.sort(key=lambda line: line[1] + line[3])
    table = lasting(device, lambda: torch.tensor(lines, dtype=torch.int64, device=device))
    return width, table


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return lasting(device, lambda: torch.ones(1, dtype=torch.int64, device=device))


@functools.cache
def _none_skipped(device: torch.device) -> torch.Tensor:
    """Return a device tensor with the number 0: the number of skipped rows, for updates that skip none. Callers must not write
    it.
    """
    return lasting(device, lambda: torch.zeros(1, dtype=torch.int64, device=device))


def _steps(tables: int) -> int:
    """Return the number of steps in which a binary search finds one of `tables` tables."""
    return max(0, tables - 1).bit_length()


def _fixed_numbers(
    numbers: tuple[tuple[str, float], ...], factor: float, clip: float, device: torch.device
) -> torch.Tensor:
    """Return the constants of an update rule as a device tensor, for optimizers whose constants do not change between
    calls.

    numbers: (name, value) of the optimizer's hyperparameters; missing hyperparameters are 0.
    factor: the number by which gradients are multiplied.
    clip: the bound to which the elements of gradients are clamped.
    """
    return keep_for_graphs(_made_numbers(numbers, factor, clip, device))


@functools.lru_cache(maxsize=64)
def _made_numbers(
    numbers: tuple[tuple[str, float], ...], factor: float, clip: float, device: torch.device
) -> torch.Tensor:
    of = dict(numbers)
    beta1, beta2 = of.get("beta1", 0.0), of.get("beta2", 0.0)
    decay = of.get("weight_decay", 0.0)
    values = [factor, of.get("eps", 0.0), decay, beta1, beta2, 1 - beta1, 1 - beta2, 1.0, 1.0, clip]
    return lasting(device, lambda: torch.tensor(values, dtype=torch.float32, device=device))


def _numbers(of: ForwardCall, tables: Tables, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the constants of the optimizer's update rule as an fp32 device tensor. The device computes bias corrections, which
    depend on the number of updates.

    scale: a device tensor that multiplies the gradients; None for 1.
    """
    optimizer, device = tables.optimizer, tables.learning_rate.device
    clip = optimizer.clip_value or math.inf
    numbers = _fixed_numbers(tuple(optimizer.numbers.items()), of.factor, clip, device)
    if scale is None and not optimizer.counts:
        return numbers
    numbers = numbers.clone()
    if scale is not None:
        numbers[device_code.FACTOR] *= scale
    if optimizer.counts:
        step = tables.step.to(torch.float64)
        for place, beta in ((device_code.CORRECTION1, "beta1"), (device_code.CORRECTION2, "beta2")):
            numbers[place] = 1 / (1 - optimizer.numbers[beta] ** step)
    return numbers


class _DeviceTable(NamedTuple):
    """A description of embedding tables on the device, for kernels.

    lines: a tensor with a row for each embedding table: its addresses and sizes, int64 on the device.
    size: the number of embedding tables.
    is_aligned: True if all addresses are multiples of 16.
    """

    lines: torch.Tensor
    size: int
    is_aligned: bool


_device_tables: dict[tuple[Any, ...], _DeviceTable] = {}


def _device_table(lines: list[list[int]], device: torch.device) -> _DeviceTable:
    """Return a `_DeviceTable` with `lines`. The result is cached."""
    key = device, tuple(map(tuple, lines))
    table = _device_tables.get(key)
    if table is None:
        if len(_device_tables) >= 64:
            _device_tables.clear()
        rows = lines or [[0] * device_code.TABLE_FIELDS]
        of_lines = _on_device([*rows, _AFTER_LAST], device)
        is_aligned = all(address % 16 == 0 for line in rows for address in line[:4])
        table = _device_tables[key] = _DeviceTable(of_lines, max(1, len(lines)), is_aligned)
    keep_for_graphs(table.lines)
    return table
