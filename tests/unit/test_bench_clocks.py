"""The clocks of the benchmark, on a modelled machine. A call takes known times on its CPU and its GPU, so the reported
times must match.

The machine's CPU and GPU have their own simulated time. The second of two ranks takes twice as long for everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.bench.core import ceilings, harness, measure
from weft.bench.core.ceilings import measure_ceilings
from weft.bench.core.harness import Mode, Ranks, Timing, time_variants
from weft.runtime.cuda.issue import StreamItems
from weft.timeline import Span, Timeline

CYCLES_PER_S = 2e9


class Machine:
    """A CPU that enqueues work, and a GPU that executes its queue. Times are in seconds."""

    def __init__(self) -> None:
        self.now, self.queue_ends = 1000.0, 0.0

    def call(self, host_s: float, device_s: float = 0.0) -> None:
        self.now += host_s
        self.enqueue(device_s)

    def enqueue(self, seconds: float) -> None:
        self.queue_ends = max(self.now, self.queue_ends) + seconds

    def synchronize(self, device: object = None) -> None:
        self.now = max(self.now, self.queue_ends)

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.at = machine, 0.0

    def record(self) -> None:
        self.at = max(self.machine.now, self.machine.queue_ends)

    def query(self) -> bool:
        return self.machine.now >= self.at

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


class Two(Ranks):
    """The first of two ranks. The second rank reports twice the first rank's numbers. Starting together takes some
    time.
    """

    def __init__(self, machine: Machine, device: str) -> None:
        super().__init__(None, None, torch.device(device))  # type: ignore[arg-type]
        object.__setattr__(self, "machine", machine)

    world_size = 2  # type: ignore[assignment]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values), [2 * value for value in values]]

    def start_together(self) -> None:
        self.machine.now += 0.5  # type: ignore[attr-defined]

    def meet_on_device(self) -> None:
        self.machine.enqueue(0.25)  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        self.machine.synchronize()  # type: ignore[attr-defined]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    here = Machine()
    for module in (harness, measure):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: here.now))
    monkeypatch.setattr(torch.cuda, "synchronize", here.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", here.event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: here.enqueue(cycles / CYCLES_PER_S))
    return here


def timed(machine: Machine, mode: Mode, device: str, call: Any, **options: Any) -> Timing:
    """Return the timing of `call`. A second variant, which takes longer on the CPU and the GPU, is timed alternately."""
    variants = {"it": call, "another": lambda which: machine.call(3e-4, 1e-2)}
    return time_variants(variants, Two(machine, device), mode, input_sets=2, seconds=0.2, **options)["it"]


@pytest.mark.parametrize("mode", ["single", "queued"])
def test_on_cpu_a_call_takes_what_its_host_does(machine: Machine, mode: Mode) -> None:
    found = timed(machine, mode, "cpu", lambda which: machine.call(2e-3))
    assert found.p50_ms == pytest.approx(2 * 2.0), "of the second rank, which takes twice as long"
    assert found.skew_ms == pytest.approx(2.0)
    assert found.host_us is None
    assert (found.calls > 1) == (mode == "queued")


@pytest.mark.parametrize("mode", ["queued", "graph"])
@pytest.mark.parametrize("host_us", [10, 100, 3000])
def test_behind_a_sleep_of_the_device_the_hosts_time_is_hidden(machine: Machine, mode: Mode, host_us: float) -> None:
    found = timed(machine, mode, "cuda", lambda which: machine.call(1e-6 * host_us, 50e-6))
    assert found.p50_ms == pytest.approx(2 * 0.05)
    assert found.host_us == pytest.approx(2 * host_us)
    assert found.calls > 1


def test_a_host_that_outlasts_the_longest_sleep_shows(machine: Machine) -> None:
    """The longest sleep of the GPU ends before the CPU has enqueued three calls of half a second, so the CPU's time
    shows.
    """
    found = timed(machine, "queued", "cuda", lambda which: machine.call(0.5, 1e-3))
    assert found.p50_ms > 2 * 100


def test_who_waits_for_the_device_takes_both(machine: Machine) -> None:
    def call(which: int) -> None:
        machine.call(20e-6, 50e-6)
        machine.synchronize()

    found = timed(machine, "queued", "cuda", call, waiting=("it",))
    # The CPU time of the first call in a row is hidden, because GPUs synchronise before it.
    assert found.p50_ms == pytest.approx(2 * (0.07 - 0.02 / found.calls))


def test_a_single_call_is_host_then_device_and_the_first_does_not_count(machine: Machine) -> None:
    rested = [0.0]

    def call(which: int) -> None:
        pause = machine.now - rested[0] > 0.1  # the GPU was idle since the last call
        machine.call(20e-6, 5e-3 if pause else 50e-6)
        machine.synchronize()
        rested[0] = machine.now

    def enqueued(which: int) -> None:
        machine.call(20e-6, 50e-6)

    assert timed(machine, "single", "cuda", call).p50_ms == pytest.approx(2 * 0.07)
    found = timed(machine, "single", "cuda", enqueued)
    assert found.p50_ms == pytest.approx(2 * 0.07)
    assert found.host_us == pytest.approx(2 * 20), "not the wait for the device"


def test_first_calls_are_timed_to_their_end(machine: Machine) -> None:
    variants: Any = {"short": lambda which: machine.call(1e-3, 2e-3), "long": lambda which: machine.call(0.0, 1.0)}
    found = measure.first_calls(variants, Two(machine, "cuda"))
    assert found == {"short": pytest.approx(2 * 3.0), "long": pytest.approx(2 * 1000.0)}


# -- measured peak rates


@pytest.mark.parametrize(
    ("copy_s", "read_s", "bytes_per_s"),
    [(0.5, 1.0, 2 * 4096 / 0.5), (0.5, 0.2, 4096 / 0.2)],  # a copy reads and writes
    ids=["copying", "reading"],
)
def test_ceilings_are_bytes_and_operations_over_the_best_time(
    monkeypatch: pytest.MonkeyPatch, copy_s: float, read_s: float, bytes_per_s: float
) -> None:
    times = [seconds * slower for seconds in (copy_s, read_s, 4.0) for slower in (3, 2, 1, 5, 2, 4, 3)]
    ticks = iter([tick for seconds in times for tick in (100.0, 100.0 + seconds)])
    monkeypatch.setattr(ceilings, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    ranks = Two(Machine(), "cpu")
    monkeypatch.setattr(Two, "world_size", 1)
    mine, other = measure_ceilings(ranks, 4096, torch.float32)
    assert mine.memory == pytest.approx(bytes_per_s)
    assert mine.link == float("inf")
    assert mine.matmul == pytest.approx(2 * 1024**3 / 4.0)
    assert other.memory == 2 * mine.memory, "each rank has its own"


# -- time stamps of a GPU


def test_stamps_are_nanoseconds_and_spans_microseconds() -> None:
    """A step has a stamp before and after it. A set has only the first stamp, and no duration."""
    stamps = SimpleNamespace(times=torch.tensor([1000, 3500, 9000, 0]))
    spans = [("compute", "matmul", 0), ("to 1", "set", 8)]
    found = Timeline()
    StreamItems.read(SimpleNamespace(stamps=stamps, spans=spans), found, 3)  # type: ignore[arg-type]
    assert list(found) == [Span(3, "compute", "matmul", 1.0, 3.5, 0), Span(3, "to 1", "set", 9.0, 9.0, 8)]
