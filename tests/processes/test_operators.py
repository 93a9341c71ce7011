"""Every operator on CPU processes: results with every schedule, gradients, torch.compile, layouts, bad arguments, ranks
that make different calls or do not arrive, timelines.

`support/operators/cases.py` has a row for each operator. Tests of a single operator have a file of their own.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
from support.operators import suite
from support.operators.call import Case
from support.operators.cases import ROWS
from support.operators.row import values_of
from support.slow import mostly, slow

import weft
import weft.ops
from weft.launch import Pool
from weft.operator.calls import OPERATORS


def each(field: str, names: str) -> Any:
    """Return (operator, entry) for each entry of the field `field` of each operator's row. Marks of entries are kept."""
    found = []
    for operator, row in ROWS.items():
        for number, entry in enumerate(getattr(row, field)):
            label = entry if isinstance(entry, str) else number
            marks = getattr(entry, "marks", ())
            found.append(pytest.param(operator, *values_of(entry), marks=marks, id=f"{operator}-{label}"))
    return pytest.mark.parametrize(("operator", *names.split()), found)


def test_every_operator_has_a_row() -> None:
    for file in pkgutil.iter_modules(weft.ops.__path__):
        importlib.import_module(f"weft.ops.{file.name}")
    own_kernels = {"embedding_all_to_all"}  # whose tests are `test_embedding_*`
    assert set(ROWS) == {name for name in weft.__all__ if name in OPERATORS} - own_kernels


def on(world: int, case: Case) -> Case:
    """Return the case; on one rank without its schedule, because no overlapping schedule supports a single rank."""
    return case if world > 1 or case.schedule == "serial" else replace(case, schedule=None)


