"""The choice of a schedule: the fastest by simulation, serial unless it is clearly slower, pins, measured times,
memory, and the warning.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import pytest
from support.sim_toys import applicable
from support.slow import slow

from weft import plan
from weft.builders import (
    AllGatherMatmul,
    AllToAllMatmul,
    builder,
    candidates,
    described,
    named,
    unregister,
)
from weft.builders.all_gather_matmul import gather
from weft.builders.operands import all_gather_matmul_operands
from weft.hw import load_machine
from weft.hw.topology import load_topology
from weft.plan import predict as predict_module
from weft.plan.choose import ALIKE, ALIKE_US, CLEARLY, CLEARLY_OWN, CLEARLY_ROUGH, CLEARLY_US, decide
from weft.plan.predict import AT_LEAST, HOPELESS, Mode, predict
from weft.schedule import Schedule
from weft.sim import Model, model_of, simulate

module = importlib.import_module("weft.plan.choose")  # `weft.plan.choose` is a function, so import the module by name
H200 = model_of(load_machine("h200"), 2)
LARGE = AllGatherMatmul.even(8192, 4096, 8192, 2)
SMALL = AllGatherMatmul.even(256, 3072, 4096, 2)
TINY = AllGatherMatmul.even(2, 8, 8, 2)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_choices", {})
    monkeypatch.setenv("WEFT_QUIET", "1")


def with_collective(us: float) -> Model:
    """Return a model of H200s whose collectives take exactly `us`, for any size."""
    return replace(H200, collective_latency_us=us, collective_bytes_per_us=float("inf"))


def test_the_simplest_of_the_fastest_candidates_is_taken() -> None:
    choice = plan.choose(LARGE, H200)
    times = {name: predict(schedule, H200, "queued") for name, schedule in applicable(LARGE).items()}
    alike = {
        name
        for name, us in times.items()
        if us <= max(min(times.values()) * (1 + ALIKE), min(times.values()) + ALIKE_US)
    }
    rows = {name: choice.row(name) for name in alike if choice.row(name).steps and not choice.row(name).rough}
    size = {name: (row.gemms, row.steps) for name, row in rows.items()}
    assert len(size) > 1
    assert size[choice.candidate.name] == min(size.values())
    assert choice.schedule == applicable(LARGE)[choice.candidate.name]
    assert {row.candidate.name for row in choice.rows} == {candidate.name for candidate in candidates(LARGE)}
    for row in choice.rows:
        assert (row.why_not == "") == (row.candidate is choice.candidate)
        assert row.predicted_us in (None, times.get(row.candidate.name))
    assert choice.row("serial").predicted_us == times["serial"]
    assert [row.us for row in choice.rows if row.us] == sorted(row.us for row in choice.rows if row.us)


def test_no_prediction_is_faster_than_the_gemm_whole() -> None:
    slow_small = H200.with_measured({(8192, 4096, 8192, "bf16"): 1000.0, (4096, 4096, 8192, "bf16"): 300.0})
    for row in plan.choose(LARGE, slow_small).rows:
        assert row.us is None or row.us >= slow_small.matmul(LARGE.m, LARGE.n[0], LARGE.k, "bf16").time_us


def test_what_rounds_at_every_step_is_not_taken_before_experts_either() -> None:
    rough = [row for row in plan.choose(AllToAllMatmul.even(8192, 14336, 4096, 4, 2), H200).rows if row.rough]
    assert {row.candidate.builder for row in rough} == {"ficco_2d"}
    assert all(row.why_not == "rounds at every step: larger rounding error" for row in rough if row.us is not None)
    exact = plan.choose(
        AllToAllMatmul(2, 4, (512, 512), 64, 64, "fp32", 512), replace(H200, matmul_flops_per_us={"fp32": 1e8})
    )
    assert not any(row.rough for row in exact.rows)
    many = AllToAllMatmul.even(8192, 14336, 4096, 16, 16)
    assert not any(many.takes(one) for one in candidates(many) if one.builder == "ficco_2d")


def test_what_rounds_at_every_step_is_not_taken() -> None:
    choice = plan.choose(LARGE, H200)
    rough = [row for row in choice.rows if row.rough]
    assert {row.candidate.builder for row in rough} == {"ficco_2d", "ficco_2d_collective"}
    assert all(row.why_not == "rounds at every step: larger rounding error" for row in rough if row.us is not None)
    exact = plan.choose(
        AllGatherMatmul.even(LARGE.m, 8192, 4096, 2, "fp32"), replace(H200, matmul_flops_per_us={"fp32": 1e8})
    )
    assert not any(row.rough for row in exact.rows)


def test_equal_schedules_are_one() -> None:
    """With two ranks, steps=0 (the number of ranks) is the same as steps=2."""
    row = plan.choose(LARGE, H200).row("ficco_1d[start=hetero,gemms=fused,steps=2,by=dma]")
    assert row.predicted_us is None
    assert "ficco_1d[start=hetero,gemms=fused,steps=0,by=dma]" in row.why_not


@pytest.mark.parametrize("model", [H200, model_of(load_machine("mi300x"), 8)], ids=lambda m: m.name)
@pytest.mark.parametrize("shape", [slow((64, 4096, 8192)), slow((1024, 1024, 4096)), (8192, 4096, 8192)])
@pytest.mark.parametrize("mode", ["queued", slow("single")])
def test_no_run_is_shorter_than_its_bound(
    mode: Mode, shape: tuple[int, int, int], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates that are not simulated are slower than their bound, and therefore slower than the chosen candidate."""
    problem = AllGatherMatmul.even(*shape, model.world_size)
    choice = decide(problem, model, mode=mode)
    assert choice.row("serial").predicted_us is not None
    fastest = min(row.us for row in choice.rows if row.us is not None)
    pruned = {row.candidate.name for row in choice.rows if row.why_not.startswith(AT_LEAST)}
    assert pruned or model is H200
    monkeypatch.setattr("weft.plan.predict.HOPELESS", 0.0)  # compute the bounds of all candidates except serial
    bounds = {row.candidate: row.why_not for row in decide(problem, model, mode=mode).rows if row.predicted_us is None}
    for candidate, why_not in bounds.items():
        if why_not.startswith(AT_LEAST):
            us = predict(candidate.build(), model, mode)
            assert us >= float(why_not.removeprefix(AT_LEAST).split()[0]) - 0.1, candidate.name
            assert candidate.name not in pruned or us > HOPELESS * fastest * (1 - 1e-9)
    assert sum(why_not.startswith(AT_LEAST) for why_not in bounds.values()) > 20


