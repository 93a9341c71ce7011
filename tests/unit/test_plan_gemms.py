"""GEMMs that are measured at the first call of a shape: which GEMMs, the duration, the agreement of ranks, and the
effect on choices.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft import plan
from weft.builders import AllGatherMatmul, AllToAllMatmul
from weft.hw import load_machine
from weft.plan import gemms
from weft.plan.choose import decide
from weft.plan.explain import HERE, LEGEND
from weft.sim import model_of
from weft.sim.model import MatmulShape

H200 = model_of(load_machine("h200"), 2)
NAME = "NVIDIA H200"
P = AllGatherMatmul.even(8192, 5120, 8192, 2)


@pytest.fixture(autouse=True)
def _as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "_times", {})
    monkeypatch.setattr(gemms, "_informed", {})
    monkeypatch.setenv("WEFT_QUIET", "1")


class Timed:
    """A measurement in which GEMMs take `factor` times the model's time."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.asked: list[tuple[MatmulShape, int, int]] = []
        self.spent_us = 0.0

    def __call__(self, shape: MatmulShape, warm: int, calls: int) -> float:
        us = self.factor * H200.matmul_us(*shape)
        self.asked.append((shape, warm, calls))
        self.spent_us += (warm + calls) * us
        return us


def test_the_whole_gemm_comes_first_and_then_pieces_of_what_may_win() -> None:
    wanted = gemms.wanted(P, H200)
    assert wanted[0] == (8192, 5120, 8192, "bf16")
    rows = decide(P, H200, mode="queued").rows
    best = [row for row in rows if row.us is not None and not row.rough][:2]
    for row in best:
        assert row.matmuls <= set(wanted)
    rough = frozenset[MatmulShape]().union(*(row.matmuls for row in rows if row.rough))
    exact = frozenset[MatmulShape]().union(*(row.matmuls for row in rows if not row.rough))
    assert rough - exact
    assert not (rough - exact) & set(wanted)
    assert len(wanted) == len(set(wanted)) <= gemms._MOST


def test_several_weights_have_a_whole_gemm_each() -> None:
    p = AllGatherMatmul(2, (4096, 4096), (4096, 512, 512), 8192, "bf16")
    assert gemms.wanted(p, H200)[:2] == ((8192, 4096, 8192, "bf16"), (8192, 512, 8192, "bf16"))


def test_no_work_is_not_measured_nor_kernels_of_our_own() -> None:
    assert gemms.wanted(AllGatherMatmul.even(0, 8, 8, 2), H200) == ()
    assert gemms.wanted(AllToAllMatmul.even(64, 64, 64, 2, 2), H200) == ()


@pytest.mark.parametrize("shape", [(64, 64, 512), (512, 4096, 8192), (8192, 5120, 8192), (16384, 28672, 8192)])
def test_measuring_keeps_to_the_budget(shape: tuple[int, int, int]) -> None:
    wanted, timed = gemms.wanted(AllGatherMatmul.even(*shape, 2), H200), Timed()
    found, left_us = gemms.measure(wanted, H200, timed)
    assert timed.spent_us <= gemms.BUDGET_US
    assert left_us == pytest.approx(gemms.BUDGET_US - timed.spent_us)
    assert wanted[0] in found
    assert list(found) == [asked[0] for asked in timed.asked]
    for (m, n, k, dtype), warm, calls in timed.asked:
        us = H200.matmul_us(m, n, k, dtype)
        assert warm >= 1
        assert (3 if us <= gemms._ENOUGH_US else 2) <= calls <= gemms._MOST_CALLS
        assert calls * us <= max(gemms._ENOUGH_US, 3 * us)
    first_us = timed.asked[0][1] * H200.matmul_us(*wanted[0])
    if first_us > gemms._LONG_US * timed.asked[0][1]:
        assert gemms._WARM_US - H200.matmul_us(*wanted[0]) <= first_us <= gemms._WARM_US
    assert all(warm == 1 for _, warm, _ in timed.asked[1:])


def test_slower_ones_than_expected_use_the_budget_up() -> None:
    wanted = gemms.wanted(P, H200)
    assert len(gemms.measure(wanted, H200, Timed(8.0))[0]) < len(gemms.measure(wanted, H200, Timed())[0])


