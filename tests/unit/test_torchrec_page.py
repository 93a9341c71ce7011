"""docs/torchrec.md: the tables of speeds are up to date with their records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.scripts import DOCS, load


def test_the_page_follows_from_the_records() -> None:
    script = load(DOCS / "torchrec_page.py")
    assert script.page() == (DOCS / "torchrec.md").read_text(), "out of date: python docs/torchrec_page.py"
    assert {path.name for path in script.records("modules")} >= {"h100-torchrec.json", "h200-torchrec.json"}
    for name in re.findall(r"<!-- torchrec:(\w+) -->", script.PAGE.read_text()):
        for path in script.records(name):
            records = json.loads(path.read_text())
            assert records[0]["machine"] in script.body(name)
            speedup = "speedup" if name == "pipeline" else "step, speedup"
            assert all(f"{record['ms'][speedup]:.2f}x" in script.body(name) for record in records)


def test_a_pipeline_hides_a_part_of_the_exposed_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load(DOCS / "torchrec_page.py")
    ms = {"torchrec, pipeline": 4.0, "torchrec, distributed": 3.5, "torchrec, hidden by pipeline": 0.5}
    ms |= {"weft, pipeline": 2.5, "weft, prefetch": 2.25, "weft, distributed": 2.0, "speedup": 1.6}
    ms |= {"weft, hidden by pipeline": 0.25, "weft, hidden by prefetch": 0.75}
    known = {"machine": "2 x G", "peers": {"torchrec": "1"}, "versions": {"torch": "2"}, "commit": "abc"}
    (tmp_path / "g-torchrec-pipeline.json").write_text(json.dumps([{"case": "c", "ms": ms, **known}]))
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    assert "| c | 4.00 | 0.50 | 50% | 2.50 | 0.50 | 25% | 2.25 | 0.25 | 75% | 1.60x |" in script.body("pipeline")
