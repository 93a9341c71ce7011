"""docs/torchrec.md and the README: speeds relative to TorchRec are up to date with their records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.scripts import DOCS, load


def test_the_page_follows_from_the_records() -> None:
    script = load(DOCS / "torchrec_page.py")
    for document in (script.PAGE, script.README):
        assert script.written(document) == document.read_text(), (
            f"{document} is out of date: python docs/torchrec_page.py"
        )
        assert "<!-- torchrec-gain:h100-torchrec step -->" in document.read_text()
    assert {path.name for path in script.records("modules")} >= {"h100-torchrec.json", "h200-torchrec.json"}
    for name in re.findall(r"<!-- torchrec:(\w+) -->", script.PAGE.read_text()):
        for path in script.records(name):
            records = json.loads(path.read_text())
            assert records[0]["machine"] in script.body(name)
            speedup = "speedup" if name == "pipeline" else "step, speedup"
            assert all(f"{record['ms'][speedup]:.2f}x" in script.body(name) for record in records)


def test_a_speedup_is_a_geometric_mean_or_the_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load(DOCS / "torchrec_page.py")
    lines = [{"ms": {"forward, speedup": gain, "step, speedup": gain / 2}} for gain in (2.0, 4.5)]
    (tmp_path / "g-torchrec.json").write_text(json.dumps(lines))
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    for what, wanted in {"forward": "3.00x", "step": "1.50x", "step worst": "1.00x"}.items():
        mark, end = f"a <!-- torchrec-gain:g-torchrec {what} -->", "<!-- /torchrec-gain --> b"
        (tmp_path / "page.md").write_text(f"{mark}0.00x{end}")
        assert script.written(tmp_path / "page.md") == f"{mark}{wanted}{end}"


def test_a_pipeline_hides_a_part_of_the_exposed_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load(DOCS / "torchrec_page.py")
    ms = {"torchrec, pipeline": 4.0, "torchrec, distributed": 3.5, "torchrec, hidden by pipeline": 0.5}
    ms |= {"weft, pipeline": 2.5, "weft, prefetch": 2.25, "weft, distributed": 2.0, "speedup": 1.6}
    ms |= {"weft, hidden by pipeline": 0.25, "weft, hidden by prefetch": 0.75}
    known = {"machine": "2 x G", "peers": {"torchrec": "1"}, "versions": {"torch": "2"}, "commit": "abc"}
    (tmp_path / "g-torchrec-pipeline.json").write_text(json.dumps([{"case": "c", "ms": ms, **known}]))
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    assert "| c | 4.00 | 0.50 | 50% | 2.50 | 0.50 | 25% | 2.25 | 0.25 | 75% | 1.60x |" in script.body("pipeline")
