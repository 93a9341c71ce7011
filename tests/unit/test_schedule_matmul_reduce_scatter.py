"""Schedules of GEMM + reduce-scatter: tiles, scaled GEMMs and plans. `test_schedule_gemms.py` runs them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import SCALED_SCATTER
from support.sim_toys import applicable, gpu

from weft import plan
from weft.builders import (
    MatmulReduceScatter,
    NotApplicableError,
    OutputMap,
    ScaledMatmulReduceScatter,
    candidates,
    described,
    named,
)
from weft.operator import select
from weft.operator.gpu_gemms import GemmTimer
from weft.plan.gemms import ladder
from weft.schedule import Compute, Set, Tiles
from weft.schedule.kernels import TrackedMatmul
from weft.sim import simulate


@pytest.mark.parametrize("p", SCALED_SCATTER, ids=str)
def test_scaled_gemms_have_the_schedules_in_which_none_adds(p: ScaledMatmulReduceScatter) -> None:
    found = applicable(p)
    ways = {f"direct[chunks={n},by={by},add=reduce]" for n in (1, 2, 4) for by in ("dma", "kernel", "store")}
    assert found.keys() == {"serial"} | (ways | {"scatter"} if p.world_size > 1 else set())
    if p.world_size > 1:
        assert sum(p.worth_running(named(p, name)) for name in found) == 4
        with pytest.raises(NotApplicableError, match="output maps do not support scaled"):
            OutputMap(rows=p.m, chunks=2).schedule(p)
    if p.world_size > 2:
        with pytest.raises(NotApplicableError, match="an fp8 GEMM with scales cannot accumulate"):
            named(p, "ring[chunks=2,by=dma]").build()
        for by in ("gemm", "tracked"):
            with pytest.raises(NotApplicableError, match="an fp8 GEMM with scales cannot accumulate"):
                named(p, f"pulled[chunks=1,by={by}]").build()


@pytest.mark.parametrize("by", ["tensor", "row"])
def test_scaled_products_travel_and_are_priced_as_they_are(by: str) -> None:
    """Operands have half the bytes, GEMMs have the fp8 rate, and ranks exchange as many bytes as without scales."""
    plain, model = MatmulReduceScatter(2, 16384, 8192, 4096, "bf16"), gpu("h200", 2)
    p = ScaledMatmulReduceScatter(2, 16384, 8192, 4096, "bf16", by, False, False)  # type: ignore[arg-type]
    assert p.family[0] == replace(p, m=2)
    assert p.resized(p.family[1]) == p
    assert ladder(p)[:2] == ((16384, 8192, 4096, "fp8"), (8192, 8192, 4096, "fp8"))
    for name in ("serial", "scatter", "direct[chunks=2,by=dma,add=reduce]"):
        ran, usual = (simulate(named(one, name).build(), model) for one in (p, plain))
        assert ran.end_us < usual.end_us
        assert sum(s.bytes for s in ran.timeline) == sum(s.bytes for s in usual.timeline) > 0


@settings(max_examples=40)
@given(rows=st.integers(1, 5000), n=st.integers(1, 2000), chunks=st.sampled_from([1, 2, 4]), rank=st.integers(0, 1))
def test_tiles_are_each_row_and_column_once_chunk_by_chunk(rows: int, n: int, chunks: int, rank: int) -> None:
    p = MatmulReduceScatter(2, 2 * rows, n, 8, "bf16")
    try:
        schedule = named(p, f"tracked[chunks={chunks},to=dma]").build()
    except NotApplicableError:
        assert rows <= 128 * (chunks - 1)
        return
    (step,) = (s for lane in schedule.of_rank(rank) for s in lane.steps if isinstance(s, Tiles))
    kernel = step.kernel
    assert isinstance(kernel, TrackedMatmul)
    done, order = np.zeros((2 * rows, n), int), []
    for number in range(step.extent):
        matmul, told = step.tile(number)
        assert isinstance(matmul, Compute)
        assert isinstance(told, Set)
        x, w = matmul.inputs
        assert 1 <= x.rows <= kernel.rows
        assert 1 <= w.cols <= kernel.cols
        assert matmul.out.row == (x.row + (1 + rank) * rows) % (
            2 * rows
        )  # in the order of computation: the other rank's rows first
        done[x.row : x.row + x.rows, w.col : w.col + w.cols] += 1
        order.append(told.index)
    assert (done == 1).all()
    assert order == sorted(order)
    assert len(set(order)) == 2 * chunks


def test_plans_take_the_dtype_of_a_scaled_result() -> None:
    for said, dtype in {"fp8": "bf16", "bf16": "bf16", "fp32": "fp32"}.items():
        p = described("scaled_matmul_reduce_scatter", m=64, n=32, k=16, ranks=2, dtype=said)
        assert p == ScaledMatmulReduceScatter(2, 64, 32, 16, dtype, "tensor", False, False)


def test_it_is_planned_by_the_model_and_explained() -> None:
    """Overlap is much faster if GEMM and reduce-scatter take equally long. Schedules that sum in 16 bits are allowed,
    because NCCL's sums are in 16 bits too.
    """
    text = plan.explain("matmul_reduce_scatter", M=8192, N=8192, K=4096, ranks=2, hw="h200")
    assert "less than serial's" in text
    assert "errs more" not in text
    choice = plan.choose(MatmulReduceScatter(2, 16384, 16384, 2048, "bf16"), gpu("h200", 2))
    assert choice.predicted_us < 0.75 * choice.row("serial").predicted_us  # type: ignore[operator]
    with pytest.raises(ValueError, match="m=8191 must be divisible"):
        plan.explain("matmul_reduce_scatter", M=8191, N=8192, K=4096, ranks=2, hw="h200")


def test_its_gemms_are_timed_in_memory_of_their_own() -> None:
    """The result has fewer rows than the GEMMs, and the caller's operands must not change."""
    p = MatmulReduceScatter(2, 64, 8, 16, "fp32")
    tensors = {"x": torch.ones(64, 16), "w": torch.ones(16, 8), "y": torch.ones(32, 8)}
    timer = GemmTimer(p, tensors)
    for m, n, k, _ in ladder(p):
        out = timer.results["w"][:m, :n]
        timer._gemm("w", timer.x[: m * k].view(m, k), tensors["w"], out)()
        torch.testing.assert_close(out, timer.x[: m * k].view(m, k) @ tensors["w"])
    assert all(torch.equal(t, torch.ones_like(t)) for t in tensors.values())


