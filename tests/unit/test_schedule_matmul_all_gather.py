"""Every registered builder of GEMM + all-gather: its schedule verifies, survives JSON, can be issued from one thread,
and runs on GPUs. In random legal orders, over several runs, it gathers the products.

Inputs are small whole numbers, so results are compared for equality.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import Small, assert_noticed, check_candidate, check_candidates, check_rows_in_one_plan
from schedule_interpreter import Tensors
from support.sim_toys import applicable, gpu
from support.slow import mostly, slow

from weft import plan
from weft.builders import MatmulAllGather, NotApplicableError, named
from weft.plan.gemms import ladder
from weft.schedule import Compute, Set, Tiles
from weft.schedule.verify import verify

SIZES = ((1, 5, 3, 4, "fp32"), (2, 14, 3, 4, "bf16"), (2, 601, 270, 2, "fp16"), (3, 1, 2, 3, "bf16"), (4, 5, 17, 3, "fp32"),
         (8, 15, 3, 2, "bf16"))  # fmt: skip
PROBLEMS = tuple(MatmulAllGather(*sizes, columns) for sizes in SIZES for columns in (False, True))


def of_run(p: MatmulAllGather, small: Small) -> tuple[list[Tensors], list[Tensors]]:
    inputs = [{"x": small(p.m, p.k), "w": small(p.k, p.n)} for _ in range(p.world_size)]
    whole = np.concatenate([t["x"] @ t["w"] for t in inputs], axis=int(p.columns))
    return inputs, [{"y": whole} for _ in inputs]


@pytest.mark.parametrize("p", mostly(PROBLEMS, *PROBLEMS[:8]), ids=str)
def test_every_candidate_verifies_and_gathers_the_products(p: MatmulAllGather) -> None:
    check_candidates(p, of_run, {"direct", "tracked"})


@pytest.mark.parametrize("world", [5, slow(8)])
def test_every_candidate_verifies_on_more_ranks(world: int) -> None:
    for columns in (False, True):
        found = applicable(MatmulAllGather(world, 1030, 300, 4, "bf16", columns))
        assert len(found) == 1 + 8 + 4
        for schedule in found.values():
            verify(schedule)


@settings(max_examples=25)
@given(data=st.data())
def test_some_small_shapes(data: st.DataObject) -> None:
    world, m = data.draw(st.integers(1, 5), label="world_size"), data.draw(st.integers(0, 40), label="m")
    n, k = data.draw(st.integers(0, 40), label="n"), data.draw(st.integers(0, 3), label="k")
    p = MatmulAllGather(world, m, n, k, "fp32", data.draw(st.booleans(), label="columns"))
    name, schedule = data.draw(st.sampled_from(list(applicable(p).items())), label="candidate")
    check_candidate(p, name, schedule, of_run, runs=2)


@pytest.mark.parametrize("name", ["direct[chunks=2,by=dma]", "tracked[chunks=1]"])
def test_who_computes_again_too_early_is_noticed(name: str) -> None:
    p = MatmulAllGather(3, 18, 2, 3, "fp32")
    assert_noticed(p, named(p, name).build(), of_run)


@settings(max_examples=40)
@given(m=st.integers(1, 5000), n=st.integers(1, 2000), chunks=st.sampled_from([1, 2, 4, 8]), rank=st.integers(0, 2))
def test_tiles_are_each_row_and_column_once_and_tell_everybody(m: int, n: int, chunks: int, rank: int) -> None:
    try:
        schedule = named(MatmulAllGather(3, m, n, 8, "bf16"), f"tracked[chunks={chunks}]").build()
    except NotApplicableError:
        assert m <= 128 * (chunks - 1)
        return
    (step,) = (s for lane in schedule.of_rank(rank) for s in lane.steps if isinstance(s, Tiles))
    done, rows_of = np.zeros((m, n), int), dict[int, set[int]]()
    for number in range(step.extent):
        matmul, *told = step.tile(number)
        assert isinstance(matmul, Compute)
        x, w = matmul.inputs
        assert (matmul.out.row, matmul.out.col, matmul.out.at) == (x.row, w.col, rank)
        done[x.row : x.row + x.rows, w.col : w.col + w.cols] += 1
        assert [one.at for one in told if isinstance(one, Set)] == [(rank + 1) % 3, (rank + 2) % 3, rank]
        assert {one.index - i * chunks for i, one in enumerate(told)} == {told[0].index}
        rows_of.setdefault(told[0].index, set()).add(x.row)
    assert (done == 1).all()
    assert list(rows_of) == list(range(chunks))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"n": -1}, "m=14, n=-1, k=4, world_size=2: sizes must be whole numbers of at least 0"),
        ({"dtype": "fp8"}, "dtype='fp8' cannot be multiplied here: use one of fp32, bf16, fp16, fp64"),
        ({"dtype": "int64"}, "dtype='int64'"),
    ],
)
def test_what_cannot_be(change: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        replace(PROBLEMS[2], **change)  # type: ignore[arg-type]


def test_it_is_planned_by_the_model_and_explained() -> None:
    """Overlap hides most of the shorter of GEMM and all-gather. With concatenated columns, NCCL needs an additional
    copy.
    """
    found = {}
    for dim in (0, -1):
        text = plan.explain("matmul_all_gather", M=8192, N=8192, K=8192, ranks=2, hw="h200", gather_dim=dim)
        assert "less than serial's" in text
        p = MatmulAllGather(4, 8192, 8192, 8192, "bf16", dim == -1)
        found[dim] = plan.choose(p, gpu("h200", 4))
        assert found[dim].predicted_us < 0.8 * found[dim].row("serial").predicted_us  # type: ignore[operator]
    assert found[-1].row("serial").predicted_us > 1.05 * found[0].row("serial").predicted_us  # type: ignore[operator]
    assert found[-1].predicted_us < 1.02 * found[0].predicted_us
    with pytest.raises(
        ValueError, match=("gather_dim=1 is not supported: use 0 to concatenate rows, or -1 to concatenate columns")
    ):
        plan.explain("matmul_all_gather", M=8, N=8, K=8, ranks=2, hw="h200", gather_dim=1)
    with pytest.raises(ValueError, match=r"gather_dim=-1: matmul_all_reduce has no such option \(matmul_all_gather"):
        plan.explain("matmul_all_reduce", M=8, N=8, K=8, ranks=2, hw="h200", gather_dim=-1)


def test_a_new_number_of_rows_is_no_new_plan() -> None:
    p = MatmulAllGather(2, 4096, 4096, 2048, "bf16")
    check_rows_in_one_plan(p, (4095, 4200, 3900), replace(p, columns=True), 4)
    assert ladder(p)[:2] == ((4096, 4096, 2048, "bf16"), (2048, 4096, 2048, "bf16"))
