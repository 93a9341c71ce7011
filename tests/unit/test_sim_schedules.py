"""Schedules of all_gather_matmul in the engine: bytes, uneven shards, calls that the CPU issues one at a time, empty steps,
long runs. Also the cache of lowered schedules.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support.sim_toys import TOY, applicable, bytes_leaving, gpu, puts
from support.slow import pairs

from weft.builders import AllGatherMatmul
from weft.errors import ScheduleError
from weft.sim import NULL, simulate
from weft.sim.lower import _LastLowered, lower
from weft.sim.lowered import LaneProgram, LoweredSchedule


@pytest.mark.parametrize(
    ("machine", "world"), pairs(["h200", "mi300x"], [1, 2, 4, 8], ("h200", 1), ("h200", 4), ("mi300x", 2))
)
def test_every_schedule_simulates_and_moves_the_bytes_it_says(machine: str, world: int) -> None:
    problem = AllGatherMatmul.even(2048, 1024, 1024, world)
    model = gpu(machine, world)
    schedules = applicable(problem)
    assert len(schedules) >= (30 if world > 1 else 1)
    for name, schedule in schedules.items():
        result = simulate(schedule, model)
        assert result.end_us > model.matmul_us(problem.m, *problem.n, problem.k, problem.dtype), name
        for rank in range(world):
            sent = sum(s.bytes for s in result.timeline if s.rank == rank)
            assert sent == bytes_leaving(schedule, rank), name


def test_uneven_shards_are_simulated_rank_by_rank() -> None:
    problem = AllGatherMatmul(3, (100, 300, 200), (256,), 512, "bf16")
    result = simulate(applicable(problem)["shard[chunks=1,send=in_turn,by=dma]"], gpu("h200", 3))
    assert not result.program.symmetric
    assert {s.rank: s.bytes for s in result.timeline if s.bytes} == {0: 102400, 1: 307200, 2: 204800}


def test_one_call_at_a_time_waits_for_the_host() -> None:
    problem = AllGatherMatmul.even(8192, 4096, 8192, 2)
    model = gpu("h200", 2)
    for schedule in applicable(problem).values():
        assert simulate(schedule, model, mode="single").end_us >= simulate(schedule, model).end_us
    serial = applicable(problem)["serial"]
    assert simulate(serial, model, mode="single").end_us == pytest.approx(
        simulate(serial, model).end_us + model.host_step_us
    )


def test_an_hour_of_work_ends() -> None:
    """Late in a long run, the clock's resolution is coarser than the remaining time of a step."""
    problem = AllGatherMatmul.even(1_000_000, 1_000_000, 1_000_000, 2)
    roomy = replace(gpu("h200", 2), memory_bytes=math.inf)
    assert simulate(applicable(problem)["shard[chunks=1,send=in_turn,by=dma]"], roomy).end_us > 1e9


def test_lowered_schedules_are_kept_up_to_a_number_and_up_to_their_tasks() -> None:
    kept, schedule = _LastLowered(schedules=3, tasks=10), puts(2, 1)

    def add(key: int, tasks: int) -> None:
        lane = LaneProgram(0, "copy", 0, tasks=[()] * tasks)  # type: ignore[list-item]
        kept.add((key,), LoweredSchedule(schedule, (0,), [lane], [], 0, {}), TOY)

    def keys() -> list[int]:
        return [key for key in range(9) if kept.get((key,)) is not None]

    for key in range(5):
        add(key, 1)
    assert keys() == [2, 3, 4]
    add(5, 8)
    assert keys() == [3, 4, 5]
    add(6, 2)
    assert keys() == [5, 6]
    add(7, 20)
    assert keys() == [7]
    add(8, 1)
    assert keys() == [8]
    assert lower(schedule, TOY) is lower(schedule, TOY)


def test_no_work_at_all_is_an_error_and_empty_steps_are_not() -> None:
    nothing = applicable(AllGatherMatmul(2, (0, 0), (16,), 16, "bf16"))["shard[chunks=1,send=in_turn,by=dma]"]
    with pytest.raises(ScheduleError, match="has no step that takes time on NVIDIA H200"):
        simulate(nothing, gpu("h200", 2))
    assert simulate(nothing, NULL).end_us == 0
    uneven = AllGatherMatmul(2, (0, 64), (16,), 16, "bf16")
    result = simulate(applicable(uneven)["shard[chunks=1,send=in_turn,by=dma]"], gpu("h200", 2))
    assert result.end_us > 0
    assert not [s for s in result.timeline if s.rank == 0 and s.name.startswith("copy")]
