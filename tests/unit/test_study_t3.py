"""T3's sub-layers: sizes from the paper, tables and memory by hand, simulated records against the model, and the
command.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from support.sim_toys import gpu
from support.slow import slow
from typer.testing import CliRunner

from weft import plan
from weft.builders import MatmulReduceScatter, named
from weft.cli.app import app
from weft.sim.traffic import traffic
from weft.studies import t3

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SMALL = t3.NETWORKS[0]._replace(ranks=(8,))


def measured(m: int, n: int, k: int, serial: float, weft: float, **other: float) -> list[dict]:
    common = {
        "op": t3.OP, "mode": "queued", "device": "cuda", "config": f"{m}x{n}x{k}", "run": "a", "ranks": 2, "dtype": "bf16",
        "machine": "2 x NVIDIA H200", "m": m, "n": n, "k": k, "gemm_ms": 3.0, "collective_ms": 2.0, "commit": "abc",
        "date": "2026-01-01T00:00:00Z", **other,
    }  # fmt: skip
    times = {"serial": (serial, None), "weft": (weft, "direct[chunks=2,by=dma,add=gemm]")}
    return [{**common, "variant": name, "p50_ms": ms, "chosen": chosen} for name, (ms, chosen) in times.items()]


def test_sub_layers_have_the_papers_sizes() -> None:
    tokens = {network.name: (network.hidden, network.tokens) for network in t3.NETWORKS}
    assert tokens["Mega-GPT-2"] == (3072, 16384)
    assert tokens["T-NLG"] == (4256, 8192)
    k = {layer: p.k for layer, p in t3.problems(t3.NETWORKS[1], 16)}
    assert k == {"OP": 4256 // 16, "FC-2": 4 * 4256 // 16, "FC-1": 4 * 4256 // 16, "IP": 3 * 4256 // 16}


@pytest.mark.slow
@pytest.mark.parametrize("pinned", [slow(None), "serial"])
def test_a_machine_that_is_not_here_is_nothing_to_warn_of(monkeypatch: pytest.MonkeyPatch, pinned: str | None) -> None:
    """The planner chooses serial for some sub-layers, but must not warn. A schedule that is pinned for calls does not
    apply to the study.
    """
    monkeypatch.setattr(importlib.import_module("weft.plan.choose"), "_warned", False)
    monkeypatch.delenv("WEFT_QUIET", raising=False)
    with warnings.catch_warnings(), plan.use(pinned):
        warnings.simplefilter("error")
        found = t3.simulated("h200", None, [network for network in t3.NETWORKS if network.name in ("T-NLG", "GPT-3")])
    chosen = {r["chosen"] for r in found if r["variant"] == "weft"}
    assert "serial" in chosen
    assert len(chosen) > 1


def test_rows_of_measured_sub_layers_and_what_they_say() -> None:
    """The GEMM takes 3 ms, the reduce-scatter 2 ms, serial 5 ms and weft 4 ms."""
    other = measured(64, 64, 64, 1.0, 1.0)
    (row,) = t3.rows_of(
        [
            *other,
            *measured(16384, 3072, 1536, 6.0, 5.0),
            *[{**r, "run": "b"} for r in measured(16384, 3072, 1536, 5.0, 4.0)],
        ]
    )
    assert row.name == "Mega-GPT-2 OP, 2 ranks"
    assert (row.speedup, row.ideal) == (pytest.approx(5 / 4), pytest.approx(5 / 3))
    gathered = replace(row, gather_ms=1.0)
    assert (gathered.speedup, gathered.ideal) == (pytest.approx(6 / 5), pytest.approx(6 / 4))
    assert "direct for 1." in t3.conclusions([row])[0]
    assert "faster than the ideal" in t3.conclusions([replace(row, weft_ms=2.5)])[1]
    with pytest.raises(
        ValueError, match="no records of T3's sub-layers: run weft bench matmul_reduce_scatter --preset t3"
    ):
        t3.rows_of(other)


def test_simulated_records_are_the_planners() -> None:
    found = t3.simulated("h200", networks=[SMALL])
    assert [r["layer"] for r in found[::2]] == list(t3.LAYERS)
    choice = plan.choose(MatmulReduceScatter(8, 16384, 3072, 3072 // 8, "bf16"), gpu("h200", 8))
    assert found[1]["chosen"] == choice.candidate.name
    assert found[1]["p50_ms"] == pytest.approx(choice.predicted_us / 1e3)  # type: ignore[operator]
    assert found[0]["p50_ms"] > found[0]["gemm_ms"] + 0.9 * found[0]["collective_ms"]
    text = t3.markdown(found)
    assert "Simulated: 8 x NVIDIA H200, linked as a switch" in text
    assert text.count("| Mega-GPT-2 ") == 8 + 2, "four sub-layers in two tables, and what is said of all"


def test_bytes_through_memory_by_hand() -> None:
    """Two ranks have 64 rows each. If the GEMM stores the peer's rows at the peer, this rank's memory gets the peer's
    products instead.
    """
    model, p = gpu("h200", 2), MatmulReduceScatter(2, 128, 4096, 512, "bf16")
    operands, half = 2 * (128 * 512 + 512 * 4096), 2 * 64 * 4096
    serial = traffic(named(p, "serial").build(), model)
    assert serial["matmul"] == pytest.approx(operands + 2 * half)
    assert serial["peer"] == pytest.approx(4 * half), (
        "as much read as the product has, and the peer's part stored and read"
    )
    stored = traffic(named(p, "direct[chunks=1,by=store,add=reduce]").build(), model)
    assert stored["compute"] == pytest.approx(3 * half)
    assert sum(stored.values()) < sum(traffic(named(p, "direct[chunks=1,by=dma,add=reduce]").build(), model).values())


def test_the_command_shows_draws_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t3, "NETWORKS", (SMALL,))
    shown = CliRunner().invoke(
        app, ["reproduce", "t3", "--hw", "h200", "--json", str(tmp_path / "t3.jsonl"), "--pictures", str(tmp_path)]
    )
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "figure-16-speedups.png").stat().st_size > 1000
    again = CliRunner().invoke(app, ["reproduce", "t3", "--records", str(tmp_path / "t3.jsonl")])
    assert "for 4 sub-layers" in again.output.lower()
    refused = CliRunner().invoke(app, ["reproduce", "t3", "--records", str(tmp_path / "t3.jsonl"), "--json", "x"])
    assert refused.exit_code != 0


def test_the_picture_says_why_bars_pass_the_ideal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, real = [], t3.figure
    monkeypatch.setattr(t3, "figure", lambda path, title, size: drawn.append(title) or real(path, title, size))
    for weft in (2.5, 4.0):  # the ideal is 3
        t3.draw(tmp_path, t3.rows_of(measured(16384, 3072, 1536, serial=5.0, weft=weft)), "Measured")
    assert ["directly to its owner" in title for title in drawn] == [True, False]
