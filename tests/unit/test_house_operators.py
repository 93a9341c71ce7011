"""What every operator of the house has, so that a new one misses nothing: docs/operators.md, "An operator of the house"."""

from __future__ import annotations

import pytest

import weft.schedule
from weft.schedule.problem import PROBLEMS

OURS = {name: one for name, one in PROBLEMS.items() if one.__module__.startswith("weft.schedule.problems.")}


def test_there_are_operators() -> None:
    assert {"all_gather_matmul", "matmul_all_gather_gradients"} < OURS.keys()


@pytest.mark.parametrize("name", OURS)
def test_a_problem_is_a_name_of_the_package(name: str) -> None:
    assert getattr(weft.schedule, OURS[name].__name__, None) is OURS[name], (
        "without a line in weft/schedule/__init__.py"
    )
    assert OURS[name].__name__ in weft.schedule.__all__
