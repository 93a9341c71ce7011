"""Test calls on GPUs whose number of rows changes from call to call, with two and with four ranks.

Executors of different sizes share memory. Later sizes outgrow it, and graphs keep memory that was outgrown. The same
bytes hold rows of different ranks in different runs. The functions with a `group` argument run on the ranks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from gpu_ranks import device
from support.compile_at_once import at_once
from support.experts_of_any_size import many_sizes
from support.graphs import capture

import weft
from weft import symm
from weft.launch import Pool
from weft.operator import select
from weft.operator.cache import PASSING
from weft.operator.calls import prepared_calls
from weft.ops.all_gather_matmul import OPERATOR
from weft.symm.cuda import slab_bytes

pytestmark = gpu_ranks.MARKS
N, K = 64, 128
SHARD, GATHER, KERNEL = "shard[chunks=1,send=in_turn,by=dma]", "gather[by=dma]", "gather[by=kernel]"
HALVES, CHUNKS = "shard[chunks=2,send=in_turn,by=dma]", "ficco_1d[start=hetero,gemms=unfused,steps=2,by=dma]"


class Work:
    """Calls of all_gather_matmul and their largest error. Every rank draws the inputs of all ranks, to compute the
    expected results.

    Errors are computed on the GPU, which is not synchronised before `done`.
    """

    def __init__(self, group: dist.ProcessGroup, schedule: str | None) -> None:
        self.group, self.schedule, self.calls = group, schedule, 0
        self.w = torch.randn(K, N, generator=torch.Generator(device()).manual_seed(1), device=device())
        self.worst = torch.zeros((), dtype=torch.float64, device=device())

    def shards(self, rows: int, seed: int) -> list[torch.Tensor]:
        ranks = range(self.group.size())
        generators = [torch.Generator(device()).manual_seed(1000 * seed + rank) for rank in ranks]
        return [torch.randn(rows, K, generator=g, device=device()) for g in generators]

    def call(self, rows: int) -> None:
        self.calls += 1
        shards = self.shards(rows, self.calls)
        _, (y,) = weft.all_gather_matmul(
            shards[self.group.rank()], [self.w], 0, self.group, return_A=False, schedule=self.schedule
        )
        self.look(y, shards)

    def look(self, y: torch.Tensor, shards: list[torch.Tensor]) -> None:
        error = (y.double() - torch.cat(shards).double() @ self.w.double()).abs().max()
        self.worst = torch.maximum(self.worst, torch.nan_to_num(error, nan=1e9))

    def done(self) -> None:
        torch.cuda.synchronize()
        weft.symm.communicator(self.group, device()).check()
        assert float(self.worst) < 1e-2, (self.schedule, float(self.worst))


def taking_turns(group: dist.ProcessGroup, schedule: str | None, sizes: list[int]) -> None:
    work, draw = Work(group, schedule), random.Random(group.rank())
    for rows in sizes:
        if draw.random() < 0.1:  # lets the other ranks run ahead
            time.sleep(0.002) if draw.random() < 0.5 else torch.cuda._sleep(2_000_000)
        work.call(rows)
    work.done()


def sizes_of(seed: int, count: int, most: int = 512) -> list[int]:
    draw = random.Random(seed)
    few = [draw.randrange(1, most) for _ in range(5)]
    return [draw.choice(few) if draw.random() < 0.6 else draw.randrange(1, most) for _ in range(count)]


def captured(group: dist.ProcessGroup, schedule: str) -> None:
    """Replay graphs of several sizes between other calls. The graphs use memory that later calls outgrow."""
    work, stream = Work(group, schedule), torch.cuda.Stream()
    graphs = []
    for rows in (16, 96, 40):
        x = torch.empty(rows, K, device=device())
        with torch.cuda.stream(stream):
            weft.all_gather_matmul(x, [work.w], 0, group, return_A=False, schedule=schedule)
        graph, (_, (y,)) = capture(
            lambda x=x: weft.all_gather_matmul(x, [work.w], 0, group, return_A=False, schedule=schedule), stream
        )
        graphs.append((graph, x, y))
    for turn in range(30):
        work.call(16 + 11 * turn)
        graph, x, y = graphs[turn % 3]
        shards = work.shards(len(x), 500 + turn)
        x.copy_(shards[group.rank()])
        y.fill_(float("nan"))
        graph.replay()
        work.look(y, shards)
        work.call(96)
    work.done()


def on_streams(group: dist.ProcessGroup, schedule: str) -> None:
    """Make calls on two streams. Nothing orders the streams except the memory that the calls share."""
    work, streams = Work(group, schedule), [torch.cuda.Stream() for _ in range(2)]
    given = [(rows, work.shards(rows, rows)) for rows in (2048, 64, 512, 1024)]
    for _, shards in given:
        weft.all_gather_matmul(shards[group.rank()], [work.w], 0, group, return_A=False, schedule=schedule)
    torch.cuda.synchronize()
    made = []
    for turn in range(40):
        _, shards = given[turn % len(given)]
        with torch.cuda.stream(streams[turn % 2]):
            _, (y,) = weft.all_gather_matmul(
                shards[group.rank()], [work.w], 0, group, return_A=False, schedule=schedule
            )
        made.append((y, shards))
    torch.cuda.synchronize()
    for y, shards in made:
        work.look(y, shards)
    work.done()


def memory(group: dist.ProcessGroup, schedules: list[str]) -> float:
    """Call the schedules in turn. Return the largest ratio of the symmetric memory, less a slab of 8 MiB, to the gathered rows of
    the largest size so far.
    """
    own = dist.new_group(list(range(group.size())))
    work, draw, most, share, sizes = Work(own, None), random.Random(5), 0, 0.0, set[tuple[str, int]]()
    late = random.Random(group.rank())
    for call in range(120):
        rows = draw.randrange(131072, 1 << 20) if call < 40 else draw.randrange(1, 4096)
        most = max(most, rows)
        work.schedule = schedules[call % len(schedules)]
        sizes.add((work.schedule, rows))
        if late.random() < 0.2:  # lets the other rank run ahead
            torch.cuda._sleep(2_000_000)
        work.call(rows)
        share = max(share, (slab_bytes(symm.communicator(own, device())) - (8 << 20)) / (most * group.size() * K * 4))
    work.done()
    assert len(prepared_calls(OPERATOR, own)) == len(sizes), "sizes that share memory stay known"
    return share


def captured_in_turn(group: dist.ProcessGroup) -> None:
    """Capture a schedule in an arena that another schedule shares, and replay it between calls of both. Then capture a schedule
    that has its arena for itself: another schedule must not join it.
    """
    own = dist.new_group(list(range(group.size())))
    work, stream, late = Work(own, SHARD), torch.cuda.Stream(), random.Random(group.rank())
    rows = (1 << 17) + 64
    x = torch.empty(rows, K, device=device())

    def call(schedule: str) -> torch.Tensor:
        _, (y,) = weft.all_gather_matmul(x, [work.w], 0, own, return_A=False, schedule=schedule)
        return y

    for first in (SHARD, GATHER):
        call(first)
        with torch.cuda.stream(stream):
            call(SHARD)
        graph, y = capture(lambda: call(SHARD), stream)
        for turn in range(20):
            work.schedule = (GATHER, SHARD)[turn % 2]
            work.call(rows + 64 * (turn % 3))
            shards = work.shards(rows, 900 + turn)
            x.copy_(shards[group.rank()])
            if late.random() < 0.3:
                torch.cuda._sleep(2_000_000)
            y.fill_(float("nan"))
            graph.replay()
            work.look(y, shards)
        work.done()
        own = work.group = dist.new_group(list(range(group.size())))


@at_once
def between_serial(group: dist.ProcessGroup) -> list[int]:
    """Let sizes recur between sizes for which serial is chosen, also captured. Return the numbers of compiled sizes."""
    native, own = select._names_near, dist.new_group(list(range(group.size())))
    select._names_near = lambda *_, **__: ("serial", "serial")
    try:
        work, found = Work(own, None), list[int]()
        for number in range(PASSING):
            work.call(8 + 8 * number)
        for rows in (12, 20, 12, 20, 12):
            work.call(rows)
            found.append(len(prepared_calls(OPERATOR, own)))
        x = torch.empty(20, K, device=device())
        graph, (_, (y,)) = capture(lambda: weft.all_gather_matmul(x, [work.w], 0, own, return_A=False))
        for turn in range(3):
            shards = work.shards(len(x), 500 + turn)
            x.copy_(shards[own.rank()])
            y.fill_(float("nan"))
            graph.replay()
            work.look(y, shards)
            work.call(20)
            found.append(len(prepared_calls(OPERATOR, own)))
        work.done()
        return found
    finally:
        select._names_near = native


def test_sizes_between_serial_sizes_are_not_compiled_when_they_recur(pair: Pool) -> None:
    assert pair.run(between_serial, timeout_s=60) == [[PASSING] * 8] * 2


@pytest.mark.parametrize("schedule", [SHARD, GATHER, KERNEL, HALVES, CHUNKS, None])
def test_sizes_take_turns(pair: Pool, schedule: str | None) -> None:
    sizes = [2 * size for size in sizes_of(1, 120)] if schedule in (HALVES, CHUNKS) else sizes_of(1, 120)
    pair.run(taking_turns, schedule, sizes, timeout_s=90)


@pytest.mark.parametrize("schedule", [SHARD, KERNEL])
def test_graphs_of_several_sizes(pair: Pool, schedule: str) -> None:
    pair.run(captured, schedule, timeout_s=60)


@pytest.mark.parametrize("schedule", [SHARD, KERNEL])
def test_calls_on_two_streams(pair: Pool, schedule: str) -> None:
    pair.run(on_streams, schedule, timeout_s=60)


@pytest.mark.parametrize("schedules", [[SHARD], [SHARD, GATHER, KERNEL]])
def test_memory_is_that_of_the_largest(pair: Pool, schedules: list[str]) -> None:
    assert all(share <= 1.25 for share in pair.run(memory, schedules, timeout_s=90))


def test_graphs_of_several_schedules_in_one_arena(pair: Pool) -> None:
    pair.run(captured_in_turn, timeout_s=90)


@pytest.mark.parametrize("wanted", [False, True])
def test_experts_take_the_fast_path_at_any_size(pair: Pool, wanted: bool) -> None:
    for slow_calls in pair.run(many_sizes, "cuda", wanted, [*range(5, 29), 7, 7, 11], timeout_s=90):
        assert slow_calls[0] == 2
        assert sum(slow_calls[3:]) == 0, slow_calls  # a call is not recorded if two tensors happen to have equal sizes


@pytest.fixture
def four(deadline: None) -> Iterator[Pool]:
    with Pool(4, backend="nccl") as workers:
        yield workers


def test_sizes_take_turns_between_four_ranks(four: Pool) -> None:
    for schedule in (SHARD, GATHER):
        four.run(taking_turns, schedule, sizes_of(2, 60, 256), timeout_s=90)
