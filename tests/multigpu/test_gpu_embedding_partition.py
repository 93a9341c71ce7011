"""Test tables cut into parts on GPUs, with the problems and references of
`tests/processes/test_embedding_partition.py`.
"""

from __future__ import annotations

from typing import Any

import gpu_ranks as ranks
import pytest
import torch
from support.embedding_partition import assert_equal_bits, check, placements, train

import weft
from weft.launch import Pool

pytestmark = ranks.MARKS


@pytest.mark.parametrize("optimizer", [weft.Adam(lr=0.05, weight_decay=0.01), weft.Adagrad(lr=0.1)], ids=str)
@pytest.mark.parametrize("name", placements(1))
def test_tables_learn_as_in_one_process(pair: Pool, name: str, optimizer: Any) -> None:
    check(pair, 2, placements(2)[name], optimizer, is_weighted=isinstance(optimizer, weft.Adagrad))


@pytest.mark.parametrize("name", placements(1))
def test_gradients_for_an_optimizer_of_torch(pair: Pool, name: str) -> None:
    for sparse in (False, True):
        check(pair, 2, placements(2)[name], None, sparse=sparse, torchs=True, gradients="sum")


@pytest.mark.parametrize("name", ["rows", "mixed"])
def test_hashed_ids_and_halves_of_a_batch(pair: Pool, name: str) -> None:
    check(pair, 2, placements(2)[name], weft.SGD(lr=0.1), hash=True, samples=12)
    check(pair, 2, placements(2)[name], weft.Adam(lr=0.1), samples=12, accumulates=True, steps=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rows", "replicated", "mixed"])
def test_16_bit_tables(pair: Pool, name: str, dtype: torch.dtype) -> None:
    check(pair, 2, placements(2)[name], weft.SGD(lr=0.1), dtype, 1, tolerance=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["rows", "mixed"])
def test_equal_inputs_give_equal_bits(pair: Pool, name: str) -> None:
    options = {"optimizer": weft.RowwiseAdagrad(lr=0.1)}
    runs = [pair.run(train, placements(2)[name], torch.float32, 2, 300, options, timeout_s=120) for _ in range(3)]
    assert_equal_bits(runs)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_distinct_rows_learn_as_in_one_process(pair: Pool, pooling: str) -> None:
    """The samples' rank pools with `dedup=True`."""
    rows = placements(2)["rows"]
    check(pair, 2, rows, weft.RowwiseAdagrad(lr=0.1), is_weighted=True, dedup=True, pooling=pooling)
    check(
        pair, 2, rows, weft.Adam(lr=0.1), samples=12, accumulates=True, steps=2, hash=True, dedup=True, pooling=pooling
    )
    check(pair, 2, rows, None, torchs=True, gradients="sum", samples=0, dedup=True, pooling=pooling)


def test_distinct_rows_give_equal_bits(pair: Pool) -> None:
    options = {"optimizer": weft.RowwiseAdagrad(lr=0.1), "dedup": True, "pooling": "sum"}
    runs = [pair.run(train, placements(2)["rows"], torch.float32, 2, 300, options, timeout_s=120) for _ in range(3)]
    assert_equal_bits(runs)
