"""Ranks may pass whole numbers as integers of Python, of numpy, or as tensors. The layers and operators take them as equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import weft
from weft.embedding import EmbeddingBagConfig, KeyedJaggedTensor, RowWise
from weft.launch import Pool

KINDS = int, np.int64, torch.tensor


def calls(group: dist.ProcessGroup) -> list[Any]:
    number: Any = KINDS[group.rank()]
    tables = [EmbeddingBagConfig(8, 4, name, (name,)) for name in "ab"]
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(8), lengths=torch.full((4,), 2))
    found: list[Any] = []
    for placement, options in (
        (None, {"max_ids": 40, "batch_size": 2, "outputs": 3, "slice_size": 1}),
        ([RowWise(), RowWise()], {"max_ids": 40}),
        ([0, 1], {}),
    ):
        given = {name: number(value) for name, value in options.items()}
        placed: Any = [number(one) if isinstance(one, int) else one for one in placement] if placement else None
        module = weft.nn.ShardedEmbeddingBagCollection(tables, group=group, placement=placed, deadline_s=30.0, **given)
        found.append(module(ids).values())
    x, w = torch.ones(4, 8), torch.ones(1, 8, 8)
    splits = torch.full((group.size(),), 4 // group.size() or 1)
    x = x[: int(splits.sum())]
    bounds: dict[str, Any] = {"capacity": number(8), "deadline_s": 30.0}
    y, received = weft.all_to_all_matmul(x, w, splits, group=group, max_rows=number(24), return_received=True, **bounds)
    found.append(weft.matmul_all_to_all(y, w, received, splits, group=group, rows=number(len(x)), **bounds))
    layer = weft.nn.ExpertParallelMLP(8, 8, group.size(), group=group, max_rows=number(24), capacity=number(8))
    found.append([layer.max_rows, layer.capacity])
    return found


def test_numbers_of_other_libraries(pool: Pool) -> None:
    for *results, sizes in pool.run(calls, ranks=3):
        assert [(type(size), size) for size in sizes] == [(int, 24), (int, 8)]
        assert (results[-1] == 64).all()
        assert all(one.shape == (2, 8) for one in results[:-1])
