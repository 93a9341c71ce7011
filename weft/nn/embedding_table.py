"""A table of a `ShardedEmbeddingBagCollection`, and its initial values, which depend only on the seed and the table.
They do not depend on the placement, the number of ranks, or the table's parts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from weft import _core
from weft.embedding.tables import EmbeddingBagConfig, bytes_text

BLOCK_ELEMENTS = 1 << 26  # elements drawn with one seed. Filling a part needs memory for one block
_STEP = 1_000_003  # difference between the seeds of two blocks; tables have adjacent seeds


class Table(nn.EmbeddingBag):
    """The module `embedding_bags.<table>`, which contains the parameter of a table. It is an `nn.EmbeddingBag`, as in
    TorchRec, but weft never calls it.
    """

    def __init__(self, table: EmbeddingBagConfig, device: torch.device, seed: int) -> None:
        rows, dim = table.num_embeddings, table.embedding_dim
        try:
            weight = torch.empty(rows, dim, dtype=table.dtype, device=device)
        except (MemoryError, RuntimeError) as error:
            text = (
                f"table {table.name!r} has {bytes_text(table.nbytes)}, which do not fit on {device}: shard it by rows or columns "
                "(placement=, weft.embedding.RowWise, ColumnWise; weft.embedding.plan_tables chooses)"
            )
            raise (torch.OutOfMemoryError if device.type == "cuda" else MemoryError)(text) from error
        if device.type == "cpu":  # huge pages: reading rows at random would otherwise miss the TLB each time
            _core.prefer_huge_pages(weight.data_ptr(), weight.nbytes)
        super().__init__(rows, dim, mode=table.pooling, include_last_offset=True, _weight=weight)
        self._table, self._seed = table, seed
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            fill(self.weight, self._table, self._seed)


def weights_of(tables: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the parameters (weights) of the modules `tables`.

    The function avoids `nn.Module.__getattr__`, which for all tables of a model takes longer than a kernel launch. It calls
    `__getattr__` only if parameters were replaced.
    """
    tables = list(tables)
    try:
        return [table._parameters["weight"] for table in tables]  # type: ignore[misc]
    except KeyError:
        return [table.weight for table in tables]  # type: ignore[misc]


def fill(weight: torch.Tensor, table: EmbeddingBagConfig, seed: int, row: int = 0, column: int = 0) -> None:
    """Fill `weight` with the initial values of the part of `table` that begins at `row` and `column`. On the same type
    of device, a part gets the values that the whole table would have at the same rows and columns.

    Memory: a block of rows for uniform values; the whole table for an `init_fn`.
    """
    (rows, columns), dim = weight.shape, table.embedding_dim
    is_whole = (rows, columns) == (table.num_embeddings, dim)
    size = table.num_embeddings if table.init_fn else max(1, BLOCK_ELEMENTS // dim)
    for block in range(row // size, -(-(row + rows) // size)):
        first, end = block * size, min((block + 1) * size, table.num_embeddings)
        with torch.no_grad(), _seeded(seed + block * _STEP, weight.device):
            values = weight[first:end] if is_whole and not table.init_fn else weight
            if not is_whole:
                values = torch.empty(end - first, dim, dtype=weight.dtype, device=weight.device)
            table.fill(values)
            if not is_whole:
                begin, stop = max(first, row), min(end, row + rows)
                weight[begin - row : stop - row] = values[begin - first : stop - first, column : column + columns]


def filler_of(table: EmbeddingBagConfig, seed: int, row: int, column: int) -> functools.partial[None]:
    """Return an `init_fn` that fills the part of `table` that begins at `row` and `column` with the same values as in
    the whole table.

    seed: the random seed of the whole table.
    """
    return functools.partial(fill, table=table, seed=seed, row=row, column=column)


def first_values(table: EmbeddingBagConfig) -> str:
    """Return a text that describes a table's initial values, for the comparison between ranks."""
    function: Any = table.init_fn
    if function is None:
        return f"uniform in {list(table.first_values)}"
    numbers: dict[Any, int | float] = {}
    while isinstance(function, functools.partial):
        given = dict(enumerate(function.args)) | function.keywords
        numbers |= {name: value for name, value in given.items() if isinstance(value, int | float)}
        function = function.func
    return f"{getattr(function, '__qualname__', type(function).__qualname__)} {numbers or ''}".strip()


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random number generators of the CPU and of `device` inside the context, and restore them at its end."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield
