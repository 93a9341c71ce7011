"""weft.matmul_all_reduce on CPU processes: every schedule, results, gradients, torch.compile, layouts, bad input, ranks that come
late or not at all, benchmark and plan."""

from __future__ import annotations

from typing import Any

import pytest
import reduce_ranks as ranks
import torch
import torch.distributed as dist
from slow import SOME, pairs
from typer.testing import CliRunner

from weft.bench.core.options import BenchOptions
from weft.bench.core.run import run_rank
from weft.cli.app import app
from weft.launch import Pool

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# shape of x, N, dtype, op, schedule
FORWARD: dict[str, tuple[Any, ...]] = {
    "a matrix": ((24, 16), 7, F32, "sum", None),
    "the mean": ((23, 16), 7, F32, "avg", None),
    "the mean in bf16": ((24, 64), 16, BF16, "avg", "two_shot[chunks=1,by=dma,add=reduce]"),
    "serial": ((25, 16), 5, F16, "sum", "serial"),
    "one token": ((1, 1, 64), 6, BF16, "sum", None),
    "fewer rows than ranks": ((1, 64), 6, F32, "sum", "two_shot[chunks=1,by=kernel,add=gemm]"),
    "a batch of sequences": ((3, 7, 16), 6, F32, "avg", "two_shot[chunks=2,by=dma,add=gemm]"),
    "no rows": ((0, 16), 6, F32, "sum", None),
    "no batch": ((0, 12, 16), 6, F32, "avg", None),
    "no columns": ((12, 16), 0, F32, "sum", None),
    "nothing to sum over": ((12, 0), 6, F32, "sum", None),
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", FORWARD)
def test_results(pool: Pool, world: int, name: str) -> None:
    *given, schedule = FORWARD[name]
    pool.run(ranks.forward, *given, schedule if world > 1 else None, 3, ranks=world, timeout_s=60)


@pytest.mark.parametrize(("world", "dtype"), pairs([1, 2, 3, 4, 8], [F32, BF16, F16], *SOME), ids=str)
def test_every_schedule(pool: Pool, world: int, dtype: torch.dtype) -> None:
    """To the bit again, and the same bits on all ranks; with as many rows for each rank, and with fewer for the last."""
    whole = (300 if dtype == F32 else 50) * world  # several tiles, and a part of one
    for m in (whole, whole - 1):
        (names, *_) = pool.run(ranks.every_schedule, m, 40, 24, dtype, 0.02, ranks=world, timeout_s=200)
        builders = {name.split("[")[0] for name in names}
        overlapping = {"one_shot", "two_shot", "chunked"} | ({"tracked"} if m == whole else set())
        assert builders == {"serial"} | (overlapping if world > 1 else set())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("shape", "op", "wanted"),
    [
        ((12, 16), "sum", (True, True)),
        ((2, 5, 16), "avg", (True, True)),
        ((12, 16), "sum", (True, False)),
        ((12, 16), "avg", (False, True)),
    ],
)
@pytest.mark.parametrize("world", [1, 3])
def test_gradients(
    pool: Pool, world: int, shape: tuple[int, ...], op: str, wanted: tuple[bool, bool], compiled: bool
) -> None:
    """With as many rows for each rank, and not."""
    schedule = None if world == 1 or compiled else "two_shot[chunks=1,by=store,add=reduce]"
    pool.run(ranks.backward, shape, 5, op, wanted, compiled, schedule, ranks=world, timeout_s=120)


@pytest.mark.parametrize(("world", "dtype"), pairs([1, 2, 3], [F32, BF16], (1, F32), (2, BF16), (3, F32)), ids=str)
def test_what_follows_is_added_by_every_schedule(pool: Pool, world: int, dtype: torch.dtype) -> None:
    for bias, residual in ((True, True), (True, False), (False, True)):
        pool.run(ranks.following, (2, 7, 24), 40, dtype, bias, residual, ranks=world, timeout_s=200)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("wanted", [(True, True, True, True), (False, False, True, True), (True, False, False, True)])
def test_gradients_of_what_follows(pool: Pool, rows: int, wanted: tuple[bool, ...], compiled: bool) -> None:
    pool.run(ranks.backward_following, rows, wanted, compiled, ranks=2, timeout_s=120)


