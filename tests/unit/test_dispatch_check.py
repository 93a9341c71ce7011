"""The comparison that tests of experts use, on CPU and on GPUs: it finds one wrong element among many, and accepts
rounding errors.
"""

from __future__ import annotations

import pytest
import torch
from support.all_to_all_matmul_reference import assert_rows, expected, inputs, random_splits

from weft.builders import AllToAllMatmul

P = AllToAllMatmul(2, 4, (300, 200), 64, 96, "bf16", 300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_wrong_element_is_seen_and_rounding_is_not(dtype: torch.dtype) -> None:
    splits = random_splits(2, 4, P.rows, 3)
    tokens, weights = ([part.to(dtype) for part in parts] for parts in inputs(P, 3))
    case = (1, splits, tokens, torch.stack(weights))
    y = expected(*case)[0].to(dtype)
    assert_rows(y, *case, "rounded")
    smallest = int(y.abs().argmin())
    for at, value in ((smallest, 0.1), (0, torch.nan), (y.numel() - 1, float(y.flatten()[-1]) * 1.02)):
        spoiled = y.clone()
        spoiled.view(-1)[at] = value
        with pytest.raises(AssertionError, match="spoiled, rank 1: 1 of"):
            assert_rows(spoiled, *case, "spoiled")
    with pytest.raises(AssertionError, match="instead of"):
        assert_rows(y[:-1], *case, "a row too few")