# The number of ranks changes last, because each change makes a new group. Each case runs on the largest number of
# ranks. It also runs on one rank or, in `make test-slow`, on other numbers.
RESULTS = [
    (world, operator, name) if world in (1, max(row.worlds)) else slow(world, operator, name)
    for world in range(1, 9)
    for operator, row in ROWS.items()
    if world in row.worlds
    for number, name in enumerate(row.results)
    if world == max(row.worlds) or (world == 1) == (number % 2 == 0)
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


EVERY = [
    pytest.param(
        operator, *values_of(entry), whole, marks=pytest.mark.slow if whole else (), id=f"{operator}-{number}-{whole}"
    )
    for operator, row in ROWS.items()
    for number, entry in enumerate(row.every)
    for whole in (False, True)
    if whole or not hasattr(entry, "marks")
]


@pytest.mark.parametrize(("operator", "world", "case", "builders", "whole"), EVERY)
def test_every_schedule(pool: Pool, operator: str, world: int, case: Case, builders: set[str], whole: bool) -> None:
    """Repeated calls give the same bits. Results that all ranks get have the same bits on all ranks."""
    (names, *_) = pool.run(suite.every_schedule, operator, case, 0.02, whole, ranks=world, timeout_s=200)
    assert {name.split("[")[0] for name in names} == builders


GRADIENTS = [name for name in ROWS if ROWS[name].gradients]


@each("gradients", names="case wanted")
@pytest.mark.parametrize("world", [1, 3])
def test_gradients(pool: Pool, operator: str, world: int, case: Case, wanted: tuple[bool, ...]) -> None:
    row = ROWS[operator]
    given = operator, on(world, case), wanted, False, row.block if world > 1 else None
    pool.run(suite.gradients, *given, ranks=world, timeout_s=120)


COMPILED = [
    (operator, world, number, world == 2 and number in ROWS[operator].compiled_gradients)
    for operator in GRADIENTS
    for world in (1, 2, 3)
    for number in (range(len(ROWS[operator].gradients)) if world == 2 else ROWS[operator].compiled_gradients[:1])
]


@pytest.mark.parametrize(
    ("operator", "world", "number"), [one if is_fast else slow(*one) for *one, is_fast in COMPILED]
)
def test_compiled_gradients(pool: Pool, operator: str, world: int, number: int) -> None:
    case, wanted = values_of(ROWS[operator].gradients[number])
    pool.run(suite.gradients, operator, on(world, case), wanted, True, None, ranks=world, timeout_s=120)


@each("many", names="case")
def test_many_sizes_in_a_row(pool: Pool, operator: str, case: Case) -> None:
    pool.run(suite.many_sizes, operator, case, ranks=2, timeout_s=60)


@each("layouts", names="case")
def test_operands_may_lie_otherwise_on_each_rank_and_in_each_call(pool: Pool, operator: str, case: Case) -> None:
    first, second = pool.run(suite.layouts, operator, case, ranks=2, timeout_s=60)
    for operand in suite.CALLS[operator].operands:
        assert sum(f"{operand} is copied in every call" in text for text in first) == 1
    assert not second


@each("layouts", names="case")
def test_operands_whose_memory_was_freed(pool: Pool, operator: str, case: Case) -> None:
    pool.run(suite.freed, operator, case, ranks=2, timeout_s=60)


@pytest.mark.parametrize("operator", GRADIENTS)
def test_negated_views(pool: Pool, operator: str) -> None:
    row = ROWS[operator]
    case, wanted = values_of(row.gradients[0])
    assert all(wanted)
    pool.run(suite.negated, operator, case, ("serial", row.small.schedule), ranks=2, timeout_s=120)


@pytest.mark.parametrize("operator", ROWS)
def test_default_device(pool: Pool, operator: str) -> None:
    pool.run(suite.default_device, operator, ROWS[operator].small, ranks=2, timeout_s=60)


@each("compiled", names="name")
def test_compiled(pool: Pool, operator: str, name: str) -> None:
    pool.run(suite.compiled, operator, ROWS[operator].results[name], ranks=2, timeout_s=120)


@pytest.mark.parametrize("operator", ROWS)
def test_what_cannot_be_is_refused_on_every_rank_with_the_fix(pool: Pool, operator: str) -> None:
    pool.run(suite.refused, operator, ROWS[operator].small, ranks=2, timeout_s=60)


@pytest.mark.parametrize("operator", mostly(ROWS, "all_gather_matmul", "matmul_all_to_all"))
def test_bad_arguments_are_refused_while_flops_are_counted(pool: Pool, operator: str) -> None:
    pool.run(suite.refused, operator, ROWS[operator].small, True, ranks=2, timeout_s=60)


@pytest.mark.parametrize("operator", ROWS)
def test_one_rank_that_differs_is_named_on_every_rank(pool: Pool, operator: str) -> None:
    pool.run(suite.one_rank_differs, operator, ROWS[operator].small, ranks=2, timeout_s=60)


@each("late", names="case")
def test_a_rank_that_does_not_come(pool: Pool, operator: str, case: Case) -> None:
    told, _ = pool.run(suite.never_comes, operator, case, False, ranks=2, timeout_s=60)
    assert told.startswith("DeadlineError: rank 0 waited 1 s for ")
    assert operator in told


@pytest.mark.parametrize("operator", mostly(GRADIENTS, "all_gather_matmul", "matmul_all_reduce", "matmul_all_to_all"))
def test_backward_waits_as_long_as_the_call_says(pool: Pool, operator: str) -> None:
    case = replace(ROWS[operator].late[0], schedule=None)
    told, _ = pool.run(suite.never_comes, operator, case, True, ranks=2, timeout_s=60)
    assert told.startswith("DeadlineError: rank 0 waited 3 s")


@each("steps", names="case names")
def test_timelines(pool: Pool, operator: str, case: Case, names: set[str]) -> None:
    names = names - {"permute"}  # on CPU ranks of one host, the exchange puts rows into their final order
    for found in pool.run(suite.steps, operator, case, ranks=2):
        assert all(any(step.startswith(name) for step in found) for name in names), found
        assert case.schedule != "serial" or all(step.startswith(tuple(names)) for step in found)


@pytest.mark.parametrize("operator", ROWS)
def test_opcheck(pool: Pool, operator: str) -> None:
    pool.run(suite.opcheck, operator, ROWS[operator].opcheck, ranks=1, timeout_s=120)
