"""Each planted fault is found by the tests that it names, and by an assertion in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from planted import ASSERTIONS, Fault, Server, compile_sources, copy_of_tree, ends_of, faults, linked_copy, plant

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


def test_copies_without_a_fault_pass(whole: Path, server: Server, tmp_path: Path) -> None:
    """`make test` runs all these tests in the root. Copies differ in how they are found, compiled and run, so that a few
    tests are enough: of each folder the first fault's, in Python and in csrc/, which is compiled again."""
    chosen: dict[tuple[str, bool], Fault] = {}
    for fault in faults():
        chosen.setdefault((fault.tests[0].split("/")[1], bool(fault.sources)), fault)
    assert len(chosen) == 4
    tree = linked_copy(whole, tmp_path / "tree")
    for fault in chosen.values():
        compile_sources(fault, tree)
    ends = server.run_tests(tree, [test for fault in chosen.values() for test in fault.tests])
    assert {name: end for name, end in ends.items() if end != "passed"} == {}
