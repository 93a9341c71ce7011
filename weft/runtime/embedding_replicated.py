"""Backward of data-parallel tables. Every rank stores all these tables, pools its own samples, and gets the sum of all
ranks' gradients.

    dense      [rows, columns] float32 of each table: this rank's gradient. If the update or sparse gradients need to know
               which rows were read, a flag per row follows, 1 if this rank read the row
    reduced    the sums over all ranks. On GPUs, NCCL's all-reduce. On CPU, each rank sums one range of the elements: it gets
               all ranks' values by all_to_all_single, and adds them in rank order. all_gather distributes the sums

The sums have the same bits on every rank. On CPU this holds with any collective backend. NCCL reduces each element once and
copies the result to all ranks, but chooses the order of ranks itself. With another number of ranks the bits differ, since
each rank sums its own samples first. Only rows that at least one rank has read are updated.

The update uses the code for unpooled embeddings (`weft.runtime.embedding_rows`), with the sum as each row's gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft import symm
from weft.embedding import EmbeddingSharding, JaggedInput
from weft.embedding.forward_call import ForwardCall
from weft.runtime.collectives import all_gather_single, all_reduce_single, all_to_all_single
from weft.runtime.embedding_backward import compare_ranks, device_code
from weft.runtime.embedding_rows import RowGradients, gradient_of_table, update_rows
from weft.runtime.unfused.turn import turn_on
from weft.words import counted


def local_gradients(of: ForwardCall, jagged: JaggedInput, grad: torch.Tensor, world: int) -> torch.Tensor:
    """Return this rank's gradients of all tables, flattened and concatenated in float32. If `needs_flags`, a flag for each
    row follows: 1 if this rank has read the row. Zeros pad the result to a multiple of `world`, the number of ranks.

    Without an optimizer, the gradients have been multiplied by `of.factor`.

    grad: the gradient of this rank's pooled vectors, [samples, columns of all tables].
    """
    device, layout = device_code(grad.device), _layout_of(of.plan.sharding)
    plain = replace(of, sparse=False, factor=_factor_of_sums(of))
    count, flags = layout.elements, sum(layout.rows) if needs_flags(of) else 0
    flat = torch.zeros(-(-(count + flags) // world) * world, dtype=torch.float32, device=grad.device)
    rows = device.sorted_rows(plain, jagged)
    device.gradients_in(plain, rows, grad.contiguous(), flat)
    if flags:
        flat[count : count + flags] = device.rows_read(plain, rows)
    return flat


def _factor_of_sums(of: ForwardCall) -> float:
    """Return the factor by which a rank multiplies its gradients before they are summed over ranks: `of.factor`. With
    an optimizer it is 1, because the optimizer multiplies the sums by `of.factor`.
    """
    return of.factor if of.tables is None else 1.0


class _Layout(NamedTuple):
    """The sizes of the tables' gradients in a flat tensor.

    shapes, rows, sizes: the shape, the number of rows, and the number of elements of each table.
    elements: the number of elements of all tables.
    columns: the number of columns of every table; None if tables differ.
    """

    shapes: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    elements: int
    columns: int | None


@functools.lru_cache(maxsize=64)
def _layout_of(sharding: EmbeddingSharding) -> _Layout:
    shapes = tuple((table.num_embeddings, table.embedding_dim) for table in sharding.tables)
    sizes, widths = tuple(rows * columns for rows, columns in shapes), {columns for _, columns in shapes}
    rows = tuple(rows for rows, _ in shapes)
    return _Layout(shapes, rows, sizes, sum(sizes), widths.pop() if len(widths) == 1 else None)


def needs_flags(of: ForwardCall) -> bool:
    """Return True if backward must know which rows any rank has read: to update these rows, or to return sparse gradients."""
    return of.tables is not None or of.sparse


def gradients_of_rows(of: ForwardCall, given: Sequence[RowGradients]) -> torch.Tensor:
    """Return this rank's gradients of all tables, and flags of the rows that it has read, in the layout of `local_gradients`.
    This function is for lookups without pooling.

    given: for each table, the gradient of each id that this rank has looked up.
    """
    factor = _factor_of_sums(of)
    dense = [gradient_of_table(one, factor, False, torch.float32).flatten() for one in given]
    flags = [_flags(one.ids, one.table.num_embeddings) for one in given] if needs_flags(of) else []
    return torch.cat([*dense, *flags])


def _flags(ids: torch.Tensor, rows: int) -> torch.Tensor:
    read = torch.zeros(rows + 1, dtype=torch.float32, device=ids.device)
    read[torch.where((ids >= 0) & (ids < rows), ids, rows)] = 1.0  # the last flag is for ids out of range
    return read[:-1]


def reduced(
    flat: torch.Tensor, of: ForwardCall, group: dist.ProcessGroup, deadline_s: float | None, accumulates: bool = False
) -> torch.Tensor:
    """Return the sum of the gradients `flat` over all ranks, with the same bits on every rank. All ranks must make this call.

    flat: the result of `local_gradients` or `gradients_of_rows`, which this function may overwrite.
    accumulates: True inside `accumulate()`, which CPU ranks compare.
    """
    world = group.size()
    if world == 1:
        return flat
    what = f"gradients of {counted(len(of.plan.sharding.tables), 'data-parallel table')}"
    compare(of, f"backward of {what}{' in accumulate()' if accumulates else ''}", group, flat.device, deadline_s)
    if flat.device.type == "cuda":
        all_reduce_single(flat, group=group)
        return flat
    each = -(-flat.numel() // world)
    padded = flat if flat.numel() == world * each else torch.nn.functional.pad(flat, (0, world * each - flat.numel()))
    turn = turn_on(group, flat.device, what, deadline_s)
    parts = torch.empty_like(padded)
    turn.run("all_to_all of rows", all_to_all_single, parts, padded, group=group)
    total, *others = parts.view(world, each).unbind()
    total = total.clone()
    for other in others:
        total += other
    turn.run("all_gather of sums", all_gather_single, padded, total, group=group)
    return padded[: flat.numel()]


def compare(
    of: ForwardCall, what: str, group: dist.ProcessGroup, device: torch.device, deadline_s: float | None
) -> None:
    """Compare optimizers and learning rates across CPU ranks. Raise `DisagreementError` on every rank if they differ.
    All ranks must make this call.

    what: a description of the call, for error texts.
    """
    if device.type == "cpu" and group.size() > 1:
        of = replace(of, checked=of.checked._replace(batch_sizes=()))  # batch sizes differ between ranks
        compare_ranks(symm.communicator(group, device), what, of, deadline_s)


def of_tables(flat: torch.Tensor, sharding: EmbeddingSharding) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Split `flat`, the gradients of all tables. Return (the gradient of each table, [rows, columns]; the rest of `flat`). If
    `flat` has flags of the rows that were read, the rest begins with the flags of all tables. The gradients share memory with
    `flat`.

    flat: the result of `reduced`, or a tensor of the same layout.
    """
    shapes, rows, sizes, elements, columns = _layout_of(sharding)
    dense, flags = flat[:elements], flat[elements:]
    # The parts of an unsafe split have version counters of their own.
    if columns is not None:
        return list(dense.view(-1, columns).unsafe_split_with_sizes(rows)), flags
    grads = dense.unsafe_split_with_sizes(sizes)
    return [grad.view(shape) for grad, shape in zip(grads, shapes, strict=True)], flags


