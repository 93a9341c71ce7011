"""Run and check schedules of matmul_all_to_all on the ranks of GPU tests."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_all_to_all_matmul_ranks import error_of, replay_sizes, run_alone, run_many
from schedule_ranks import device, executor_of
from support.all_to_all_matmul_reference import random_splits
from support.matmul_all_to_all_reference import assert_rows, inputs, received_of

import weft
from weft import symm
from weft.builders import MatmulAllToAll, NotApplicableError, candidates
from weft.operator.replay import AnyRows
from weft.runtime.cuda.schedule import CudaSchedule
from weft.timeline import Timeline


class Case:
    """Fresh random data on this rank. h has `room` more rows than all ranks have tokens, and y has `room` more rows than this
    rank's tokens. `p.rows` has the number of each rank's tokens.

    tight: True if h has only the rows of this rank's experts.
    """

    def __init__(
        self, p: MatmulAllToAll, rank: int, seed: int, *, room: int = 0, transposed: bool = False, tight: bool = False
    ) -> None:
        self.p, self.rank = p, rank
        self.splits = random_splits(p.world_size, p.experts, p.rows, seed)
        self.hs, self.weights = inputs(self.splits, p.k, p.n, p.dtype, seed)
        mine = self.weights.split(p.experts)[rank].to(device())
        h = torch.full((len(self.hs[rank]) if tight else sum(p.rows) + room, p.k), torch.nan, dtype=mine.dtype)
        h[: len(self.hs[rank])] = self.hs[rank]
        self.out = torch.full((p.rows[rank] + room, p.n), torch.nan, dtype=mine.dtype, device=device())
        self.tensors: dict[str, Any] = {
            "h": h.to(device()),
            "received": received_of(rank, self.splits).to(device()),
            "splits": torch.tensor(self.splits[rank], device=device()).view(p.world_size, p.experts),
            "w": mine.mT.contiguous().mT if transposed else mine,
            "y": self.out,
        }

    def fill(self, other: Case) -> None:
        """Copy the data of `other` into this case's tensors, and fill the result with NaN."""
        self.splits, self.hs, self.weights = other.splits, other.hs, other.weights
        for name in ("h", "received", "splits", "w"):
            self.tensors[name].copy_(other.tensors[name])
        self.out.fill_(torch.nan)

    def check(self, what: str) -> None:
        rows = self.p.rows[self.rank]
        assert self.out[rows:].isnan().all(), f"{what}, rank {self.rank}: rows beyond its tokens are written"
        assert_rows(self.out[:rows].cpu(), self.rank, self.splits, self.hs, self.weights, what)


def every_candidate(group: dist.ProcessGroup, p: MatmulAllToAll, transposed: bool) -> int:
    """Run all overlapped schedules four times each, with other sizes each time. Return the number of schedules.

    Before the first run, symmetric memory is filled with NaN.
    """
    comm, count = symm.communicator(group, device()), 0
    for candidate in candidates(p, ("combine", "combine_by_expert")):
        try:
            schedule = candidate.build()
        except NotApplicableError:
            continue
        executor = CudaSchedule(schedule, comm)
        for name, own in executor.context.own.items():
            if name != "counts":
                own.fill_(torch.nan if own.is_floating_point() else -1)
        torch.cuda.synchronize()
        dist.barrier(group)
        room = 0 if p.exact else 5
        cases = [
            Case(p, group.rank(), seed, room=room, transposed=transposed, tight=seed % 2 == 1) for seed in range(4)
        ]
        for number, case in enumerate(cases):
            if number % 3 == 2 * group.rank():
                torch.cuda._sleep(2_000_000)
            executor.run(case.tensors)
        torch.cuda.synchronize()
        for number, case in enumerate(cases):
            case.check(f"{candidate.name}, run {number}")
        first = cases[0].out.clone()
        cases[0].out.fill_(torch.nan)
        executor.run(cases[0].tensors)
        torch.cuda.synchronize()
        assert torch.equal(first.nan_to_num(), cases[0].out.nan_to_num()), f"{candidate.name}: other bits"
        count += 1
        dist.barrier(group)
        executor.close()
    return count


