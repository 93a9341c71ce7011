"""FiCCO's evaluation: tables of invented times, the simulated records against the model, the command and the page."""

from __future__ import annotations

import json
import re
from importlib.resources import files as files_of
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.bench.core import records as files
from weft.bench.report import rewrite
from weft.bench.table_1 import SYNTHETIC, TABLE_1, find_gemms
from weft.cli.app import app
from weft.studies import ficco as study
from weft.studies import ficco_losses
from weft.studies.ficco import _divisible, conclusions, draw, markdown, rows_of, simulated, tables
from weft.studies.ficco_choosers import drawn
from weft.studies.ficco_rows import NAMED, SHARD, STUDIED, ficco

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PICK = {"g1": STUDIED["uniform-fused-2D"], "g2": STUDIED["uniform-fused-1D"]}


def record(config: str, variant: str, ms: float, **other) -> dict:
    gemm = find_gemms([config.partition("-")[0]])[0].sharded(8)
    return {
        "op": "all_gather_matmul", "mode": "queued", "device": "cuda", "config": config, "run": "a", "ranks": 8, "dtype": "bf16",
        "machine": "8 x AMD Instinct MI300X", "m": gemm.m, "n": gemm.n, "k": gemm.k, "gemm_ms": 6.0, "communication_ms": 4.0,
        "variant": variant, "p50_ms": ms, "commit": "abc", "date": "2026-01-01T00:00:00Z", **other,
    }  # fmt: skip


def of(config: str, **ms: float) -> list[dict]:
    return [record(config, {"serial": "serial", "shard": SHARD}.get(name, name), value) for name, value in ms.items()]


def made_up() -> list[dict]:
    """Return records. For g1 the heuristic's choice is the best of the paper's four schedules, and 10% slower than
    another schedule. For g2 it is 20% slower than the best of the four.
    """
    g1 = of("g1", serial=10.0, shard=40.0, **{PICK["g1"]: 8.0, ficco("2d", "hetero", "fused"): 7.2})
    return g1 + of("g2-m4", serial=12.0, **{PICK["g2"]: 10.0, STUDIED["hetero-fused-1D"]: 8.0})


def with_losses(of: dict[str, tuple[float, float, float]]) -> list[dict]:
    """Return records of g2, with M > K, in which the eight schedules have these losses, by the paper's name. Other schedules lose
    nothing."""
    found = [r for r in made_up() if r["config"] == "g2-m4"][:1]
    for name, weft_name in NAMED.items():
        found.append(record("g2-m4", weft_name, 10.0, losses=of.get(name, (1.0, 1.0, 1.0))))
    return found


def test_schedules_are_ordered_by_their_losses() -> None:
    """In the paper's order, uniform-fused-1D has the least DIL and the most CIL, and hetero-unfused-1D the reverse."""
    order = {
        "uniform-fused-1D": (1.1, 1.3, 1.0),
        "hetero-fused-1D": (1.2, 1.2, 1.0),
        "hetero-unfused-1D": (1.4, 1.1, 1.0),
        "uniform-unfused-1D": (1.5, 1.1, 1.2),
    }
    rows = rows_of(with_losses(order))
    assert [claim.reproduced for claim in ficco_losses.claims(rows)] == [True, True, True]
    line = ficco_losses.losses_table(rows).cells[1]
    assert list(line) == ["uniform-unfused-1D", "1.500", "1.100", "1.200"]
    swapped = order | {"uniform-fused-1D": order["hetero-fused-1D"], "hetero-fused-1D": order["uniform-fused-1D"]}
    assert [claim.reproduced for claim in ficco_losses.claims(rows_of(with_losses(swapped)))] == [False, False, True]
    more = order | {"uniform-unfused-1D": (1.5, 1.2, 1.0)}
    assert [claim.reproduced for claim in ficco_losses.claims(rows_of(with_losses(more)))] == [True, True, False]


