"""weft.matmul_all_reduce with a norm behind the sum, on two GPUs; most functions are those of the CPU tests."""

from __future__ import annotations

import gpu_ranks
import product_ranks
import pytest
import torch
from support import reduce_ranks as ranks

from weft.builders import MatmulAllReduce
from weft.launch import Pool

pytestmark = gpu_ranks.MARKS
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (2048, 512, 256)
"""M, N, K"""
BUILDERS = [c.name for c in ranks.every(MatmulAllReduce(2, *SIZES, "bf16"))]


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("n", [256, 19], ids=["whole", "odd"])
def test_sums_are_normed_by_every_schedule(pair: Pool, n: int, dtype: torch.dtype) -> None:
    """Compare the sum and its norm, which repeat to the bit; with weights of each rank's own, and of all ranks."""
    for m, residual in ((256, True), (301, False)):
        pair.run(ranks.normed, (2, m, 128), n, dtype, residual, 1e-6, timeout_s=200)


def test_norms_of_little_compiled_and_of_scattered_weights(pair: Pool) -> None:
    pair.run(ranks.normed_alike, timeout_s=200)


@pytest.mark.parametrize("n", [7168, 16384, 40000])
def test_long_rows_are_normed(pair: Pool, n: int) -> None:
    pair.run(ranks.normed, (1, 17, 64), n, BF16, True, 1e-6, timeout_s=200)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_with_a_norm_is_captured_and_replayed(pair: Pool, name: str) -> None:
    p = MatmulAllReduce(2, *SIZES, "bf16", bias=True, residual=True, eps=1e-6)
    pair.run(product_ranks.on_streams, p, name, timeout_s=60)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("of", ["yt", "y", "t"])
def test_gradients_of_norms(pair: Pool, of: str, compiled: bool) -> None:
    pair.run(ranks.backward_normed, 64, (True,) * 5, of, compiled, timeout_s=120)
