"""Test the schedules that compute both gradients of weft.matmul_all_gather, on two GPUs. Most functions are shared with
the CPU tests.
"""

from __future__ import annotations

import gpu_ranks
import product_ranks
import pytest
import torch
from support import matmul_all_gather_gradients_ranks as ranks
from support.on_ranks import BF16, F16, F32, applicable
from support.operators import suite
from support.operators.gemms import Gemm

from weft.builders import MatmulAllGatherGradients
from weft.launch import Pool

pytestmark = gpu_ranks.MARKS
NAME = "matmul_all_gather_gradients"
SIZES = {"whole": (2048, 1024, 256), "odd": (601, 1030, 43), "few columns": (301, 19, 7)}
"""M, N, K. `whole`: all sizes are whole tiles. `odd`: only blocks of columns have whole tiles. `few columns`: no block
has a whole tile.
"""
DIRECT, COLUMNS = "direct[chunks=2]", "direct[chunks=4,last=columns]"
NAMES = [candidate.name for candidate in applicable(MatmulAllGatherGradients(2, 2048, 1024, 256, "bf16"))]
OVERLAPPING = [name for name in NAMES if name != "serial"]
each_dim = pytest.mark.parametrize("dim", [0, -1])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_behind_stragglers_and_replayed(pair: Pool, sizes: str, columns: bool, dtype: str) -> None:
    p = MatmulAllGatherGradients(2, *SIZES[sizes], dtype, columns)
    for name in OVERLAPPING if dtype == "bf16" else (DIRECT, COLUMNS):
        pair.run(product_ranks.on_streams, p, name, timeout_s=60)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@each_dim
def test_every_schedule_by_the_operator(pair: Pool, dim: int, dtype: torch.dtype) -> None:
    """Call every schedule three times with fresh data, late ranks and results filled with NaN. Bits must repeat."""
    names = pair.run(suite.every_schedule, NAME, Gemm((777, 264), 520, dtype, dim), 0.01, timeout_s=200)
    assert names[0] == NAMES


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("shape", "dim"), [((128, 64), 0), ((128, 64), -1), ((3, 65, 48), 1), ((3, 65, 48), -1)])
def test_gradients(pair: Pool, shape: tuple[int, ...], dim: int, compiled: bool) -> None:
    for schedule in (DIRECT, COLUMNS):
        pair.run(ranks.backward, schedule, Gemm(shape, 40, dim=dim), compiled, timeout_s=120)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@each_dim
@pytest.mark.parametrize("schedule", [None, DIRECT, COLUMNS])
def test_many_sizes_in_a_row(pair: Pool, schedule: str | None, dim: int, dtype: torch.dtype) -> None:
    pair.run(suite.many_sizes, NAME, Gemm(dtype=dtype, dim=dim, schedule=schedule), timeout_s=60)


@pytest.mark.parametrize("schedule", ["serial", DIRECT, COLUMNS])
def test_operands_may_lie_otherwise_and_the_gradient_of_a_weight_lies_as_it(pair: Pool, schedule: str) -> None:
    """Let GEMMs write blocks of a column-major result. Calls of other shapes come in between."""
    assert pair.run(ranks.layouts, schedule, timeout_s=60) == [[]] * 2


@pytest.mark.parametrize("sizes", [(0, 4, 3), (5, 0, 3), (5, 4, 0)], ids=str)
def test_sizes_of_nothing(pair: Pool, sizes: tuple[int, int, int]) -> None:
    pair.run(ranks.empty, *sizes, timeout_s=60)


def test_the_librarys_way_is_taken_until_it_has_been_tried(pair: Pool) -> None:
    for untried, tried in pair.run(ranks.chosen, timeout_s=60):
        assert untried == "serial"
        assert tried.startswith("direct")
