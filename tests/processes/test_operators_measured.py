"""`weft bench` and `weft plan` for operators whose GEMM precedes a collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from support.slow import slow
from typer.testing import CliRunner

from weft.bench.core.options import BenchOptions
from weft.bench.core.run import run_rank
from weft.cli.app import app
from weft.launch import Pool

# A measured schedule.
MEASURED = {
    "matmul_reduce_scatter": "scatter",
    "matmul_all_reduce": "one_shot[by=load]",
    "matmul_all_gather": "direct[chunks=2,by=dma]",
    "matmul_all_gather_gradients": "direct[chunks=2]",
}
# Shape, options, their text, and a schedule or a note of the table.
PLANNED = [
    ("matmul_reduce_scatter", "8192,8192,4096", [], "", "tracked[chunks=4,to=dma]"),
    (
        "scaled_matmul_reduce_scatter",
        "8192,8192,4096",
        [],
        "fp8 scaled by tensor",
        "an fp8 GEMM with scales cannot accumulate",
    ),
    ("matmul_all_reduce", "8191,8192,4096", [], "", "one_shot[by=load]"),
    slow(
        "matmul_all_reduce",
        "8191,8192,4096",
        ["--option", "residual=true", "--option", "norm=true"],
        "reduced + residual and normed (eps 1e-06), the whole sum to each rank",
        "one_shot[by=load]",
    ),
    ("matmul_all_gather", "8191,8192,4096", ["--option", "gather_dim=0"], "all rows to each rank", "tracked[chunks=8]"),
    slow(
        "matmul_all_gather",
        "8191,8192,4096",
        ["--option", "gather_dim=-1"],
        "all columns to each rank",
        "tracked[chunks=8]",
    ),
]


def measured(group: dist.ProcessGroup, operator: str) -> list[dict[str, Any]]:
    named = ("weft", MEASURED[operator])
    return run_rank(group.rank(), 2, BenchOptions(operator, "64x24x32", variants=named, quick=True, seconds=0.05))


@pytest.mark.slow  # test_bench_matmul.py measures another operator in the same way
@pytest.mark.parametrize("operator", MEASURED)
def test_it_is_measured(pool: Pool, operator: str) -> None:
    written = pool.run(measured, operator, ranks=2, timeout_s=120)[0]
    assert {r["variant"] for r in written} == {"serial", "weft", MEASURED[operator]}
    assert all(r["p50_ms"] > 0 and r["error"] < 1e-5 for r in written)


@pytest.mark.parametrize(("operator", "shape", "options", "said", "listed"), PLANNED)
def test_it_is_planned(operator: str, shape: str, options: list[str], said: str, listed: str) -> None:
    runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})
    for more in ([], ["--ranks", "4", "--mode", "graph", "--all"]):
        done = runner.invoke(app, ["plan", operator, "--shape", shape, "--hw", "h200", *options, *more])
        assert done.exit_code == 0, done.output
        assert "less than serial's" in " ".join(done.output.split())
        assert said in " ".join(done.output.split())
    assert listed in done.output
