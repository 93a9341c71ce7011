"""Test unpooled embeddings on GPUs, with the problems and references of `tests/processes/test_embedding_collection.py`."""

from __future__ import annotations

from typing import Any

import gpu_ranks as ranks
import pytest
import torch
from support.embedding_collection import check, columns, placements, train
from support.embedding_partition import assert_equal_bits

import weft
from weft.embedding import DataParallel, RowWise
from weft.launch import Pool

pytestmark = ranks.MARKS
REPLICATED = ("replicated", "mixed too")
"""The placements with data-parallel tables. These tables do not support clipping by norm."""


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("name", placements(1))
def test_rows_and_updates(pair: Pool, name: str, dedup: bool) -> None:
    clipped = weft.SGD(lr=0.1, clip_value=0.3) if name in REPLICATED else weft.SGD(lr=0.1, clip_norm=1.0)
    for optimizer in (weft.Adam(lr=0.05, weight_decay=0.01), clipped):
        check(pair, 2, placements(2)[name], optimizer, dedup=dedup)


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("parts", [2, 3])
def test_tables_cut_by_columns(pair: Pool, parts: int, dedup: bool) -> None:
    check(pair, 2, columns(2, parts), weft.Adam(lr=0.05, weight_decay=0.01), dedup=dedup)
    check(pair, 2, columns(2, parts), None, torchs=True, sparse=dedup)


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"dedup": True, "gradients": "sum"}], ids=str)
def test_gradients_for_an_optimizer_of_torch(pair: Pool, options: dict[str, Any]) -> None:
    for name in ("mixed", "mixed too"):
        check(pair, 2, placements(2)[name], None, torchs=True, **options)


def test_replicated_tables_of_an_optimizer_of_torch(pair: Pool) -> None:
    """An optimizer of torch updates the replicated tables. The optimizer in backward updates the other tables, by the
    same rule.
    """
    mixed = {"users": DataParallel(fused=False), "items": RowWise(), "pairs": DataParallel(fused=False)}
    check(pair, 2, mixed, weft.SGD(lr=0.1), torchs=True)


@pytest.mark.parametrize("name", ["rows", *REPLICATED])
def test_hashed_ids_and_accumulation(pair: Pool, name: str) -> None:
    check(pair, 2, placements(2)[name], weft.SGD(lr=0.1), hash=True, accumulates=True)


@pytest.mark.parametrize("name", ["rows", *REPLICATED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tables(pair: Pool, dtype: torch.dtype, name: str) -> None:
    check(pair, 2, placements(2)[name], weft.SGD(lr=0.1), dtype, 1, tolerance=3 * torch.finfo(dtype).eps, dedup=True)


@pytest.mark.parametrize("name", ["mixed", "mixed too"])
@pytest.mark.parametrize("dedup", [False, True])
def test_equal_inputs_give_equal_bits(pair: Pool, dedup: bool, name: str) -> None:
    options = {"optimizer": weft.RowwiseAdagrad(lr=0.1), "dedup": dedup}
    runs = [pair.run(train, placements(2)[name], torch.float32, 2, options, timeout_s=120) for _ in range(3)]
    assert_equal_bits(runs)
