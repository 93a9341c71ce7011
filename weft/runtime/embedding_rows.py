"""Updates of tables by gradients of rows: each id has a gradient of its own, as in backward of unpooled embeddings.

A table is a call of its own to the code that updates pooled tables: every bag has one id. Equal ids are summed in the order in
which they are given, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.embedding import EmbeddingBagConfig, EmbeddingSharding, JaggedInput
from weft.embedding.check import CheckedInput
from weft.embedding.forward_call import ForwardCall, Tables
from weft.embedding.options import EmbeddingOptions
from weft.embedding.plan import EmbeddingPlan
from weft.runtime.embedding_backward import device_code, scale_of_norm


class RowGradients(NamedTuple):
    """Gradients of rows of a table, number `number` of all. ids: [n] int64; out of range they have no row. grads: [n, columns]."""

    table: EmbeddingBagConfig
    number: int
    ids: torch.Tensor
    grads: torch.Tensor


def update_rows(
    given: Sequence[RowGradients], tables: Tables, factor: float, group: dist.ProcessGroup, deadline_s: float | None
) -> None:
    """Update the rows of all ids. tables: those of `given`, in order. Collective if the optimizer clips by norm."""
    prepared = []
    for place, one in enumerate(given):
        of, jagged = _call(one, factor, _alone(tables, place, one.number), False)
        device = device_code(one.grads.device)
        prepared.append((device, of, device.sorted_rows(of, jagged), one.grads))
    scale = None
    if (clip_norm := tables.optimizer.clip_norm) is not None:
        squares = torch.zeros((), dtype=torch.float64, device=tables.step.device)
        for device, of, rows, grads in prepared:
            squares = squares + device.sum_of_squares(of, of.tables, rows, grads)
        scale = scale_of_norm(squares, clip_norm, group, deadline_s)
    for device, of, rows, grads in prepared:
        device.update(of, of.tables, rows, grads, scale)


def gradient_of_table(
    given: RowGradients, factor: float, sparse: bool, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the gradient of the table: dense, or a coalesced sparse COO tensor, for which it waits for the device."""
    of, jagged = _call(given, factor, None, sparse)
    device: Any = device_code(given.grads.device)
    (found,) = device.gradients_of_tables(of, device.sorted_rows(of, jagged), given.grads, dtype)
    return found  # type: ignore[no-any-return]


def sums_of_equal(inverse: torch.Tensor, count: int, grads: torch.Tensor) -> torch.Tensor:
    """Return the sums of gradients with equal `inverse`, [count, columns], in float32 and in their order.

    inverse: [n], numbers below `count`, each of which occurs. It waits for the device.
    """
    rows = 1 << max(0, count - 1).bit_length()  # few different tables, whose descriptions are kept
    dtype = grads.dtype
    table = EmbeddingBagConfig(max(1, rows), grads.shape[1], "equal ids", ("row",), dtype=dtype)
    if not len(inverse):
        return grads.new_empty(0, grads.shape[1])
    return gradient_of_table(RowGradients(table, 0, inverse, grads), 1.0, True).values()


def _call(given: RowGradients, factor: float, tables: Tables | None, sparse: bool) -> tuple[ForwardCall, JaggedInput]:
    count = given.ids.numel()
    jagged = JaggedInput(None, given.ids, torch.arange(count + 1, device=given.ids.device), None)
    return ForwardCall(_plan_of(given.table), 0, CheckedInput((0,), (count,), count), 0, tables, factor, sparse), jagged


def _alone(tables: Tables, place: int, number: int) -> Tables:
    """Return one of the tables, with a seed of its own: as the only table of a plan it has no number."""
    seed = (tables.optimizer.seed + number * 0x9E3779B97F4A7C15) % 2**63
    optimizer = replace(tables.optimizer, seed=seed)
    return Tables(optimizer, [tables.weights[place]], [tables.states[place]], tables.learning_rate, tables.step)


@functools.lru_cache(maxsize=256)
def _plan_of(table: EmbeddingBagConfig) -> EmbeddingPlan:
    """Return a plan of one table that one feature reads, by sums."""
    alone = replace(table, feature_names=("row",), pooling="sum")
    return EmbeddingPlan(EmbeddingSharding((alone,), (0,), 1), EmbeddingOptions("direct"))
