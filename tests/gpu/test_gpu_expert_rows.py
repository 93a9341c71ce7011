"""The kernels of an MoE layer on a GPU, against torch's functions, at the sizes of models."""

from __future__ import annotations

import pytest
import torch
from support.expert_rows_cases import arrival, rows

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "width", "dtype"),
    [
        (4096, 8, 256, 1024, torch.bfloat16), (2048, 2, 8, 14336, torch.bfloat16), (1000, 3, 5, 1001, torch.float16),
        (5, 1, 64, 4096, torch.float32), (0, 2, 8, 256, torch.bfloat16),
    ],
)  # fmt: skip
def test_rows(tokens: int, top_k: int, experts: int, width: int, dtype: torch.dtype) -> None:
    rows(tokens, top_k, experts, width, dtype, "cuda")


@pytest.mark.parametrize(("world", "experts", "most"), [(2, 4, 3000), (8, 32, 700), (2, 128, 200), (4, 1, 9)])
def test_arrival(world: int, experts: int, most: int) -> None:
    arrival(world, experts, most, "cuda")