def cells(records: list[dict]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return {end of the table's title: {first cell of a line: all cells of the line}} for a page's tables.

    In the table of choices, the key of a line is its first three cells.
    """
    found = {}
    for table in tables(rows_of(records)):
        assert {len(line) for line in table.cells} == {len(table.columns)}
        found[table.title[-11:]] = {
            " ".join(line[: 3 if "who chooses" in table.columns else 1]): line for line in table.cells
        }
    return found


def test_speedups_are_over_serial_and_the_ideal_is_the_longer_half() -> None:
    ratio = cells(made_up())["(figure 13)"]
    assert list(ratio) == ["g1", "g2-m4", "maximum", "paper's"]
    assert ratio["g1"][2:] == ("6", "4", "1.50", "10", "1.67", "0.25", "1.39", "70%")
    assert ratio["g2-m4"][-4:] == ("2.00", "", "1.50", "67%")
    kinds = cells(made_up())["(figure 14)"]
    assert kinds["ideal"][1:] == (f"{(10 / 6 * 2) ** 0.5:.2f}", "", f"{(10 / 6 * 2) ** 0.5:.2f}")
    assert kinds["FiCCO 2D"][1] == f"{10 / 7.2:.2f}"
    assert "AsyncTP" not in kinds


def test_what_the_heuristic_loses_is_a_part_of_the_best_speedup() -> None:
    picked = cells(made_up())["best speedup"[-11:]]
    assert picked["table-1 the heuristic the paper's four"][3:7] == ("1 of 2", "1 of 2", "20.0%", "20.0%")
    assert picked["table-1 the heuristic all eight"][3:7] == ("0 of 2", "0 of 2", "15.0%", "20.0%")
    with_weft = [*made_up(), record("g1", "weft", 8.0), record("g2-m4", "weft", 12.0)]
    assert cells(with_weft)["best speedup"[-11:]]["table-1 weft all that ran"][3:7] == (
        "0 of 2",
        "0 of 2",
        "21.7%",
        "33.3%",
    )
    line = cells(made_up())["figure 12b)"]["g1"]
    assert line[-4:] == ("1.39", "hetero-fused-2D", "uniform-fused-2D", "10.0%")
    assert conclusions(rows_of(made_up()))[0].startswith("For 1 of 2 GEMMs, the fastest")


def test_of_each_gemm_the_last_run_counts_and_others_do_not() -> None:
    again = [record("g1", "serial", 9.0, run="b"), record("g1", "serial", 1.0, run="b", mode="single")]
    (row,) = rows_of([*of("g1", serial=10.0), *again, record("g1", "serial", 5.0) | {"config": "512x512x512"}])
    assert row.ms == {"serial": 9.0}
    with pytest.raises(
        ValueError, match="no records of FiCCO's GEMMs: run weft bench all_gather_matmul --preset table-1"
    ):
        rows_of([])
    with pytest.raises(ValueError, match="g1 lacks the time of serial: run weft bench all_gather_matmul --preset g1"):
        rows_of([record("g1", SHARD, 1.0)])


def test_ranks_that_do_not_divide_are_refused() -> None:
    started: list[str] = []
    message = "ranks=3: M=16384 of g1 is not divisible into 3 shards of 3 pieces: use 2, 4, 8, 16, 32 or 64 ranks"
    with pytest.raises(ValueError, match=message):
        simulated("mi300x", 3, progress=lambda what, share: started.append(what))
    assert not started
    with pytest.raises(ValueError, match="M=1607680 of g13 is not divisible into 64 shards"):
        simulated("mi300x", 64, gemms=find_gemms(["g13"]))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_ranks_that_a_refusal_names_divide_all_gemms_but_one(ranks: int) -> None:
    chosen, omitted = _divisible((*TABLE_1, *SYNTHETIC), ranks)
    assert len(chosen) + len(omitted) == 32
    assert [gemm.name for gemm in omitted] == (["g13"] if ranks == 64 else [])
    assert not [gemm.name for gemm in drawn() if gemm.m % (ranks * ranks)]


@pytest.mark.parametrize(
    ("options", "sensitive"),
    [([], True), (["--ranks", "32"], False), (["--ranks", "32", "--sensitivity"], True), (["--no-sensitivity"], False)],
)
def test_many_ranks_get_no_sensitivity_without_being_asked(
    options: list[str], sensitive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The analysis takes most of the time."""
    given: list[bool] = []

    def made(*positional: object, sensitive: bool, progress: object) -> list[dict]:
        given.append(sensitive)
        return made_up()

    monkeypatch.setattr(study, "simulated", made)
    done = CliRunner().invoke(app, ["reproduce", "ficco", *options])
    assert done.exit_code == 0, done.output
    assert given == [sensitive]
    assert ("add --sensitivity" in done.output) == (not sensitive)


def test_a_gemm_that_64_ranks_cannot_divide_is_omitted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "predict", lambda *given: 1.0)
    found = simulated("mi300x", 64, gemms=find_gemms(["g13", "g10"]))
    assert {one["config"] for one in found} == {"g10"}
    assert "g13 (M=1607680) is omitted: its M cannot be divided by the square" in " ".join(study.notes(found))


def test_a_machine_that_lacks_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^topology mesh: NVIDIA H200 has no link\.pair_usable: add it to the file of the machine"
    ):
        simulated("h200", 4, "mesh")
    file = tmp_path / "mine.toml"
    shipped = (files_of("weft.hw") / "h200.toml").read_text()
    file.write_text(re.sub(r"\[memory\.l2\]\n(.+\n)+", "", shipped))
    with pytest.raises(ValueError, match=r"^NVIDIA H200: add memory\.l2 to its machine file"):
        simulated(str(file), 4)


