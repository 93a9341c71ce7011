"""The requirements for every operator of weft, from docs/operators.md, "Adding an operator to weft itself"."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import weft.builders
import weft.ops
from weft.builders import builders_of
from weft.builders.problem import PROBLEMS
from weft.operator import calls
from weft.operator.spec import Operator

ROOT = Path(__file__).parents[2]
for _file in pkgutil.iter_modules(weft.ops.__path__):
    importlib.import_module(f"weft.ops.{_file.name}")
SPECS = {name: one for name, one in calls.OPERATORS.items() if type(one).__module__.startswith("weft.ops.")}
CALLED = sorted(name for name, one in SPECS.items() if one.title == name)
"""Operators that users call; the other operators are parts of these."""
OURS = {name: one for name, one in PROBLEMS.items() if one.__module__.startswith("weft.builders.problems.")}


def test_there_are_operators() -> None:
    assert {"all_gather_matmul", "matmul_all_gather_gradients"} < OURS.keys()
    assert {"all_gather_matmul", "all_gather_scaled_matmul"} < set(CALLED)


def test_the_page_names_what_there_is() -> None:
    page = (ROOT / "docs" / "operators.md").read_text()
    rows = re.findall(
        r"^\| `(\S+)` \| (.+) \| `(\S+)` \|$", page[page.index("## Adding an operator to weft itself") :], re.MULTILINE
    )
    assert len(rows) >= 12
    for file, _, test in rows:
        for name in [one for one in CALLED if one in OURS] if "NAME" in file else [""]:
            assert (ROOT / file.replace("NAME", name)).exists(), file
        path, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / path).read_text(), test


@pytest.mark.parametrize("name", CALLED)
def test_an_operator_is_a_name_of_weft(name: str) -> None:
    assert name in weft.__all__, "without a line in weft/__init__.py"
    assert getattr(weft, name).__module__ == f"weft.ops.{name}"


@pytest.mark.parametrize("name", SPECS)
def test_its_operations_are_counted(name: str) -> None:
    assert type(SPECS[name]).gemms is not Operator.gemms, "without `gemms`"


@pytest.mark.parametrize("name", CALLED)
def test_it_declares_how_each_argument_compares_across_ranks(name: str) -> None:
    """`tests/processes/test_arguments_across_ranks.py` checks that the declarations are true."""
    assert list(SPECS[name].across_ranks) == list(inspect.signature(getattr(weft, name)).parameters)


@pytest.mark.parametrize("name", CALLED)
def test_it_is_described_wherever_users_look(name: str) -> None:
    assert re.search(r"^ *Sources?: ", inspect.getdoc(getattr(weft, name)) or "", re.MULTILINE), "its docstring"
    readme = (ROOT / "README.md").read_text()
    assert re.search(rf"^\|.*`{name}`", readme[readme.index("## What works where") :], re.MULTILINE), "README.md"
    assert f"`weft.{name}`" in (ROOT / "CHANGELOG.md").read_text(), "CHANGELOG.md"
    pages = [
        path for path in (ROOT / "docs").glob("*.md") if path.name not in ("api.md", "architecture.md", "results.md")
    ]
    assert any(f"weft.{name}" in path.read_text() for path in pages), "a page in docs"


@pytest.mark.parametrize("name", OURS)
def test_a_problem_is_a_name_of_the_package(name: str) -> None:
    assert getattr(weft.builders, OURS[name].__name__, None) is OURS[name], (
        "without a line in weft/builders/__init__.py"
    )
    assert OURS[name].__name__ in weft.builders.__all__


@pytest.mark.parametrize("name", OURS)
def test_a_problem_says_where_its_builders_are(name: str) -> None:
    """The docstring must have a sentence "Builders: `weft.builders.FILE`, ..." with exactly the files of its builders."""
    said = re.search(r"Builders: ((?:`[\w.]+`(?:,\s+|\s+and\s+)?)+)\.", OURS[name].__doc__ or "")
    modules = {function.__module__ for _, function in builders_of(OURS[name])}
    files = {one for one in modules if one.startswith("weft.")}  # other tests register builders too
    assert "serial" in dict(builders_of(OURS[name]))
    assert said is not None, f"its docstring must say: Builders: {', '.join(f'`{file}`' for file in sorted(files))}."
    assert set(re.findall(r"`([\w.]+)`", said[1])) == files
