"""Compare weft.all_gather_scaled_matmul and weft.scaled_matmul_reduce_scatter with torch's fused operators, on two
GPUs.

Other tests of these operators are in `test_gpu_operators.py`.
"""

from __future__ import annotations

from dataclasses import replace

import gpu_ranks
import pytest
from gpu_cases import ROWS, needs_fp8
from support import fused_by_torch

from weft.launch import Pool

pytestmark = [*gpu_ranks.MARKS, needs_fp8]
GATHERED = ["large", "large, by row", "large, fast", "A wanted", "biases", "a batch of sequences", "fp8", "fp8, biases"]
SCATTERED = ["large", "large, by row", "large, fast", "biases", "batches", "a batch of sequences", "fp32"]


@pytest.mark.parametrize("name", GATHERED)
def test_all_gather_scaled_matmul_is_as_the_fused_op_of_torch(pair: Pool, name: str) -> None:
    case = replace(ROWS["all_gather_scaled_matmul"].results[name], return_A=True)  # type: ignore[call-arg]
    pair.run(fused_by_torch.all_gather_scaled_matmul, case, timeout_s=60)


@pytest.mark.parametrize("name", SCATTERED)
def test_scaled_matmul_reduce_scatter_is_as_the_fused_op_of_torch(pair: Pool, name: str) -> None:
    case = ROWS["scaled_matmul_reduce_scatter"].results[name]
    pair.run(fused_by_torch.scaled_matmul_reduce_scatter, case, timeout_s=60)
