"""A user's schedule on CPU processes: results through the public operator are right, and steps run in the order of the
lanes.

Functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import made_up
from support.on_ranks import assert_errors, error_of
from support.operators import suite
from support.operators.gemms import Gathered

import weft
from weft import symm
from weft.builders import AllGatherMatmul
from weft.launch import Pool
from weft.runtime.cpu.schedule import CpuSchedule
from weft.runtime.null import NullSchedule
from weft.schedule import RANK, Draft, Reduce, Schedule, Set, Wait, lookup
from weft.schedule.verify import verify
from weft.timeline import Timeline

UNEVEN = [5, 0, 9, 2]


def multiply(group: dist.ProcessGroup, name: str, rows: list[int] | None, return_A: bool) -> None:
    with made_up.registered():
        case = Gathered((6, 16), 7, more=(4,), rows=rows and tuple(rows), return_A=return_A, schedule=name)
        suite.results(group, "all_gather_matmul", case, 4)


def order_of_lanes(group: dist.ProcessGroup) -> None:
    """Compare a run's timeline, lane by lane, with the order of the null executor."""
    rank, world, ran, wanted = group.rank(), group.size(), Timeline(), Timeline()
    x, w = torch.randn(8, 12), torch.randn(12, 5)
    with made_up.registered():
        weft.all_gather_matmul(x, [w], 0, group, return_A=False, schedule="ring[by=dma]", timeline=ran)
    schedule = made_up.ring(AllGatherMatmul.even(8 * world, 5, 12, world, "fp32"), by="dma")
    tensors = {"x_shard": x, "w0": w, "y0": torch.empty(8 * world, 5)}
    NullSchedule(schedule, SimpleNamespace(rank=rank, world_size=world)).run(tensors, timeline=wanted)
    assert set(ran.lanes(rank)) == {"compute", "pull"}
    for lane in ran.lanes(rank):
        found = [span.name for span in ran if span.lane == lane and not span.name.startswith("set")]
        assert found == [span.name for span in wanted if span.lane == lane]
    fetched = [span.bytes for span in ran if span.name == f"copy box@{(rank - 1) % world} -> box"]
    assert fetched == [8 * 12 * 4] * (world - 1)
    assert sum(span.bytes for span in ran) == sum(fetched)


def unknown(group: dist.ProcessGroup) -> tuple[str, str]:
    x, w = torch.ones(3, 4), torch.ones(4, 5)
    return error_of(lambda: weft.all_gather_matmul(x, [w], 0, group, schedule="ring[by=dma]"))


def registered_here_alone(group: dist.ProcessGroup) -> dict[str | None, tuple[str, str]]:
    """Register a builder on rank 1 only. Calls that do not choose a schedule must not be affected."""
    x, w = torch.ones(3, 4), torch.ones(4, 5)
    with made_up.registered() if group.rank() == 1 else nullcontext():
        weft.all_gather_matmul(x, [w], 0, group, schedule="gather[by=kernel]")
        found = {}
        for name in (None, "autotune"):
            own = dist.new_group(list(range(group.size())))
            found[name] = error_of(lambda name=name, own=own: weft.all_gather_matmul(x, [w], 0, own, schedule=name))
        return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_operator_is_right_with_it(pool: Pool, world: int) -> None:
    for by in ("dma", "kernel"):
        pool.run(multiply, f"ring[by={by}]", None, False, ranks=world, timeout_s=60)
        pool.run(multiply, f"ring[by={by}]", UNEVEN[:world], True, ranks=world, timeout_s=60)


def test_a_run_keeps_the_order_of_its_lanes(pool: Pool) -> None:
    pool.run(order_of_lanes, ranks=3, timeout_s=60)


def test_without_its_registration_the_name_is_unknown(pool: Pool) -> None:
    assert_errors(
        pool.run(unknown, ranks=2, timeout_s=60), "RefusedError", "no schedule 'ring[by=dma]' for all_gather_matmul"
    )


def test_a_rank_that_registered_it_alone_is_told(pool: Pool) -> None:
    for told in pool.run(registered_here_alone, ranks=3, timeout_s=60):
        for kind, text in told.values():
            assert kind == "DisagreementError"
            first, second = text.split("; rank 1: ")
            assert "ranks 0, 2: " in first
            assert "builders" not in first
            assert "with registered builders that are not weft's own: ring[by=dma], ring[by=kernel]" in second


def sum_on_the_last(world: int) -> Schedule:
    """Return a schedule that computes the sum of all ranks' x on the last rank. Only this rank has rows of y."""
    d, last = Draft("sum on the last", world), world - 1
    mine = lookup((*(0 for _ in range(last)), 1), RANK)
    x, y = d.buffer("x", 4, 6, "fp32", "input"), d.buffer("y", mine * 4, 6, "fp32", "output")
    box = d.buffer("box", 4 * world, 6, "fp32", "symmetric")
    there, credit = d.signals("there", world), d.signals("credit", 1)
    parts = tuple(box.part(rows=(4 * source, 4)) for source in range(world))
    lane = d.lane("compute").wait(credit, previous=True)
    lane.copy(x.part(), box.part(rows=(RANK * 4, 4), at=last)).set(there, RANK, at=last)
    come, gone = [Wait("there", source) for source in range(world)], [Set("credit", 0, at) for at in range(world)]
    lane.repeat("only", mine, *come, Reduce(y.part(rows=(0, 4)), parts), *gone)
    return d.schedule()


def on_one_rank(group: dist.ProcessGroup, schedule: Schedule) -> None:
    with CpuSchedule(schedule, symm.communicator(group, "cpu")) as executor:
        for call in range(4):
            xs = torch.randn(group.size(), 4, 6, generator=torch.Generator().manual_seed(call))
            y = torch.full((4 * (group.rank() == group.size() - 1), 6), float("nan"))
            executor.run({"x": xs[group.rank()], "y": y})
            if len(y):
                torch.testing.assert_close(y.double(), xs.double().sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [1, 3])
def test_what_one_rank_alone_does_and_has(pool: Pool, world: int) -> None:
    schedule = sum_on_the_last(world)
    verify(schedule)
    pool.run(on_one_rank, schedule, ranks=world, timeout_s=60)
    table = [schedule.table(rank=rank) for rank in range(world)]
    assert ["reduce" in text for text in table] == [rank == world - 1 for rank in range(world)]