def test_the_slowest_rank_counts_and_only_what_all_have() -> None:
    a, b, c = ((64 * i, 64, 64, "bf16") for i in (1, 2, 3))
    gemms.learn(NAME, [{a: 1.0, b: 5.0}, {b: 4.0, a: 3.0, c: 9.0}])
    assert gemms.measured_here(NAME) == {a: 3.0, b: 5.0}
    gemms.learn(NAME, [{c: 7.0}, {c: 6.0}])
    assert gemms.measured_here(NAME) == {a: 3.0, b: 5.0, c: 7.0}
    assert gemms.measured_here("another") == {}


def test_a_model_knows_what_was_measured_before_what_was_calibrated() -> None:
    a, b = (8192, 5120, 8192, "bf16"), (4096, 4096, 4096, "bf16")
    calibrated = replace(H200.with_measured({a: 800.0, b: 250.0}), sustained=1.0)
    assert gemms.informed(calibrated, NAME) is calibrated
    gemms.learn(NAME, [{a: 890.0}])
    model = gemms.informed(calibrated, NAME)
    assert model.matmul_us(*a) == pytest.approx(890.0)
    assert model.matmul_us(*b) == pytest.approx(250.0)
    assert gemms.informed(calibrated, NAME) is model
    gemms.learn(NAME, [{a: 890.0}])
    assert gemms.informed(calibrated, NAME) is model
    gemms.learn(NAME, [{b: 260.0}])
    assert gemms.informed(calibrated, NAME).matmul_us(*b) == pytest.approx(260.0)
    assert gemms.informed(calibrated, "another") is calibrated


def test_long_gemms_are_taken_to_be_slower_in_sustained_work() -> None:
    """The same holds for their pieces by rows, columns or K, but not for other short GEMMs."""
    long, short = (8192, 5120, 8192, "bf16"), (64, 4096, 4096, "bf16")
    pieces = [(1024, 5120, 8192, "bf16"), (8192, 512, 8192, "bf16"), (8192, 5120, 1024, "bf16")]
    others = [(1024, 5120, 4096, "bf16"), (1024, 5120, 8192, "fp16"), (1024, 5376, 8192, "bf16")]
    gemms.learn(NAME, [{long: 900.0, **dict.fromkeys((short, *pieces, *others), 30.0)}])
    model = gemms.informed(replace(H200, sustained=1.2), NAME)
    assert model.matmul_us(*long) == pytest.approx(900.0 * 1.2)
    assert [model.matmul_us(*piece) for piece in pieces] == pytest.approx([30.0 * 1.2] * 3)
    assert [model.matmul_us(*other) for other in (short, *others)] == pytest.approx([30.0 * 1.02] * 4)


def test_slow_pieces_are_not_chosen() -> None:
    """The formula's choice is dropped if measurements show that a piece takes as long as the whole GEMM."""
    chosen = decide(P, H200, mode="queued").row(decide(P, H200, mode="queued").candidate.name)
    (piece,) = chosen.matmuls
    whole = (P.m, P.n[0], P.k, P.dtype)
    us = H200.matmul_us(*whole)
    gemms.learn(NAME, [{whole: us, piece: us}])
    assert decide(P, gemms.informed(H200, NAME), mode="queued").candidate.name != chosen.candidate.name


def test_an_explanation_says_what_was_measured_here() -> None:
    def said() -> str:
        return plan.explain("all_gather_matmul", M=P.m, N=P.n[0], K=P.k, ranks=2, hw="h200")

    before = said()
    assert LEGEND in before
    assert "measured here" not in before
    gemms.learn(NAME, [{shape: 1.2 * H200.matmul_us(*shape) for shape in gemms.wanted(P, H200)}])
    after = said()
    assert f"{len(gemms.measured_here(NAME))} GEMMs measured here" in after
    assert HERE in after
    serial = next(line for line in after.splitlines() if line.startswith("serial  ") and "%" in line)
    assert " measured here " in serial
    found = plan.explanation(
        "all_gather_matmul", M=P.m, N=P.n[0], K=P.k, ranks=2, hw="h200", dtype="bf16", mode="queued"
    ).as_json()
    marked = {row["candidate"] for row in found["candidates"] if row["measured_here"]}
    assert {"serial", "shard[chunks=1,send=in_turn,by=dma]"} <= marked
    other = plan.explain("all_gather_matmul", M=P.m, N=P.n[0], K=P.k, ranks=2, hw="mi300x")
    assert "measured here" not in other
