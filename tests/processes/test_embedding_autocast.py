"""Autocast has no effect on modules with embedding tables, whatever its dtype. Results are compared bit by bit with calls outside
of autocast.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_ranks import told

import weft
from weft.embedding import ColumnWise, DataParallel, EmbeddingBagConfig, KeyedJaggedTensor, RowWise
from weft.launch import Pool
from weft.nn import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

ROWS, COLUMNS, COPIES = RowWise(), ColumnWise((0, 1)), DataParallel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        ("bags", [ROWS, COLUMNS]),
        ("bags", [COPIES, 1]),
        ("dedup", [ROWS, 1]),
        ("rows", [ROWS, COPIES]),
        ("rows", [COLUMNS, COLUMNS]),
    ],
    ids=str,
)
def test_autocast_has_no_effect(pool: Pool, kind: str, placement: Any, dtype: torch.dtype) -> None:
    assert pool.run(_error, kind, placement, dtype, ranks=2) == ["nothing"] * 2


def _error(group: dist.ProcessGroup, *arguments: Any) -> str:
    return told(lambda: _compares(group, *arguments))


def _compares(group: dist.ProcessGroup, kind: str, placement: Any, dtype: torch.dtype) -> None:
    tables = [EmbeddingBagConfig(40, 8, name, ["f", name], dtype=dtype) for name in ("t", "s")]
    values = (torch.arange(24) * 7 + group.rank()) % 40
    features = KeyedJaggedTensor(["f", "t", "s"], values, lengths=torch.tensor([1, 0, 7, 4, 4, 0, 3, 3, 2]))
    for optimizer in (None, weft.SGD(lr=0.5)):
        found = []
        for is_on in (False, True):
            torch.manual_seed(3)
            made: Any = (
                ShardedEmbeddingCollection(tables, group=group, placement=placement, optimizer=optimizer)
                if kind == "rows"
                else ShardedEmbeddingBagCollection(
                    tables, group=group, placement=placement, optimizer=optimizer, dedup=kind == "dedup"
                )
            )
            context = made.accumulate() if optimizer else contextlib.nullcontext()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on), context:
                result = made(features)
                vectors = [result[key].values() for key in result] if kind == "rows" else [result.values()]
                # torch's own backward of `split` fails under autocast, and only `dedup` needs none.
                with torch.autocast("cpu", enabled=False) if kind != "dedup" else contextlib.nullcontext():
                    torch.autograd.backward(vectors, [torch.ones_like(one) for one in vectors])
            grads = [parameter.grad for parameter in made.parameters() if parameter.grad is not None]
            found.append([*vectors, *grads, *made.parameters()])
        assert all(one.dtype == dtype for one in found[1])
        assert len(found[0]) == len(found[1])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