@pytest.mark.parametrize(
    ("topology", "rows"),
    [("hosts", "even"), slow("switch", "uneven"), slow("ring", "even"), slow("torus", "even"), slow("torus", "uneven")],
)
def test_of_many_ranks_no_run_is_shorter_than_the_bytes_on_its_links(
    topology: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound rules out candidates, but not the candidate that is the fastest of all."""
    world = 16
    h200 = load_machine("h200")
    machine = replace(h200, quantities={**h200.quantities, "link.pair_usable": h200["link.port_usable"]})
    model = replace(model_of(machine, world), wiring=load_topology(topology, machine))
    shards = (1024,) * world if rows == "even" else (2048, 0, *(1024,) * (world - 3), 512)
    problem = AllGatherMatmul(world, shards, (1024,), 1024, "bf16")
    names = (
        "serial",
        "gather",
        "shard[chunks=1,",
        "ficco_1d_collective[start=uniform",
        "ficco_1d[start=hetero,gemms=fused,steps=2",
    )
    among = frozenset(
        one.name for one in candidates(problem) if one.name.startswith(names) and "steps=0" not in one.name
    )
    for one in predict_module._built(problem, lambda what, share: None, among=among):
        if one.schedule is not None:
            us = predict(one.schedule, model, "queued")
            assert us >= predict_module._least_us(one, model, "queued") * (1 - 1e-9), one.row.candidate.name
    some = decide(problem, model, mode="queued", among=among)
    monkeypatch.setattr("weft.plan.predict.HOPELESS_OF_MANY", math.inf)
    every = decide(problem, model, mode="queued", among=among)
    assert some.candidate == every.candidate
    assert any(row.why_not.startswith(AT_LEAST) for row in some.rows) or topology == "switch"
    assert not any(row.why_not.startswith(AT_LEAST) for row in every.rows)


def test_more_than_32_ranks_leave_out_schedules_of_a_piece_for_each_rank() -> None:
    model = model_of(load_machine("h200"), 33)
    names = [row.candidate.name for row in decide(AllGatherMatmul.even(33 * 64, 64, 64, 33), model, mode="queued").rows]
    assert not any("steps=0" in name for name in names)
    pinned = "ficco_1d_collective[start=uniform,gemms=fused,steps=0]"
    few = AllGatherMatmul.even(33 * 64, 64, 64, 33)
    assert decide(few, model, mode="queued", pinned=pinned).candidate.name == pinned


def test_measured_candidates_are_predicted_however_slow() -> None:
    problem = AllGatherMatmul.even(64, 4096, 8192, 8)
    model = model_of(load_machine("mi300x"), 8)
    pruned = next(row for row in decide(problem, model, mode="queued").rows if row.why_not.startswith(AT_LEAST))
    name = pruned.candidate.name
    choice = decide(problem, model, mode="queued", measured={"serial": 9.0, name: 5.0})
    assert choice.candidate.name == name
    assert choice.predicted_us == choice.row(name).predicted_us


@pytest.mark.parametrize("gain_us", [-50, 1, 10, 14, 15, 16, 50])
def test_serial_is_taken_unless_it_is_clearly_beaten(gain_us: float) -> None:
    """The latency of the collective is set such that another schedule gains exactly this time."""
    alone = decide(LARGE, with_collective(0.0), mode="queued")
    best_us = min(row.us for row in alone.rows if row.us is not None and row.candidate.name != "serial")
    late = best_us + gain_us - alone.row("serial").us
    choice = decide(LARGE, with_collective(late), mode="queued") if late >= 0 else alone
    serial_us = choice.row("serial").us
    gain = serial_us - best_us
    if abs(gain - max(CLEARLY * serial_us, CLEARLY_US)) > 0.01:
        assert (choice.candidate.name == "serial") == (gain < max(CLEARLY * serial_us, CLEARLY_US))
    if choice.candidate.name == "serial" and gain > 0:
        assert "nothing is clearly faster than serial" in choice.reason
        assert any(row.why_not == "not clearly faster than serial" for row in choice.rows)


def test_single_calls_pay_for_the_hosts_steps() -> None:
    slow_host = replace(H200, host_step_us=100.0)
    assert plan.choose(LARGE, slow_host, mode="single").candidate.name == "serial"
    assert plan.choose(LARGE, slow_host, mode="queued").candidate.name != "serial"
    graph, queued = (plan.choose(LARGE, slow_host, mode=mode).predicted_us for mode in ("graph", "queued"))
    assert queued < graph < queued + 100.0


def test_calls_that_outlast_serial_on_the_host_are_for_graphs() -> None:
    """In a loop, calls are not faster than the CPU can issue them, however fast the GPU is."""
    problem = AllGatherMatmul.even(4096, 1024, 4096, 8)
    model = replace(model_of(load_machine("h200"), 8), tile_step=0, library_tile_half=None)  # eight GEMMs are fast
    ahead = decide(problem, replace(model, host_call_us=0.0), mode="queued")
    name = ahead.candidate.name
    assert ahead.row(name).gemms == 8
    choice = decide(problem, model, mode="queued")
    assert choice.row(choice.candidate.name).gemms == 1
    assert choice.predicted_us < (choice.row("serial").us or 0.0) < choice.row(name).host_us
    assert f"CPU busy for {choice.row(name).host_us:.0f} us" in choice.row(name).why_not
    assert choice.row(name).us < choice.predicted_us
    fastest = next(row for row in choice.rows if not row.rough)
    assert choice.reason.endswith(
        f"; {fastest.candidate.name}, {fastest.us:.1f} us, would keep the CPU busy for {fastest.host_us:.0f} us per call"
    )
    assert "host" not in decide(problem, model, mode="graph").reason
    assert decide(problem, model, mode="graph").row(name).why_not != choice.row(name).why_not


def test_where_the_device_does_not_decide_the_host_is_spared() -> None:
    """Choose the candidate with less CPU time, unless it would be much slower if the prediction errs a little."""
    long = AllGatherMatmul.even(64, 28672, 6144, 2)
    choice = decide(long, H200, mode="queued")
    serial, taken = choice.row("serial"), choice.row("gather[by=kernel]")
    assert (serial.us or 0.0) - (taken.us or 0.0) < max(CLEARLY * (serial.us or 0.0), CLEARLY_US)
    assert choice.candidate == taken.candidate
    assert "uses less CPU time" in choice.reason
    assert decide(long, replace(H200, host_call_us=0.0), mode="queued").candidate.name == "serial"
    assert decide(AllGatherMatmul.even(64, 3072, 4096, 2), H200, mode="queued").candidate.name == "serial"


def test_a_small_share_of_serial_is_enough_if_only_communication_differs() -> None:
    """The GEMM takes 238 us with either schedule, so errors of its time do not count."""
    p = described("matmul_reduce_scatter", m=128, n=25024, k=15232, ranks=2)
    choice = decide(p, model_of(load_machine("h100"), 2), mode="graph")
    serial_us, taken_us = choice.row("serial").us or 0.0, choice.predicted_us
    assert choice.candidate.name == "scatter"
    assert CLEARLY_US < serial_us - taken_us < CLEARLY * serial_us


def test_a_doubtful_gain_does_not_hide_a_clear_one() -> None:
    """The prediction for `tracked` is the fastest but too uncertain. The next candidate is clearly faster than serial, so
    it is chosen, although a third candidate takes as long as serial and needs less CPU time.
    """
    problem = described("matmul_reduce_scatter", m=16384, n=3072, k=1152, ranks=8)
    choice = decide(problem, model_of(load_machine("h200"), 8), mode="queued")
    serial_us, names = choice.row("serial").us or 0.0, [row.candidate.builder for row in choice.rows if not row.rough]
    assert names[0] == "tracked"
    assert serial_us - (choice.rows[0].us or 0.0) < CLEARLY_ROUGH * serial_us
    assert choice.candidate.builder == "direct"
    assert serial_us - choice.predicted_us > CLEARLY_OWN * serial_us
    assert choice.row("scatter").host_us < choice.row("serial").host_us


@pytest.mark.parametrize(
    ("name", "longer_us"),
    [
        ("serial", 300.0),
        ("gather[by=kernel]", 0.0),  # a single stream that only has kernels
        ("shard[chunks=1,send=in_turn,by=dma]", 7.0),  # all lanes end before the graph does
    ],
)
def test_in_graphs_collectives_and_ends_take_longer(name: str, longer_us: float) -> None:
    schedule = named(SMALL, name).build()
    model = replace(H200, graph_run_us=7.0, graph_collective_us=300.0)
    longer = predict(schedule, model, "graph") - predict(schedule, model, "queued")
    assert longer == pytest.approx(longer_us, abs=1e-6)


def test_what_is_taken_beats_serial_clearly_itself() -> None:
    """It is not enough that another candidate with nearly the same time beats serial clearly."""
    choice = plan.choose(AllGatherMatmul.even(512, 512, 4096, 2), H200, mode="single")
    gain = (choice.row("serial").us or 0.0) - choice.predicted_us
    assert choice.candidate.name == "serial" or gain >= max(CLEARLY * (choice.row("serial").us or 0.0), CLEARLY_US)


def test_of_schedules_alike_one_is_taken_that_does_not_stop_the_host() -> None:
    """With many rows all schedules hide the exchange, and their predicted times are nearly equal."""
    p = AllToAllMatmul(2, 16, (32768, 32768), 28672, 4096, "bf16", 32768)
    choice = plan.choose(p, H200)
    assert "simplest" in choice.reason
    assert choice.candidate.name == "dispatch_by_expert[by=kernel,chunks=1]"
    assert any(row.stops_host and (row.us or 0.0) <= choice.predicted_us for row in choice.rows)


@pytest.mark.parametrize(
    "problem",
    [
        AllGatherMatmul.even(64, 32, 16, 1),
        AllGatherMatmul(2, (0, 0), (8,), 8, "bf16"),
        AllGatherMatmul.even(8, 8, 0, 2),
    ],
)
def test_one_rank_or_no_work_is_serial(problem: AllGatherMatmul) -> None:
    model = model_of(load_machine("h200"), problem.world_size)
    for mode in plan.MODES:
        assert plan.choose(problem, model, mode=mode).candidate.name == "serial"


def test_ragged_shards_have_a_choice_and_the_others_a_reason() -> None:
    choice = plan.choose(AllGatherMatmul(2, (5000, 3192), (4096,), 8192, "bf16"), H200)
    assert choice.candidate.builder in ("shard", "gather")
    row = choice.row("ficco_2d[start=uniform,gemms=fused,steps=0,by=dma]")
    assert row.us is None
    assert row.losses is None
    assert "(5000, 3192)" in row.why_not


def test_losses_are_those_of_the_row() -> None:
    choice = plan.choose(LARGE, H200)
    losses = choice.row("serial").losses
    assert losses is not None
    assert losses.exposed_us > choice.rows[0].losses.exposed_us
    assert losses.gemm_decomposition == pytest.approx(1.0)


# -- measured times


def test_measured_times_decide_among_themselves() -> None:
    gather = "gather[by=dma]"
    choice = plan.choose(LARGE, H200, measured={"serial": 900.0, gather: 700.0})
    assert (choice.candidate.name, choice.measured_us) == (gather, 700.0)
    assert choice.predicted_us == choice.row(gather).predicted_us != 700.0
    assert "700.0 us measured" in choice.reason
    faster = plan.choose(LARGE, H200).candidate.name  # by prediction
    assert choice.row(faster).why_not == "not measured"
    assert plan.choose(LARGE, H200, measured={"serial": 700.0, gather: 690.0}).candidate.name == "serial"


def test_measured_times_must_have_serial_and_known_names() -> None:
    with pytest.raises(ValueError, match="lacks serial: measure it too"):
        plan.choose(LARGE, H200, measured={"gather[by=dma]": 1.0})
    with pytest.raises(ValueError, match=r"no schedule 'gather\[by=hand\]'"):
        plan.choose(LARGE, H200, measured={"serial": 2.0, "gather[by=hand]": 1.0})


# -- pins


def test_a_choice_is_remembered_for_its_model_mode_and_builders() -> None:
    first = plan.choose(LARGE, H200)
    assert plan.choose(AllGatherMatmul.even(8192, 4096, 8192, 2), H200) is first
    assert plan.choose(LARGE, replace(H200)) is not first
    assert plan.choose(LARGE, H200, mode="single") is not first

    @builder(AllGatherMatmul)
    def half(p: AllGatherMatmul) -> Schedule:
        """Build a wrong schedule, which computes too little and is therefore the fastest."""
        d, x, ws, ys, _ = all_gather_matmul_operands("half", p)
        d.lane("compute").matmul(ys[0].part(rows=(0, p.rows[0])), x.part(), ws[0].part())
        return d.schedule()

    try:
        assert plan.choose(LARGE, H200).candidate.name == "half"
    finally:
        unregister(AllGatherMatmul, "half")
    assert plan.choose(LARGE, H200) is first


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 3)
    for rows in range(1, 7):
        plan.choose(AllGatherMatmul.even(2 * rows, 8, 8, 2), H200, pinned="serial")
    assert len(module._choices) == 3
    assert plan.choose(AllGatherMatmul.even(12, 8, 8, 2), H200, pinned="serial").problem.m == 12


def test_autotune_pins_nothing() -> None:
    first = plan.choose(LARGE, H200)
    with plan.use("autotune"):
        assert plan.choose(LARGE, H200) is first
    with plan.use("serial"):
        assert plan.choose(LARGE, H200, pinned=plan.AUTOTUNE) is first


def test_the_heuristics_pick_is_taken_if_it_can_run() -> None:
    long, wanted = AllGatherMatmul.even(2048, 4096, 8192, 2), replace(LARGE, return_gathered=True)
    with plan.use("heuristic"):
        assert plan.choose(LARGE, H200).candidate.name == plan.static_pick(LARGE, load_machine("h200"))
        assert plan.choose(long, H200).candidate.name == "ficco_2d[start=uniform,gemms=fused,steps=0,by=dma]"
        instead = plan.choose(wanted, H200)
    assert instead is plan.choose(wanted, H200)


def test_why_the_heuristic_is_not_followed_is_said() -> None:
    uneven, odd = AllGatherMatmul(2, (64, 32), (8,), 8, "bf16"), AllGatherMatmul.even(2, 8, 1, 2)
    assert plan.pick_here(LARGE, "no machine of this name") == (plan.static_pick(LARGE, load_machine("mi300x")), "")
    for problem, why in (
        (uneven, "does not support this problem: shards of (64, 32) rows cannot be cut into equal chunks"),
        (odd, "a shard (1) cannot be cut into 2 pieces"),
        (described("matmul_reduce_scatter", m=8, n=8, k=8, ranks=2), "it does not cover matmul_reduce_scatter"),
    ):
        picked, said = plan.pick_here(problem, "NVIDIA H200")
        assert picked is None
        assert why in said


def test_a_second_choice_builds_and_simulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []

    def counted_builder(p: AllGatherMatmul) -> Schedule:
        counted.append("built")
        return gather(p, by="dma")

    def counting(*arguments: Any, **options: Any) -> Any:
        counted.append("simulated")
        return simulate(*arguments, **options)

    monkeypatch.setattr("weft.sim.run_time.simulate", counting)
    problem, measured = AllGatherMatmul.even(8192, 4096, 4096, 2), {"serial": 900.0, "gather[by=dma]": 700.0}
    builder(AllGatherMatmul)(counted_builder)
    try:
        for options in ({}, {"mode": "graph"}, {"measured": measured}):
            before = len(counted)
            plan.choose(problem, H200, **options)  # type: ignore[arg-type]
            after = len(counted)
            assert after > before
            plan.choose(AllGatherMatmul.even(8192, 4096, 4096, 2), H200, **options)  # type: ignore[arg-type]
            assert len(counted) == after
    finally:
        unregister(AllGatherMatmul, "counted_builder")
    assert {"built", "simulated"} == set(counted)


def test_modes_are_named() -> None:
    with pytest.raises(ValueError, match="mode='eager' is unknown: use one of queued, graph, single"):
        plan.choose(LARGE, H200, mode="eager")  # type: ignore[arg-type]


# -- the warning
