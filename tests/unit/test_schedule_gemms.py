"""Every registered builder of an operator with a GEMM: its schedule verifies, survives JSON, can be issued from one thread,
and runs on GPUs. In random legal orders, over several runs, it computes the results (`schedule_cases.py`).

Planted faults, such as a rank that refills a buffer too early, show that random orders find races.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import BY_TENSOR, CASES, JOIN, REDUCE, SCALED_GATHER, SCALED_SCATTER, SCATTER
from schedule_checks import assert_noticed, builders, check_candidate, check_candidates, check_rows_in_one_plan
from support.sim_toys import applicable
from support.slow import slow

from weft.builders import (
    MatmulAllGather,
    MatmulAllGatherGradients,
    MatmulAllReduce,
    MatmulReduceScatter,
    Problem,
    named,
)
from weft.plan.gemms import ladder
from weft.schedule.verify import verify

SMALL = [name for name, case in CASES.items() if case.small]


@pytest.mark.parametrize(
    ("name", "p"),
    [(name, p) if p in case.usual else slow(name, p) for name, case in CASES.items() for p in case.problems],
    ids=str,
)
def test_every_candidate_verifies_and_computes(name: str, p: Problem) -> None:
    check_candidates(p, CASES[name].of_run, CASES[name].overlapping(p))


@pytest.mark.parametrize(
    "p",
    [
        slow(MatmulAllReduce(5, 750, 20, 4, "bf16")), slow(MatmulAllReduce(8, 239, 20, 4, "bf16")),
        MatmulReduceScatter(4, 600, 20, 4, "bf16"), slow(MatmulReduceScatter(8, 1200, 20, 4, "bf16")),
        MatmulAllGather(5, 1030, 300, 4, "bf16"), slow(MatmulAllGather(8, 1030, 300, 4, "bf16", True)),
    ],
    ids=str,
)  # fmt: skip
def test_every_candidate_verifies_on_more_ranks(p: Problem) -> None:
    found = applicable(p)
    assert builders(found) == {"serial"} | CASES[p.name].overlapping(p)
    for schedule in found.values():
        verify(schedule)


def any_small_shape(name: str, data: st.DataObject) -> None:
    case = CASES[name]
    assert case.small is not None
    p = case.small(lambda most: data.draw(st.integers(0, most)), lambda: data.draw(st.booleans()))
    candidate, schedule = data.draw(st.sampled_from(sorted(applicable(p).items(), key=lambda one: one[0])))
    check_candidate(p, candidate, schedule, case.of_run, runs=2)


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=25)
@given(data=st.data())
def test_some_small_shapes(name: str, data: st.DataObject) -> None:
    any_small_shape(name, data)


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data())
def test_any_small_shape(data: st.DataObject) -> None:
    any_small_shape("all_gather_matmul", data)


@pytest.mark.parametrize(
    ("p", "candidate"),
    [
        (CASES["all_gather_matmul"].problems[1], "shard[chunks=1,send=in_turn,by=dma]"),
        (MatmulAllReduce(3, 18, 2, 3, "fp32"), "one_shot[by=dma]"),
        (MatmulAllReduce(3, 18, 2, 3, "fp32"), "one_shot[by=load]"),
        (MatmulReduceScatter(3, 18, 2, 3, "fp32"), "direct[chunks=1,by=dma,add=gemm]"),
        (MatmulReduceScatter(3, 18, 2, 3, "fp32"), "tracked[chunks=1,to=dma]"),
        (MatmulReduceScatter(3, 18, 2, 3, "fp32"), "ring[chunks=2,by=dma]"),
        (MatmulReduceScatter(3, 18, 2, 3, "fp32"), "pulled[chunks=1,by=gemm]"),
        (MatmulAllGather(3, 18, 2, 3, "fp32"), "direct[chunks=2,by=dma]"),
        (MatmulAllGather(3, 18, 2, 3, "fp32"), "tracked[chunks=1]"),
    ],
    ids=str,
)
def test_who_fills_a_slot_again_too_early_is_noticed(p: Problem, candidate: str) -> None:
    assert_noticed(p, named(p, candidate).build(), CASES[p.name].of_run)


ODD = {"n": -1}, "n=-1, k=4, world_size=2: sizes must be at least 0"
UNEVEN = {"m": 15}, "m=15 must be divisible by world_size=2: use 14 or 16"
UNSUMMED = {"dtype": "fp8"}, "dtype='fp8' cannot be reduced: use one of fp32, bf16, fp16, fp64"
INDICES = {"dtype": "int64"}, "dtype='int64'"
OUT = "use bf16, fp16 or fp32, or, if there is one scale per tensor, fp8"


@pytest.mark.parametrize(
    ("p", "change", "fault"),
    [
        (REDUCE[1], *ODD), (REDUCE[1], *UNSUMMED), (REDUCE[1], *INDICES),
        (REDUCE[1], {"m": True}, "m=True is a bool: pass a size, an integer"),
        (REDUCE[1], {"eps": -1.0}, "eps=-1.0 must be a finite number of at least 0"),
        (REDUCE[1], {"eps": float("nan")}, "eps=nan must be"),
        (REDUCE[1], {"eps": float("inf")}, "eps=inf must be a finite number of at least 0"),
        (SCATTER[1], *UNEVEN), (SCATTER[1], *ODD), (SCATTER[1], *UNSUMMED), (SCATTER[1], *INDICES),
        (JOIN[2], *ODD), (JOIN[2], *INDICES),
        (JOIN[2], {"dtype": "fp8"}, "dtype='fp8' cannot be multiplied here: use one of fp32, bf16, fp16, fp64"),
        (SCALED_SCATTER[1], *UNEVEN),
        (SCALED_SCATTER[1], {"n": 24}, "N=24 must be a positive multiple of 16 for fp8 GEMMs: use 16 or 32"),
        (SCALED_SCATTER[1], {"k": 0}, "K=0 must be a positive multiple of 16 for fp8 GEMMs: use 16"),
        (SCALED_SCATTER[1], {"dtype": "fp8"}, "dtype='fp8' cannot be reduced: use one of fp32, bf16, fp16"),
        (SCALED_SCATTER[1], {"dtype": "fp64"}, "dtype='fp64' is not supported: results of scaled GEMMs are bf16, fp16 or fp32"),
        (SCALED_GATHER[3], {"dtype": "bf16"}, "dtype='bf16': scaled GEMMs need fp8 operands"),
        (SCALED_GATHER[3], {"k": 24}, "K=24 must be a positive multiple of 16 for fp8 GEMMs: use 16 or 32"),
        (SCALED_GATHER[3], {"n": (8,)}, "N of Bs[0]=8 must be a positive multiple of 16 for fp8 GEMMs: use 16"),
        (SCALED_GATHER[3], {"n": (16, 16)}, "one entry for each of the 2 weights (n=(16, 16))"),
        (SCALED_GATHER[3], {"scaled": replace(BY_TENSOR, out=("int32",))}, OUT),
        (SCALED_GATHER[3], {"scaled": replace(BY_TENSOR, by="row", out=("fp8",))}, OUT),
    ],
)  # fmt: skip
def test_what_cannot_be(p: Any, change: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        replace(p, **change)


@pytest.mark.parametrize(
    ("p", "rows", "other", "running"),
    [
        (MatmulAllReduce(2, 8192, 4096, 2048, "bf16"), (8191, 8400, 7801), {"n": 8}, 4),
        (MatmulReduceScatter(2, 8192, 4096, 2048, "bf16"), (8190, 8400, 7800), {"n": 8}, 4),
        (MatmulAllGather(2, 4096, 4096, 2048, "bf16"), (4095, 4200, 3900), {"columns": True}, 4),
        (MatmulAllGatherGradients(2, 4096, 4096, 2048, "bf16"), (4095, 4200, 3900), {"columns": True}, 3),
    ],
    ids=str,
)
def test_a_new_number_of_rows_is_no_new_plan(
    p: Any, rows: tuple[int, ...], other: dict[str, Any], running: int
) -> None:
    check_rows_in_one_plan(p, rows, replace(p, **other), running)
    if not isinstance(p, MatmulAllGatherGradients):
        assert ladder(p)[:2] == ((p.m, 4096, 2048, "bf16"), (p.m // 2, 4096, 2048, "bf16"))
