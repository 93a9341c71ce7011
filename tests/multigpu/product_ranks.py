"""Run and check, on the ranks of GPU tests, schedules of operators that communicate after their GEMM."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.graphs import capture
from support.on_ranks import close, late
from support.operators.suite import CALLS

from weft import symm
from weft.builders import Problem, named
from weft.operator.calls import operator_named
from weft.operator.replay import Replay
from weft.runtime.cuda.schedule import CudaSchedule
from weft.runtime.unfused import STRAIGHT
from weft.runtime.unfused.serial import Unfused


class Case:
    """Random inputs of `p` on this rank, results filled with NaN, and two expected results: exact, and by NCCL and
    cuBLAS.
    """

    def __init__(self, p: Problem, group: dist.ProcessGroup, seed: int) -> None:
        self.op, self.p, self.rank = operator_named(p.name), p, group.rank()
        calls = [self.op.drawn(p, r, self._generator(100 * seed + r)) for r in range(group.size())]
        mine = calls[self.rank]
        self.inputs = self.op.inputs(p, mine)
        self.results = {name: y.fill_(torch.nan) for name, y in self.op.outputs(mine, group.size()).items()}
        self.exact = self.op.expected(p, self.rank, calls)
        self.usual = self.op.unfused(p, mine, group, STRAIGHT) or self._serial(group)

    def check(self) -> None:
        for y, exact, usual in zip(self.results.values(), self.exact, self.usual, strict=True):
            close(y, exact, usual)

    def _serial(self, group: dist.ProcessGroup) -> list[torch.Tensor]:
        made = Unfused(named(self.p, "serial").build(), self.rank).run(self.inputs, STRAIGHT, group)
        return [made[name] for name in self.results]

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(torch.device("cuda", torch.cuda.current_device())).manual_seed(seed)

    @property
    def tensors(self) -> dict[str, Any]:
        return {**self.inputs, **self.results}


def on_streams(group: dist.ProcessGroup, p: Problem, name: str) -> None:
    """Run a schedule of `p` with late ranks and memory filled with NaN. Then capture and replay it."""
    made = CudaSchedule(
        named(p, name).build(), symm.communicator(group, torch.device("cuda", torch.cuda.current_device()))
    )
    for own in made.context.own.values():
        own.fill_(torch.nan)
    torch.cuda.synchronize()
    dist.barrier(group)
    cases = [Case(p, group, seed) for seed in range(6)]
    for number, case in enumerate(cases):
        if number % 3 == 2 and group.rank() == number // 3 % 2:
            late(0.005)
        made.run(case.tensors)
    torch.cuda.synchronize()
    for case in cases:
        case.check()
    given = cases[0]
    graph, _ = capture(lambda: made.run(given.tensors), torch.cuda.Stream())
    for case in cases[1:]:
        for buffer, tensor in given.inputs.items():
            tensor.copy_(case.inputs[buffer])
        for y in given.results.values():
            y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        given.exact, given.usual = case.exact, case.usual
        given.check()
    made.check()
    made.close()


def in_python(group: dist.ProcessGroup, operator: str, case: Any, many: int) -> int:
    """Make `many` calls with fresh data. Return how many of them Python runs, after two calls that record the first."""
    calls, count = [CALLS[operator](case, group, seed) for seed in range(many)], 0
    usual = Replay.run

    def run(*given: Any) -> list[torch.Tensor]:
        nonlocal count
        count += 1
        return usual(*given)

    for call in calls[:2]:
        call.check(group, call(group))
    with mock.patch.object(Replay, "run", run):
        found = []
        for call in calls:
            if random.random() < 0.3:
                late(random.random() * 0.002)
            found.append(call(group))
    for call, ys in zip(calls, found, strict=True):
        call.check(group, ys)
    return count