def replays(group: dist.ProcessGroup, p: MatmulAllToAll, name: str, count: int) -> None:
    executor, rank = executor_of(group, p, name), group.rank()
    held = Case(p, rank, 0)
    replay_sizes(group, executor, held, [Case(p, rank, 100 + seed) for seed in range(count)])


def timeline(group: dist.ProcessGroup, p: MatmulAllToAll, name: str) -> list[str]:
    executor, rank = executor_of(group, p, name), group.rank()
    for seed in range(2):
        case, found = Case(p, rank, seed), Timeline()
        executor.run(case.tensors, timeline=found)
        case.check("with a timeline")
    dist.barrier(group)
    executor.close()
    return [span.name for span in found]


def many_calls(group: dist.ProcessGroup, p: MatmulAllToAll, name: str, count: int) -> None:
    executor, rank = executor_of(group, p, name), group.rank()
    run_many(group, executor, [Case(p, rank, seed, room=3, tight=seed % 2 == 1) for seed in range(8)], count)


def contradicts(group: dist.ProcessGroup, p: MatmulAllToAll, name: str) -> tuple[bool, bool, str]:
    """Let rank 1 return fewer rows to rank 0 than rank 0 has sent to it. Return (True if the rows from rank 1 are NaN, True if
    the other rows are right, the error of the next call).
    """
    executor = executor_of(group, p, name)
    case = Case(p, group.rank(), 1)
    executor.run(case.tensors)
    torch.cuda.synchronize()
    case.check("before")
    wanted = case.out.clone()
    case.out.fill_(0)
    dist.barrier(group)
    if group.rank() == 1:
        case.tensors["received"][0, -1] -= 1
    executor.run(case.tensors)
    torch.cuda.synchronize()
    first = int(case.tensors["splits"][0].sum())
    lost, kept = case.out[first:].isnan().all(), torch.equal(case.out[:first], wanted[:first])
    return bool(lost), kept, error_of(executor)


def never_calls(group: dist.ProcessGroup, p: MatmulAllToAll, name: str) -> tuple[str, bool]:
    """Let rank 1 run only once. Return (the error of each rank, True if rank 0's rows from rank 1 are NaN)."""
    executor = executor_of(group, p, name)
    case = Case(p, group.rank(), 1)
    error = run_alone(group, executor, case)
    first = int(case.tensors["splits"][0].sum())
    return error, bool(case.out[first:].isnan().all())


def native(group: dist.ProcessGroup, experts: int) -> None:
    """Make many unfused calls of other sizes, a dispatch and then its combine. After the first calls, Python runs none of them.
    The dispatch has the bits of a call that Python runs.
    """
    rank, world = group.rank(), group.size()
    options: dict[str, Any] = {"group": group, "capacity": 300, "schedule": "serial"}
    for number in range(40):
        p = MatmulAllToAll(world, experts, (90 + 5 * number, 290 - number), 72, 64, "bf16", most=300)
        case = Case(p, rank, number, room=number % 2)
        t = case.tensors
        splits = t["splits"].flatten()
        sent = torch.randn(p.rows[rank], p.k, dtype=torch.bfloat16, device=device()), t["w"], splits
        in_python = weft.all_to_all_matmul(*sent, return_received=True, timeline=Timeline(), **options)
        with mock.patch.object(AnyRows, "run", _in_python if number > 4 else AnyRows.run):
            for _ in range(2):
                found = weft.all_to_all_matmul(*sent, return_received=True, **options)
                y = weft.matmul_all_to_all(t["h"], t["w"], found[1], splits, **options)
        assert all(torch.equal(one, other) for one, other in zip(found, in_python, strict=True))
        case.out[: len(y)] = y
        case.check(f"call {number}")


def _in_python(*_: Any) -> Any:
    raise AssertionError("Python runs the call")
