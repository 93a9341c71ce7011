"""weft.matmul_all_gather on CPU processes: every schedule, results, gradients, torch.compile, layouts, bad input, ranks that come
late or not at all, benchmark and plan."""

from __future__ import annotations

from typing import Any

import gathered_product_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from slow import SOME, pairs
from typer.testing import CliRunner

from weft.bench.core.options import BenchOptions
from weft.bench.core.run import run_rank
from weft.cli.app import app
from weft.launch import Pool

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# shape of x, N, dtype, dimension, schedule
FORWARD: dict[str, tuple[Any, ...]] = {
    "rows": ((24, 16), 7, F32, 0, None),
    "columns": ((23, 16), 7, F32, -1, None),
    "columns by number": ((23, 16), 7, BF16, 1, "direct[chunks=2,by=kernel]"),
    "serial, rows": ((25, 16), 5, F16, 0, "serial"),
    "serial, columns": ((25, 16), 5, F16, -1, "serial"),
    "one token": ((1, 1, 64), 6, BF16, -1, "direct[chunks=1,by=kernel]"),
    "sequences, columns": ((3, 7, 16), 6, F32, 2, "direct[chunks=4,by=dma]"),
    "sequences, along them": ((3, 7, 16), 6, F32, 1, "direct[chunks=4,by=dma]"),
    "sequences, batches": ((3, 7, 16), 6, F32, -3, "tracked[chunks=1]"),
    "no rows": ((0, 16), 6, F32, 0, None),
    "no rows, columns": ((0, 16), 6, F32, -1, None),
    "no batch": ((0, 12, 16), 6, F32, 1, None),
    "no columns": ((12, 16), 0, F32, 0, None),
    "no columns, joined": ((12, 16), 0, F32, -1, None),
    "nothing to sum over": ((12, 0), 6, F32, 0, None),
    "nothing to sum over, columns": ((12, 0), 6, F32, -1, None),
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", FORWARD)
def test_results(pool: Pool, world: int, name: str) -> None:
    *given, schedule = FORWARD[name]
    pool.run(ranks.forward, *given, schedule if world > 1 else None, 3, ranks=world, timeout_s=60)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize(("world", "dtype"), pairs([1, 2, 3, 4, 8], [F32, BF16, F16], *SOME), ids=str)
def test_every_schedule(pool: Pool, world: int, dim: int, dtype: torch.dtype) -> None:
    """To the bit again, and the same bits on all ranks."""
    (names, *_) = pool.run(ranks.every_schedule, 299, 40, 24, dim, dtype, 0.02, ranks=world, timeout_s=200)
    assert {name.split("[")[0] for name in names} == {"serial"} | ({"direct", "tracked"} if world > 1 else set())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("shape", "dim", "wanted"),
    [
        ((12, 16), 0, (True, True)),
        ((12, 16), -1, (True, True)),
        ((2, 5, 16), 1, (True, True)),
        ((2, 5, 16), 2, (True, False)),
        ((12, 16), 0, (False, True)),
    ],
)
@pytest.mark.parametrize("world", [1, 3])
def test_gradients(
    pool: Pool, world: int, shape: tuple[int, ...], dim: int, wanted: tuple[bool, bool], compiled: bool
) -> None:
    schedule = None if world == 1 or compiled else "direct[chunks=1,by=dma]"
    pool.run(ranks.backward, shape, 5, dim, wanted, compiled, schedule, ranks=world, timeout_s=120)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("schedule", [None, "direct[chunks=1,by=kernel]", "direct[chunks=4,by=dma]"])
def test_many_sizes_in_a_row(pool: Pool, dim: int, schedule: str | None) -> None:
    pool.run(ranks.many_sizes, dim, schedule, F32, ranks=2, timeout_s=60)


@pytest.mark.parametrize("schedule", ["serial", "direct[chunks=2,by=dma]", "tracked[chunks=1]"])
def test_operands_may_lie_otherwise_on_each_rank_and_in_each_call(pool: Pool, schedule: str) -> None:
    with Pool(2) as fresh:  # which has not warned of these strides
        first, second = fresh.run(ranks.layouts, schedule, timeout_s=60)
    assert sum("x is copied at every call" in text for text in first) == 1
    assert sum("w is copied at every call" in text for text in first) == 1
    assert not second


def test_operands_that_cannot_be_are_refused_on_every_rank(pool: Pool) -> None:
    expected = {
        "integers": "x is torch.int64: use one of torch.float32, torch.float16, torch.bfloat16",
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
            assert "columns=True" in told["dimension"]
            assert "schedule direct[chunks=1,by=dma]" in told["schedule"]
            assert "gradients wanted of (x, w): (False, True)" in told["gradients"]


def test_backward_waits_as_long_as_the_call_says() -> None:
    with Pool(2) as alone:
        told, _ = alone.run(ranks.backward_alone, timeout_s=60)
    assert told.startswith("DeadlineError")
    assert "waited 1 s" in told


def test_timelines(pool: Pool) -> None:
    for dim, more in ((0, set[str]()), (-1, {"unpack"})):
        for found in pool.run(ranks.spans, dim, "serial", ranks=2):
            assert found == {"matmul", "all_gather"} | more
        for found in pool.run(ranks.spans, dim, "direct[chunks=2,by=dma]", ranks=2):
            assert {"matmul", "copy"} <= found


def test_opcheck(pool: Pool) -> None:
    pool.run(ranks.checked_as_op, ranks=1, timeout_s=120)


def measured(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    named = ("weft", "direct[chunks=2,by=dma]")
    options = BenchOptions("matmul_all_gather", "64x24x32", variants=named, quick=True, seconds=0.05)
    return run_rank(group.rank(), 2, options)


def test_it_is_measured(pool: Pool) -> None:
    written = pool.run(measured, ranks=2, timeout_s=120)[0]
    assert {r["variant"] for r in written} == {"serial", "weft", "direct[chunks=2,by=dma]"}
    assert all(r["p50_ms"] > 0 and r["error"] < 1e-5 for r in written)


@pytest.mark.parametrize("dim", ["0", "-1"])
def test_it_is_planned(dim: str) -> None:
    runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})
    arguments = ["plan", "matmul_all_gather", "--shape", "8191,8192,4096", "--hw", "h200", "--gather-dim", dim]
    for more in ([], ["--ranks", "4", "--mode", "graph", "--all"]):
        done = runner.invoke(app, [*arguments, *more])
        assert done.exit_code == 0, done.output
        assert "less than serial's" in " ".join(done.output.split())
        assert ("the columns of all" if dim == "-1" else "the rows of all") in done.output
    assert "tracked[chunks=8]" in done.output
