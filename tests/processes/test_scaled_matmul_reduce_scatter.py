"""Tests of weft.scaled_matmul_reduce_scatter only, on CPU processes: one row per rank, and its benchmark.
`test_operators.py` has the other tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.operators import suite
from support.operators.scaled import ScaledGemm

from weft.bench.__main__ import options_of
from weft.bench.core.harness import Ranks
from weft.bench.core.operators import operator
from weft.bench.core.options import BenchOptions
from weft.bench.core.run import run_rank
from weft.bench.ops.gemms import GemmShape
from weft.bench.ops.matmul_reduce_scatter import SCALED as measuring
from weft.launch import Pool


def test_one_row_each(pool: Pool) -> None:
    """An A_scale of one element is the scale of all of A, or of a rank's only row if the columns of B have scales."""
    for world, schedule in ((1, None), (2, "scatter")):
        case = ScaledGemm((world, 16), by="row", schedule=schedule)
        pool.run(suite.results, "scaled_matmul_reduce_scatter", case, 2, ranks=world, timeout_s=60)


def measured(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    options = BenchOptions(
        measuring.name, "64x32x48", variants=("weft", "scatter"), dtype="fp8", quick=True, seconds=0.05
    )
    return run_rank(group.rank(), 2, options)


@pytest.mark.slow
def test_it_is_measured(pool: Pool) -> None:
    written = pool.run(measured, ranks=2, timeout_s=120)[0]
    assert {(r["variant"], r["dtype"]) for r in written} == {(name, "fp8") for name in ("serial", "weft", "scatter")}
    assert all(r["p50_ms"] > 0 and 0 < r["error"] < 0.01 for r in written)  # of bf16
    assert all(r["ideal_ms"] == max(r["gemm_ms"], r["communication_ms"]) for r in written)


def moved(group: dist.ProcessGroup) -> tuple[float, float, float]:
    ranks_here = Ranks(group, group, torch.device("cpu"))
    return measuring.variants(measuring.spec, GemmShape(64, 32, 48, ()), ranks_here, "fp8").moved()


def test_operands_are_counted_with_one_byte_and_what_travels_with_two(pool: Pool) -> None:
    # x and w, and this rank's 32 rows of y; the peer's 32 rows; all rows
    expected = (64 * 48 + 48 * 32 + 2 * 32 * 32, 2 * 32 * 32, 2 * 64 * 32 * 48)
    assert pool.run(moved, ranks=2, timeout_s=60) == [expected] * 2


def test_its_benchmark_has_the_shapes_of_the_plain_operator_and_fp8_only() -> None:
    assert options_of([measuring.name, "--device", "cpu", "--ranks", "2"]).dtype == "fp8"
    for device in ("cpu", "cuda"):
        options = BenchOptions(measuring.name, device=device, dtype="fp8")
        plain = BenchOptions("matmul_reduce_scatter", device=device, dtype="bf16")
        shapes, plain_shapes = measuring.presets(options), operator("matmul_reduce_scatter").presets(plain)
        assert [(s.name, s.sources) for s in shapes] == [(s.name, s.sources) for s in plain_shapes] != []
    with pytest.raises(
        ValueError, match="dtype='bf16': the operands of scaled_matmul_reduce_scatter are fp8: do not pass dtype"
    ):
        BenchOptions(measuring.name, dtype="bf16")
    with pytest.raises(ValueError, match="N=24 must be a positive multiple of 16"):
        BenchOptions(measuring.name, "64x24x48", dtype="fp8")
