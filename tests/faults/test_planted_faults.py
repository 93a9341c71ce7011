"""Test that each planted fault makes an assertion fail in each test that it names."""

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
    """Return a copy of the source tree without a fault."""
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
    """Tests pass in a copy without faults.

    `make test` runs all these tests in the root. A copy is found, compiled and run in another way, which a few tests
    cover. They are the tests of the first Python fault and of the first csrc fault in each folder of tests.
    """
    chosen: dict[tuple[str, bool], Fault] = {}
    for fault in faults():
        chosen.setdefault((fault.tests[0].split("/")[1], bool(fault.sources)), fault)
    assert len(chosen) == 5
    tree = linked_copy(whole, tmp_path / "tree")
    for fault in chosen.values():
        compile_sources(fault, tree)
    ends = server.run_tests(tree, [test for fault in chosen.values() for test in fault.tests])
    assert {name: end for name, end in ends.items() if end != "passed"} == {}