def test_no_sum_is_pulled_unasked() -> None:
    """`pulled` is used only if it is pinned, because the cost of reading sums from peers has not been measured."""
    model = gpu("h200", 2)
    for p in (MatmulReduceScatter(2, 8192, 4096, 4096, "bf16"), MatmulReduceScatter(2, 512, 4096, 4096, "bf16")):
        assert not any(p.takes(one) or p.worth_running(one) for one in candidates(p, ("pulled",)))
        rows = {row.candidate.name for row in plan.choose(p, model).rows}
        assert {name.split("[")[0] for name in rows} == {"serial", "scatter", "direct", "tracked", "ring"}


@pytest.mark.parametrize("by", ["gemm", "tracked"])
@pytest.mark.parametrize("world", [2, 4])
def test_pulled_sums_cross_as_often_as_the_librarys_and_are_read_only(world: int, by: str) -> None:
    p = MatmulReduceScatter(world, 4096 * world, 4096, 2048, "bf16")
    ran, serial = (
        simulate(named(p, name).build(), gpu("h200", world)) for name in (f"pulled[chunks=2,by={by}]", "serial")
    )
    assert sum(s.bytes for s in ran.timeline) == sum(s.bytes for s in serial.timeline) > 0
    for rank in range(world):
        left = (rank - 1) % world
        steps = [s for lane in named(p, f"pulled[chunks=2,by={by}]").build().of_rank(rank) for s in lane.steps]
        regions = [
            (access.writes, access.region.at)
            for step in steps
            for inner in (step.tile(0) if isinstance(step, Tiles) else (step,))
            for access in inner.accesses()
        ]
        assert {at for writes, at in regions if writes} == {rank}
        assert {at for writes, at in regions if not writes} == {rank, left}


def test_gpus_take_the_librarys_way_where_the_others_have_not_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    comm: Any = SimpleNamespace(device=torch.device("cuda"), all_mapped=True)
    p = MatmulReduceScatter(2, 8192, 4096, 4096, "bf16")
    monkeypatch.setattr(MatmulReduceScatter, "tried_on_gpus", False)
    chosen = select.choose(p, comm, {}, None, deadline_s=None)
    assert chosen.names == ("serial", "serial")
    assert chosen.usual is None
