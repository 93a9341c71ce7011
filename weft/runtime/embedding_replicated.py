"""Backward of data-parallel tables. Every rank has all these tables, pools its own samples, and gets the sum of all
ranks' gradients.

    dense      [rows, columns] float32 of each table: this rank's gradient; then a flag per row, 1 if this rank read it
    parts      by all_to_all_single, a rank gets all ranks' values for its range of elements, and sums them in the order of ranks
    reduced    the sums of all ranges, by all_gather

So the sum has the same bits on every rank, and does not depend on how torch's backends reduce. The bits depend on the
number of ranks, since each rank sums its own samples first. Only rows that at least one rank has read are updated, as
for tables that are not replicated.

The update uses the code for unpooled embeddings (`weft.runtime.embedding_rows`), with the sum as each row's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist

from weft import symm
from weft.embedding import EmbeddingSharding, JaggedInput
from weft.embedding.forward_call import ForwardCall
from weft.embedding.hashing import rows_of_hashes
from weft.runtime.collectives import all_gather_single, all_to_all_single
from weft.runtime.embedding_backward import compare_ranks, device_code
from weft.runtime.embedding_rows import RowGradients, gradient_of_table, update_rows
from weft.runtime.unfused.turn import turn_on
from weft.words import counted


@dataclass(frozen=True)
class Spans:
    """The range (start, end) of each feature's ids in `JaggedInput.values`, as numbers on the CPU."""

    of_slot: tuple[tuple[int, int], ...]


def local_gradients(of: ForwardCall, jagged: JaggedInput, spans: Spans, grad: torch.Tensor) -> torch.Tensor:
    """Return this rank's gradients of all tables, flattened and concatenated in float32. A flag for each row follows: 1 if
    this rank has read the row.

    grad: the gradient of this rank's pooled vectors, [samples, columns of all tables].
    """
    device = device_code(grad.device)
    plain = replace(of, sparse=False, factor=1.0)
    found = device.gradients_of_tables(plain, device.sorted_rows(plain, jagged), grad.contiguous(), torch.float32)
    return torch.cat([*(dense.flatten() for dense in found), _rows_read(of, jagged, spans)])


def _rows_read(of: ForwardCall, jagged: JaggedInput, spans: Spans) -> torch.Tensor:
    sharding, device = of.plan.sharding, jagged.values.device
    sizes = [table.num_embeddings for table in sharding.tables]
    bases = [0, *accumulate(sizes)]
    of_slots = [(sizes[slot.table], bases[slot.table]) for slot in sharding.slots]
    counts = torch.tensor([end - begin for begin, end in spans.of_slot], device=device)
    total = sum(end - begin for begin, end in spans.of_slot)
    of_ids = torch.tensor(of_slots, device=device).repeat_interleave(counts, 0, output_size=total)
    ids, (rows, base) = torch.cat([jagged.values[begin:end] for begin, end in spans.of_slot]), of_ids.unbind(1)
    row = rows_of_hashes(ids, rows) if of.plan.options.hash else ids.to(torch.int64)
    read = torch.zeros(bases[-1] + 1, dtype=torch.float32, device=device)
    read[torch.where((row >= 0) & (row < rows), base + row, bases[-1])] = 1.0  # the last flag is for ids out of range
    return read[:-1]


def gradients_of_rows(given: Sequence[RowGradients]) -> torch.Tensor:
    """Return gradients and flags like `local_gradients`, for lookups without pooling.

    given: for each table, the gradient of each id that this rank has looked up.
    """
    dense = [gradient_of_table(one, 1.0, False, torch.float32).flatten() for one in given]
    return torch.cat([*dense, *(_flags(one.ids, one.table.num_embeddings) for one in given)])


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
    padded = torch.nn.functional.pad(flat, (0, world * each - flat.numel()))
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


def of_tables(flat: torch.Tensor, sharding: EmbeddingSharding) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the gradient of each table, [rows, columns], with a flag for each row: True if any rank has read the row.

    flat: the result of `reduced`.
    """
    shapes = [(table.num_embeddings, table.embedding_dim) for table in sharding.tables]
    dense, read = flat.split([sum(rows * columns for rows, columns in shapes), sum(rows for rows, _ in shapes)])
    grads = dense.split([rows * columns for rows, columns in shapes])
    flags = (read > 0).split([rows for rows, _ in shapes])
    return [(grad.view(shape), flag) for grad, shape, flag in zip(grads, shapes, flags, strict=True)]


def update(of: ForwardCall, flat: torch.Tensor, group: dist.ProcessGroup, deadline_s: float | None) -> None:
    """Update each row that any rank has read. The caller must already have incremented `tables.step`.

    flat: the result of `reduced`.
    """
    tables = of.tables
    assert tables is not None
    tables.require_intact(of.plan.sharding, of.rank)
    given = []
    for number, (config, (grad, is_read)) in enumerate(
        zip(of.plan.sharding.tables, of_tables(flat, of.plan.sharding), strict=True)
    ):
        rows = config.num_embeddings
        ids = torch.where(is_read, torch.arange(rows, device=flat.device), rows)
        given.append(RowGradients(config, number, ids, grad))
    update_rows(given, tables, of.factor, group, deadline_s)


def gradients(of: ForwardCall, flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the gradient of each table in the table's dtype: dense, or with `of.sparse` a coalesced sparse COO tensor,
    for which the CPU waits for the device.

    flat: the result of `reduced`.
    """
    found = []
    for config, (grad, is_read) in zip(of.plan.sharding.tables, of_tables(flat, of.plan.sharding), strict=True):
        grad = (grad * of.factor).to(config.dtype)
        if of.sparse:
            at = is_read.nonzero().t()
            grad = torch.sparse_coo_tensor(at, grad[at[0]], grad.shape, is_coalesced=True, check_invariants=False)
        found.append(grad)
    return found
