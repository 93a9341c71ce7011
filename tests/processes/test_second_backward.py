"""A second backward of an embedding call whose first backward has updated the tables. If only one rank runs it, every rank
learns of it at once, and the next calls work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import own_group, told, waits_end_after

import weft
from weft.embedding import ColumnWise, DataParallel, EmbeddingBagConfig, KeyedJaggedTensor, RowWise
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

NAMES = "users", "items"
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "pooling": (ShardedEmbeddingBagCollection, {"placement": [0, 1]}),
    "pooling, compiled": (ShardedEmbeddingBagCollection, {"placement": [0, 1]}),
    "parts": (ShardedEmbeddingBagCollection, {"placement": [RowWise(), ColumnWise((0, 1))]}),
    "data parallel": (ShardedEmbeddingBagCollection, {"placement": [DataParallel()] * 2}),
    "data parallel rows": (ShardedEmbeddingCollection, {"placement": [DataParallel()] * 2}),
    "parts and data parallel": (ShardedEmbeddingBagCollection, {"placement": [DataParallel(), RowWise()]}),
    "rows and data parallel rows": (ShardedEmbeddingCollection, {"placement": [RowWise(), DataParallel()]}),
    "distinct rows": (ShardedEmbeddingBagCollection, {"placement": [0, 1], "dedup": True}),
    "rows": (ShardedEmbeddingCollection, {"placement": [0, 1]}),
}


def made(group: dist.ProcessGroup, name: str) -> Callable[[], torch.Tensor]:
    """Return a function that makes a call, and returns the sum of its results."""
    kind, options = CASES[name]
    tables = [EmbeddingBagConfig(10, 4, table, (table,)) for table in NAMES]
    module = kind(tables, group=group, optimizer=weft.SGD(lr=0.1), **options)
    ids = KeyedJaggedTensor([*NAMES], torch.arange(8), lengths=torch.tensor([1, 3, 2, 2]))
    forward = torch.compile(module, backend="eager") if "compiled" in name else module

    def call() -> torch.Tensor:
        found = forward(ids)
        values = found.values()
        return values.sum() if isinstance(values, torch.Tensor) else sum(one.values().sum() for one in values)

    return call


def second(group: dist.ProcessGroup, name: str, calls: int, retain: bool) -> list[str]:
    """Make `calls` steps. Let rank 1 run the last backward again while its peers make the next step, then let every rank run a
    second backward. Return both errors. The step afterwards must work.
    """
    call = made(own_group(group), name)
    for _ in range(calls):
        loss = call()
        loss.backward(retain_graph=retain)
    found = []
    for repeats in (group.rank() == 1, True):
        with waits_end_after(20):
            found.append(told(loss.backward if repeats else lambda: call().backward()))
        if not found[-1].startswith(("RefusedError", "RuntimeError")):
            return [*found, ""][:2]
        loss = call()
        before = loss.detach().clone()
        error = told(lambda loss=loss: loss.backward(retain_graph=retain))
        assert error == "nothing", error
    assert call() != before, "the step has not updated the tables"
    return found


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("calls", [1, 5])
@pytest.mark.parametrize("name", CASES)
def test_a_second_backward_on_one_rank_is_refused_on_every_rank(
    pool: Pool, name: str, calls: int, retain: bool
) -> None:
    freed = "Trying to backward through the graph a second time"
    text = "second backward of the same call of"
    for of_one, of_all in pool.run(second, name, calls, retain, ranks=2, timeout_s=60):
        assert of_one.startswith(("RefusedError: rank 1: ", "RefusedError: ranks 1: ")), of_one
        assert of_all.startswith(("RefusedError: ranks 0, 1: ", "RuntimeError: ")), of_all
        assert text in of_one or (freed in of_one and not retain)
        assert text in of_all or (freed in of_all and not retain)


def stale(group: dist.ProcessGroup) -> str:
    """Let rank 1 run backward for per-sample weights after another backward has updated the tables. Return the error."""
    tables = [EmbeddingBagConfig(10, 4, table, (table,)) for table in NAMES]
    make = {"group": own_group(group), "optimizer": weft.SGD(lr=0.1), "is_weighted": True}
    module = ShardedEmbeddingBagCollection(tables, placement=[0, 1], **make)  # type: ignore[arg-type]
    weights = torch.ones(8, requires_grad=True)
    ids = KeyedJaggedTensor([*NAMES], torch.arange(8), weights, lengths=torch.tensor([1, 3, 2, 2]))
    first, other = module(ids).values().sum(), module(ids).values().sum()
    other.backward()
    with waits_end_after(20):
        error = told(first.backward if group.rank() == 1 else lambda: module(ids))
    module(ids).values().sum().backward()
    return error


def test_backward_after_an_update_on_one_rank_is_refused_on_every_rank(pool: Pool) -> None:
    for error in pool.run(stale, ranks=2, timeout_s=60):
        assert error.startswith("RefusedError: rank 1: backward of embedding_all_to_all for per_sample_weights: "), (
            error
        )
