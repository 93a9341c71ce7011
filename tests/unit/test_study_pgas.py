"""PGAS's study: bounds by hand, conclusions from the paper's speedups, and records against the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.bench.core import records as files
from weft.hw import load_machine
from weft.studies import pgas as study
from weft.studies.pages import scaled

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "sim-pgas.jsonl"


@pytest.fixture(scope="module")
def found() -> study.PgasRows:
    return study.rows_of(files.read([RECORDS]))


def test_the_bounds_are_the_papers_bytes_over_the_machines_rates(found: study.PgasRows) -> None:
    row, machine = found.rows["weak", 2], load_machine("v100")
    assert row.sent == 8192 * 64 * 64 * 4 == 134_217_728  # half of the samples, 64 tables, 64 floats
    assert row.exchange == pytest.approx(row.sent / machine["link.pair_usable"].si * 1e6)
    assert row.pooling == pytest.approx(16384 * 64 * (64 * 264 + 8) / machine["memory.copy_bandwidth"].si * 1e6)
    for one in found.rows.values():
        assert one.direct >= max(one.pooling, one.exchange)
        assert one.serial >= one.pooling + one.exchange + one.unpacking
        assert one.ranks == 1 or one.speedup < 1.05 * one.bound


def test_the_implied_rate_gives_the_papers_speedup(found: study.PgasRows) -> None:
    row = found.rows["weak", 2]
    rate = study.implied_gbps(row, 2.10)
    baseline = row.pooling + row.unpacking + row.sent / rate / 1e3
    assert baseline / row.direct == pytest.approx(2.10)
    said = study.conclusions(found)[0].split(". ")[1]
    assert said.startswith("In weak scaling on two GPUs, the paper's baseline sends 134 MB from each GPU at")


@pytest.mark.parametrize(("scaling", "ranks"), [(study.SCALINGS[0], 2), (study.SCALINGS[1], 3)])
def test_the_records_are_the_models(found: study.PgasRows, scaling: study.Scaling, ranks: int) -> None:
    now = study.row_of(scaling, ranks, load_machine("v100"))
    recorded = found.rows[scaling.name, ranks]
    assert [now.serial, now.direct] == pytest.approx([recorded.serial, recorded.direct])


def test_a_number_changes_what_depends_on_it(found: study.PgasRows) -> None:
    faster = scaled(load_machine("v100"), "link.pair_usable", 2.0)
    assert faster["link.pair_usable"].si == 2 * load_machine("v100")["link.pair_usable"].si
    (line,) = (line for line in found.sensitivity if line[:2] == ["link.pair_usable", 2.0])
    assert line[2][0] < found.rows["weak", 2].speedup  # less communication to hide
    with pytest.raises(ValueError, match="no records of PGAS embedding retrieval: run weft reproduce pgas"):
        study.rows_of([])
