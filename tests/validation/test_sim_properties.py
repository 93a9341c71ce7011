"""Properties for any machine: no schedule is faster than its resources allow, and one rank may represent all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.sim_toys import applicable, bytes_leaving, gpu

from weft.builders import AllGatherMatmul
from weft.hw.topology import Wiring, mesh, ring, switch
from weft.schedule import Schedule
from weft.sim import NULL, Model, simulate
from weft.sim.engine import _Engine
from weft.sim.lower import lower


def _rate(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high)


@st.composite
def models(draw: st.DrawFn) -> Model:
    link = draw(_rate(1e3, 1e6))
    copy = draw(_rate(1e3, 1e6))
    return replace(
        NULL,
        name="random",
        compute_units=draw(st.integers(2, 300)),
        matmul_flops_per_us={"bf16": draw(_rate(1e6, 1e9))},
        tile=draw(st.sampled_from([(128, 256), (256, 256), (64, 64)])),
        tile_half=draw(_rate(0, 100)),
        tile_ramp=draw(_rate(0, 200)),
        vector_flops_per_us=draw(_rate(1e5, 1e8)),
        launch_us=draw(_rate(0.1, 20)),
        hbm_bytes_per_us=draw(_rate(1e4, 1e7)),
        l2_bytes=draw(_rate(0, 3e8)),
        wiring=Wiring(draw(st.sampled_from([switch, mesh, ring])), (link,)),
        copy_latency_us=draw(_rate(0, 50)),
        copy_bytes_per_us=copy,
        copy_engines=draw(st.integers(1, 16)),
        copy_row_us=draw(_rate(0, 0.1)),
        kernel_copy_units=draw(st.integers(1, 32)),
        put_bytes_per_us=((8, copy), (64, 2 * copy)),
        get_bytes_per_us=((8, copy),),
        collective_latency_us=draw(_rate(0, 50)),
        collective_bytes_per_us=link * draw(_rate(0.1, 1.0)),
        collective_units=draw(st.integers(1, 2)),
        copy_disturbance=draw(_rate(0, 0.3)) / (16 * copy),
        kernel_copy_disturbance=draw(_rate(0, 0.3)) / (16 * copy),
        signal_local_us=draw(_rate(0, 5)),
        signal_remote_us=draw(_rate(0, 5)),
        host_step_us=draw(_rate(0, 10)),
    )


WORLDS = (2, 3, 4)
PROBLEMS = {world: AllGatherMatmul.even(world * 12 * 16, 320, 192, world) for world in WORLDS}
SCHEDULES: dict[int, dict[str, Schedule]] = {world: applicable(PROBLEMS[world]) for world in WORLDS}
SHARD = "shard[chunks=1,send=in_turn,by=dma]"
CASES = st.sampled_from([(world, name) for world in WORLDS for name in SCHEDULES[world]])
RUNS = settings(max_examples=30)


@RUNS
@given(models(), CASES)
def test_nothing_is_faster_than_what_it_needs(model: Model, case: tuple[int, str]) -> None:
    world, name = case
    schedule, problem = SCHEDULES[world][name], PROBLEMS[world]
    result = simulate(schedule, model)
    assert result.end_us >= problem.flops / model.matmul_flops_per_us["bf16"] * (1 - 1e-9)
    sent = bytes_leaving(schedule, 0)
    leaving = {route[0] for other in range(1, world) for route in model.wiring.of(world).routes(0, other) if route}
    assert result.end_us >= sent / sum(link.bytes_per_us for link in leaving) * (1 - 1e-9)
    assert result.end_us >= 2 * sent / model.hbm_bytes_per_us * (1 - 1e-9)  # bytes sent; equally many are received
    assert 0 <= result.exposed_us <= result.end_us
    assert max(result.compute_us) <= result.end_us * (1 + 1e-9)
    for span in result.timeline:
        assert 0 <= span.start_us <= span.end_us <= result.end_us


@RUNS
@given(models(), CASES)
def test_all_ranks_simulated_end_when_the_one_does(model: Model, case: tuple[int, str]) -> None:
    world, name = case
    schedule = SCHEDULES[world][name]
    one = simulate(schedule, model, runs=2)
    assume(one.program.symmetric)
    assert len(one.simulated_ends_us) == 1
    each = _Engine(lower(schedule, model, alike=False), [0.0] * world, None, 2).run()
    assert len(each.simulated_ends_us) == world
    # If steps use several resources in different proportions, shares are only nearly fair in rare cases, and then
    # depend on the number of equal steps.
    for run in range(2):
        assert [ends[run] for ends in each.ends_us] == pytest.approx([one.ends_us[0][run]] * world, rel=1e-3)


FASTER = {
    "links": lambda m, f: replace(m, wiring=replace(m.wiring, numbers=(m.wiring.numbers[0] * f,))),
    "engines": lambda m, f: replace(m, copy_bytes_per_us=m.copy_bytes_per_us * f),
    "memory": lambda m, f: replace(m, hbm_bytes_per_us=m.hbm_bytes_per_us * f),
    "matmul": lambda m, f: replace(m, matmul_flops_per_us={"bf16": m.matmul_flops_per_us["bf16"] * f}),
    "signals": lambda m, f: replace(m, signal_remote_us=m.signal_remote_us / f),
}


APART = ("serial", SHARD, "shard[chunks=2,send=in_turn,by=dma]")


def with_nothing_shared(model: Model) -> Model:
    """Return a model in which GEMMs and copies share no resource. With sharing, an earlier copy may run at a worse
    moment.
    """
    wiring = Wiring(mesh, model.wiring.numbers)
    return replace(model, copy_disturbance=0.0, kernel_copy_disturbance=0.0, hbm_bytes_per_us=1e12, wiring=wiring)


@RUNS
@given(models(), st.sampled_from(WORLDS), st.sampled_from(sorted(FASTER)), st.floats(1, 10))
def test_better_hardware_is_no_slower(model: Model, world: int, what: str, factor: float) -> None:
    for name in APART:
        machine = with_nothing_shared(model)
        better = simulate(SCHEDULES[world][name], FASTER[what](machine, factor)).end_us
        assert better <= simulate(SCHEDULES[world][name], machine).end_us * (1 + 1e-6), name


@pytest.mark.parametrize("what", sorted(FASTER))
def test_each_kind_of_hardware_matters_to_these_schedules(what: str) -> None:
    """The property "no slower" would be trivial for a number on which nothing depends."""
    usual = gpu("h200", 2)
    worse = FASTER[what](usual, 1 / 30)
    assert any(
        simulate(SCHEDULES[2][name], worse).end_us > 1.01 * simulate(SCHEDULES[2][name], usual).end_us for name in APART
    )


@RUNS
@given(models(), st.sampled_from(WORLDS), st.lists(st.floats(0, 500), min_size=4, max_size=4))
def test_stragglers_delay_by_no_more_than_they_are_late(model: Model, world: int, late: list[float]) -> None:
    """The bound holds without sharing. On shared links, ranks that are out of step may send to the same rank at once."""
    for name in APART:
        schedule, machine = SCHEDULES[world][name], with_nothing_shared(model)
        on_time, found = (simulate(schedule, machine, late_us=us).end_us for us in ((), late[:world]))
        assert max(on_time, max(late[:world])) <= found * (1 + 1e-6), name
        assert found <= (on_time + max(late[:world])) * (1 + 1e-6), name


@RUNS
@given(models(), CASES, st.floats(0, 500))
def test_ranks_that_are_all_late_end_later_by_just_that(model: Model, case: tuple[int, str], late: float) -> None:
    schedule = SCHEDULES[case[0]][case[1]]
    on_time, found = (simulate(schedule, model, late_us=us) for us in ((), (late,) * case[0]))
    assert [ends[0] for ends in found.ends_us] == pytest.approx([late + ends[0] for ends in on_time.ends_us], rel=1e-6)


@RUNS
@given(models(), CASES, st.lists(st.floats(0, 500), min_size=4, max_size=4))
def test_each_rank_begins_when_it_comes_and_all_end(model: Model, case: tuple[int, str], late: list[float]) -> None:
    world, name = case
    found = simulate(SCHEDULES[world][name], model, late_us=late[:world])
    own_us = PROBLEMS[world].flops / model.matmul_flops_per_us["bf16"]
    for rank, ends in enumerate(found.ends_us):
        assert ends[0] >= (late[rank] + own_us) * (1 - 1e-6)
        assert all(span.start_us >= late[rank] for span in found.timeline if span.rank == rank)
