"""The null executor runs every schedule, in an order that its signals allow."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from support.sim_toys import applicable

from weft.builders import AllGatherMatmul
from weft.errors import ScheduleError
from weft.runtime.null import NullSchedule
from weft.schedule import Draft, Schedule, Set, Wait
from weft.timeline import Timeline


def _tensors(schedule: Schedule, rank: int) -> dict[str, np.ndarray]:
    buffers = schedule.buffers_of_rank(rank)
    return {b.name: np.empty((b.rows, b.cols)) for b in buffers if b.role in ("input", "output")}


def _comm(rank: int, world: int) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, world_size=world)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_schedule_runs_and_every_wait_comes_after_what_its_rank_set(world: int) -> None:
    problem = AllGatherMatmul.even(48 * world, 8, 12 * world, world)
    for name, schedule in applicable(problem).items():
        timeline = Timeline()
        for rank in range(world):
            executor = NullSchedule(schedule, _comm(rank, world))
            executor.run(_tensors(schedule, rank), timeline=timeline, deadline_s=1.0)
            executor.close()
        for rank in range(world):
            for lane in schedule.of_rank(rank):
                names = [s.name for s in timeline if s.rank == rank and s.lane == lane.name]
                assert len(names) == sum(not isinstance(step, Set) for step in lane.steps), name
                waits = [step for step in lane.steps if isinstance(step, Wait)]
                assert len([n for n in names if n.startswith("wait")]) == len(waits), name


def test_order_follows_the_signals() -> None:
    d = Draft("relay", 1)
    x, y = d.buffer("x", 2, 2, "fp32", "input"), d.buffer("y", 2, 2, "fp32", "output")
    scratch, ready = d.buffer("s", 2, 2, "fp32", "scratch"), d.signals("ready", 1)
    d.lane("second").wait(ready).compute("relu", y.part(), scratch.part())
    d.lane("first").copy(x.part(), scratch.part()).set(ready)
    executor, timeline = NullSchedule(d.schedule(), _comm(0, 1)), Timeline()
    for _ in range(2):
        executor.run(_tensors(d.schedule(), 0), timeline=timeline)
    assert [(s.name, s.start_us) for s in timeline] == [
        ("copy x -> s", 0), ("wait ready[0]", 1), ("relu y", 2), ("copy x -> s", 3), ("wait ready[0]", 4), ("relu y", 5),
    ]  # fmt: skip


def test_what_would_hang_is_refused_when_it_is_made() -> None:
    d = Draft("stuck", 1)
    d.lane("only").wait(d.signals("never", 1))
    with pytest.raises(ScheduleError, match=r"lane 'only' in run 1: wait never\[0\]"):
        NullSchedule(d.schedule(), _comm(0, 1))


def test_arguments_are_looked_at() -> None:
    schedule = applicable(AllGatherMatmul.even(8, 8, 8, 2))["serial"]
    with pytest.raises(ValueError, match="is for 2 ranks, but the group has 3"):
        NullSchedule(schedule, _comm(0, 3))
    executor, tensors = NullSchedule(schedule, _comm(0, 2)), _tensors(schedule, 0)
    with pytest.raises(ValueError, match="deadline_s=0"):
        executor.run(tensors, deadline_s=0)
    with pytest.raises(ValueError, match="tensors have shapes"):
        executor.run({**tensors, "w0": np.empty((8, 7))})
