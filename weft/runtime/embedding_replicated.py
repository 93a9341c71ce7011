"""Backward of data-parallel tables: every rank has the tables, pools its own samples, and gets the sum of all ranks' gradients.

    dense      [rows, columns + 1] float32 of each table: this rank's gradient, and 1 in rows that it has read
    parts      all ranks' values of a range of elements, all_to_all_single; summed in the order of ranks
    reduced    the sums of all ranges, all_gather

So the sum is the same on every rank, to the bit, and does not depend on how torch's backends reduce. It depends on the number of
ranks: each rank sums its own samples first. Rows that some rank has read are updated, as those of other tables are.

Tables are updated as unpooled ones are (`weft.runtime.embedding_rows`): each row's gradient is the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from weft import symm
from weft.embedding import EmbeddingSharding, JaggedInput
from weft.embedding.forward_call import ForwardCall
from weft.embedding.hashing import hash_ids
from weft.runtime.collectives import all_gather_single, all_to_all_single
from weft.runtime.embedding_backward import compare_ranks, device_code
from weft.runtime.embedding_rows import RowGradients, update_rows
from weft.runtime.meeting import Topic
from weft.runtime.unfused.turn import turn_on
from weft.words import counted


@dataclass(frozen=True)
class Spans:
    """Where the ids of each slot are in the values, known to the host."""

    of_slot: tuple[tuple[int, int], ...]


def local_gradients(of: ForwardCall, jagged: JaggedInput, spans: Spans, grad: torch.Tensor) -> torch.Tensor:
    """Return gradients of all tables, flat: [rows, columns + 1] float32 of each. The last column is 1 in rows that it read.

    grad: [samples, columns of all tables].
    """
    device, sharding = device_code(grad.device), of.plan.sharding
    plain = replace(of, sparse=False, factor=1.0)
    found = device.gradients_of_tables(plain, device.sorted_rows(plain, jagged), grad.contiguous(), torch.float32)
    flat = []
    for number, (table, dense) in enumerate(zip(sharding.tables, found, strict=True)):
        rows = table.num_embeddings
        is_read = torch.zeros(rows + 1, dtype=torch.float32, device=grad.device)
        for slot, (begin, end) in zip(sharding.slots, spans.of_slot, strict=True):
            if slot.table == number:
                ids = jagged.values[begin:end]
                row = hash_ids(ids, rows) if of.plan.options.hash else ids.to(torch.int64)
                is_read[torch.where((row >= 0) & (row < rows), row, rows)] = 1.0
        flat.append(torch.cat([dense, is_read[:rows, None]], dim=1).flatten())
    return torch.cat(flat)


def reduced(flat: torch.Tensor, of: ForwardCall, group: dist.ProcessGroup, deadline_s: float | None) -> torch.Tensor:
    """Return the sum of all ranks' `flat`, equal on all ranks to the bit. Collective."""
    world = group.size()
    if world == 1:
        return flat
    what = f"gradients of {counted(len(of.plan.sharding.tables), 'data-parallel table')}"
    if flat.device.type == "cpu":
        of = replace(of, checked=of.checked._replace(batch_sizes=()))  # which differ
        compare_ranks(
            symm.communicator(group, flat.device),
            Topic(f"backward of {what}", of.plan.sharding.written),
            of,
            deadline_s,
        )
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


def of_tables(flat: torch.Tensor, sharding: EmbeddingSharding) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each table's gradient, [rows, columns], and a flag for each row: True if a rank has read it."""
    shapes = [(table.num_embeddings, table.embedding_dim + 1) for table in sharding.tables]
    found = [part.view(shape) for part, shape in zip(flat.split([a * b for a, b in shapes]), shapes, strict=True)]
    return [(both[:, :-1].contiguous(), both[:, -1] > 0) for both in found]


def update(of: ForwardCall, flat: torch.Tensor, group: dist.ProcessGroup, deadline_s: float | None) -> None:
    """Update each row that a rank has read. `flat`: the sum of all ranks' gradients. The number of updates is counted before."""
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
    """Return the gradient of each table in its dtype: dense, or a coalesced sparse COO tensor, which waits for the device."""
    found = []
    for config, (grad, is_read) in zip(of.plan.sharding.tables, of_tables(flat, of.plan.sharding), strict=True):
        grad = (grad * of.factor).to(config.dtype)
        if of.sparse:
            at = is_read.nonzero().t()
            grad = torch.sparse_coo_tensor(at, grad[at[0]], grad.shape, is_coalesced=True, check_invariants=False)
        found.append(grad)
    return found
