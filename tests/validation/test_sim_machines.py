"""Predictions for real machines, against times measured on two H200s and the FiCCO paper's observations on MI300X."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from support.sim_toys import applicable, gpu
from support.slow import slow

from weft.bench.table_1 import find_gemms
from weft.builders import AllGatherMatmul
from weft.schedule import Schedule
from weft.schedule.steps import Lane
from weft.sim import inefficiencies, simulate
from weft.sim.losses import communication_us

# Measured on 2 x H200 (2026-11-21, torch 2.11.0+cu130, NCCL 2.28.9, bf16), in microseconds per call of 20 queued calls:
# cuBLAS after NCCL's all-gather, and a prototype that computes its own shard while copy engines fetch the other shard.
MEASURED_ON_TWO_H200 = {
    (512, 4096, 8192): (84, 70),
    (2048, 4096, 8192): (262, 182),
    (4096, 4096, 8192): (495, 356),
    (8192, 4096, 8192): (971, 711),
    (16384, 8192, 4096): (1751, 1497),
    (16384, 3584, 8192): (1746, 1342),
    (8192, 14336, 8192): (2835, 2604),
}
SHARD = "shard[chunks=1,send=in_turn,by=dma]"


def _errors(column: int, name: str) -> list[float]:
    errors = []
    for shape, measured in MEASURED_ON_TWO_H200.items():
        problem = AllGatherMatmul.even(*shape, 2)
        predicted = simulate(applicable(problem)[name], gpu("h200", 2), runs=4).per_run_us
        errors.append(predicted / measured[column] - 1)
    return errors


@pytest.mark.parametrize(("column", "name", "median"), [(0, "serial", 0.04), (1, SHARD, 0.04)])
def test_queued_times_on_two_h200(column: int, name: str, median: float) -> None:
    """The largest errors are at M = 512 (serial +12.0%, shard -9.9%); others are within 4.5%. The prediction is not
    blind.

    `compute.launch`, `compute.tile_half` and `compute.tile_ramp` were not measured, but fitted to these times.
    """
    errors = _errors(column, name)
    assert max(abs(e) for e in errors) <= 0.125
    assert statistics.median(abs(e) for e in errors) <= median


def test_overlap_beats_serial_on_h200_as_measured() -> None:
    """At M = 512 the predicted gain, 1.47, is more than the measured 1.2, because the prototype began with a barrier."""
    for shape, (serial, shard) in MEASURED_ON_TWO_H200.items():
        schedules = applicable(AllGatherMatmul.even(*shape, 2))
        predicted = [simulate(schedules[name], gpu("h200", 2)).end_us for name in ("serial", SHARD)]
        assert predicted[0] > predicted[1]
        if shape[0] >= 2048:
            assert predicted[0] / predicted[1] == pytest.approx(serial / shard, rel=0.09)


@pytest.mark.parametrize("name", ["g1", "g5", slow("g6"), slow("g11")])  # from table I, some with much communication
def test_on_a_mesh_shards_go_over_one_link_of_seven_and_ficco_uses_all(name: str) -> None:
    """From the paper, VI-B and VI-C: shard overlap communicates 7 times slower, and is up to 3.9 times slower than
    serial. FiCCO is up to 1.6 or 1.7 times faster, and no faster than the ideal.
    """
    gemm = find_gemms([name])[0].sharded(8)
    problem, model = AllGatherMatmul.even(gemm.m, gemm.n, gemm.k, 8), gpu("mi300x", 8)
    schedules = applicable(problem)
    serial = simulate(schedules["serial"], model).end_us
    shard = simulate(_one_peer_at_a_time(schedules[SHARD]), model)
    assert shard.communication_us[0] == pytest.approx(7 * communication_us(problem, model), rel=0.02)
    assert 2 < shard.end_us / serial < 5
    ficco = {s: simulate(schedules[s], model).end_us for s in schedules if s.startswith("ficco") and "dma" in s}
    best = min(ficco, key=ficco.__getitem__)
    assert 1.3 < serial / ficco[best] < serial / inefficiencies(schedules[best], problem, model).ideal_us


def _one_peer_at_a_time(schedule: Schedule) -> Schedule:
    """Return the schedule with all copies on one lane, like the paper's shard overlap."""
    senders = [lane for lane in schedule.lanes if lane.resource == "copy"]
    others = [lane for lane in schedule.lanes if lane.resource != "copy"]
    send = Lane("send", "copy", tuple(step for lane in senders for step in lane.steps))
    return replace(schedule, lanes=(*others, send))


def test_serial_loses_nothing_but_what_it_exposes() -> None:
    problem, model = AllGatherMatmul.even(8192, 4096, 8192, 2), gpu("h200", 2)
    found = inefficiencies(applicable(problem)["serial"], problem, model)
    assert (found.gemm_decomposition, found.gemm_contention, found.communication_contention) == pytest.approx((1, 1, 1))
    assert found.communication_decomposition > 1  # the collective of this machine is slower than copy engines
    assert found.end_us == pytest.approx(found.gemm_us + found.exposed_us)
    assert found.over_ideal == pytest.approx(found.end_us / max(found.gemm_us, found.communication_us))


def test_losses_tell_cutting_from_disturbing() -> None:
    problem, model = AllGatherMatmul.even(147456, 3584, 4096, 8), gpu("mi300x", 8)
    schedules = applicable(problem)
    few, many, kernel = (
        inefficiencies(schedules[f"ficco_1d[start=hetero,gemms={gemms},steps=0,by={by}]"], problem, model)
        for gemms, by in (("fused", "dma"), ("unfused", "dma"), ("unfused", "kernel"))
    )
    assert many.gemm_decomposition > few.gemm_decomposition > 1
    assert kernel.gemm_contention > many.gemm_contention > 1
    assert kernel.gemm_decomposition == many.gemm_decomposition
    assert min(few.communication_decomposition, many.communication_decomposition) >= 1
    for found in (few, many, kernel):
        assert found.communication_contention >= 1 - 1e-9
        assert found.over_ideal >= 1


def test_losses_count_as_many_ranks_together_as_alone() -> None:
    """Ranks of this schedule compute different parts, so all ranks are simulated. Their collectives alone are equal."""
    problem, model = AllGatherMatmul.even(8192, 4096, 4096, 8), gpu("mi300x", 8)
    schedule = applicable(problem)["ficco_1d_collective[start=hetero,gemms=fused,steps=0]"]
    assert not simulate(schedule, model).program.symmetric
    assert 1 - 1e-9 <= inefficiencies(schedule, problem, model).communication_contention < 2


def test_one_rank_has_nothing_to_communicate() -> None:
    problem, model = AllGatherMatmul.even(1024, 1024, 1024, 1), gpu("h200", 1)
    found = inefficiencies(applicable(problem)["serial"], problem, model)
    assert (found.communication_us, found.communication_decomposition, found.exposed_us) == (0, 1, 0)
    assert found.ideal_us == found.gemm_us
