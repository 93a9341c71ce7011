"""Schedules of GEMM + all-gather: tiles and plans. `test_schedule_gemms.py` runs them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sim_toys import gpu

from weft import plan
from weft.builders import MatmulAllGather, NotApplicableError, named
from weft.schedule import Compute, Set, Tiles


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
