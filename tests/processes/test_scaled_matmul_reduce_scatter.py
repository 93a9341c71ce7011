"""weft.scaled_matmul_reduce_scatter on CPU processes: every schedule, results, torch.compile, layouts, bad input, ranks that come
late, benchmark and plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import scaled_scatter_ranks as ranks
from support.scaled_scatter_ranks import Case
from typer.testing import CliRunner

from weft.bench.__main__ import options_of
from weft.bench.core.harness import Ranks
from weft.bench.core.operators import operator
from weft.bench.core.options import BenchOptions
from weft.bench.core.run import run_rank
from weft.bench.ops.gemms import GemmShape
from weft.bench.ops.matmul_reduce_scatter import SCALED as measuring
from weft.cli.app import app
from weft.launch import Pool

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DIRECT, STORE = "direct[chunks=2,by=dma,add=reduce]", "direct[chunks=1,by=store,add=reduce]"
FORWARD = {
    "a scale for all": Case(),
    "a scale for each row": Case(by="row"),
    "serial": Case(out=F16, schedule="serial"),
    "serial, by row, the mean": Case(by="row", op="avg", schedule="serial"),
    "the mean": Case(op="avg", schedule=DIRECT),
    "the mean in fp32": Case(op="avg", out=F32, by="row", schedule=STORE),
    "fast": Case(fast=True, schedule="scatter"),
    "biases": Case(biased=True, n=48, schedule=DIRECT),
    "biases, by row, in fp16": Case(biased=True, by="row", out=F16, schedule="scatter"),
    "batches": Case(shape=(12, 3, 16), by="row", schedule=DIRECT),
    "a batch of sequences": Case(shape=(3, 12, 16), dim=1, by="row", op="avg", schedule=DIRECT),
    "a batch of sequences, from behind": Case(shape=(2, 12, 3, 16), dim=-3, by="row", schedule="scatter"),
    "flattened": Case(shape=(12, 3, 16), by="row", flat=True, schedule=DIRECT),
    "flattened, another dimension": Case(shape=(2, 3, 12, 32), dim=2, by="row", flat=True, schedule=DIRECT),
    "flattened, a scale for all": Case(shape=(3, 12, 32), dim=1, flat=True, biased=True),
    "no rows": Case(shape=(0, 16), by="row"),
    "no batch": Case(shape=(0, 12, 16), dim=1, op="avg"),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("world", [1, 2, 4])  # the one that changes last: each change makes a new group
def test_results(pool: Pool, world: int, name: str) -> None:
    case = FORWARD[name] if world > 1 else replace(FORWARD[name], schedule=None)
    pool.run(ranks.forward, case, 3, ranks=world, timeout_s=60)


@pytest.mark.parametrize("out", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("world", "by"), [(1, "row"), (2, "tensor"), (2, "row"), (3, "row"), (4, "tensor")])
def test_every_schedule(pool: Pool, world: int, by: str, out: torch.dtype) -> None:
    case = Case((50 * world, 32), n=48, by=by, out=out, biased=out != F32)  # type: ignore[arg-type]
    (names, *_) = pool.run(ranks.every_schedule, case, 0.02, ranks=world, timeout_s=100)
    assert {name.split("[")[0] for name in names} == ({"serial"} if world == 1 else {"serial", "scatter", "direct"})
    assert not any("add=gemm" in name for name in names)


def test_one_row_each(pool: Pool) -> None:
    """A_scale with one element is of all of A, or of a rank's only row where B's columns have scales of their own."""
    pool.run(ranks.forward, Case(shape=(1, 16), by="row"), 1, ranks=1, timeout_s=60)
    pool.run(ranks.forward, Case(shape=(2, 16), by="row", schedule="scatter"), 2, ranks=2, timeout_s=60)


@pytest.mark.parametrize("schedule", [None, "scatter", "direct[chunks=2,by=store,add=reduce]"])
def test_many_sizes_in_a_row(pool: Pool, schedule: str | None) -> None:
    pool.run(ranks.many_sizes, Case(by="row", schedule=schedule), ranks=2, timeout_s=60)


@pytest.mark.parametrize("name", ["a scale for all", "biases, by row, in fp16", "a batch of sequences", "flattened"])
def test_compiled(pool: Pool, name: str) -> None:
    pool.run(ranks.compiled, FORWARD[name], ranks=2, timeout_s=120)


def test_opcheck(pool: Pool) -> None:
    pool.run(ranks.checked_as_op, ranks=1, timeout_s=120)


@pytest.mark.parametrize("schedule", ["serial", DIRECT])
def test_operands_may_lie_otherwise_on_each_rank(schedule: str) -> None:
    with Pool(2) as fresh:  # which has not warned of these strides
        first, second = fresh.run(ranks.copies, Case(schedule=schedule), timeout_s=60)
    assert sum("A is copied at every call" in text for text in first) == 1
    assert sum("B is copied at every call" in text for text in first) == 1
    assert not second


def test_what_cannot_be_is_refused_on_every_rank_with_the_fix(pool: Pool) -> None:
    expected = {
        "integers": "A is torch.int64: use torch.float8_e4m3fn, or weft.matmul_reduce_scatter for fp32, fp16 and bf16",
        "bf16": "A is torch.bfloat16: use torch.float8_e4m3fn",
        "other fp8": "A is torch.float8_e5m2: use torch.float8_e4m3fn",
        "K": "K=24 must be a positive multiple of 16 for fp8 GEMMs: use 16 or 32",
        "N": "N=8 must be a positive multiple of 16 for fp8 GEMMs: use 16",
        "other K": "B has shape (16, 16): it must be [K=32, N] to follow A [..., 32]",
        "no matrix": "B has shape (): it must be [K=32, N]",
        "no rows": "A has shape (32,): pass at least two dimensions",
        "odd rows": "the 23 of orig_scatter_dim=0 must be divisible by world_size=2, as every rank gets as many: pad to 24",
        "a number": "A_scale is a float: pass a torch.Tensor",
        "shape of A_scale": "A_scale has shape (5, 1): pass one element, or, for each row a scale, (24, 1)",
        "dtype of A_scale": "A_scale is torch.float16 on cpu: use torch.float32",
        "shape of B_scale": "B_scale has shape (16, 1): pass [1, 16]",
        "columns of B only": "B_scale has shape (1, 16): pass one element, or A_scale with a scale for each row",
        "bias": "bias is torch.float32 on cpu: use torch.bfloat16",
        "shape of bias": "bias has shape (15,), strides (1,): pass a contiguous [16]",
        "bias of fp32": "bias and a result in fp32: fp8 GEMMs add none there; use bf16, or add it after",
        "result scale": "result_scale is not supported: pass None, and scale B_scale, or the result",
        "no out": "out_dtype=None: use one of torch.bfloat16, torch.float16, torch.float32, in which the ranks' products can be",
        "out": "out_dtype=torch.float8_e4m3fn: use one of torch.bfloat16",
        "gradient": "an input wants gradients, and there are none of fp8",
        "reduce_op": 'reduce_op=\'max\': use "sum" or "avg"',
        "fast": "use_fast_accum=1 is an int: pass True or False",
        "last": "orig_scatter_dim=1 must name a dimension of A (24, 32) before the last",
        "other dimension": "scatter_dim_after_maybe_reshape=1: of A (12, 2, 32) orig_scatter_dim=0 is dimension 0",
        "no such dimension": "scatter_dim_after_maybe_reshape=2 must name a dimension of A (24, 32) before the last",
        "columns of shape": "output_shape=(24, 17) does not fit A (24, 32) @ B (32, 16): pass (24, 16), or, with A as (24, 32)",
        "rows of shape": "output_shape=(24, 2, 16) does not fit A (24, 32) @ B (32, 16)",
        "a word for a size": "output_shape[1]='16' is a str: pass a whole number",
        "another shape": "output_shape=(2, 12, 16) does not fit A (12, 2, 32) @ B (32, 16): pass (12, 2, 16), or, with A as",
        "add": "an fp8 GEMM with scales cannot accumulate: use add=reduce",
        "tracked": "its kernel does not support fp8: use direct[...] or scatter",
        "deadline": "deadline_s=0 must be positive",
    }
    for told in pool.run(ranks.errors, ranks=2, timeout_s=60):
        assert told.keys() == {f"{name}, {who}" for name in expected for who in ("all", "one")}
        for name, text in expected.items():
            assert text in told[f"{name}, all"], name
            assert told[f"{name}, one"].startswith("RefusedError: rank 0: "), (name, told[f"{name}, one"])
            assert text in told[f"{name}, one"], name


def test_one_rank_that_differs_is_named_on_every_rank() -> None:
    with Pool(2) as alone:
        for told in alone.run(ranks.one_rank_differs, timeout_s=60):
            for name, text in told.items():
                assert text.startswith("DisagreementError: ranks make different calls"), name
            assert "scaled by row" in told["scales"]
            assert "added up in fp16" in told["out"]
            assert "with a bias" in told["bias"]
            assert "use_fast_accum=True" in told["fast"]


def test_timelines(pool: Pool) -> None:
    for found in pool.run(ranks.spans, "serial", ranks=2):
        assert found == {"scaled_matmul", "reduce_scatter"}
    for found in pool.run(ranks.spans, DIRECT, ranks=2):
        assert {"scaled_matmul", "copy", "reduce"} <= found


def measured(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    options = BenchOptions(
        measuring.name, "64x32x48", variants=("weft", "scatter"), dtype="fp8", quick=True, seconds=0.05
    )
    return run_rank(group.rank(), 2, options)


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
        assert measuring.presets(options) == operator("matmul_reduce_scatter").presets(plain) != ()
    with pytest.raises(
        ValueError, match="dtype='bf16': the operands of scaled_matmul_reduce_scatter are fp8: leave it out"
    ):
        BenchOptions(measuring.name, dtype="bf16")
    with pytest.raises(ValueError, match="N=24 must be a positive multiple of 16"):
        BenchOptions(measuring.name, "64x24x48", dtype="fp8")


def test_it_is_planned() -> None:
    runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})
    arguments = ["plan", "scaled_matmul_reduce_scatter", "--shape", "8192,8192,4096", "--hw", "h200"]
    for more in ([], ["--ranks", "4", "--mode", "graph", "--all"]):
        done = runner.invoke(app, [*arguments, *more])
        assert done.exit_code == 0, done.output
        assert "fp8 scaled by tensor" in " ".join(done.output.split())
    assert "an fp8 GEMM with scales cannot accumulate" in " ".join(done.output.split())
