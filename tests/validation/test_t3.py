"""T3 on its own hardware: the recorded study is near the paper, and the model still gives the records."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.bench.core import records as files
from weft.sim.memory_controller import dram, t3_gpu
from weft.studies import t3_hardware, t3_iteration, t3_sublayers

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "sim-t3-hardware.jsonl"


@pytest.fixture(scope="module")
def rows() -> t3_hardware.Rows:
    return t3_hardware.rows_of(files.read([RECORDS]))


BARS = {
    "ideal, geometric mean": (35, 5), "ideal, maximum": (50, 8),
    "ideal: FC-1 of T-NLG on 16 ranks, gap to the best sub-layer": (0, 2),
    "ideal: OP of Mega-GPT-2 on 16 ranks, gap to the worst sub-layer": (0, 0),
    "T3, geometric mean": (20, 5), "T3, maximum": (39, 8), "T3-MCA, geometric mean": (30, 5), "T3-MCA, maximum": (47, 8),
    "T3-MCA on the large networks, geometric mean": (29, 5), "memory accesses saved, mean": (22, 5),
    "fewer reads of the reduce-scatter, 8 ranks": (2.5, 0.0125), "fewer reads of the reduce-scatter, 16 ranks": (2.2, 0.022),
    "fewer writes of GEMM and reduce-scatter, 8 ranks (sequential / T3 - 1)": (14, 2),
    "fewer writes of GEMM and reduce-scatter, 16 ranks": (7, 2),
    "fewer reads of the GEMM, 8 ranks": (1.2, 0.24), "fewer reads of the GEMM, 16 ranks": (2.0, 0.4),
}  # fmt: skip
"""The paper's number, and the largest deviation from it: in points for percentages, otherwise in the number's own unit."""


def test_the_paper_is_met(rows: t3_hardware.Rows) -> None:
    """`test_the_model_gives_the_records` compares records and model."""
    claims = {claim.what: claim for claim in t3_sublayers.claims(rows.small["75"], rows.large["75"])}
    assert {what for what, claim in claims.items() if claim.limit is not None} == BARS.keys()
    for what, (paper, allowed) in BARS.items():
        assert claims[what].paper == paper
        assert claims[what].ours == pytest.approx(paper, abs=allowed + 1e-9), what
        assert claims[what].said == "yes"
    assert t3_sublayers.in_order(rows.small["75"])
    assert t3_hardware.conclusions(rows)[0].startswith(
        "16 of 16 numbers for which a limit is set deviate from the paper's by less than the limit. "
        "The geometric means of speedups have the paper's order T3 < T3-MCA < ideal. "
    )


@pytest.mark.parametrize(
    ("network", "layer", "ranks"), [("T-NLG", "FC-2", 16), ("Mega-GPT-2", "OP", 8), ("GPT-3", "IP", 32)]
)
def test_the_model_gives_the_records(rows: t3_hardware.Rows, network: str, layer: str, ranks: int) -> None:
    large = network == "GPT-3"
    recorded = {(r.network, r.layer, r.ranks): r for r in (rows.large if large else rows.small)["75"]}
    for one in t3_sublayers.sublayers(large):
        if (one[0].name, one[2], one[1]) == (network, layer, ranks):
            now = t3_sublayers.row_of(one[0], layer, ranks, one[3], t3_gpu())
            assert now.t3 == pytest.approx(recorded[network, layer, ranks].t3)
            assert now.mca == pytest.approx(recorded[network, layer, ranks].mca)
            assert now.moved["t3-mca"] == pytest.approx(recorded[network, layer, ranks].moved["t3-mca"])


def test_all_accesses_are_in_the_counts_of_figure_10(rows: t3_hardware.Rows) -> None:
    for row in rows.small["75"]:
        n, out = row.ranks, row.moved["sequential"]["GEMM writes"]
        chunk = out / n
        chunks = {
            "sequential": (n, 2 * n - 1, n, n - 1, n - 1), "t3-mca": (n - 1, n - 2, n - 1, n - 1, n - 1),
        }  # fmt: skip
        for which, counts in chunks.items():
            kinds = ("GEMM writes", "RS reads", "RS writes", "AG reads", "AG writes")
            assert [row.moved[which][kind] / chunk for kind in kinds] == pytest.approx(counts)


def test_the_timings_of_the_dram_bear_out_the_rate_and_bank_groups_the_updates() -> None:
    patterns = dram.patterns(1500)
    effective = t3_gpu()["memory.effective"]
    for name in ("last step of a reduce-scatter: two reads, one store", "a GEMM's operands, rows of 64 bytes"):
        assert 0.9 < dram.rate(patterns[name]) / effective < 1.25
    assert 0.9e12 < dram.rate(patterns["stores in a row"]) < 1.03e12
    assert 1.1 < dram.update_ratio(1500) < t3_gpu()["memory.update"]
    # With one bank group, a column takes CCDL clocks, or CCDWL clocks if memory adds.
    same = [dram.Access(op, 0, 0) for op in ("store", "update") for _ in range(200)]
    assert dram.cycles(same[:200]) == pytest.approx(200 * dram.CCDL, abs=40)
    assert dram.cycles(same[200:]) == pytest.approx(200 * dram.CCDWL, abs=40)


def test_iterations_are_within_three_points_of_the_paper(rows: t3_hardware.Rows) -> None:
    both = {False: rows.small["75"], True: rows.large["75"]}
    found = t3_iteration.deviations(both)
    assert len(found) == 10
    assert max(map(abs, found.values())) <= 3
    assert max(map(abs, t3_iteration.deviations(both, 0.425).values())) > 3
