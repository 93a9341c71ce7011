"""What every operator of the house has, so that a new one misses nothing: docs/operators.md, "An operator of the house"."""

from __future__ import annotations

import re

import pytest

import weft.schedule
from weft.schedule import builders_of
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


@pytest.mark.parametrize("name", OURS)
def test_a_problem_says_where_its_builders_are(name: str) -> None:
    """Its docstring has a sentence "Builders: `weft.schedule.FILE`, ...", which names their files and no others."""
    said = re.search(r"Builders: ((?:`[\w.]+`(?:,\s+|\s+and\s+)?)+)\.", OURS[name].__doc__ or "")
    modules = {function.__module__ for _, function in builders_of(OURS[name])}
    files = {one for one in modules if one.startswith("weft.")}  # tests add theirs
    assert "serial" in dict(builders_of(OURS[name]))
    assert said is not None, f"its docstring must say: Builders: {', '.join(f'`{file}`' for file in sorted(files))}."
    assert set(re.findall(r"`([\w.]+)`", said[1])) == files
