"""Run and check schedules of all_to_all_matmul, which have dynamic sizes, on the ranks of GPU tests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from schedule_ranks import device
from support.all_to_all_matmul_reference import added_to, assert_rows, expected, inputs, random_splits
from support.graphs import capture

from weft import symm
from weft.builders import AllToAllMatmul, NotApplicableError, candidates, named
from weft.runtime.cuda.schedule import CudaSchedule
from weft.timeline import Timeline


class Case:
    """Fresh random data on this rank, and its expected results.

    room: the rows that y has beyond the rows that arrive. None: y is allocated once the number of rows is known.
    """

    def __init__(
        self, p: AllToAllMatmul, rank: int, seed: int, room: int | None, transposed: bool = False, to_one: bool = False
    ) -> None:
        """Draw the data. With `to_one`, all rows go to the first expert."""
        self.p, self.rank = p, rank
        self.splits = random_splits(p.world_size, p.experts, p.rows, seed)
        if to_one:
            self.splits = [[rows, *[0] * (p.world_size * p.experts - 1)] for rows in p.rows]
        self.tokens, self.weights = inputs(p, seed)
        self.y, self.received = expected(rank, self.splits, self.tokens, self.weights)
        mine = self.weights.split(p.experts)[rank].to(device())
        self.tensors: dict[str, Any] = {
            "tokens": self.tokens[rank].to(device()),
            "splits": torch.tensor([self.splits[rank]], device=device()),
            "w": mine.mT.contiguous().mT if transposed else mine,
            "y": self.make if room is None else self.make(len(self.y) + room),
            "received": torch.full(self.received.shape, -1, device=device()),
        }
        if p.return_x:
            self.tensors["x"] = self.make_x if room is None else self.make_x(len(self.y) + room)

    def make(self, rows: int) -> torch.Tensor:
        self.out = torch.full((rows, self.p.n), float("nan"), dtype=self.tensors_dtype(), device=device())
        return self.out

    def make_x(self, rows: int) -> torch.Tensor:
        self.x = torch.full((rows, self.p.k), float("nan"), dtype=self.tensors_dtype(), device=device())
        return self.x

    def tensors_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.p.dtype]

    def fill(self, other: Case) -> None:
        """Copy the data of `other` into this case's tensors. Fill the results with values that no run leaves there."""
        self.y, self.received = other.y, other.received
        self.splits, self.tokens, self.weights = other.splits, other.tokens, other.weights
        for name in ("tokens", "splits", "w"):
            self.tensors[name].copy_(other.tensors[name])
        self.out.fill_(float("nan"))
        self.tensors["received"].fill_(-1)

    def check(self, what: str, added: int = 0) -> None:
        """Compare the results with float64. added: the number of times that products were added to y."""
        rows = len(self.y)
        found = self.tensors["received"].cpu()
        assert torch.equal(found, self.received), (what, self.rank, found, self.received)
        assert len(self.out) >= rows, (what, self.rank)
        assert self.out[rows:].isnan().all(), f"{what}, rank {self.rank}: rows beyond those that came are written"
        assert_rows(self.out[:rows].cpu(), self.rank, self.splits, self.tokens, self.weights, what, added)
        if self.p.return_x:  # rows in the order of sending: by source rank, then by expert
            by_rank = [[sum(part) for part in zip(*[iter(of)] * self.p.experts, strict=True)] for of in self.splits]
            sent = [part.split(to)[self.rank] for part, to in zip(self.tokens, by_rank, strict=True)]
            assert torch.equal(self.x[:rows].cpu(), torch.cat(sent)), f"{what}, rank {self.rank}: other tokens"
            assert self.x[rows:].isnan().all(), f"{what}, rank {self.rank}: tokens beyond those that came are written"


OVERLAPPED = ("dispatch", "dispatch_by_expert", "dispatch_sorted")


def every_candidate(
    group: dist.ProcessGroup, p: AllToAllMatmul, transposed: bool, to_one: bool = False, names: Sequence[str] = ()
) -> int:
    """Run all overlapped schedules of `weft.builders.all_to_all_matmul`, or those in `names`, four times each. Return
    the number of schedules.

    Each run has other sizes. Before the first run, the inbox is filled with NaN. With `to_one`, all rows of the last
    two runs go to the first expert, so its rank receives many more rows.
    """
    comm, count = symm.communicator(group, device()), 0
    for candidate in [named(p, name) for name in names] or candidates(p, OVERLAPPED):
        try:
            schedule = candidate.build()
        except NotApplicableError:
            assert not names, candidate.name
            continue
        executor = CudaSchedule(schedule, comm)
        executor.context.own["inbox"].fill_(float("nan"))
        torch.cuda.synchronize()
        dist.barrier(group)
        room = None if p.exact else 5
        cases = [Case(p, group.rank(), seed, room, transposed, to_one and seed > 1) for seed in range(4)]
        for case in cases:
            executor.run(case.tensors)
        torch.cuda.synchronize()
        for number, case in enumerate(cases):
            case.check(f"{candidate.name}, run {number}", added_to(candidate, p))
        count += 1
        dist.barrier(group)
        executor.close()
    return count