def test_what_cannot_follow_is_refused(pool: Pool) -> None:
    for told in pool.run(ranks.bad_following, ranks=2, timeout_s=60):
        assert "bias has shape (1, 3): it must be [N]" in told["bias of two dimensions"]
        assert "bias has 4 columns: it must have the N=3 of w" in told["bias of other length"]
        assert "bias is torch.float16 on cpu and x is torch.float32 on cpu" in told["bias of another dtype"]
        assert "residual has shape (4, 3) and x (5, 8): all but the last" in told["residual of fewer rows"]
        assert "residual has 2 columns: it must have the N=3 of w" in told["residual of fewer columns"]
        assert 'op="avg" is of sums alone' in told["mean"]
        assert "residual is a list: pass a torch.Tensor" in told["no tensor"]


def test_gradients_are_those_of_torchs_all_reduce(pool: Pool) -> None:
    pool.run(ranks.as_torch_has_it, ranks=3, timeout_s=60)


@pytest.mark.parametrize(
    "schedule", [None, "one_shot[by=kernel]", "two_shot[chunks=2,by=store,add=gemm]", "chunked[chunks=4,by=dma]"]
)
def test_many_sizes_in_a_row(pool: Pool, schedule: str | None) -> None:
    pool.run(ranks.many_sizes, schedule, F32, ranks=2, timeout_s=60)


@pytest.mark.parametrize("schedule", ["serial", "one_shot[by=dma]", "two_shot[chunks=2,by=dma,add=gemm]"])
def test_operands_may_lie_otherwise_on_each_rank_and_in_each_call(pool: Pool, schedule: str) -> None:
    with Pool(2) as fresh:  # which has not warned of these strides
        first, second = fresh.run(ranks.layouts, schedule, timeout_s=60)
    assert sum("x is copied at every call" in text for text in first) == 1
    assert sum("w is copied at every call" in text for text in first) == 1
    assert not second


def test_operands_that_cannot_be_are_refused_on_every_rank(pool: Pool) -> None:
    expected = {
        "integers": "x is torch.int64: use one of torch.float32, torch.float16, torch.bfloat16, torch.float64, in which the",
        "fp8": "x is torch.float8_e4m3fn: use one of",
        "complex": "x is torch.complex64: use one of",
        "other K": "w has shape (5, 3): it must be [K=8, N] to follow x [..., 8]",
        "other dtype": "w is torch.float16 on cpu and x is torch.float32 on cpu",
        "three dimensions": "w has shape (1, 8, 3): it must be [K=8, N]",
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
            assert "schedule one_shot[by=load]" in told["schedule"]
            assert "gradients wanted of (x, w, bias, residual): (False, True, False, False)" in told["gradients"]


@pytest.mark.parametrize("schedule", ["serial", "one_shot[by=load]", "two_shot[chunks=1,by=dma,add=gemm]"])
def test_sums_beyond_fp16_are_infinite_and_means_of_them_too(pool: Pool, schedule: str) -> None:
    for found in pool.run(ranks.overflow, schedule, ranks=2, timeout_s=60):
        assert found == (torch.inf, torch.inf)


def test_the_librarys_sum_leaves_what_it_adds_up(pool: Pool) -> None:
    pool.run(ranks.librarys_sum, ranks=2, timeout_s=60)


def test_backward_waits_as_long_as_the_call_says() -> None:
    with Pool(2) as alone:
        told, _ = alone.run(ranks.backward_alone, timeout_s=60)
    assert told.startswith("DeadlineError")
    assert "waited 1 s" in told


def test_timelines(pool: Pool) -> None:
    for found in pool.run(ranks.spans, "serial", ranks=2):
        assert found == {"matmul", "all_reduce"}
    for found in pool.run(ranks.spans, "two_shot[chunks=2,by=dma,add=gemm]", ranks=2):
        assert {"matmul", "copy"} <= found


def test_opcheck(pool: Pool) -> None:
    pool.run(ranks.checked_as_op, ranks=1, timeout_s=120)


def measured(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    options = BenchOptions(
        "matmul_all_reduce", "64x24x32", variants=("weft", "one_shot[by=load]"), quick=True, seconds=0.05
    )
    return run_rank(group.rank(), 2, options)


def test_it_is_measured(pool: Pool) -> None:
    written = pool.run(measured, ranks=2, timeout_s=120)[0]
    assert {r["variant"] for r in written} == {"serial", "weft", "one_shot[by=load]"}
    assert all(r["p50_ms"] > 0 and r["error"] < 1e-5 for r in written)


def test_it_is_planned() -> None:
    runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})
    arguments = ["plan", "matmul_all_reduce", "--shape", "8191,8192,4096", "--hw", "h200"]
    for more in ([], ["--ranks", "4", "--mode", "graph", "--all"]):
        done = runner.invoke(app, [*arguments, *more])
        assert done.exit_code == 0, done.output
        assert "less than serial's" in " ".join(done.output.split())
    assert "one_shot[by=load]" in done.output
