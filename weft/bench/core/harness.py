"""Timing of calls on all ranks. The time of a repetition is the slowest rank's time. There are three timing modes:

- `single`: the CPU synchronises with the device after each call, as in a loop that uses each result.
- `queued`: the CPU makes many calls in a row and then synchronises, as in training. The time is divided by the number
  of calls. On GPUs the calls are enqueued behind a sleep kernel and a barrier of all ranks. So the time contains
  launches only if they take longer than the work.
- `graph`: a call is captured in a CUDA graph, and the graph is replayed many times in a row, as in decoding.

All variants run in each repetition, so that a drift of clocks, temperature or load affects all of them. The order is random,
because a variant influences the clock rate during the next variant. If the difference of two variants will be published, these
two are repeated until their difference exceeds twice its noise, or until a limit on repetitions.

In the last repetition a callback receives the last output of each variant, for example to check the output.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

HARNESS = 4
"""The version of this harness; every record has it. Increment it when times of the same code would change, and document the
change in benchmarks/README.md."""

Mode = Literal["single", "queued", "graph"]
Call = Callable[[int], object]  # runs a variant on the input set of this number
_SLEEP_CYCLES_PER_S = 2.0e9  # at least the clock rate of current GPUs, so that sleeps are long enough
_LONGEST_SLEEP_S = 0.2
_MOST_CALLS = 20  # the maximum number of calls in a row
_MOST_REPLAYS = 12  # after more replays of NCCL graphs, a launch waits for the device
_ATTEMPTS = 4  # attempts to enqueue a row of calls before the sleep ends
_LONGER = 4  # the largest factor by which repetitions increase while a difference is within its noise
_CLEAR = 2.0  # a difference is clear if it exceeds this many times its noise


@dataclass(frozen=True)
class Ranks:
    """The ranks of a benchmark. group: the process group of the measured calls. control: a gloo group on which ranks
    exchange timings and start together.
    """

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
        """Exchange numbers between ranks. Return the values of every rank, on all ranks: `[rank][i]`. Every rank must pass the
        same number of values.
        """
        mine = torch.tensor(list(values), dtype=torch.float64)
        everybody = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everybody, mine, group=self.control)
        return [t.tolist() for t in everybody]

    def most(self, value: float) -> float:
        """Return the largest `value` over all ranks; NaN counts as infinity."""
        return max(float("inf") if v[0] != v[0] else v[0] for v in self.gather([value]))

    def start_together(self) -> None:
        """Wait until a moment that all ranks agree on, so that all ranks of this host return at the same time. The moment is a
        time of the system's clock, which these ranks share.
        """
        until = self.most(time.perf_counter()) + 3e-4
        while time.perf_counter() < until:
            pass

    def meet_on_device(self) -> None:
        """Enqueue a barrier: later work on the current stream starts when all ranks' streams have reached the barrier."""
        if self._meeting is not None:
            self._meeting.barrier()

    @cached_property
    def _meeting(self) -> Any:
        """A barrier between the devices of all ranks, by signals in symmetric memory; None without peer access."""
        # Not an NCCL barrier: the CPU would wait for its end before it launches a graph with NCCL collectives.
        if self.world_size == 1:
            return None
        import torch.distributed._symmetric_memory as symm_mem

        try:
            return symm_mem.rendezvous(symm_mem.empty(1, dtype=torch.int64, device=self.device), self.group.group_name)
        except RuntimeError:  # without peer access, only the CPUs synchronise
            return None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait until the devices of all ranks are idle, and all ranks have made this call."""
        self.synchronize()
        dist.barrier(self.control)


@dataclass(frozen=True)
class Timing:
    """The time of one call in ms, of the slowest rank: median and 20th and 80th percentiles over repetitions.

    skew_ms: the slowest rank's time minus the fastest rank's time, as the median over repetitions.
    calls: the number of calls in a repetition.
    host_us: microseconds for which a call keeps the CPU busy (GPUs only).
    each_ms: the time in each repetition.
    """

    p20_ms: float
    p50_ms: float
    p80_ms: float
    skew_ms: float
    repetitions: int
    calls: int = 1
    host_us: float | None = None
    each_ms: tuple[float, ...] = field(default=(), repr=False)

    def as_fields(self) -> dict[str, float | None]:
        """Return the times as fields of a record: all except `each_ms`."""
        return {of.name: getattr(self, of.name) for of in fields(self) if of.name != "each_ms"}

    @property
    def noise(self) -> float:
        return noise(self.p20_ms, self.p50_ms, self.p80_ms, self.repetitions)


def noise(p20: float, p50: float, p80: float, repetitions: int) -> float:
    """Return the relative standard error of the median of `repetitions` times with the percentiles p20, p50 and p80.

    Times are assumed to be normally distributed: p80 - p20 is 1.68 standard deviations.
    """
    return 1.2533 * (p80 - p20) / 1.6832 / math.sqrt(repetitions) / p50


def is_clear(ratio: float, noise_a: float, noise_b: float) -> bool:
    """True if two medians differ by more than twice the noise of their ratio.

    ratio: one median time divided by the other. noise_a, noise_b: the relative standard error of each median (`noise`).
    """
    return abs(math.log(ratio)) > _CLEAR * math.hypot(noise_a, noise_b)


def summarise(
    repetitions_ms: Sequence[Sequence[float]], calls: int = 1, host_us: Sequence[Sequence[float]] | None = None
) -> Timing:
    """Return the timing of a variant. Raise ValueError if there are no repetitions.

    repetitions_ms: the measured times in milliseconds per call, as [repetition][rank].
    host_us: the microseconds for which a call keeps the CPU busy, as [repetition][rank].
    calls: the number of calls in a repetition.
    """
    if not repetitions_ms:
        raise ValueError("repetitions=0: time at least 1 repetition")
    times = np.asarray(repetitions_ms, dtype=float)
    slowest = times.max(axis=1)
    p20, p50, p80 = (float(np.percentile(slowest, p)) for p in (20, 50, 80))
    skew = float(np.median(slowest - times.min(axis=1)))
    host = None if host_us is None else float(np.median(np.asarray(host_us, dtype=float).max(axis=1)))
    return Timing(p20, p50, p80, skew, len(repetitions_ms), calls, host, tuple(slowest.tolist()))


def time_variants(
    variants: Mapping[str, Call], ranks: Ranks, mode: Mode, *, input_sets: int, seconds: float = 1.0,
    repetitions: tuple[int, int] = (5, 25), waiting: Collection[str] = (), claims: Collection[tuple[str, str]] = (),
    advance: Callable[[float], None] = lambda share: None, before_last: Callable[[], None] = lambda: None,
    inspect: Callable[[str, int, Any], None] = lambda name, which, output: None,
) -> dict[str, Timing]:  # fmt: skip
    """Time `variants` alternately on all ranks. Return {variant: timing}, equal on all ranks.

    Args:
        variants: the functions to time, by name. A function gets the number of an input set. In mode "graph" it must replay a
            graph.
        input_sets: the number of input sets (different inputs of one configuration). Calls cycle through them.
        seconds: the approximate time in which to measure the slowest variant.
        repetitions: the smallest and the largest number of repetitions. All variants get the same number.
        waiting: the names of variants that synchronise with the device in each call. In mode "queued" they are timed
            without the sleep kernel (see the module), because the synchronisation would also wait for the end of the
            sleep.
        claims: pairs of variants whose difference will be published. These two are repeated until their difference exceeds
            twice its noise, but at most `_LONGER` times as often as other variants.
        advance: called after each repetition with its fraction of all repetitions.
        before_last: called before the last repetition, for example to fill outputs with NaN before `inspect` checks them.
        inspect: called in the last repetition after each variant, in the same order on all ranks. Its arguments are the
            variant's name, the number of the input set of the variant's last call, and the output of this call.
    """
    slowest_s = max(_warm_up(call, ranks, input_sets) for call in variants.values())
    most = _MOST_REPLAYS if mode == "graph" else _MOST_CALLS
    calls = max(3, min(most, round(0.25 * seconds / slowest_s)))
    calls = 1 if mode == "single" and ranks.device.type == "cpu" else calls
    count = max(repetitions[0], min(repetitions[1], round(seconds / (slowest_s * calls))))
    clock = HostClock if ranks.device.type == "cpu" else SingleClock if mode == "single" else QueueClock
    clocks = {name: clock(call, ranks, name in waiting, calls, input_sets) for name, call in variants.items()}
    claims = [pair for pair in claims if set(pair) <= set(variants)]
    mine: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}

    def repeat(repetition: int, names: Sequence[str], looking: bool = False) -> None:
        for number in np.random.default_rng(repetition).permutation(len(names)):  # the same on all ranks
            name, taken = names[number], clocks[names[number]]
            mine[name].append(taken.measure(repetition))
            if looking:
                inspect(name, *taken.last)
            taken.last = (0, None)  # free its memory for the other variants

    def found() -> dict[str, Timing]:
        timings = {}
        for name in variants:
            of_ranks, busy = (list(zip(*ranks.gather([row[i] for row in mine[name]]), strict=True)) for i in range(2))
            timings[name] = summarise(of_ranks, calls, busy if ranks.device.type == "cuda" else None)
        return timings

    for repetition in range(count - 1):
        repeat(repetition, list(variants))
        advance(1 / count)
    for more in range(1, _LONGER):
        timings = found() if claims and count > 1 else {}
        unclear = dict.fromkeys(
            name for pair in claims if timings and not _clear(*(timings[variant] for variant in pair)) for name in pair
        )
        if not unclear:
            break
        for repetition in range(more * count, (more + 1) * count):
            repeat(repetition, list(unclear))
    before_last()
    repeat(_LONGER * count, list(variants), looking=True)
    advance(1 / count)
    return found()


def _clear(a: Timing, b: Timing) -> bool:
    return is_clear(a.p50_ms / b.p50_ms, a.noise, b.noise)


def _warm_up(call: Call, ranks: Ranks, input_sets: int) -> float:
    """Call each input set twice, because the first calls may compile or allocate. Return the slowest rank's seconds per
    call.
    """
    for _ in range(2):
        ranks.start_together()
        start = time.perf_counter()
        for which in range(input_sets):
            call(which)
        ranks.synchronize()
        seconds = (time.perf_counter() - start) / input_sets
    return max(ranks.most(seconds), 1e-6)


@dataclass
class HostClock:
    """The timer of a variant on CPUs, where a call returns a complete result. last: the last call, as (number of its input set,
    its output).
    """

    call: Call
    ranks: Ranks
    waits: bool
    calls: int
    input_sets: int
    last: tuple[int, object] = field(default=(0, None), init=False)

    def measure(self, repetition: int) -> tuple[float, float]:
        """Run one repetition. Return (milliseconds per call, microseconds per call for which the CPU was busy) on this rank."""
        self.ranks.start_together()
        start = time.perf_counter()
        self._row(repetition, self.calls)
        seconds = (time.perf_counter() - start) / self.calls
        return 1e3 * seconds, 1e6 * seconds

    def _row(self, repetition: int, calls: int) -> None:
        output = None
        for i in range(calls):
            del output
            output = self.call((repetition + i) % self.input_sets)
        self.last = (repetition + calls - 1) % self.input_sets, output


class SingleClock(HostClock):
    """The timer of a variant in mode `single` on GPUs. It synchronises with the device after each call, and returns the median
    over calls. The first call is not counted, because the device has been idle before it.
    """

    def measure(self, repetition: int) -> tuple[float, float]:
        found = []
        torch.cuda.synchronize(self.ranks.device)
        self.ranks.start_together()
        for i in range(1 + self.calls):
            start = time.perf_counter()
            self.last = (0, None)
            self._row(repetition + i, 1)
            host_s = time.perf_counter() - start
            torch.cuda.synchronize(self.ranks.device)
            found.append((1e3 * (time.perf_counter() - start), 1e6 * host_s))
        call_ms, host_us = np.median(np.asarray(found[1:]), axis=0)
        return float(call_ms), float(host_us)


@dataclass
class QueueClock(HostClock):
    """The timer of a variant in the modes `queued` and `graph` on GPUs: calls are enqueued behind a sleep kernel, so that the
    CPU's time does not count.

    If the sleep ends on any rank before all calls are enqueued, the calls are repeated with a longer sleep. Calls that
    synchronise with the device get no sleep, because they would wait for its end.
    """

    sleep_s: float = field(default=0.0, init=False)

    def measure(self, repetition: int) -> tuple[float, float]:
        for _ in range(_ATTEMPTS):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(self.ranks.device)
            self.ranks.start_together()
            torch.cuda._sleep(int(self.sleep_s * _SLEEP_CYCLES_PER_S))
            self.ranks.meet_on_device()
            self.last = (0, None)
            before.record()
            start = time.perf_counter()
            self._row(repetition, self.calls)
            enqueue_s = time.perf_counter() - start
            late = before.query()
            after.record()
            torch.cuda.synchronize(self.ranks.device)
            if self.waits or self.ranks.most(float(late)) == 0 or self.sleep_s == _LONGEST_SLEEP_S:
                break
            longer_s = max(1.5 * self.sleep_s, 1.3 * self.ranks.most(enqueue_s) + 1e-3)
            self.sleep_s = min(longer_s, _LONGEST_SLEEP_S)
        return before.elapsed_time(after) / self.calls, 1e6 * enqueue_s / self.calls