def more_than_expected(group: dist.ProcessGroup, p: AllToAllMatmul, name: str) -> None:
    """Run a schedule repeatedly without synchronisation. Some runs bring many more rows than the run before.

    In these runs results are allocated again, and GEMMs are repeated.
    """
    comm, rank = symm.communicator(group, device()), group.rank()
    executor, added = CudaSchedule(named(p, name).build(), comm), added_to(named(p, name), p)
    cases = [Case(p, rank, seed, None, to_one=seed % 3 == 1) for seed in range(8)]
    results = []
    for number, case in enumerate(cases):
        if number % 4 == 2 * rank:
            torch.cuda._sleep(2_000_000)
        results.append(executor.run(case.tensors)["y"])
    torch.cuda.synchronize()
    for number, (case, y) in enumerate(zip(cases, results, strict=True)):
        case.check(f"run {number}", added)
        assert y.shape == case.y.shape, (number, y.shape, case.y.shape)
        assert y.is_contiguous()
        assert not len(y) or y.data_ptr() == case.out.data_ptr()
    dist.barrier(group)
    executor.close()


def replay_sizes(
    group: dist.ProcessGroup, executor: CudaSchedule, held: Any, cases: Iterable[Any], *added: int
) -> None:
    """Replay a captured graph, each time with the sizes of another case, then close the executor. One rank is sometimes
    late.
    """
    executor.run(held.tensors)
    torch.cuda.synchronize()
    held.check("before the capture", *added)
    graph, _ = capture(lambda: executor.run(held.tensors))
    for number, case in enumerate(cases):
        held.fill(case)
        if number % 7 == 3 * group.rank():
            torch.cuda._sleep(2_000_000)
        graph.replay()
        torch.cuda.synchronize()
        held.check(f"replay {number}", *added)
    executor.run(held.tensors)  # a call that is not captured, between replays
    graph.replay()
    torch.cuda.synchronize()
    held.check("after another call", *added)
    dist.barrier(group)
    executor.close()


def run_many(group: dist.ProcessGroup, executor: CudaSchedule, cases: Sequence[Any], count: int, *added: int) -> None:
    """Run many calls with other sizes each time, without waiting for the device between calls, then close the executor. One rank
    is sometimes late.
    """
    for number in range(count):
        case = cases[number % len(cases)]
        if number % 11 == 5 * group.rank():
            torch.cuda._sleep(2_000_000)
        if number % 5 == 4 and number >= len(cases):
            torch.cuda.synchronize()
            case.check(f"run {number - len(cases)}", *added)
            case.out.fill_(torch.nan)
        executor.run(case.tensors)
    torch.cuda.synchronize()
    for number, case in enumerate(cases):
        case.check(f"case {number} after {count} runs", *added)
    dist.barrier(group)
    executor.close()


def run_alone(group: dist.ProcessGroup, executor: CudaSchedule, case: Any) -> str:
    """Run a call on both ranks, then another only on rank 0. Return the error of each rank."""
    executor.run(case.tensors)
    torch.cuda.synchronize()
    dist.barrier(group)
    if group.rank() == 0:
        case.out.fill_(0)
        executor.run(case.tensors, deadline_s=2.0)
        torch.cuda.synchronize()  # returns, because the watchdog ends the wait at the deadline
        time.sleep(0.3)  # the watching thread reads that the poisoned counts differ, which is not the cause
    return error_of(executor)


def error_of(executor: CudaSchedule) -> str:
    """Wait up to 20 s until the executor reports an error, and return it."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            executor.check()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        time.sleep(0.05)
    return "nothing"


def many_calls(group: dist.ProcessGroup, p: AllToAllMatmul, name: str, count: int) -> None:
    executor, rank = CudaSchedule(named(p, name).build(), symm.communicator(group, device())), group.rank()
    run_many(group, executor, [Case(p, rank, seed, sum(p.rows), to_one=seed % 3 == 1) for seed in range(8)], count)


def never_calls(group: dist.ProcessGroup, p: AllToAllMatmul, name: str) -> tuple[str, bool]:
    """Let rank 1 run only once. Return (the error of each rank, True if all products of rank 0's second run are NaN)."""
    executor = CudaSchedule(named(p, name).build(), symm.communicator(group, device()))
    case = Case(p, group.rank(), 1, sum(p.rows))
    return run_alone(group, executor, case), bool(case.out.isnan().all())


def replays(group: dist.ProcessGroup, p: AllToAllMatmul, name: str, count: int) -> None:
    comm, rank = symm.communicator(group, device()), group.rank()
    executor, added = CudaSchedule(named(p, name).build(), comm), added_to(named(p, name), p)
    held = Case(p, rank, 0, sum(p.rows))
    cases = [Case(p, rank, 100 + seed, sum(p.rows)) for seed in range(count)]
    replay_sizes(group, executor, held, cases, added)


def timeline(group: dist.ProcessGroup, p: AllToAllMatmul, by: str) -> list[str]:
    comm, rank = symm.communicator(group, device()), group.rank()
    executor = CudaSchedule(next(c for c in candidates(p, ("dispatch",)) if by in c.name).build(), comm)
    for seed in range(2):
        case, found = Case(p, rank, seed, None), Timeline()
        executor.run(case.tensors, timeline=found)
        case.check("with a timeline")
    dist.barrier(group)
    executor.close()
    return [span.name for span in found]
