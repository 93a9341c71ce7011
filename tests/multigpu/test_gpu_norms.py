"""Test weft.matmul_all_reduce with operations after the sum, on two GPUs. The functions are shared with the CPU tests."""

from __future__ import annotations

import gpu_ranks
import product_ranks
import pytest
import torch
from support.matmul_all_reduce_ranks import normed_alike
from support.on_ranks import BF16, F16, F32, applicable
from support.operators import suite
from support.operators.gemms import Following

from weft.builders import MatmulAllReduce
from weft.launch import Pool

pytestmark = gpu_ranks.MARKS
NORMED = MatmulAllReduce(2, 2048, 512, 256, "bf16", bias=True, residual=True, eps=1e-6)


def every_schedule(pair: Pool, case: Following) -> None:
    pair.run(suite.every_schedule, "matmul_all_reduce", case, 0.01, timeout_s=300)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("n", [256, 19], ids=["whole", "odd"])
def test_what_follows_is_added_by_every_schedule(pair: Pool, n: int, dtype: torch.dtype) -> None:
    for bias, residual in ((True, True), (True, False), (False, True)):
        every_schedule(pair, Following((2, 256, 128), n, dtype, bias=bias, residual=residual))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("n", [256, 19], ids=["whole", "odd"])
def test_sums_are_normed_by_every_schedule(pair: Pool, n: int, dtype: torch.dtype) -> None:
    """Check the sum and its norm, and that their bits repeat."""
    for m, residual in ((256, True), (301, False)):
        every_schedule(pair, Following((2, m, 128), n, dtype, residual=residual, eps=1e-6))


def test_norms_of_little_compiled_and_of_scattered_weights(pair: Pool) -> None:
    pair.run(normed_alike, timeout_s=200)


@pytest.mark.parametrize("n", [7168, 16384, 40000])
def test_long_rows_are_normed(pair: Pool, n: int) -> None:
    every_schedule(pair, Following((1, 17, 64), n, BF16, residual=True, eps=1e-6))


@pytest.mark.parametrize("name", [candidate.name for candidate in applicable(NORMED)])
def test_every_schedule_with_a_norm_is_captured_and_replayed(pair: Pool, name: str) -> None:
    pair.run(product_ranks.on_streams, NORMED, name, timeout_s=60)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("wanted", [(True, True, True, True), (False, False, True, True)])
def test_gradients_of_what_follows(pair: Pool, wanted: tuple[bool, ...], compiled: bool) -> None:
    case = Following((64, 8), 5, bias=True, residual=True)
    pair.run(suite.gradients, "matmul_all_reduce", case, wanted, compiled, None, timeout_s=120)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("weighed", [(0, 1), (0,), (1,)], ids=["both", "norm", "sum"])
def test_gradients_of_norms(pair: Pool, weighed: tuple[int, ...], compiled: bool) -> None:
    case = Following((64, 8), 5, bias=True, residual=True, eps=0.1)
    pair.run(suite.gradients, "matmul_all_reduce", case, (True,) * 5, compiled, None, (4,), weighed, timeout_s=120)
