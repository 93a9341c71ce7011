"""Pooled vectors and gradients that are sent in 16 bits, on CPU processes."""

from __future__ import annotations

import pytest
import torch
from support.embedding_training import narrowed, rounded_on_the_way
from support.reference import assert_close, problem

from weft.launch import Pool


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_rounded_once(pool: Pool, ranks: int, name: str, dtype: torch.dtype) -> None:
    p = problem(ranks, (8, 3, 16, 70), 13)
    assert pool.run(rounded_on_the_way, p, name, dtype, ranks=ranks) == [True] * ranks


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_vectors_are_rounded_once(pool: Pool, ranks: int, name: str, dtype: torch.dtype) -> None:
    p = problem(ranks, (8, 3, 16, 70), 13, weighted=True)
    for rank, found in enumerate(pool.run(narrowed, p, name, dtype, "auto", ranks=ranks)):
        assert_close(found, p, p.rows_of(rank), dtype=dtype)
