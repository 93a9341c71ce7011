"""weft.matmul_reduce_scatter on CPU processes: every schedule, results, gradients, torch.compile, layouts, bad input, ranks that
come late or not at all, benchmark and plan."""

from __future__ import annotations

from typing import Any

import pytest
import scatter_ranks as ranks
import torch
import torch.distributed as dist
from slow import SOME, pairs
from typer.testing import CliRunner

from weft.bench.core.options import BenchOptions
from weft.bench.core.run import run_rank
from weft.cli.app import app
from weft.launch import Pool

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# shape of A, dimension, N, dtype, op, schedule
FORWARD: dict[str, tuple[Any, ...]] = {
    "a matrix": ((24, 16), 0, 7, F32, "sum", None),
    "the mean": ((24, 16), 0, 7, F32, "avg", None),
    "the mean in bf16": ((24, 64), 0, 16, BF16, "avg", "direct[chunks=1,by=dma,add=reduce]"),
    "serial": ((24, 16), 0, 5, F16, "sum", "serial"),
    "batches": ((12, 3, 16), 0, 6, F32, "sum", "direct[chunks=2,by=dma,add=gemm]"),
    "a batch of sequences": ((3, 12, 16), 1, 6, F32, "avg", "direct[chunks=2,by=dma,add=gemm]"),
    "a batch of sequences, from behind": ((2, 12, 3, 16), -3, 6, F32, "sum", "scatter"),
    "no rows": ((0, 16), 0, 6, F32, "sum", None),
    "no batch": ((0, 12, 16), 1, 6, F32, "avg", None),
    "nothing to sum over": ((12, 0), 0, 6, F32, "sum", None),
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", FORWARD)
def test_results(pool: Pool, world: int, name: str) -> None:
    *given, schedule = FORWARD[name]
    pool.run(ranks.forward, *given, schedule if world > 1 else None, 3, ranks=world, timeout_s=60)


@pytest.mark.parametrize(("world", "dtype"), pairs([1, 2, 3, 4], [F32, BF16, F16], *SOME), ids=str)
def test_every_schedule(pool: Pool, world: int, dtype: torch.dtype) -> None:
    m = (300 if dtype == F32 else 50) * world  # several tiles, and a part of one
    (names, *_) = pool.run(ranks.every_schedule, m, 40, 24, dtype, 0.02, ranks=world, timeout_s=100)
    builders = {name.split("[")[0] for name in names}
    assert builders == {1: {"serial"}, 2: {"serial", "scatter", "direct", "tracked"}}.get(
        world, {"serial", "scatter", "direct", "tracked", "ring"}
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("shape", "dim", "op", "wanted"),
    [
        ((12, 16), 0, "sum", (True, True)),
        ((2, 12, 16), 1, "avg", (True, True)),
        ((12, 16), 0, "sum", (True, False)),
        ((12, 16), 0, "avg", (False, True)),
    ],
)
@pytest.mark.parametrize("world", [1, 3])
def test_gradients(
    pool: Pool, world: int, shape: tuple[int, ...], dim: int, op: str, wanted: tuple[bool, bool], compiled: bool
) -> None:
    schedule = None if world == 1 or compiled else "direct[chunks=1,by=store,add=reduce]"
    pool.run(ranks.backward, shape, dim, 5, op, wanted, compiled, schedule, ranks=world, timeout_s=120)


@pytest.mark.parametrize("schedule", [None, "scatter", "direct[chunks=2,by=store,add=gemm]"])
def test_many_sizes_in_a_row(pool: Pool, schedule: str | None) -> None:
    pool.run(ranks.many_sizes, schedule, F32, ranks=2, timeout_s=60)


@pytest.mark.parametrize("schedule", ["serial", "scatter", "tracked[chunks=1,to=store]"])
def test_operands_may_lie_otherwise_on_each_rank_and_in_each_call(pool: Pool, schedule: str) -> None:
    with Pool(2) as fresh:  # which has not warned of these strides
        first, second = fresh.run(ranks.layouts, schedule, timeout_s=60)
    assert sum("A is copied at every call" in text for text in first) == 1
    assert sum("B is copied at every call" in text for text in first) == 1
    assert not second


def test_operands_that_cannot_be_are_refused_on_every_rank(pool: Pool) -> None:
    expected = {
        "integers": "A is torch.int64: use one of torch.float32, torch.float16, torch.bfloat16, torch.float64, in which the",
        "fp8": "A is torch.float8_e4m3fn: use one of",
        "complex": "A is torch.complex64: use one of",
        "other K": "B has shape (5, 3): it must be [K=8, N] to follow A [..., 8]",
        "other dtype": "B is torch.float16 on cpu and A is torch.float32 on cpu",
        "three dimensions": "B has shape (1, 8, 3): it must be [K=8, N]",
    }
    for told in pool.run(ranks.bad_operands, ranks=2, timeout_s=60):
        for name, text in expected.items():
            assert text in told[f"{name}, all"]
            assert told[f"{name}, one"].startswith(f"RefusedError: rank 0: {text}"), name


def test_one_rank_that_differs_is_named_on_every_rank() -> None:
    with Pool(2) as alone:
        for told in alone.run(ranks.one_rank_differs, timeout_s=60):
            for name, text in told.items():
                assert text.startswith("DisagreementError: ranks make different calls"), name
            assert "m=4" in told["rows"]
            assert "schedule scatter" in told["schedule"]
            assert "gradients wanted of (A, B): (False, True)" in told["gradients"]


def test_backward_waits_as_long_as_the_call_says() -> None:
    with Pool(2) as alone:
        told, _ = alone.run(ranks.backward_alone, timeout_s=60)
    assert told.startswith("DeadlineError")
    assert "waited 1 s" in told


def test_timelines(pool: Pool) -> None:
    for found in pool.run(ranks.spans, "serial", ranks=2):
        assert found == {"matmul", "reduce_scatter"}
    for found in pool.run(ranks.spans, "direct[chunks=2,by=dma,add=gemm]", ranks=2):
        assert {"matmul", "copy"} <= found


def test_opcheck(pool: Pool) -> None:
    pool.run(ranks.checked_as_op, ranks=1, timeout_s=120)


def measured(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    options = BenchOptions("matmul_reduce_scatter", "64x24x32", variants=("weft", "scatter"), quick=True, seconds=0.05)
    return run_rank(group.rank(), 2, options)


def test_it_is_measured(pool: Pool) -> None:
    written = pool.run(measured, ranks=2, timeout_s=120)[0]
    assert {r["variant"] for r in written} == {"serial", "weft", "scatter"}
    assert all(r["p50_ms"] > 0 and r["error"] < 1e-5 for r in written)


def test_it_is_planned() -> None:
    runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})
    arguments = ["plan", "matmul_reduce_scatter", "--shape", "8192,8192,4096", "--hw", "h200"]
    for more in ([], ["--ranks", "4", "--mode", "graph", "--all"]):
        done = runner.invoke(app, [*arguments, *more])
        assert done.exit_code == 0, done.output
        assert "less than serial's" in " ".join(done.output.split())
    assert "tracked[chunks=4,to=dma]" in done.output
