"""docs/planning.md shows what the planner says today: WEFT_WRITE_DOCS=1 pytest tests/unit/test_plan_page.py writes it anew."""

import os
import re
from pathlib import Path

import pytest

from weft import plan

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
BLOCK = re.compile(
    r"(?<=^```\n)(\$ weft plan all_gather_matmul --shape (\d+),(\d+),(\d+) --hw (\w+)\n)(.*?)(?=^```$)",
    re.DOTALL | re.MULTILINE,
)


def test_the_example_is_what_the_planner_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))  # no calibration
    text = PAGE.read_text()
    found = BLOCK.search(text)
    assert found is not None
    m, n, k = (int(found[i]) for i in (2, 3, 4))
    said = plan.explain("all_gather_matmul", M=m, N=n, K=k, ranks=2, hw=found[5]).rstrip() + "\n"
    if os.environ.get("WEFT_WRITE_DOCS") == "1":
        PAGE.write_text(text[: found.start(6)] + said + text[found.end(6) :])
        return
    assert found[6] == said, "docs/planning.md is out of date: WEFT_WRITE_DOCS=1 pytest tests/unit/test_plan_page.py"
