"""The rule of the choice, with invented predictions in which each clause alone is decisive.

`test_plan_choose.py` tests the same planner with real machines and shapes.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest

from weft.builders import AllGatherMatmul, AllToAllMatmul, MatmulAllToAll, candidates, named
from weft.hw import load_machine
from weft.hw.topology import load_topology
from weft.plan.choose import ALIKE, ALIKE_US, CLEARLY_OWN, CLEARLY_US, Choice, decide
from weft.plan.predict import AT_LEAST, Mode, Row, predict
from weft.schedule import Schedule
from weft.sim import model_of
from weft.sim.run_time import TORCH_CALLS

module = importlib.import_module("weft.plan.choose")  # `weft.plan.choose` is a function, so import the module by name
PROBLEM = AllGatherMatmul.even(8192, 4096, 8192, 2)
H200 = replace(model_of(load_machine("h200"), 2), host_call_us=10.0)
SERIAL, ONE, TWO = "serial", "gather[by=dma]", "gather[by=kernel]"


def row(name: str, us: float, **more: Any) -> Row:
    """Return the prediction of a call. It takes 10 us of CPU time per GEMM and 15 us per collective. With several
    lanes, each step takes 1 us more.
    """
    return Row(named(PROBLEM, name), us, problem=PROBLEM, model=H200, **({"gemms": 1, "steps": 1} | more))


def choice_of(monkeypatch: pytest.MonkeyPatch, *rows: Row, mode: Mode = "queued") -> Choice:
    made_up = list(rows), dict.fromkeys([row.candidate.name for row in rows])
    monkeypatch.setattr(module, "predicted_rows", lambda *_: made_up)
    return decide(PROBLEM, H200, mode=mode)


@pytest.mark.parametrize(
    ("fastest_us", "other_us", "alike"),
    [
        (10.0, 10.0 + ALIKE_US - 0.1, True),  # more than 3% slower
        (10.0, 10.0 + ALIKE_US + 0.1, False),
        (1000.0, 1000.0 * (1 + ALIKE) - 1, True),  # more than 3 us slower
        (1000.0, 1000.0 * (1 + ALIKE) + 1, False),
    ],
)
def test_alike_is_what_differs_by_little_in_parts_or_in_microseconds(
    monkeypatch: pytest.MonkeyPatch, fastest_us: float, other_us: float, alike: bool
) -> None:
    serial = row(SERIAL, 2 * other_us)
    choice = choice_of(monkeypatch, serial, row(ONE, fastest_us, gemms=2), row(TWO, other_us), mode="single")
    assert choice.candidate.name == (TWO if alike else ONE)


@pytest.mark.parametrize(("gemms", "collectives", "taken"), [(10, 0, ONE), (11, 0, SERIAL), (11, 3, ONE)])
def test_a_call_may_keep_the_host_as_busy_as_serials_does(
    monkeypatch: pytest.MonkeyPatch, gemms: int, collectives: int, taken: str
) -> None:
    """Serial takes 115 us on the GPU. Its CPU time depends on its number of collectives."""
    serial = row(SERIAL, 115.0, gemms=8, collectives=collectives)
    choice = choice_of(monkeypatch, serial, row(ONE, 60.0, gemms=gemms))
    assert choice.candidate.name == taken
    assert ("CPU busy" in choice.row(ONE).why_not) == (taken == SERIAL)


def test_the_reason_names_the_one_gain_that_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 us are more than 3% of a short call."""
    choice = choice_of(monkeypatch, row(SERIAL, 20.0), row(ONE, 18.0), mode="graph")
    text = f"{ONE} at 18.0 us saves less than the required 15.0% of serial's time"
    assert choice.reason == f"nothing is clearly faster than serial, 20.0 us predicted: {text}"


def test_steps_of_many_lanes_keep_the_host_busy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    serial = row(SERIAL, 115.0)
    assert choice_of(monkeypatch, serial, row(ONE, 60.0, steps=200)).candidate.name == ONE
    assert choice_of(monkeypatch, serial, row(ONE, 60.0, steps=200, lanes=3)).candidate.name == SERIAL
    assert choice_of(monkeypatch, serial, row(ONE, 60.0, steps=200, lanes=3), mode="graph").candidate.name == ONE


def test_of_those_that_spare_the_host_the_simplest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    serial = row(SERIAL, 1000.0, collectives=1)
    spares, also = row(ONE, 999.0, steps=2), row(TWO, 998.0, steps=3)
    assert choice_of(monkeypatch, serial, spares, also).candidate.name == ONE
    assert choice_of(monkeypatch, serial, also).candidate.name == TWO
    busier = row(TWO, 998.0, gemms=2, collectives=1)
    assert choice_of(monkeypatch, serial, busier).candidate.name == SERIAL
    assert choice_of(monkeypatch, row(SERIAL, 1000.0), replace(spares, gemms=1)).candidate.name == SERIAL
    slower = row(ONE, 1001.0)
    assert choice_of(monkeypatch, serial, slower).candidate.name == SERIAL
    assert serial.host_us - spares.host_us >= CLEARLY_US


