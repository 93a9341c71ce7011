"""Test every operator on two GPUs: results of every schedule, gradients, layouts, torch.compile and CUDA graphs.

The functions that run on ranks are shared with the CPU tests (`support/operators/suite.py`). `gpu_cases.py` has the
parameters of each operator.
"""

from __future__ import annotations

from typing import Any

import gpu_ranks
import product_ranks
import pytest
from gpu_cases import ROWS
from support.on_ranks import applicable
from support.operators import suite
from support.operators.call import Case

from weft.builders import Problem
from weft.launch import Pool

pytestmark = gpu_ranks.MARKS


def each(field: str, names: str) -> Any:
    """Return a parametrization over all operators and all entries that their rows have in `field`."""
    found = []
    for operator, row in ROWS.items():
        for number, entry in enumerate(getattr(row, field)):
            values = entry if isinstance(entry, tuple) else (entry,)
            label = entry if isinstance(entry, str) else getattr(values[0], "schedule", None) or number
            found.append(pytest.param(operator, *values, marks=row.marks, id=f"{operator}-{label}-{number}"))
    return pytest.mark.parametrize(("operator", *names.split()), found)


@each("results", "name")
def test_results(pair: Pool, operator: str, name: str) -> None:
    row = ROWS[operator]
    pair.run(suite.results, operator, row.results[name], row.calls, timeout_s=120)


@each("every", "case builders")
def test_every_schedule(pair: Pool, operator: str, case: Case, builders: set[str]) -> None:
    """Call every schedule three times with fresh data, late ranks and results filled with NaN. Bits must repeat.

    If both ranks get the same result, they must get the same bits.
    """
    names = pair.run(suite.every_schedule, operator, case, 0.01, timeout_s=300)
    assert {name.split("[")[0] for name in names[0]} == builders


REPLAYED = [
    pytest.param(p, one.name, marks=row.marks, id=f"{operator}-{number}-{one.name}")
    for operator, row in ROWS.items()
    for number, p in enumerate(row.replayed)
    for one in applicable(p)
    if one.name != "serial"  # it runs unfused, without an executor
]


@pytest.mark.parametrize(("p", "name"), REPLAYED)
def test_every_schedule_is_captured_and_replayed(pair: Pool, p: Problem, name: str) -> None:
    pair.run(product_ranks.on_streams, p, name, timeout_s=60)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@each("gradients", "case wanted")
def test_gradients(pair: Pool, operator: str, case: Case, wanted: tuple[bool, ...], compiled: bool) -> None:
    pair.run(suite.gradients, operator, case, wanted, compiled, None, timeout_s=120)


@each("many", "case")
def test_repeated_calls_are_native(pair: Pool, operator: str, case: Case) -> None:
    """Python runs no repeated call of a GEMM operator, unfused or overlapped, unless Triton must launch a kernel."""
    wanted = 8 if "tracked" in (case.schedule or "") else 0
    assert pair.run(product_ranks.in_python, operator, case, 8, timeout_s=60) == [wanted, wanted]


@each("many", "case")
def test_many_sizes_in_a_row(pair: Pool, operator: str, case: Case) -> None:
    pair.run(suite.many_sizes, operator, case, timeout_s=60)


@each("layouts", "case")
def test_operands_may_lie_otherwise_on_each_rank_and_in_each_call(pair: Pool, operator: str, case: Case) -> None:
    pair.run(suite.layouts, operator, case, timeout_s=60)


@each("steps", "case names")
def test_timelines_of_unfused_calls(pair: Pool, operator: str, case: Case, names: set[str]) -> None:
    for found in pair.run(suite.steps, operator, case, timeout_s=60):
        assert all(step.startswith(tuple(names)) for step in found)


@each("captured", "case")
def test_two_calls_in_a_graph(pair: Pool, operator: str, case: Case) -> None:
    for refusal in pair.run(suite.captured, operator, case, 10, timeout_s=60):
        assert "before capturing it" in refusal


@each("layouts", "case")
def test_operands_whose_memory_was_freed(pair: Pool, operator: str, case: Case) -> None:
    pair.run(suite.freed, operator, case, timeout_s=60)


@each("compiled", "name")
def test_compiled(pair: Pool, operator: str, name: str) -> None:
    pair.run(suite.compiled, operator, ROWS[operator].results[name], timeout_s=120)
