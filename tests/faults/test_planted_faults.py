"""Each planted fault is found by the tests that it names, and by an assertion in them; without it they pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from planted import ASSERTIONS, Fault, Server, copy_of_tree, ends_of, faults, linked_copy, plant

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without a fault."""
    return copy_of_tree(tmp_path_factory.mktemp("whole") / "tree")


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_is_found(fault: Fault, whole: Path, server: Server, tmp_path: Path) -> None:
    assert fault.tests, f"{fault.patch.name} names no test"
    tree = linked_copy(whole, tmp_path / "tree")
    plant(fault, tree)
    ends = server.run_tests(tree, fault.tests)
    for test in fault.tests:
        found = set(ends_of(test, ends)) - {"passed"}
        assert found, f"{test} passes, though {fault.patch.read_text()}"
        assert found <= set(ASSERTIONS), f"{test} ends with {found}, and no assertion says what is wrong"


def test_without_a_fault_all_pass(whole: Path, server: Server, tmp_path: Path) -> None:
    tests = sorted({test for fault in faults() for test in fault.tests})
    ends = server.run_tests(linked_copy(whole, tmp_path / "tree"), tests)
    assert {name: end for name, end in ends.items() if end != "passed"} == {}
