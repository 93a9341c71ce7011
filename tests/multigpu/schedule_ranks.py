"""Run and check schedules of all_gather_matmul on the ranks of GPU tests."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import device
from support.graphs import capture

from weft import symm
from weft.builders import AllGatherMatmul, NotApplicableError, Problem, candidates, named
from weft.runtime.cuda.schedule import CudaSchedule
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.timeline import Timeline


class Case:
    """Fresh random data of all_gather_matmul on this rank, with outputs filled with NaN. `check` compares the outputs."""

    def __init__(self, p: AllGatherMatmul, rank: int, seed: int, transposed: bool = True) -> None:
        self.p, self.rank, dtype = p, rank, TORCH_DTYPE[p.dtype]
        everywhere = torch.Generator(device=device()).manual_seed(seed)
        shards = [torch.randn(m, p.k, device=device(), generator=everywhere).to(dtype) for m in p.rows]
        own = torch.Generator(device=device()).manual_seed(1000 * seed + rank)
        self.whole = torch.cat(shards)
        self.tensors = {"x_shard": shards[rank].clone()}
        for i, n in enumerate(p.n):
            w = torch.randn(n, p.k, device=device(), generator=own).to(dtype)
            self.tensors[f"w{i}"] = w.t() if transposed else w.t().contiguous()
            self.tensors[f"y{i}"] = torch.full((p.m, n), float("nan"), dtype=dtype, device=device())
        if p.return_gathered:
            self.tensors["x"] = torch.full((p.m, p.k), float("nan"), dtype=dtype, device=device())

    def fill(self, other: Case) -> None:
        """Copy the tensors of `other` into this case's tensors."""
        self.whole = other.whole
        for name, tensor in self.tensors.items():
            tensor.copy_(other.tensors[name])

    def check(self, what: str, roundings: int = 1) -> None:
        """Assert that each error against float64 is at most 2 * `roundings` times the error of one cuBLAS GEMM in this
        dtype.

        roundings: how often the output is rounded.
        """
        for i in range(len(self.p.n)):
            y, w = self.tensors[f"y{i}"], self.tensors[f"w{i}"]
            exact = self.whole.double() @ w.double()
            scale = float(exact.abs().max()) if exact.numel() else 1.0
            usual = float(((self.whole @ w).double() - exact).abs().max()) / scale if exact.numel() else 0.0
            found = float((y.double() - exact).abs().max()) / scale if exact.numel() else 0.0
            bound = 2 * max(usual, 1e-6) * roundings
            assert found <= bound, f"{what}, y{i}, rank {self.rank}: error {found:.3g}, a library GEMM's is {usual:.3g}"
        if self.p.return_gathered:
            assert torch.equal(self.tensors["x"], self.whole), f"{what}, rank {self.rank}: the gathered input differs"


def roundings(name: str) -> int:
    """Return how often the schedule `name` rounds its output. A 2D schedule rounds it once in each of its steps."""
    return 4 if name.startswith("ficco_2d") else 1


def every_candidate(group: dist.ProcessGroup, p: AllGatherMatmul, transposed: bool) -> int:
    """Run every schedule three times, with fresh data each time. Return the number of schedules.

    Before the first run, the schedule's own buffers are filled with NaN.
    """
    comm, count = symm.communicator(group, device()), 0
    for candidate in candidates(p):
        try:
            schedule = candidate.build()
        except NotApplicableError:
            continue
        executor = CudaSchedule(schedule, comm)
        for tensor in executor.context.own.values():
            tensor.fill_(float("nan"))
        torch.cuda.synchronize()
        dist.barrier(group)
        cases = [Case(p, group.rank(), seed, transposed) for seed in range(3)]
        for case in cases:
            executor.run(case.tensors)
        torch.cuda.synchronize()
        executor.check()
        for number, case in enumerate(cases):
            case.check(f"{candidate.name}, run {number}", roundings(candidate.name))
        executor.close()
        count += 1
    return count


def executor_of(group: dist.ProcessGroup, p: Problem, name: str) -> CudaSchedule:
    return CudaSchedule(named(p, name).build(), symm.communicator(group, device()))


