"""Backward of data-parallel tables. Every rank stores all these tables, pools its own samples, and gets the sum of all
ranks' gradients.

    dense      [rows, columns] float32 of each table: this rank's gradient. If the update or sparse gradients need to know
               which rows were read, a flag per row follows, 1 if this rank read the row
    parts      each rank sums one range of the elements: it gets all ranks' values by all_to_all_single, and adds them in rank
               order
    reduced    the sums of all ranges, by all_gather

So the sum has the same bits on every rank, with any collective backend. With another number of ranks the bits differ, since
each rank sums its own samples first. Only rows that at least one rank has read are updated.

The update uses the code for unpooled embeddings (`weft.runtime.embedding_rows`), with the sum as each row's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from weft import symm
from weft.embedding import EmbeddingSharding, JaggedInput
from weft.embedding.forward_call import ForwardCall
from weft.runtime.collectives import all_gather_single, all_to_all_single
from weft.runtime.embedding_backward import compare_ranks, device_code
from weft.runtime.embedding_rows import RowGradients, gradient_of_table, update_rows
from weft.runtime.unfused.turn import turn_on
from weft.words import counted


def local_gradients(of: ForwardCall, jagged: JaggedInput, grad: torch.Tensor, world: int) -> torch.Tensor:
    """Return this rank's gradients of all tables, flattened and concatenated in float32. If `needs_flags`, a flag for each
    row follows: 1 if this rank has read the row. Zeros pad the result to a multiple of `world`, the number of ranks.

    grad: the gradient of this rank's pooled vectors, [samples, columns of all tables].
    """
    device, sharding = device_code(grad.device), of.plan.sharding
    plain = replace(of, sparse=False, factor=1.0)
    rows_of_all = sum(table.num_embeddings for table in sharding.tables) if needs_flags(of) else 0
    count = rows_of_all + sum(table.num_embeddings * table.embedding_dim for table in sharding.tables)
    flat = torch.zeros(-(-count // world) * world, dtype=torch.float32, device=grad.device)
    grads, flags = of_tables(flat, sharding)
    rows = device.sorted_rows(plain, jagged)
    device.gradients_of_tables(plain, rows, grad.contiguous(), torch.float32, grads)
    if rows_of_all:
        flags[:rows_of_all] = device.rows_read(plain, rows)
    return flat


def needs_flags(of: ForwardCall) -> bool:
    """Return True if backward must know which rows any rank has read: to update these rows, or to return sparse gradients."""
    return of.tables is not None or of.sparse


def gradients_of_rows(of: ForwardCall, given: Sequence[RowGradients]) -> torch.Tensor:
    """Return gradients and flags like `local_gradients`, for lookups without pooling.

    given: for each table, the gradient of each id that this rank has looked up.
    """
    dense = [gradient_of_table(one, 1.0, False, torch.float32).flatten() for one in given]
    flags = [_flags(one.ids, one.table.num_embeddings) for one in given] if needs_flags(of) else []
    return torch.cat([*dense, *flags])


def _flags(ids: torch.Tensor, rows: int) -> torch.Tensor:
    read = torch.zeros(rows + 1, dtype=torch.float32, device=ids.device)
    read[torch.where((ids >= 0) & (ids < rows), ids, rows)] = 1.0  # the last flag is for ids out of range
    return read[:-1]


def reduced(flat: torch.Tensor, of: ForwardCall, group: dist.ProcessGroup, deadline_s: float | None) -> torch.Tensor:
    """Return the sum of `flat` over all ranks, with the same bits on every rank. All ranks must make this call.

    flat: the result of `local_gradients` or `gradients_of_rows`.
    """
    world = group.size()
    if world == 1:
        return flat
    what = f"gradients of {counted(len(of.plan.sharding.tables), 'data-parallel table')}"
    compare(of, f"backward of {what}", group, flat.device, deadline_s)
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
    """Return the gradient of each table, [rows, columns], and the rest of `flat`, which begins with the flags of the rows of
    all tables if there are flags. The gradients share memory with `flat`.

    flat: the result of `reduced`, or a tensor of the same layout.
    """
    shapes = [(table.num_embeddings, table.embedding_dim) for table in sharding.tables]
    sizes = [rows * columns for rows, columns in shapes]
    grads = flat[: sum(sizes)].unsafe_split_with_sizes(sizes)  # each with a version counter of its own
    return [grad.view(shape) for grad, shape in zip(grads, shapes, strict=True)], flat[sum(sizes) :]


def _are_read(flags: torch.Tensor, sharding: EmbeddingSharding) -> tuple[torch.Tensor, ...]:
    """Return for each table a flag for each row: True if any rank has read the row. flags: from `of_tables`."""
    rows = [table.num_embeddings for table in sharding.tables]
    return (flags[: sum(rows)] > 0).split(rows)


def update(of: ForwardCall, flat: torch.Tensor, group: dist.ProcessGroup, deadline_s: float | None) -> None:
    """Update each row that any rank has read. The caller must already have incremented `tables.step`.

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

    flat: the result of `reduced`, which this function overwrites. Dense gradients share one allocation.
    """
    sharding = of.plan.sharding
    if not of.sparse:
        if of.factor != 1.0:
            flat *= of.factor
        return of_tables(flat.to(sharding.dtype), sharding)[0]
    grads, flags = of_tables(flat, sharding)
    found = []
    for config, grad, is_read in zip(sharding.tables, grads, _are_read(flags, sharding), strict=True):
        at = is_read.nonzero().t()
        values = (grad[at[0]] * of.factor).to(config.dtype)
        found.append(torch.sparse_coo_tensor(at, values, grad.shape, is_coalesced=True, check_invariants=False))
    return found