@pytest.mark.parametrize(
    ("mode", "serial_stops", "other_stops", "taken"),
    [
        ("queued", True, False, ONE),
        ("queued", False, False, SERIAL),
        ("queued", True, True, SERIAL),
        ("single", True, False, SERIAL),
    ],
)
def test_the_margin_is_smaller_if_only_serial_waits_for_sizes(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, serial_stops: bool, other_stops: bool, taken: str
) -> None:
    """Weft's own kernels must save 8% of serial's time. If only serial waits for sizes, 20 us of serial's CPU time
    count towards this margin.
    """
    serial = row(SERIAL, 1000.0, gemms=2, stops_host=serial_stops)
    assert serial.host_us == 20.0
    margin_us = CLEARLY_OWN * 1000.0 - 20.0
    saves, too_little = (
        row(ONE, 1000.0 - us, own_gemms=True, gemms=3, collectives=2, stops_host=other_stops)
        for us in (margin_us + 1, margin_us - 1)
    )
    assert choice_of(monkeypatch, serial, saves, mode=mode).candidate.name == taken
    assert choice_of(monkeypatch, serial, too_little, mode=mode).candidate.name == SERIAL


def test_serials_reason_names_the_best_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choice_of(monkeypatch, row(SERIAL, 100.0), row(ONE, 130.0), row(TWO, 120.0))
    assert choice.candidate.name == SERIAL
    assert "120.0 us" in choice.reason
    assert "130.0 us" not in choice.reason


# -- predictions that CPU time determines


def built(problem: AllGatherMatmul | AllToAllMatmul | MatmulAllToAll, name: str) -> Schedule:
    return next(candidate for candidate in candidates(problem) if candidate.name == name).build()


def test_reading_sizes_costs_the_host_each_dynamic_step_of_a_run() -> None:
    """Serial waits for the sizes first, and then makes several torch calls per step. Other schedules issue a step in
    native code.
    """
    problem, slow = (
        AllToAllMatmul.even(64, 32, 16, 4, 2),
        replace(H200, host_dynamic_us=1e3, host_late_us=1e4, host_call_us=1e5),
    )
    for name, us in (
        ("dispatch_by_expert[by=kernel,chunks=1]", 1e3 + 2 * 1e4),
        ("dispatch_by_expert[by=kernel,chunks=2]", 1e3 + 4 * 1e4),
        ("serial", 1e3 + 4 * TORCH_CALLS * 1e5),
    ):
        schedule = built(problem, name)
        assert schedule.reads_on_host
        assert predict(schedule, slow, "queued") == pytest.approx(us)


@pytest.mark.parametrize("problem_type", [AllToAllMatmul, MatmulAllToAll])
@pytest.mark.parametrize("hosts", [2, 4])
def test_serial_of_experts_between_hosts_takes_at_most_the_sum_of_its_parts(
    problem_type: type[AllToAllMatmul | MatmulAllToAll], hosts: int
) -> None:
    """Serial sorts the rows of all ranks in one call, so its CPU time does not grow with the number of ranks."""
    world, rows, n, k, experts = 8 * hosts, 4096, 2048, 2048, 4
    machine = load_machine("h100")
    model = replace(model_of(machine, world), wiring=load_topology(f"hosts:{hosts}x8", machine))
    serial = built(
        replace(problem_type.even(rows, n, k, experts, world), exact=problem_type is AllToAllMatmul), "serial"
    )
    sent_us = 2 * rows * 2048 * (world - 8) / world / 48e3  # a NIC has 48 GB/s
    gemms_us = experts * model.matmul_us(rows // experts, n, k, "bf16")
    sorted_us = 4 * rows * 2048 / model.hbm_bytes_per_us
    starts_us = 20 * (model.launch_us + model.collective_latency_us) + 2 * model.host_read_us
    parts_us = 1.1 * (sent_us + 2 * gemms_us + sorted_us) + starts_us
    assert sent_us + gemms_us < predict(serial, replace(model, host_call_us=0.0), "queued") <= parts_us
    host_us = model.host_dynamic_us + 4 * TORCH_CALLS * 1e3
    assert predict(serial, replace(model, host_call_us=1e3), "queued") == pytest.approx(host_us)


def test_sizes_that_the_cpu_knows_cost_no_wait() -> None:
    """After a dispatch that has counted rows, the CPU knows the sizes of the combine. After a bounded dispatch it reads them."""
    p = MatmulAllToAll.even(64, 32, 16, 4, 2)
    known, unknown = built(p, "serial"), built(replace(p, exact=False), "serial")
    assert known.reads_on_host, "a graph must not keep these sizes"
    assert (known.waits_for_sizes, known.stops_host) == (False, False)
    assert (unknown.waits_for_sizes, unknown.stops_host) == (True, True)
    slow = replace(H200, host_read_us=1e4)
    assert predict(known, slow, "queued") == predict(known, H200, "queued") < 1e3
    assert predict(unknown, slow, "queued") > 2e4


def test_a_single_call_takes_at_least_what_the_host_needs_for_its_steps() -> None:
    choice = decide(PROBLEM, replace(H200, host_step_us=1e5), mode="single")
    pruned = [row for row in choice.rows if row.why_not.startswith(AT_LEAST)]
    assert len(pruned) > 5
    for found in pruned:
        assert found.why_not == f"{AT_LEAST} {1e5 * found.steps:.1f} us"
