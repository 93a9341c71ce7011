"""Gradients of every operator against finite differences, in float64 on two CPU processes."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from support import gradcheck_ranks as ranks
from support.slow import mostly, pairs, slow

import weft.ops
from weft.launch import Pool
from weft.operator.calls import OPERATORS

SCHEDULES = {
    "all_gather_matmul": ["shard[chunks=1,send=in_turn,by=dma]"],
    "matmul_reduce_scatter": ["direct[chunks=1,by=dma,add=gemm]", "direct[chunks=1,by=kernel,add=reduce]"],
    "matmul_all_reduce": ["one_shot[by=load]", "two_shot[chunks=1,by=dma,add=reduce]"],
    "matmul_all_gather": ["direct[chunks=1,by=kernel]"],
    "all_to_all_matmul": ["dispatch[by=dma,rest=each]"],
    "matmul_all_to_all": ["combine[chunks=1,by=store]"],
}


def test_every_operator_with_gradients_is_here() -> None:
    for file in pkgutil.iter_modules(weft.ops.__path__):
        importlib.import_module(f"weft.ops.{file.name}")
    ours = {name: op for name, op in OPERATORS.items() if type(op).__module__.startswith("weft.ops.")}
    differentiable = {name for name, op in ours.items() if op.gradients_of}
    # Tables are never fp64: tests/processes/test_embedding_backward.py compares their gradients with torch's.
    assert differentiable == {*SCHEDULES, "embedding_all_to_all"}


# The suite of all operators compares their gradients with float64 too.
CHECKED = pairs(SCHEDULES, ["serial"], *((one, "serial") for one in ("matmul_all_reduce", "matmul_all_to_all")))
OTHERS = [slow(operator, one) for operator in SCHEDULES for one in SCHEDULES[operator]]


@pytest.mark.parametrize(("name", "schedule"), [*CHECKED, *OTHERS, slow("all_gather_matmul_gradients", "serial")])
def test_gradients_are_what_differences_say(pool: Pool, name: str, schedule: str) -> None:
    assert pool.run(ranks.checked, name, schedule, False, ranks=2, timeout_s=120) == ["", ""]


@pytest.mark.parametrize("name", mostly(SCHEDULES, "matmul_reduce_scatter", "matmul_all_to_all"))
def test_gradients_that_are_twice_as_large_are_noticed(pool: Pool, name: str) -> None:
    for told in pool.run(ranks.checked, name, "serial", True, ranks=2, timeout_s=120):
        assert "Jacobian mismatch" in told


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_adds_up_in_float64(pool: Pool, name: str) -> None:
    for count, wrong in pool.run(ranks.every_schedule, name, ranks=2, timeout_s=120):
        assert wrong == []
        assert count >= 5