def test_a_page_shows_the_same_tables_of_simulated_and_measured_records() -> None:
    page = "<!-- study:ficco now -->\n<!-- /study -->\n<!-- study:ficco later -->\n<!-- /study -->\n"
    written = rewrite(page, {"now": made_up()})
    assert written == page.replace("now -->\n", f"now -->\n{markdown(made_up())}")
    assert rewrite(written, {"now": made_up()}) == written
    assert (
        "Measured on 8 x AMD Instinct MI300X, 8 ranks, bf16, queued; commit abc, 2026-01-01. 1 GEMM has a fraction"
        in written
    )
    assert "Nothing was measured for this" in markdown(files.read([RESULTS / "sim-ficco.jsonl"]))


def test_the_command_shows_records_and_draws(tmp_path: Path) -> None:
    runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"})
    arguments = ["reproduce", "ficco", "--records", str(RESULTS / "sim-ficco.jsonl")]
    done = runner.invoke(app, [*arguments, "--pictures", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert "figure 12b" in done.output
    assert sorted(path.name[:10] for path in (tmp_path / "new").iterdir()) == ["figure-12b", "figure-13-", "figure-14-"]
    refused = runner.invoke(app, [*arguments, "--json", str(tmp_path / "x.jsonl")])
    assert "--json cannot be combined with --records" in str(refused.exception)
    for paper, records, ignored in (
        ("ficco", "sim-ficco", ["--hw", "h200"]),
        ("ficco", "sim-ficco", ["--ranks", "8"]),
        ("t3", "sim-t3", ["--hw", "h200"]),
    ):
        file = str(RESULTS / f"{records}.jsonl")
        refused = runner.invoke(app, ["reproduce", paper, "--records", file, *ignored])
        assert f"{ignored[0]} cannot be combined with --records, which shows stored results" in str(refused.exception)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "line 2 cannot be read: it is nested 100000 deep"),
        (json.dumps(record("g1", "serial", 1.0, p50_ms="fast")), "a record has a value of a wrong type or size"),
        (json.dumps(record("g1", "serial", 0.0)), "a record has a value of a wrong type or size"),
    ],
)
def test_records_of_others_are_shown_or_refused_by_a_sentence(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{json.dumps(record('g1', 'serial', 1.0))}\n{line}\n")
    done = CliRunner().invoke(app, ["reproduce", "ficco", "--records", str(path)])
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


def test_pictures_do_without_what_was_not_recorded(tmp_path: Path) -> None:
    for path in draw(tmp_path, rows_of(made_up()), "two GEMMs"):
        assert path.read_bytes().startswith(b"\x89PNG")
