"""docs/torchrec.md: the tables of speeds are up to date with their records."""

from __future__ import annotations

import json

from support.scripts import DOCS, load


def test_the_page_follows_from_the_record() -> None:
    script = load(DOCS / "torchrec_page.py")
    assert script.page() == (DOCS / "torchrec.md").read_text(), "out of date: python docs/torchrec_page.py"
    assert {path.name for path in script.RECORDS} >= {"h100-torchrec.json", "h200-torchrec.json"}
    for path in script.RECORDS:
        records = json.loads(path.read_text())
        assert records[0]["machine"] in script.body()
        assert all(f"{record['ms']['step, speedup']:.2f}x" in script.body() for record in records)
