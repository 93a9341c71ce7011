"""FiCCO's closed-form chooser compared with the simulator, on a mesh and a switch, and the sweep over the heuristic's
thresholds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weft.bench.table_1 import GatheredGemm, find_gemms
from weft.builders import AllGatherMatmul
from weft.hw import load_machine
from weft.plan.closed_form import closed_form_us
from weft.sim import model_of
from weft.studies import ficco_choosers as choosers
from weft.studies import ficco_sensitivity as sensitivity
from weft.studies.ficco_rows import EIGHT, STUDIED, GemmRow

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "sim-ficco.jsonl"


def test_several_weights_take_as_long_as_their_gemms() -> None:
    model = model_of(load_machine("mi300x"), 8)
    one = AllGatherMatmul.even(65536, 1024, 4096, 8)
    two = AllGatherMatmul(8, one.rows, (512, 512), 4096, "bf16")
    for name, us in closed_form_us(two, model).items():
        assert us >= closed_form_us(one, model)[name]


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (AllGatherMatmul(2, (64, 96), (8,), 64, "bf16"), "needs at least 2 ranks with equal numbers of rows"),
        (AllGatherMatmul.even(72, 8, 64, 8), "9 rows of a shard and K=64 must be divisible by 8 ranks: pad, or plan"),
    ],
)
def test_what_the_formulas_lack_is_refused(problem: AllGatherMatmul, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        closed_form_us(problem, model_of(load_machine("mi300x"), problem.world_size))


def test_drawn_gemms_are_those_of_their_seed_and_none_of_the_tables() -> None:
    found = choosers.drawn(count=12)
    assert found == choosers.drawn(count=12) != choosers.drawn(seed=1, count=12)
    known = {(gemm.m, gemm.n, gemm.k) for gemm in find_gemms([])}
    for gemm in found:
        assert (gemm.m, gemm.n, gemm.k) not in known
        assert gemm.m % 64 == gemm.n % 8 == gemm.k % 64 == 0


def test_the_sweep_reaches_what_a_dense_grid_of_thresholds_reaches() -> None:
    """With these invented times, the paper's rule can classify two of the three GEMMs, and two free thresholds can
    classify all.
    """

    def row(name: str, m: int, k: int, fastest: str) -> GemmRow:
        ms = {of: 1.0 if title == fastest else 2.0 for title, of in STUDIED.items()}
        ms |= {of: 3.0 for of in EIGHT if of not in ms}
        return GemmRow(name, GatheredGemm(name, "", "", m, 1, k), "", {"serial": 4.0, **ms}, 1.0, 1.0)

    rows = [
        row("g1", 1000, 10, "uniform-fused-1D"),
        row("g2", 2000, 10, "hetero-fused-1D"),
        row("g3", 3000, 10, "hetero-unfused-1D"),
    ]
    one, of_paper, any_thresholds = (
        swept.near["all"] for swept in choosers.sweep(rows, {"all": "g"}) if swept.among == "all eight"
    )
    assert one == 1
    assert of_paper == 2  # 2 MNK of g3 is less than five times that of g2
    assert any_thresholds == 3


def test_an_assumed_number_moves_what_depends_on_it_and_others_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, machine = ("copy_engine.bandwidth", "host.read"), load_machine("mi300x")
    numbers = {
        key: replace(machine[key], source="assumed" if key in kept else "derived") for key in machine
    }  # fmt: skip
    monkeypatch.setattr(sensitivity, "TABLE_1", find_gemms(["g14"]))
    told: list[float] = []
    record = sensitivity.simulate(replace(machine, quantities=numbers), 8, None, lambda what, share: told.append(share))
    assert record["without"] == ["host.read"]
    as_it_is, slower = (
        line[2] for line in record["lines"] if line[:2] in (["as it is", None], ["copy_engine.bandwidth", 0.8])
    )
    assert slower["shard"] < 0.9 * as_it_is["shard"]
    assert sum(told) == pytest.approx(1)
    assert sensitivity.sensitivity_table(record).cells[1][0] == "copy_engine.bandwidth x 0.8"
