"""Calls of many sizes in random order on CPU processes. These functions run on the ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.on_ranks import close, own_group

import weft
from weft import symm
from weft.builders import AllGatherMatmul, Candidate, MatmulReduceScatter, NotApplicableError, candidates
from weft.errors import WeftError
from weft.operator import measure
from weft.operator.calls import prepared_calls
from weft.ops.all_gather_matmul import OPERATOR
from weft.runtime.cpu import schedule as cpu_schedule
from weft.runtime.cpu.memory import memory_of
from weft.symm.memory import lent

K, N, LEAST, MOST = 24, 16, 16, 300
NAN_BYTE = 0xFF  # a NaN of any floating-point type consists of these bytes


class Held(NamedTuple):
    """The resources of this process: all threads, mappings of weft's shared memory, and threads of weft's lanes."""

    threads: int
    maps: int
    lanes: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        maps = sum("/memfd:weft" in line for line in Path("/proc/self/maps").read_text().splitlines())
        lanes = sum(thread.name.startswith("weft rank") for thread in threading.enumerate())
        return cls(len(os.listdir("/proc/self/task")), maps, lanes)


def poison(comm: symm.Communicator) -> None:
    """Fill the memory of the group's schedules with NaN. All ranks must have ended their runs."""
    comm.all_gather(None, what="runs have ended")
    mapped = memory_of(comm).mapped
    assert mapped is not None
    begin = mapped.addresses[comm.rank] + mapped.buffers_at
    lent(begin, [mapped.nbytes], torch.uint8, torch.device("cpu"), mapped.owners).fill_(NAN_BYTE)
    mapped.scratch.fill_(NAN_BYTE)
    comm.all_gather(None, what="poisoned")


@contextlib.contextmanager
def dynamic_lanes(rank: int, before: Callable[[], None]) -> Iterator[None]:
    """Delay this rank's lanes at random, before and after their steps. before: a function to call before each lane."""
    native, late = cpu_schedule._play, random.Random(rank)

    def play(*given: Any) -> None:
        before()
        time.sleep(0.003 * late.random() * (late.random() < 0.2))
        native(*given)
        time.sleep(0.003 * late.random() * (late.random() < 0.2))

    cpu_schedule._play = play
    try:
        yield
    finally:
        cpu_schedule._play = native


def can_build(candidate: Candidate) -> bool:
    with contextlib.suppress(NotApplicableError):
        candidate.build()
        return True
    return False


def _calls(group: dist.ProcessGroup) -> list[Callable[[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Return functions of (rows, seed) that make a call. Each returns (result, exact result, result by torch).

    The schedules of the calls differ in signals and memory.
    """
    world, rank = group.size(), group.rank()

    def data(rows: int, columns: int, seed: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))

    def gathered(schedule: str, rows: int, seed: int) -> Any:
        shards, w = [data(rows, K, 100 * seed + r) for r in range(world)], data(K, N, seed + rank)
        y = weft.all_gather_matmul(shards[rank], [w], 0, group, return_A=False, schedule=schedule)[1][0]
        x = torch.cat(shards)
        return y, x.double() @ w.double(), x @ w

    def scattered(schedule: str, rows: int, seed: int) -> Any:
        pairs = [(data(rows * world, K, 100 * seed + r), data(K, N, seed + 7 * r)) for r in range(world)]
        y = weft.matmul_reduce_scatter(*pairs[rank], "sum", 0, group, schedule=schedule)
        mine = slice(rows * rank, rows * (rank + 1))
        exact = sum(x[mine].double() @ w.double() for x, w in pairs)
        return y, exact, sum(x[mine] @ w for x, w in pairs)

    def names(p: Any, builders: tuple[str, ...]) -> list[str]:
        usual = [one for one in candidates(p) if one.builder in builders and "by=dma" in one.name]
        return [one.name for one in usual if can_build(one)]

    even, summed = (
        AllGatherMatmul.even(LEAST * world, N, K, world, "fp32"),
        MatmulReduceScatter(world, LEAST * world, N, K, "fp32"),
    )
    ways = [partial(gathered, name) for name in names(even, ("gather", "shard"))]
    ways += [partial(scattered, name) for name in names(summed, ("direct",))]
    return ways[:: max(1, len(ways) // 5)]


def in_random_order(group: dist.ProcessGroup, counts: tuple[int, int]) -> dict[str, Any]:
    """Make calls of random sizes, some of them repeated, with random delays. Return the resources that this process holds
    before the calls, after the first counts[0] sizes, after the first counts[1] sizes, and after closing.
    """
    own, same = own_group(group), random.Random(5)
    before, comm, ways = Held.now(), symm.communicator(own, "cpu"), _calls(own)
    found, made = {"ways": len(ways), "before": before}, []
    sizes = [(ways[i % len(ways)], size) for i, size in enumerate(same.choices(range(LEAST, MOST), k=counts[1]))]
    with dynamic_lanes(group.rank(), lambda: None):
        for call, (way, size) in enumerate(sizes):
            made.append(way(size, call))
            if same.random() < 0.3:
                way, size = sizes[same.randrange(call + 1)]
                made.append(way(size, call))
            if call % 10 == 0:
                poison(comm)
            if call + 1 in counts:
                found[f"after {call + 1}"] = Held.now()
    for y, exact, usual in made:
        close(y, exact, usual)
    comm.close()
    return found | {"closed": Held.now()}


def killed(group: dist.ProcessGroup, at: int) -> list[str]:
    """Call until rank 1 is about to run its lane number `at`, counted over all calls, and kill rank 1 there. Return the
    next two errors of another rank.
    """
    ways, lanes, errors = _calls(group), [0], list[str]()

    def die() -> None:
        lanes[0] += 1
        if group.rank() == 1 and lanes[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)

    with dynamic_lanes(group.rank(), die):
        for call in range(at):
            try:
                ways[call % len(ways)](LEAST + 7 * call % MOST, call)
            except WeftError as error:
                errors.append(f"{type(error).__name__}: {error}")
                if len(errors) == 2:
                    return errors
    raise AssertionError("nobody was killed")


def measured_sizes(group: dist.ProcessGroup, rows: list[int | list[int]]) -> list[tuple[str, ...]]:
    """Call with each of the sizes `rows`. Return for each call the schedules that it measures, and at the end the
    schedules in use.

    rows: a number for all ranks, or a list with a number for each rank.
    """
    own, rank, found = own_group(group), group.rank(), list[tuple[str, ...]]()
    native, w = measure.measured, torch.randn(22, 14)

    def measured(p: Any, schedules: dict[str, Any], *given: Any, anew: bool = False) -> Any:
        if not anew:  # otherwise the fastest schedule is confirmed, which happens only if it is faster than serial
            found[-1] = tuple(schedules)
        return native(p, schedules, *given, anew=anew)

    measure.measured = measured
    try:
        for of_ranks in rows:
            found.append(())
            given = None if isinstance(of_ranks, int) else of_ranks
            x = torch.randn(of_ranks if isinstance(of_ranks, int) else of_ranks[rank], 22)
            weft.all_gather_matmul(x, [w], 0, own, return_A=False, rows=given)
    finally:
        measure.measured = native
    taken = {one.taken[0] for one in prepared_calls(OPERATOR, own)}
    symm.communicator(own, "cpu").close()
    return [*found, tuple(sorted(taken))]
