"""docs/planning.md shows the planner's current output. To rewrite it: WEFT_WRITE_DOCS=1 pytest
tests/unit/test_plan_page.py.
"""

import os
import re
from pathlib import Path

import pytest

from weft import plan
from weft.plan.choose import ALIKE, ALIKE_US, CLEARLY, CLEARLY_OWN, CLEARLY_ROUGH, CLEARLY_US, SPARED
from weft.plan.predict import HOPELESS

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
BLOCK = re.compile(
    r"(?<=^```\n)(\$ weft plan (\w+) --shape (\d+),(\d+),(\d+)(?: --option (\w+)=(\d+))? --hw (\w+)\n)(.*?)(?=^```$)",
    re.DOTALL | re.MULTILINE,
)


def _said(found: re.Match[str]) -> str:
    m, n, k = (int(found[i]) for i in (3, 4, 5))
    option = {found[6]: int(found[7])} if found[6] else {}
    dtype = "fp32" if found[2] == "embedding_all_to_all" else "bf16"
    text = plan.explain(found[2], M=m, N=n, K=k, ranks=2, hw=found[8], dtype=dtype, **option)
    return f"{found[1]}{text.rstrip()}\n"


def test_the_examples_are_what_the_planner_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))  # an empty cache, so that there is no calibration
    text = PAGE.read_text()
    said, count = BLOCK.subn(_said, text)
    assert count == 3
    if os.environ.get("WEFT_WRITE_DOCS") == "1":
        PAGE.write_text(said)
        return
    assert text == said, "docs/planning.md is out of date: WEFT_WRITE_DOCS=1 pytest tests/unit/test_plan_page.py"


def test_the_page_says_the_planners_thresholds() -> None:
    """The percentages, times and factors in the text about the choice must be those of the code."""
    text = PAGE.read_text()
    first = text.index("## How the choice is made")
    steps = " ".join(text[text.index("\n1. ", first) : text.index("\n4. ", first)].split())
    parts = CLEARLY, CLEARLY_ROUGH, CLEARLY_OWN, ALIKE, SPARED
    assert set(re.findall(r"(\d+)%", steps)) == {f"{100 * part:.0f}" for part in parts}
    assert set(re.findall(r"(\d+) us", steps)) == {f"{us:.0f}" for us in (CLEARLY_US, ALIKE_US, CLEARLY_US / SPARED)}
    assert re.findall(r"([\d.]+) times the best", steps) == [str(HOPELESS)]
