"""docs/hosts.md: its tables and its picture are up to date with the records, and the simulated record with the planner."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
from support.scripts import DOCS, load


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load(DOCS / "hosts_page.py")


def test_the_page_and_its_picture_follow_from_the_records(script: ModuleType) -> None:
    assert script.page() == (DOCS / "hosts.md").read_text(), "out of date: python docs/hosts_page.py"
    assert script.ratios().split("\n")[0] in script.PICTURE.read_bytes().decode("latin-1"), "python docs/hosts_page.py"


@pytest.mark.parametrize("op", ["matmul_all_gather", "embedding_all_to_all", "all_to_all_matmul"])
def test_the_simulated_record_is_what_the_planner_predicts(script: ModuleType, op: str) -> None:
    recorded = [json.dumps(record) for record in json.loads(script.SIMULATED.read_text()) if record["op"] == op]
    assert len(recorded) == len(script.HOSTS)
    assert json.dumps(script.simulate(op, 2)) == recorded[0], "python docs/hosts_page.py --simulate"
