"""Each planted fault is found by the tests that it names, and by an assertion in them; without it they pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import ASSERTIONS, Fault, copy_of_tree, ends_of, faults, plant, run_tests

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_is_found(fault: Fault, tmp_path: Path) -> None:
    assert fault.tests, f"{fault.patch.name} names no test"
    tree = copy_of_tree(tmp_path)
    plant(fault, tree)
    ends = run_tests(tree, fault.tests)
    for test in fault.tests:
        found = set(ends_of(test, ends)) - {"passed"}
        assert found, f"{test} passes, though {fault.patch.read_text()}"
        assert found <= set(ASSERTIONS), f"{test} ends with {found}, and no assertion says what is wrong"


def test_without_a_fault_all_pass(tmp_path: Path) -> None:
    tests = sorted({test for fault in faults() for test in fault.tests})
    ends = run_tests(copy_of_tree(tmp_path), tests)
    assert {name: end for name, end in ends.items() if end != "passed"} == {}
