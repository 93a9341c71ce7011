"""`weft reproduce all`: it runs every study, its progress sums to 100%, and it shows and writes the results of the
studies.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.bench.core import records as files
from weft.cli.app import app
from weft.studies import everything, pgas

ROOT = Path(__file__).parents[2]
QUICK = everything.STUDIES[2:]


def test_every_study_is_in_it_once_and_the_shares_are_of_all() -> None:
    assert [study.name for study in everything.STUDIES] == ["t3", "ficco", "fused-embedding", "pgas"]
    assert sum(study.share for study in everything.STUDIES) == pytest.approx(1)


@pytest.mark.parametrize("name", ["fused-embedding", "pgas"])
def test_the_command_shows_and_draws_simulated_and_measured_records(tmp_path: Path, name: str) -> None:
    for of in ("sim", "h100"):
        recorded = ROOT / "benchmarks" / "results" / f"{of}-{name}.jsonl"
        shown = CliRunner().invoke(app, ["reproduce", name, "--records", str(recorded), "--pictures", str(tmp_path)])
        assert shown.exit_code == 0, shown.output
        assert "claims are reproduced" in shown.output
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (ROOT / "docs" / "studies" / name).iterdir()
    }


def test_the_command_says_what_is_reproduced_and_writes_all_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everything, "STUDIES", QUICK)
    told: list[float] = []
    simulated = everything.simulated

    def counted(step: everything.Progress) -> list[everything.Done]:
        return simulated(lambda what, share: (told.append(share), step(what, share))[1])

    monkeypatch.setattr(everything, "simulated", counted)
    json, pictures = tmp_path / "all.jsonl", tmp_path / "pictures"
    shown = CliRunner().invoke(app, ["reproduce", "all", "--json", str(json), "--pictures", str(pictures)])
    assert shown.exit_code == 0, shown.output
    assert sum(told) == pytest.approx(sum(study.share for study in QUICK))
    assert min(told) >= 0
    found = files.read([json])
    assert {record["study"] for record in found} == {"fused_embedding", "pgas"}
    assert {path.parent.name for path in pictures.rglob("*.png")} == {"fused-embedding", "pgas"}
    claims = pgas.claims(pgas.rows_of(found))
    missed = [claim for claim in claims if not claim.reproduced]
    counts = [str(len(claims)), str(len(claims) - len(missed)), str(len(missed))]
    assert ["pgas", *counts] in [re.findall(r"[\w-]+", line) for line in shown.output.splitlines()]
    for claim in missed:
        assert claim.what in shown.output