def replays(group: dist.ProcessGroup, p: AllGatherMatmul, name: str, count: int, straggle_every: int) -> None:
    """Replay a captured graph `count` times with fresh data, and compare bits with the results of ordinary calls.

    In one of `straggle_every` replays a rank is late. Ordinary calls are also made between the replays.
    """
    executor = executor_of(group, p, name)
    case = Case(p, group.rank(), 0)
    fresh = [Case(p, group.rank(), seed) for seed in range(1, 9)]
    expected = []
    for other in fresh:
        executor.run(other.tensors)
        expected.append(other.tensors["y0"].clone())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        executor.run(case.tensors)
    graph, _ = capture(lambda: executor.run(case.tensors), stream)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    for number in range(count):
        other = number % len(fresh)
        case.tensors["x_shard"].copy_(fresh[other].tensors["x_shard"])
        case.tensors["w0"].copy_(fresh[other].tensors["w0"])
        case.tensors["y0"].fill_(float("nan"))
        if straggle_every and number % straggle_every == 0 and group.rank() == (number // straggle_every) % 2:
            torch.cuda._sleep(2_000_000)
        graph.replay()
        wrong += (case.tensors["y0"] != expected[other]).any()
        if number % 10 == 5:
            executor.run(fresh[other].tensors)
    torch.cuda.synchronize()
    executor.check()
    assert int(wrong) == 0, f"{name}: {int(wrong)} of {count} replays differ from a call"


def stragglers(group: dist.ProcessGroup, p: AllGatherMatmul, names: list[str]) -> None:
    """Delay each rank in turn, on the CPU or on the GPU. The other ranks must wait for its data, and not read old data."""
    for name in names:
        executor = executor_of(group, p, name)
        for late in range(group.size()):
            for seed in range(2):
                case = Case(p, group.rank(), 10 * late + seed)
                torch.cuda.synchronize()
                dist.barrier(group)
                if group.rank() == late:
                    time.sleep(0.1) if seed else torch.cuda._sleep(100_000_000)
                executor.run(case.tensors)
                torch.cuda.synchronize()
                case.check(f"{name}, rank {late} late", roundings(name))
        executor.close()


def spans(group: dist.ProcessGroup, p: AllGatherMatmul, name: str) -> list[Any]:
    """Return the spans of a run's timeline."""
    executor = executor_of(group, p, name)
    case = Case(p, group.rank(), 1)
    executor.run(case.tensors)
    timeline = Timeline()
    executor.run(case.tensors, timeline=timeline)
    case.check(name, roundings(name))
    return list(timeline)


def never_calls(group: dist.ProcessGroup, p: AllGatherMatmul, name: str) -> tuple[str, str]:
    """Let rank 1 make the schedule and never run it. Return the error that each rank raises. The caller limits the
    time.
    """
    executor = executor_of(group, p, name)
    case = Case(p, group.rank(), 1)
    executor.run(case.tensors)
    torch.cuda.synchronize()
    if group.rank() == 1:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                executor.check()
            except Exception as error:
                return type(error).__name__, str(error)
            time.sleep(0.05)
        return "nothing", ""
    executor.run(case.tensors, deadline_s=2.0)
    torch.cuda.synchronize()  # returns, because the watchdog ends the wait at the deadline
    try:
        executor.run(case.tensors)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def disagree(group: dist.ProcessGroup) -> str:
    p = AllGatherMatmul.even(64 * (1 + group.rank()), 32, 16, group.size())
    try:
        executor_of(group, p, "serial")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def raises_in_the_middle(group: dist.ProcessGroup, p: AllGatherMatmul, name: str) -> tuple[str, str]:
    """Let a cuBLAS call raise in rank 0's second run. Return the error of that run and of the next run, on this rank."""
    executor = executor_of(group, p, name)
    case = Case(p, group.rank(), 1)
    executor.run(case.tensors)
    torch.cuda.synchronize()
    dist.barrier(group)
    first = "nothing"
    if group.rank() == 0:
        items = executor._programs[(False,)].items
        at = next(i for i, item in enumerate(items) if item.kind == 1)

        def fail(tensors: object) -> None:
            raise MemoryError("no room for a workspace")

        items[at] = items[at]._replace(what=fail)
    try:
        executor.run(case.tensors, deadline_s=10.0)
        torch.cuda.synchronize()
    except Exception as error:
        first = type(error).__name__
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            executor.check()
        except Exception as error:
            return first, type(error).__name__
        time.sleep(0.05)
    return first, "nothing"
