"""T3's hardware: the recorded study meets the paper's numbers, and the model still gives the records."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.bench.core import records as files
from weft.cli.app import app
from weft.sim.memory_controller import t3_gpu
from weft.studies import t3_figures, t3_hardware, t3_iteration, t3_sublayers

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "sim-t3-hardware.jsonl"


@pytest.fixture(scope="module")
def rows() -> t3_hardware.Rows:
    return t3_hardware.rows_of(files.read([RECORDS]))


def test_a_claim_that_is_missed_is_named(rows: t3_hardware.Rows) -> None:
    slow = [t3_sublayers.replace(row, mca=2 * row.mca) for row in rows.small["75"]]
    said = t3_hardware.conclusions(rows._replace(small={"75": slow}))[0]
    assert "these deviate by more: T3-MCA, geometric mean (6.1.3), T3-MCA, maximum (6.1.3)" in said
    assert "do not have the paper's order" in said


def test_iterations_are_their_parts(rows: t3_hardware.Rows) -> None:
    (first, *_) = t3_iteration.iterations(rows.small["75"], "prompt")
    assert first.total(0.5) == pytest.approx(2 * (first.gemms + first.collectives))
    assert first.total() == pytest.approx(first.gemms + first.collectives + sum(first.rest.values()))
    assert first.total(times=0) == pytest.approx(first.gemms + first.collectives)
    assert 1 < first.speedup("t3") < first.speedup("ideal")
    assert first.speedup("t3-mca", 0.3) > first.speedup("t3-mca", 0.45)
    (trained, *_) = t3_iteration.iterations(rows.small["75"], "training")
    assert trained.gemms == pytest.approx(3 * first.gemms)
    assert trained.collectives == pytest.approx(2 * first.collectives)
    assert trained.rest["attention"] == pytest.approx(3 * first.rest["attention"])
    assert first.rest["update"] == 0 < trained.rest["update"]


def test_the_roofline_of_a_layer_by_hand() -> None:
    """The layer is Mega-GPT-2's on 8 ranks: 24 heads of 128, 16 sequences of 1024 tokens; 1 TB/s."""
    gpu = t3_gpu()
    us = t3_iteration.roofline_us(3072, 16384, 8, "prompt", gpu)
    scores, flop = 16 * 3 * 1024 * 1024, 2 * 2 * 16 * 3 * 1024 * 1024 * 128
    assert us["attention"] == pytest.approx(2 * 10 * scores / 1e6 + flop / (gpu.peak * gpu["gpu.efficiency"]) * 1e6)
    assert us["element-wise"] == pytest.approx(2 * 16384 * 3072 * (14 + 4 * 4 / 8) / 1e6)
    trained = t3_iteration.roofline_us(3072, 16384, 8, "training", gpu)
    assert trained["update"] == pytest.approx(28 * 12 * 3072 * 3072 / 8 / 1e6)


def test_conclusions_name_the_assumptions_that_reverse_t3_and_mca_and_what_more_units_do(
    rows: t3_hardware.Rows,
) -> None:
    lines = [["as it is", 1.2, 1.3, 1.4], ["first", 1.3, 1.25, 1.4], ["second", 1.1, 1.0, 1.4]]
    units = {"1": [["A OP, 8 ranks", 1.2, 1.2], ["A FC-2, 8 ranks", 1.2, 1.2]], "2": [["", 1.1, 1.3], ["", 1.3, 1.1]]}
    changed = {**rows.figures, "assumptions": {"lines": lines}, "20": {"units": units}}
    said = t3_hardware.conclusions(rows._replace(figures=changed))[0]
    assert "T3 is 10 to 30% faster and T3-MCA 0 to 30%. T3-MCA is slower than T3 in these cases: first; second." in said
    assert "Here 0 of 1 FC-2 layers gain more with T3-MCA (1 with the ideal), and 1 of 1 OP layers," in said


def test_figure_20_is_shown_with_other_memory_and_links(rows: t3_hardware.Rows) -> None:
    readings = dict(rows.figures["20"]["readings"])
    assert readings["as it is"] == {
        key: list(of) for key, of in t3_figures.gain_with_more_units(rows.figures["20"]).items()
    }
    compute_bound = readings["links of 150 GB/s in each direction"]["ideal"]
    assert compute_bound[0] > readings["as it is"]["ideal"][0], "faster links leave more FC-2 layers to their GEMMs"
    shown = t3_figures.more_units_readings_table(rows.figures["20"])
    assert [line[0] for line in shown.cells] == list(readings)


def test_splitting_units_slows_both_sides(rows: t3_hardware.Rows) -> None:
    """Figure 6, by hand: a ring on 8 units moves 3 bytes for each byte that the reduce-scatter sends, and 2 bytes for
    the all-gather.
    """
    gpu, cells = t3_gpu(), rows.figures["6"]["cells"]
    (few,) = (c for c in cells if c["name"] == "Mega-GPT-2 FC-2" and c["split"] == [72, 8])
    sent = 7 / 8 * 2 * 16384 * 3072
    assert few["ring_us"] == pytest.approx((3 + 2) * sent / (8 * gpu["kernel.unit"]) * 1e6, rel=0.05)
    (whole,) = (c for c in cells if c["name"] == "Mega-GPT-2 FC-2" and c["split"] == [80, 80])
    assert whole["gemm_us"] < few["gemm_us"] < 80 / 64 * whole["gemm_us"]


def test_cutting_k_keeps_tiles_and_stages() -> None:
    cells = t3_figures.stages_table(t3_gpu()).cells
    assert len({line[2:4] for line in cells}) == 1
    assert float(cells[0][4]) == pytest.approx(8 * float(cells[1][4]), rel=0.01)


@pytest.mark.slow
def test_the_command_shows_and_draws_its_records(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["reproduce", "t3", "--records", str(RECORDS), "--pictures", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "16 of 16 numbers for which a limit is set deviate from the paper's by less than the limit" in " ".join(
        shown.output.split()
    )
    names = {path.name for path in tmp_path.iterdir() if path.stat().st_size > 1000}
    assert names == {path.name for path in (ROOT / "docs" / "studies" / "t3").iterdir()} - {"figure-16-speedups.png"}


def test_simulated_records_are_those_of_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate only one network, and skip repetitions."""
    few = (t3_sublayers.NETWORKS[1]._replace(ranks=(8,)), t3_sublayers.NETWORKS[2])
    monkeypatch.setattr(t3_sublayers, "NETWORKS", few)
    empty = {"figure": "sensitivity", "lines": []}
    for name in (
        "simulate_sensitivity",
        "simulate_assumptions",
        "simulate_more_units",
        "simulate_splits",
        "simulate_stagger",
    ):
        monkeypatch.setattr(t3_figures, name, lambda *given, **more: empty)
    monkeypatch.setattr(t3_iteration, "simulate_future", lambda gpu: {"figure": "4", "networks": []})
    monkeypatch.setattr(t3_sublayers, "READINGS", {"75": t3_gpu})
    found = t3_hardware.simulated()
    now = t3_hardware.rows_of(found)
    assert [row.layer for row in now.small["75"]] == [*t3_sublayers.LAYERS]
    assert {row.network for row in now.large["75"]} == {"GPT-3"}
    assert {"7.1", "14", "17", "dram"} <= now.figures.keys()
    with pytest.raises(ValueError, match="no records of T3's hardware: run weft reproduce t3"):
        t3_hardware.rows_of([])