def _are_read(flags: torch.Tensor, sharding: EmbeddingSharding) -> tuple[torch.Tensor, ...]:
    """Return, for each table, a tensor with True for each row that any rank has read. flags: the flags of the rows of all
    tables, as numbers.
    """
    rows = _layout_of(sharding).rows
    return (flags[: sum(rows)] > 0).split(rows)


def update(of: ForwardCall, flat: torch.Tensor, group: dist.ProcessGroup, deadline_s: float | None) -> None:
    """Update each table row that any rank has read, by the optimizer. The caller must already have incremented `tables.step`.

    flat: the result of `reduced`.
    """
    tables = of.tables
    assert tables is not None
    tables.require_intact(of.plan.sharding, of.rank)
    given, sharding = [], of.plan.sharding
    grads, flags = of_tables(flat, sharding)
    of_rows = zip(sharding.tables, grads, _are_read(flags, sharding), strict=True)
    for number, (config, grad, is_read) in enumerate(of_rows):
        rows = config.num_embeddings
        ids = torch.where(is_read, torch.arange(rows, device=flat.device), rows)
        given.append(RowGradients(config, number, ids, grad))
    update_rows(given, tables, of.factor, group, deadline_s)


def gradients(of: ForwardCall, flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the gradient of each table in the table's dtype: dense, or with `of.sparse` a coalesced sparse COO tensor,
    for which the CPU waits for the device.

    flat: the result of `reduced`. Dense gradients share its memory, or one other allocation.
    """
    sharding = of.plan.sharding
    if not of.sparse:
        return of_tables(flat.to(sharding.dtype), sharding)[0]
    grads, flags = of_tables(flat, sharding)
    found = []
    for config, grad, is_read in zip(sharding.tables, grads, _are_read(flags, sharding), strict=True):
        at = is_read.nonzero().t()
        values = grad[at[0]].to(config.dtype)
        found.append(torch.sparse_coo_tensor(at, values, grad.shape, is_coalesced=True, check_invariants=False))
    return found
