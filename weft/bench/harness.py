"""Timing across ranks: arms alternate, a repetition takes as long as its slowest rank, and calls come in two ways.

- `single`: all ranks start together, one call, a synchronisation. What a caller sees who waits for each result.
- `queued`: many calls in a row and one synchronisation, divided by their number: how training runs. On CUDA the calls
  are enqueued behind a sleep of the device, so that the host is ahead and launch time is hidden unless it exceeds the
  work. On CPU a call returns when its result is there, so `queued` only drops the common start.

Arms take turns inside each repetition (clocks, temperature and neighbours drift), starting with another arm each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

Mode = Literal["single", "queued"]
MODES: tuple[Mode, ...] = ("single", "queued")
Call = Callable[[int], object]  # one call on the input set of that number

_SLEEP_CYCLES_PER_S = (
    2.0e9  # at least the clock of any present GPU: a sleep may be longer than asked, never much shorter
)


@dataclass(frozen=True)
class Ranks:
    """Who takes part. `group` moves the data, `control` is a gloo group for small numbers and common starts."""

    group: dist.ProcessGroup
    control: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The same number of values from each rank, on all ranks: `[rank][i]`."""
        mine = torch.tensor(list(values), dtype=torch.float64)
        everybody = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everybody, mine, group=self.control)
        return [t.tolist() for t in everybody]

    def most(self, value: float) -> float:
        """The largest `value` of any rank; NaN counts as infinity."""
        return max(float("inf") if v[0] != v[0] else v[0] for v in self.gather([value]))

    def start_together(self) -> None:
        """Leave at one moment on all ranks: they agree on a time just ahead (one host, one monotonic clock)."""
        until = self.most(time.perf_counter()) + 3e-4
        while time.perf_counter() < until:
            pass

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call. `skew_ms` is the median over repetitions of slowest minus fastest rank."""

    p20_ms: float
    p50_ms: float
    p80_ms: float
    skew_ms: float
    repetitions: int
    calls: int = 1

    def __str__(self) -> str:
        return f"{self.p50_ms:.3f} ms ({self.p20_ms:.3f} to {self.p80_ms:.3f})"


def summarise(repetitions_ms: Sequence[Sequence[float]], calls: int = 1) -> Timing:
    """`repetitions_ms[i][rank]` -> the slowest rank's percentiles. Raises ValueError on no repetition."""
    if not repetitions_ms:
        raise ValueError("no repetition was timed: ask for at least one")
    times = np.asarray(repetitions_ms, dtype=float)
    slowest = times.max(axis=1)
    p20, p50, p80 = (float(np.percentile(slowest, p)) for p in (20, 50, 80))
    skew = float(np.median(slowest - times.min(axis=1)))
    return Timing(p20, p50, p80, skew, len(repetitions_ms), calls)


def time_arms(
    arms: Mapping[str, Call],
    ranks: Ranks,
    mode: Mode,
    *,
    input_sets: int,
    seconds: float = 1.0,
    repetitions: tuple[int, int] = (5, 25),
    advance: Callable[[float], None] = lambda share: None,
) -> dict[str, Timing]:
    """Time `arms` in turns, on all ranks at once; every rank returns the same.

    The slowest arm gets about `seconds`, all the same number of `repetitions` (least, most); calls walk through
    `input_sets`. `advance` is told after each repetition which share of the whole it was.
    """
    measure = _measure_cuda if ranks.device.type == "cuda" else _measure_cpu
    slowest_s = max(_warm_up(call, ranks, input_sets) for call in arms.values())
    calls = 1 if mode == "single" else max(3, min(20, round(0.25 * seconds / slowest_s)))
    count = max(repetitions[0], min(repetitions[1], round(seconds / (slowest_s * calls))))
    names = list(arms)
    mine: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(count):
        start = repetition % len(names)
        for name in names[start:] + names[:start]:
            mine[name].append(measure(arms[name], ranks, mode, calls, input_sets, repetition))
        advance(1 / count)
    timings = {}
    for name in names:
        by_rank = ranks.gather(mine[name])
        timings[name] = summarise(list(zip(*by_rank, strict=True)), calls)
    return timings


def _warm_up(call: Call, ranks: Ranks, input_sets: int) -> float:
    """Two rounds over all input sets (the first may compile or allocate); the slowest rank's seconds of a call."""
    for _ in range(2):
        ranks.start_together()
        start = time.perf_counter()
        for which in range(input_sets):
            call(which)
        ranks.synchronize()
        seconds = (time.perf_counter() - start) / input_sets
    return max(ranks.most(seconds), 1e-6)


def _measure_cpu(call: Call, ranks: Ranks, mode: Mode, calls: int, input_sets: int, repetition: int) -> float:
    ranks.start_together()
    start = time.perf_counter()
    for i in range(calls):
        call((repetition + i) % input_sets)
    return 1e3 * (time.perf_counter() - start) / calls


def _measure_cuda(call: Call, ranks: Ranks, mode: Mode, calls: int, input_sets: int, repetition: int) -> float:
    torch.cuda.synchronize(ranks.device)
    if mode == "single":
        ranks.start_together()
        start = time.perf_counter()
        call(repetition % input_sets)
        torch.cuda.synchronize(ranks.device)
        return 1e3 * (time.perf_counter() - start)
    # How long the host takes to enqueue is measured by an unslept round; the next one sleeps that long first.
    ranks.start_together()
    start = time.perf_counter()
    for i in range(calls):
        call(i % input_sets)
    enqueue_s = ranks.most(time.perf_counter() - start)
    torch.cuda.synchronize(ranks.device)
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    ranks.start_together()
    torch.cuda._sleep(int(min(1.2 * enqueue_s + 1e-3, 0.2) * _SLEEP_CYCLES_PER_S))
    before.record()
    for i in range(calls):
        call((repetition + i) % input_sets)
    after.record()
    torch.cuda.synchronize(ranks.device)
    return before.elapsed_time(after) / calls
