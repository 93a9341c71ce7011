"""Test on two GPUs the operator of `test_made_up_operator`, which is defined outside weft and without code for GPUs.

Its schedule reduces arriving data in a reduce step. Its unfused implementation is NCCL's reduce-scatter. The functions
with a `group` argument run on the ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import device

from weft import symm
from weft.launch import Pool
from weft.runtime.cuda.schedule import CudaSchedule
from weft.schedule import Draft

sys.path.append(str(Path(__file__).parents[1] / "processes"))
from test_made_up_operator import OPERATOR, MatmulScatter, matmul_scatter, serial

pytestmark = gpu_ranks.MARKS


def run(group: dist.ProcessGroup, schedule: str | None) -> None:
    rank, world = group.rank(), group.size()
    for call, rows in enumerate((64, 192, 8, 64, 320, 192)):  # calls of different sizes share memory
        p = MatmulScatter(world, rows * world, 48, 80, "fp32")
        calls = [OPERATOR.drawn(p, r, torch.Generator(device()).manual_seed(10 * call + r)) for r in range(world)]
        x, w = (t.clone().requires_grad_() for t in calls[rank])
        y = matmul_scatter(x, w, group, schedule)
        exact = OPERATOR.expected(p, rank, calls)[0]
        torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)
        grad = torch.randn(p.m, p.n, generator=torch.Generator(device()).manual_seed(call), device=device())
        y.backward(grad.chunk(world)[rank])
        torch.testing.assert_close(x.grad, grad @ calls[rank].w.t(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(w.grad, calls[rank].x.t() @ grad, rtol=1e-4, atol=1e-4)


def by_streams(group: dist.ProcessGroup, name: str) -> None:
    """Run the reducing collective `name` of NCCL as a step of a schedule."""
    rank, world = group.rank(), group.size()
    d = Draft(name, world)
    x = d.buffer("x", 4 * world, 24, "bf16", "input")
    y = d.buffer("y", 4 if name == "reduce_scatter" else 4 * world, 24, "bf16", "output")
    getattr(d.lane("compute"), name)(x.part(), y.part())
    made = CudaSchedule(d.schedule(), symm.communicator(group, device()))
    for call in range(4):
        xs = [
            torch.randn(4 * world, 24, generator=torch.Generator().manual_seed(10 * call + r)).bfloat16()
            for r in range(world)
        ]
        out = torch.full((y.rows, 24), float("nan"), dtype=torch.bfloat16, device=device())
        made.run({"x": xs[rank].to(device()), "y": out})
        total = sum(one.double() for one in xs)
        exact = total.chunk(world)[rank] if name == "reduce_scatter" else total  # type: ignore[union-attr]
        torch.testing.assert_close(out.cpu().double(), exact, rtol=1e-2, atol=3e-2)
    made.close()


@pytest.mark.parametrize("schedule", ["serial", "straight", None])
def test_it_is_right(pair: Pool, schedule: str | None) -> None:
    pair.run(run, schedule, timeout_s=60)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce"])
def test_collectives_that_add(pair: Pool, name: str) -> None:
    pair.run(by_streams, name, timeout_s=60)


def test_its_serial_schedule_runs_on_streams_too(pair: Pool) -> None:
    pair.run(serial_on_streams, timeout_s=60)


def serial_on_streams(group: dist.ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    p = MatmulScatter(world, 16 * world, 48, 80, "fp32")
    made = CudaSchedule(serial(p), symm.communicator(group, device()))
    calls = [OPERATOR.drawn(p, r, torch.Generator(device()).manual_seed(r)) for r in range(world)]
    y = torch.full((16, 48), float("nan"), device=device())
    made.run({**calls[rank]._asdict(), "y": y})
    torch.testing.assert_close(y.double(), OPERATOR.expected(p, rank, calls)[0], rtol=1e-4, atol=1e-4)
    made.close()
