"""The local computation of embedding_all_to_all's backward on a CPU process, by csrc/embedding_backward.cpp."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from weft import _core
from weft.embedding import EmbeddingSharding, JaggedInput
from weft.embedding.forward_call import ForwardCall, Tables
from weft.embedding.optimizers import seed_of_update
from weft.embedding.tables import column_runs

_DTYPE_CODE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_GRADIENT, _SQUARES = 0, 6  # codes of rules: write gradients, or sums of their squares


def sort_ahead(of: ForwardCall, jagged: JaggedInput) -> None:
    """Sort the ids of a forward call now. The next call of `sorted_rows` returns the result."""
    of.sorted_ahead = None
    of.sorted_ahead = sorted_rows(of, jagged)


def sorted_rows(of: ForwardCall, jagged: JaggedInput) -> _core.SortedRows:
    """Return the ids of the batch that read this rank's tables, sorted by table and row. An id that occurs twice is listed
    twice.

    of: the forward call.
    """
    if of.sorted_ahead is not None:
        found, of.sorted_ahead = of.sorted_ahead, None
        return found  # type: ignore[no-any-return]
    slots, tables = _described(of.plan.sharding, of.rank, of.checked.key_of_slot)
    weights = 0 if jagged.weights is None else jagged.weights.data_ptr()
    return _core.SortedRows(slots=slots, tables=tables, per_sample_weights=weights, **_input(of, jagged))


def update(
    of: ForwardCall, tables: Tables, rows: _core.SortedRows, received: torch.Tensor, scale: torch.Tensor | None = None
) -> int:
    """Apply the optimizer of `tables` to each row that occurs in the batch. Return the number of rows that were skipped
    because their gradient is infinite or NaN.

    received: the gradients, [global batch, columns of this rank's tables].
    scale: a tensor with one element that multiplies every gradient; None for 1.
    """
    optimizer, memory = tables.optimizer, _memory_of(of, tables)
    numbers = optimizer.numbers
    beta1, beta2 = numbers.get("beta1", 0.0), numbers.get("beta2", 0.0)
    step = int(tables.step)
    corrections = [1 / (1 - beta**step) for beta in (beta1, beta2)]
    of_rule = [numbers.get("eps", 0.0), numbers["weight_decay"], beta1, beta2, 1 - beta1, 1 - beta2, *corrections]
    factor = of.factor if scale is None else of.factor * float(scale)
    given = [float(tables.learning_rate), factor, *of_rule, optimizer.clip_value or math.inf]
    random = optimizer.rounding == "stochastic", seed_of_update(optimizer.seed, step)
    skip = optimizer.nonfinite == "skip"
    skipped = _updated(of, rows, received, memory, optimizer.rule, given, skip, of.plan.sharding.dtype, random)
    torch.autograd.graph.increment_version(tables.tensors)
    return skipped


def by_owner(grad: torch.Tensor, sharding: EmbeddingSharding, dtype: torch.dtype) -> torch.Tensor:
    """Reorder the columns of `grad` by the rank that owns their table, and convert to `dtype`. Return a flat tensor: for each
    rank, the matrix [samples, columns of its tables].

    grad: the gradient of this rank's output, [samples, columns of all tables].
    """
    samples, runs = len(grad), column_runs(sharding)
    pieces: list[list[torch.Tensor]] = [[] for _ in range(sharding.world_size)]
    for (rank, _, _), piece in zip(runs, grad.split([end - begin for _, begin, end in runs], dim=1), strict=True):
        pieces[rank].append(piece)
    send = grad.new_empty(grad.numel(), dtype=dtype)
    columns = sharding.columns_of_ranks
    for part, of_rank, count in zip(send.split([samples * count for count in columns]), pieces, columns, strict=True):
        if of_rank:
            torch.cat(of_rank, dim=1, out=part.view(samples, count))
    return send


_memories: dict[Any, np.ndarray[Any, Any]] = {}


def _memory_of(of: ForwardCall, tables: Tables) -> np.ndarray[Any, Any]:
    """Describe the memory of this rank's tables to native code. Return an array int64 [tables, 5]. The row of a table has the
    addresses of the table and of up to three optimizer states, and the table's index among all tables. The result is cached by
    `of.layout`.
    """
    key = of.plan, of.rank, of.layout
    if of.layout is not None and (known := _memories.get(key)) is not None:
        return known
    memory = np.zeros((len(tables.weights), 5), dtype=np.int64)
    numbers_of_tables = of.plan.sharding.local_tables(of.rank)
    for line, weight, states, number in zip(memory, tables.weights, tables.states, numbers_of_tables, strict=True):
        line[0] = weight.data_ptr()
        line[1 : 1 + len(states)] = [state.data_ptr() for state in states]
        line[4] = number
    if of.layout is not None:
        if len(_memories) >= 64:
            _memories.clear()
        _memories[key] = memory
    return memory


def sum_of_squares(of: ForwardCall, tables: Tables, rows: _core.SortedRows, received: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of the row gradients that `update` would apply, as a float64 scalar tensor.

    received: the gradients, [global batch, columns of this rank's tables].
    """
    squares = [torch.zeros(count, dtype=torch.float32, device="cpu") for count in rows.counts()]
    memory = np.zeros((len(squares), 5), dtype=np.int64)
    memory[:, 3] = [one.data_ptr() for one in squares]
    numbers = [0.0, of.factor, *[0.0] * 8, math.inf]
    _updated(
        of, rows, received, memory, _SQUARES, numbers, tables.optimizer.nonfinite == "skip", of.plan.sharding.dtype
    )
    return sum((one.double().sum() for one in squares), torch.zeros((), dtype=torch.float64, device="cpu"))


def gradients_of_tables(
    of: ForwardCall, rows: _core.SortedRows, received: torch.Tensor, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the gradient of each table, [rows, columns]: dense, or with `of.sparse` a coalesced sparse COO tensor.

    received: the gradients of the pooled vectors, [global batch, columns of this rank's tables].
    dtype: the dtype of the result; by default the tables' dtype.
    """
    sharding = of.plan.sharding
    tables = [sharding.tables[index] for index in sharding.local_tables(of.rank)]
    counts = rows.counts()
    sizes = counts if of.sparse else [table.num_embeddings for table in tables]
    make = torch.empty if of.sparse else torch.zeros
    values = [
        make(size, table.embedding_dim, dtype=dtype or table.dtype) for size, table in zip(sizes, tables, strict=True)
    ]
    _write_gradients(of, rows, received, [value.data_ptr() for value in values], dtype or sharding.dtype)
    if not of.sparse:
        return values
    found = []
    for number, (table, value) in enumerate(zip(tables, values, strict=True)):
        indices = torch.empty(1, counts[number], dtype=torch.int64, device="cpu")
        rows.rows(number, indices.data_ptr())
        shape = table.num_embeddings, table.embedding_dim
        found.append(torch.sparse_coo_tensor(indices, value, shape, is_coalesced=True, check_invariants=False))
    return found


def gradients_in(of: ForwardCall, rows: _core.SortedRows, received: torch.Tensor, flat: torch.Tensor) -> None:
    """Write the gradients of this rank's tables to `flat`, one table after the other.

    flat: the tensor to write to. It has zeros in float32, at least as many as all tables have elements.
    """
    tables = [of.plan.sharding.tables[index] for index in of.plan.sharding.local_tables(of.rank)]
    sizes = [table.num_embeddings * table.embedding_dim * flat.itemsize for table in tables]
    addresses = list(accumulate(sizes, initial=flat.data_ptr()))[:-1]
    _write_gradients(of, rows, received, addresses, flat.dtype)


def _write_gradients(
    of: ForwardCall, rows: _core.SortedRows, received: torch.Tensor, addresses: list[int], dtype: torch.dtype
) -> None:
    """Write the gradient of each table, with elements of type `dtype`, to the address given for the table in `addresses`."""
    memory = np.zeros((len(addresses), 5), dtype=np.int64)
    memory[:, 3] = addresses
    _updated(of, rows, received, memory, _GRADIENT, [0.0, of.factor, *[0.0] * 8, math.inf], False, dtype)


def rows_read(of: ForwardCall, rows: _core.SortedRows) -> torch.Tensor:
    """Return a float32 tensor with an element for each row of this rank's tables, one table after the other: 1 if the batch
    reads the row, else 0.
    """
    sharding, flags = of.plan.sharding, []
    for number, (index, count) in enumerate(zip(sharding.local_tables(of.rank), rows.counts(), strict=True)):
        indices = torch.empty(1, count, dtype=torch.int64, device="cpu")
        rows.rows(number, indices.data_ptr())
        read = torch.zeros(sharding.tables[index].num_embeddings, dtype=torch.float32, device="cpu")
        flags.append(read.index_fill_(0, indices[0], 1.0))
    return torch.cat(flags)


def gradients_of_weights(
    of: ForwardCall, jagged: JaggedInput, weights: Sequence[torch.Tensor], received: torch.Tensor
) -> torch.Tensor:
    """Return the gradients of per-sample weights, float32 [number of ids].

    received: the gradients of the pooled vectors, [global batch, columns of this rank's tables].
    """
    slots, tables = _described(of.plan.sharding, of.rank, of.checked.key_of_slot)
    out = torch.empty(jagged.values.numel(), dtype=torch.float32, device="cpu")
    _core.gradients_of_weights(
        slots=slots,
        tables=tables,
        weights=[weight.data_ptr() for weight in weights],
        gradients=received.data_ptr(),
        stride=received.shape[1],
        dtype=_DTYPE_CODE[received.dtype],
        out=out.data_ptr(),
        **_input(of, jagged),
    )
    return out


def _updated(
    of: ForwardCall, rows: _core.SortedRows, received: torch.Tensor, memory: np.ndarray, rule: int, numbers: list[float],
    skip_nonfinite: bool, dtype: torch.dtype, random: tuple[bool, int] = (False, 0),
) -> int:  # fmt: skip
    return rows.update(
        memory=memory,
        gradients=received.data_ptr(),
        stride=received.shape[1],
        gradients_dtype=_DTYPE_CODE[received.dtype],
        dtype=_DTYPE_CODE[dtype],
        rule=rule,
        sparse=of.sparse,
        numbers=numbers,
        is_stochastic=random[0],
        seed=random[1],
        skip_nonfinite=skip_nonfinite,
        n_threads=torch.get_num_threads(),
    )


def _input(of: ForwardCall, jagged: JaggedInput) -> dict[str, Any]:
    return {
        "values": jagged.values.data_ptr(),
        "values_bits": 8 * jagged.values.element_size(),
        "n_values": jagged.values.numel(),
        "offsets": jagged.offsets.data_ptr(),
        "offsets_bits": 8 * jagged.offsets.element_size(),
        "batch": of.checked.global_batch,
        "hash": of.plan.options.hash,
        "n_threads": torch.get_num_threads(),
    }


@functools.lru_cache(maxsize=64)
def _described(sharding: EmbeddingSharding, rank: int, key_of_slot: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return two int64 arrays that describe this rank's features and tables to native code:

    - A row for each feature, [features, 4]: its table, index in the input, first column in the received gradients, and 1
      for mean pooling, else 0.
    - A row for each table, [tables, 2]: its number of rows and its number of columns.
    """
    local = sharding.local_tables(rank)
    number = {index: place for place, index in enumerate(local)}
    slots, column = np.zeros((len(key_of_slot), 4), dtype=np.int64), 0
    for line, slot, key in zip(slots, sharding.local_slots(rank), key_of_slot, strict=True):
        line[:] = number[slot.table], key, column, sharding.tables[slot.table].pooling == "mean"
        column += slot.dim
    of_tables = [sharding.tables[index] for index in local]
    tables = np.array([(t.num_embeddings, t.embedding_dim) for t in of_tables], dtype=np.int64).reshape(-1, 2)
    return slots, tables
