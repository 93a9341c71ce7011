"""A table of a `ShardedEmbeddingBagCollection`, and its initial values: they depend on the seed and the table alone, so not on the
placement or the number of ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from weft.embedding.tables import EmbeddingBagConfig


class Table(nn.EmbeddingBag):
    """The table's parameter, with TorchRec's name and module type. The module is never called."""

    def __init__(self, table: EmbeddingBagConfig, device: torch.device, seed: int) -> None:
        rows, dim = table.num_embeddings, table.embedding_dim
        weight = torch.empty(rows, dim, dtype=table.dtype, device=device)
        super().__init__(rows, dim, mode=table.pooling, include_last_offset=True, _weight=weight)
        self._table, self._seed = table, seed
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            with _seeded(self._seed, self.weight.device):
                self._table.fill(self.weight)


def first_values(table: EmbeddingBagConfig) -> str:
    """Return the text that ranks compare for the initialization of a table."""
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
    """Seed the generators of the CPU and of `device`, and restore them at the end."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield
