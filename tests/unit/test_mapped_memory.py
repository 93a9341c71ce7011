"""Steps that move data need mapped memory. On GPUs that pretend to be on two hosts, steps that access memory of another
rank are refused.

Groups on two hosts: tests/processes/test_hosts.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.sim_toys import applicable

from weft.builders import AllGatherMatmul, AllToAllMatmul, EmbeddingAllToAll, MatmulAllToAll
from weft.errors import RefusedError, ScheduleError
from weft.runtime.schedule_memory import agree_on_schedule
from weft.schedule import RANK, Collective, Draft, Schedule, Tiles
from weft.symm.communicator import Communicator

SLOTS = tuple(((64 * rank, 32), (64 * rank + 32, 32)) for rank in range(4))
PROBLEMS = (
    AllGatherMatmul.even(64, 96, 64, 4),
    AllToAllMatmul.even(96, 96, 64, 4, 4),
    MatmulAllToAll.even(96, 96, 64, 4, 4),
    EmbeddingAllToAll(4, (8,) * 4, SLOTS),
)


def _comm(rank: int, *mapped: bool) -> Any:
    return SimpleNamespace(
        rank=rank, mapped=mapped, all_mapped=all(mapped), device=torch.device("cuda"), all_gather=lambda mine, what: [mine],
        hosts=tuple("here" if one else "elsewhere" for one in mapped),
    )  # fmt: skip


def _agree(schedule: Schedule, rank: int) -> None:
    """Run the check of schedules as on two hosts: ranks 0 and 1 on one host, ranks 2 and 3 on the other."""
    agree_on_schedule(schedule, _comm(rank, *(other // 2 == rank // 2 for other in range(4))))


def _leaves_the_rank(schedule: Schedule, rank: int) -> bool:
    steps = [step for lane in schedule.of_rank(rank) for step in lane.steps]
    steps += [one for step in steps if isinstance(step, Tiles) for n in range(step.extent) for one in step.tile(n)]  # type: ignore[arg-type]
    regions = [access.region for step in steps if not isinstance(step, Collective) for access in step.accesses()]
    owners = {region.at for region in regions} | {at for step in steps if not step.inner for at, _, _ in step.sets()}
    return owners != {rank}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_a_schedule_is_refused_where_one_of_its_steps_leaves_the_rank(problem: Any) -> None:
    """Only collectives may send data. So serial always passes."""
    refused, passed = set(), set()
    for name, schedule in applicable(problem).items():
        for rank in range(4):
            agree_on_schedule(schedule, _comm(rank, *[True] * 4))
            if _leaves_the_rank(schedule, rank):
                refused.add(name)
                where = rf"memory of rank [0-3], on host \w+, is not mapped on rank {rank}: use collective steps"
                wanted = rf"{schedule.name}.*, lane .*{where}$"
                with pytest.raises(ScheduleError, match=wanted):
                    _agree(schedule, rank)
            else:
                passed.add(name)
                _agree(schedule, rank)
    assert len(refused) >= 2
    assert {"serial", "pooled"} & passed


def test_a_signal_and_a_send_to_another_rank_are_refused_and_the_step_is_named() -> None:
    d, peer = Draft("neighbours", 4), RANK // 2 * 2 + (RANK + 1) % 2
    x, box, y = (
        d.buffer(name, 4, 4, "fp32", role) for name, role in (("x", "input"), ("box", "symmetric"), ("y", "scratch"))
    )
    came = d.signals("came", 1)
    d.lane("own", "copy").copy(x.part(), box.part()).set(came)
    d.lane("compute").wait(came).copy(box.part(), y.part())
    for rank in range(4):
        _agree(d.schedule(), rank)
    for name in ("set", "send"):
        d = Draft(name, 4)
        x, box = d.buffer("x", 4, 4, "fp32", "input"), d.buffer("box", 4, 4, "fp32", "symmetric")
        came, lane = d.signals("came", 1), d.lane("late", "copy")
        if name == "set":
            lane.set(came, at=peer)
        else:
            lane.send(x.part(), box.part(at=peer))
        with pytest.raises(
            ScheduleError,
            match=rf"{name}, lane late: {name} .*: memory of rank 0, on host here, is not mapped on rank 1",
        ):
            _agree(d.schedule(), 1)


def test_what_one_rank_may_not_do_all_ranks_are_told() -> None:
    schedule = applicable(PROBLEMS[0])["serial"]
    comm = _comm(0, *[True] * 4)
    comm.all_gather = lambda mine, what: [
        mine,
        (mine[0], "lane copies: copy: memory of rank 0 is not mapped on rank 1"),
    ]
    with pytest.raises(
        ScheduleError, match=f"{schedule.name}.*lane copies: copy: memory of rank 0 is not mapped on rank 1"
    ):
        agree_on_schedule(schedule, comm)


def test_symmetric_memory_of_gpus_is_refused_where_a_rank_cannot_map_it() -> None:
    with pytest.raises(
        RefusedError, match=r"flags: memory of ranks \[2, 3\] on other hosts cannot be mapped on rank 0: make a group"
    ):
        Communicator.allocate(_comm(0, True, True, False, False), 64, what="flags")
