"""docs/torchrec.md: the table of speed follows from its record."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_follows_from_the_record() -> None:
    script = runpy.run_path(str(DOCS / "torchrec_page.py"))
    assert script["page"]() == (DOCS / "torchrec.md").read_text(), "out of date: python docs/torchrec_page.py"
    for record in json.loads(script["RECORD"].read_text()):
        assert record["case"] in script["body"]()
