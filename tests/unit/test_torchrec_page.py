"""docs/torchrec.md: the table of speeds is up to date with its record."""

from __future__ import annotations

import json

from support.scripts import DOCS, load


def test_the_page_follows_from_the_record() -> None:
    script = load(DOCS / "torchrec_page.py")
    assert script.page() == (DOCS / "torchrec.md").read_text(), "out of date: python docs/torchrec_page.py"
    for record in json.loads(script.RECORD.read_text()):
        assert record["case"] in script.body()
