"""Every operator on CPU processes: results by every schedule, gradients, torch.compile, layouts, bad arguments, ranks that differ
or do not come, timelines.

`support/operators/cases.py` has a row for each. What one operator does alone has a file of its own.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from support.operators import suite
from support.operators.call import Case
from support.operators.cases import ROWS

import weft
import weft.ops
from weft.launch import Pool
from weft.operator.calls import OPERATORS


def each(*fields: str, names: str) -> Any:
    """Return all operators with each entry of a field of theirs, or with each pair of entries of two, marked as the entries are."""
    found = []
    for operator, row in ROWS.items():
        for entries in product(*(enumerate(getattr(row, field)) for field in fields)):
            values, marks, labels = list[Any](), list[Any](), [operator]
            for number, entry in entries:
                given = entry.values if hasattr(entry, "marks") else entry if isinstance(entry, tuple) else (entry,)
                values += given
                marks += getattr(entry, "marks", ())
                plain = all(isinstance(value, int | str) for value in given)
                labels.append("-".join(map(str, given)) if plain else str(number))
            found.append(pytest.param(operator, *values, marks=marks, id="-".join(labels)))
    return pytest.mark.parametrize(("operator", *names.split()), found)


def test_every_operator_has_a_row() -> None:
    for file in pkgutil.iter_modules(weft.ops.__path__):
        importlib.import_module(f"weft.ops.{file.name}")
    assert set(ROWS) == {name for name in weft.__all__ if name in OPERATORS}


def on(world: int, case: Case) -> Case:
    """Return the case with its schedule, or without if there is one rank, for which there are none."""
    return case if world > 1 or case.schedule == "serial" else replace(case, schedule=None)


# Worlds change last: each change makes a new group.
RESULTS = [
    (world, name, case)
    for world in range(1, 9)
    for name in ROWS
    if world in ROWS[name].worlds
    for case in ROWS[name].results
]


@pytest.mark.parametrize(("world", "operator", "name"), RESULTS)
def test_results(pool: Pool, world: int, operator: str, name: str) -> None:
    row = ROWS[operator]
    pool.run(suite.results, operator, on(world, row.results[name]), row.calls, ranks=world, timeout_s=60)


@each("more", names="world case")
def test_results_on_other_numbers_of_ranks(pool: Pool, operator: str, world: int, case: Case) -> None:
    pool.run(suite.results, operator, case, 4, ranks=world, timeout_s=60)


@pytest.mark.parametrize("operator", ROWS)
def test_many_calls_in_a_row(pool: Pool, operator: str) -> None:
    pool.run(suite.results, operator, ROWS[operator].small, 50, ranks=2, timeout_s=60)


@each("every", names="world case builders")
def test_every_schedule(pool: Pool, operator: str, world: int, case: Case, builders: set[str]) -> None:
    """Results repeat to the bit; if all ranks get them, they are the same bits on all."""
    (names, *_) = pool.run(suite.every_schedule, operator, case, 0.02, ranks=world, timeout_s=200)
    assert {name.split("[")[0] for name in names} == builders


GRADIENTS = [name for name in ROWS if ROWS[name].gradients]


@each("gradients", "worlds_of_gradients", names="case wanted world compiled")
def test_gradients(pool: Pool, operator: str, world: int, case: Case, wanted: tuple[bool, ...], compiled: bool) -> None:
    row = ROWS[operator]
    block = None if world == 1 or compiled else row.block
    given = operator, on(world, case), wanted, compiled, block, row.seeds[:2] if compiled else row.seeds
    pool.run(suite.gradients, *given, ranks=world, timeout_s=120)


@each("many", names="case")
def test_many_sizes_in_a_row(pool: Pool, operator: str, case: Case) -> None:
    pool.run(suite.many_sizes, operator, case, ranks=2, timeout_s=60)


@each("layouts", names="case")
def test_operands_may_lie_otherwise_on_each_rank_and_in_each_call(operator: str, case: Case) -> None:
    with Pool(2) as fresh:  # which has not warned of these strides
        first, second = fresh.run(suite.layouts, operator, case, timeout_s=60)
    for operand in suite.CALLS[operator].operands:
        assert sum(f"{operand} is copied at every call" in text for text in first) == 1
    assert not second


@each("compiled", names="name")
def test_compiled(pool: Pool, operator: str, name: str) -> None:
    pool.run(suite.compiled, operator, ROWS[operator].results[name], ranks=2, timeout_s=120)


@pytest.mark.parametrize("operator", ROWS)
def test_what_cannot_be_is_refused_on_every_rank_with_the_fix(pool: Pool, operator: str) -> None:
    pool.run(suite.refused, operator, ROWS[operator].small, ranks=2, timeout_s=60)


@pytest.mark.parametrize("operator", ROWS)
def test_one_rank_that_differs_is_named_on_every_rank(operator: str) -> None:
    with Pool(2) as alone:
        alone.run(suite.one_rank_differs, operator, ROWS[operator].small, timeout_s=60)


@each("late", names="case")
def test_a_rank_that_does_not_come(operator: str, case: Case) -> None:
    with Pool(2) as alone:
        told, _ = alone.run(suite.never_comes, operator, case, False, timeout_s=60)
    assert told.startswith("DeadlineError: rank 0 waited 1 s for ")
    assert operator in told


@pytest.mark.parametrize("operator", GRADIENTS)
def test_backward_waits_as_long_as_the_call_says(operator: str) -> None:
    with Pool(2) as alone:
        told, _ = alone.run(
            suite.never_comes, operator, replace(ROWS[operator].late[0], schedule=None), True, timeout_s=60
        )
    assert told.startswith("DeadlineError: rank 0 waited 1 s")


@each("steps", names="case names")
def test_timelines(pool: Pool, operator: str, case: Case, names: set[str]) -> None:
    for found in pool.run(suite.steps, operator, case, ranks=2):
        assert all(any(step.startswith(name) for step in found) for name in names), found
        assert case.schedule != "serial" or all(step.startswith(tuple(names)) for step in found)


@pytest.mark.parametrize("operator", ROWS)
def test_opcheck(pool: Pool, operator: str) -> None:
    pool.run(suite.opcheck, operator, ROWS[operator].opcheck, ranks=1, timeout_s=120)
