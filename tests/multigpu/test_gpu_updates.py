"""Test steps that accumulate, and GEMMs that store into a peer's buffer, on GPUs.

The schedules of `test_updates` are compared with float64, in repeated runs, with late ranks and in graphs. The
functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import device
from support.graphs import capture

from weft import symm
from weft.launch import Pool
from weft.runtime.cuda.schedule import CudaSchedule
from weft.schedule import RANK, Draft, Schedule

sys.path.append(str(Path(__file__).parents[1] / "processes"))
from test_updates import DTYPES, TOLERANCE, K, M, N, scattered

pytestmark = gpu_ranks.MARKS
WAYS = ("copy", "reduce", "remote", "tracked", "tracked remote", "library")


class Case:
    """This rank's operands and expected rows. Every rank draws the operands of all ranks."""

    def __init__(self, group: dist.ProcessGroup, dtype: str, way: str, seed: int) -> None:
        rank, world, g = group.rank(), group.size(), torch.Generator().manual_seed(seed)
        xs = [torch.randn(world * M, K, generator=g).to(DTYPES[dtype]) for _ in range(world)]
        ws = [(torch.randn(K, N, generator=g) / K**0.5).to(DTYPES[dtype]) for _ in range(world)]
        self.tensors = {"x": xs[rank].to(device()), "w": ws[rank].to(device())}
        self.tensors["y"] = torch.full((M, N), float("nan"), dtype=DTYPES[dtype], device=device())
        exact = torch.stack([x.double() @ w.double() for x, w in zip(xs, ws, strict=True)]).sum(0).chunk(world)[rank]
        self.exact = exact.relu() if way == "copy" else exact
        self.limit = TOLERANCE[dtype] * world

    def check(self) -> None:
        error = float((self.tensors["y"].cpu().double() - self.exact).abs().max())
        assert error < self.limit, f"off by {error}"  # also fails for NaN


def summed(group: dist.ProcessGroup, dtype: str, way: str) -> None:
    made = CudaSchedule(scattered(group.size(), dtype, way), symm.communicator(group, device()))
    for own in made.context.own.values():
        own.fill_(float("nan"))
    torch.cuda.synchronize()
    dist.barrier(group)
    cases = [Case(group, dtype, way, seed) for seed in range(12)]
    for number, case in enumerate(cases):
        if number % 4 == 3 and group.rank() == number // 4 % 2:
            torch.cuda._sleep(5_000_000)
        made.run(case.tensors)
    torch.cuda.synchronize()
    for case in cases:
        case.check()
    case = cases[0]
    graph, _ = capture(lambda: made.run(case.tensors), torch.cuda.Stream())
    for other in cases[1:]:
        for name in ("x", "w"):
            case.tensors[name].copy_(other.tensors[name])
        case.tensors["y"].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        case.exact = other.exact
        case.check()
    made.check()
    made.close()


def adds(world: int, dtype: str, times: int, rows: int, cols: int) -> Schedule:
    """Return a schedule in which every rank adds ones to the same items of rank 0, in two lanes."""
    d = Draft("adds", world)
    one, y = d.buffer("one", rows, cols, dtype, "input"), d.buffer("y", rows, cols, dtype, "output")
    total = d.buffer("total", rows, cols, dtype, "symmetric")
    ready, there, done = d.signals("ready", world), d.signals("there", 1), d.signals("done", 2 * world)
    lane, beside = d.lane("compute"), d.lane("beside")
    lane.compute("add", total.part(), one.part(), one.part())
    for rank in range(world):
        lane.set(ready, RANK, at=rank)
    for rank in range(world):
        lane.wait(ready, rank)
    lane.set(there)
    beside.wait(there)
    for number, adding in enumerate((lane, beside)):
        for _ in range(times):
            adding.copy(one.part(), total.part(at=0), by="kernel", accumulate=True)
        for rank in range(world):
            adding.set(done, 2 * RANK + number, at=rank)
    for number in range(2 * world):
        lane.wait(done, number)
    lane.copy(total.part(at=0), y.part(), by="kernel")
    return d.schedule()


def contended(group: dist.ProcessGroup, dtype: str, cols: int) -> None:
    world, times, rows = group.size(), 10, 64
    made = CudaSchedule(adds(world, dtype, times, rows, cols), symm.communicator(group, device()))
    one = torch.ones(rows, cols, dtype=DTYPES[dtype], device=device())
    for _ in range(5):
        y = torch.full_like(one, float("nan"))
        made.run({"one": one, "y": y})
        torch.cuda.synchronize()
        # The schedule does not keep the next run from adding before all ranks have read rank 0's total.
        dist.barrier(group)
        assert torch.equal(y, torch.full_like(one, 2.0 + 2 * world * times)), "an addition was lost"
    made.close()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("way", WAYS)
def test_partial_products_are_summed_where_they_belong(pair: Pool, way: str, dtype: str) -> None:
    pair.run(summed, dtype, way, timeout_s=60)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("cols", [64, 13])
def test_no_addition_is_lost(pair: Pool, dtype: str, cols: int) -> None:
    """Rows of 13 items do not begin at aligned addresses, so items are added one at a time."""
    pair.run(contended, dtype, cols, timeout_s=60)
