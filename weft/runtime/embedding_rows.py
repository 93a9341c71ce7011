"""Table updates in which each id has its own gradient, as in backward of embeddings without pooling.

The updates use the code for pooled tables, with one id in each bag. The gradients of equal ids are summed in the given
order, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
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
    """Gradients of rows of one table: grads[i] is a gradient of row ids[i].

    table: the table's configuration.
    number: the table's index in its module. With stochastic rounding, the index is added to the optimizer's seed, so that
        each table gets its own random bits.
    ids: row numbers, [n] int64; ids out of range are ignored. grads: the gradient of each id, [n, columns].
    """

    table: EmbeddingBagConfig
    number: int
    ids: torch.Tensor
    grads: torch.Tensor


def update_rows(
    given: Sequence[RowGradients], tables: Tables, factor: float, group: dist.ProcessGroup, deadline_s: float | None
) -> None:
    """Update the rows in `given` by the optimizer of `tables`. If the optimizer clips by norm, all ranks must make this
    call.

    tables: the tables of `given`, in the same order. factor: the number by which all gradients are multiplied.
    """
    prepared = []
    for places in _similar(given, tables):
        of, jagged, grads = _call([given[place] for place in places], factor, _some(tables, places, given), False)
        device = device_code(grads.device)
        prepared.append((device, of, device.sorted_rows(of, jagged), grads))
    scale = None
    if (clip_norm := tables.optimizer.clip_norm) is not None:
        squares = torch.zeros((), dtype=torch.float64, device=tables.step.device)
        for device, of, rows, grads in prepared:
            squares = squares + device.sum_of_squares(of, of.tables, rows, grads)
        scale = scale_of_norm(squares, clip_norm, group, deadline_s)
    for device, of, rows, grads in prepared:
        device.update(of, of.tables, rows, grads, scale)


def _similar(given: Sequence[RowGradients], tables: Tables) -> list[list[int]]:
    """Divide the tables into groups with similar numbers of ids. One call then updates all tables of a group. Return the
    groups, as lists of indices into `given`.

    In one call, all tables get the space that the table with the most ids needs. So a call for tables with very different
    numbers of ids would waste memory. With stochastic rounding each table is a group of its own, because its random
    bits must not depend on other tables.
    """
    groups: dict[int, list[int]] = {}
    is_stochastic = tables.optimizer.rounding == "stochastic"
    for place, one in enumerate(given):
        groups.setdefault(-place if is_stochastic else one.ids.numel().bit_length(), []).append(place)
    return list(groups.values())


def gradient_of_table(
    given: RowGradients, factor: float, sparse: bool, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the gradient of a table, [rows, columns]: dense, or with `sparse` a coalesced sparse COO tensor, for which the
    CPU waits for the device.

    factor: the number by which the gradient is multiplied. dtype: the dtype of the result; by default the table's dtype.
    """
    of, jagged, grads = _call([given], factor, None, sparse)
    device: Any = device_code(grads.device)
    (found,) = device.gradients_of_tables(of, device.sorted_rows(of, jagged), grads, dtype)
    return found  # type: ignore[no-any-return]


def sums_of_equal(inverse: torch.Tensor, count: int, grads: torch.Tensor) -> torch.Tensor:
    """Sum the gradients of equal ids. Row i of the result, [count, columns], is the sum of all grads[j] with inverse[j] =
    i, in float32, in the order of j. The CPU waits for the device.

    inverse: the row of the result for each gradient, [n]. Every number below `count` must occur.
    grads: the gradients, [n, columns].
    """
    rows = (
        1 << max(0, count - 1).bit_length()
    )  # rounded up, so that there are few different descriptions of tables to cache
    dtype = grads.dtype
    table = EmbeddingBagConfig(max(1, rows), grads.shape[1], "equal ids", ("row",), dtype=dtype)
    if not len(inverse):
        return grads.new_empty(0, grads.shape[1])
    return gradient_of_table(RowGradients(table, 0, inverse, grads), 1.0, True).values()


def _call(
    given: Sequence[RowGradients], factor: float, tables: Tables | None, sparse: bool
) -> tuple[ForwardCall, JaggedInput, torch.Tensor]:
    """Describe `given` as a forward call with pooling, whose backward sums the gradients of equal ids. Return the call, its
    input, and the gradients of its output, [largest number of ids of a table, columns of all tables]. The call has a
    feature for each table, and a bag for each id.

    tables: the tables for an update; None to return gradients. sparse: True for sparse gradients.
    """
    counts, device = [one.ids.numel() for one in given], given[0].ids.device
    most, grads = max(counts), given[0].grads
    if len(given) == 1:
        ids, offsets = given[0].ids, torch.arange(most + 1, device=device)
    else:
        ids = torch.cat([one.ids for one in given])
        of_slot = torch.tensor(
            [(end - count, count) for end, count in zip(accumulate(counts), counts, strict=True)], device=device
        )
        begins = of_slot[:, :1] + torch.minimum(torch.arange(most, device=device), of_slot[:, 1:])
        offsets = torch.cat([begins.flatten(), torch.tensor([sum(counts)], device=device)])
        grads = grads.new_empty(most, sum(one.grads.shape[1] for one in given))
        for one, columns in zip(given, grads.split([one.grads.shape[1] for one in given], dim=1), strict=True):
            columns[: len(one.grads)] = one.grads
    plan = _plan_of(tuple(one.table for one in given))
    checked = CheckedInput(tuple(range(len(given))), (most,), most)
    return ForwardCall(plan, 0, checked, tables, factor, sparse), JaggedInput(None, ids, offsets, None), grads


def _some(tables: Tables, places: Sequence[int], given: Sequence[RowGradients]) -> Tables:
    """Return only the tables with the indices `places`. These are indices into both `tables` and `given`, which list the same
    tables.

    For a single table, add its `RowGradients.number` to the optimizer's seed. Otherwise single tables would have the same
    random bits in stochastic rounding, because each has index 0 in its call.
    """
    optimizer = tables.optimizer
    if len(places) == 1:
        seed = (optimizer.seed + given[places[0]].number * 0x9E3779B97F4A7C15) % 2**63
        optimizer = replace(optimizer, seed=seed)
    weights, states = ([of[place] for place in places] for of in (tables.weights, tables.states))
    return Tables(optimizer, weights, states, tables.learning_rate, tables.step)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def _plan_of(tables: tuple[EmbeddingBagConfig, ...]) -> EmbeddingPlan:
    """Return a plan of embedding_all_to_all in which each of `tables` has one feature, pooled by sums."""
    alone = tuple(replace(one, feature_names=(f"row of {number}",), pooling="sum") for number, one in enumerate(tables))
    return EmbeddingPlan(EmbeddingSharding(alone, (0,) * len(alone), 1), EmbeddingOptions("direct"))
