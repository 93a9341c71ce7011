"""Counters of NVIDIA's driver, read from an NVML that the test plays: power, memory traffic and NVLink traffic of calls."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.bench.__main__ import options_of
from weft.bench.core import counted
from weft.hw import counters
from weft.hw.counters import Counters, Rates

WATTS, UPDATE_S = 500.0, 0.05
REFUSED = 3


class PlayedNvml:
    """An NVML whose GPU draws `WATTS` and updates its total energy every `UPDATE_S`. `clock` is the time in seconds.

    gpm: whether the GPU has GPM counters. energy: whether it has a total energy.
    """

    def __init__(self, gpm: bool = True, energy: bool = True) -> None:
        self.clock, self.gpm, self.energy, self.samples, self.asked = 0.0, gpm, energy, dict[int, float](), list[int]()

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    def nvmlGpmQueryDeviceSupport(self, handle: Any, support: Any) -> int:
        support._obj.supported = self.gpm
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, found: Any) -> int:
        found._obj.value = int(1e3 * WATTS * UPDATE_S * int(self.clock / UPDATE_S + 1e-9))
        return 0 if self.energy else REFUSED

    def nvmlGpmSampleAlloc(self, sample: Any) -> int:
        sample._obj.value = 100 + len(self.samples)
        self.samples[sample._obj.value] = -1.0
        return 0

    def nvmlGpmSampleGet(self, handle: Any, sample: Any) -> int:
        self.samples[sample.value] = self.clock
        return 0

    def nvmlGpmSampleFree(self, sample: Any) -> int:
        self.samples.pop(sample.value)
        return 0

    def nvmlGpmMetricsGet(self, query: Any) -> int:
        asked = query._obj
        assert asked.version == 1
        assert self.samples[asked.second] - self.samples[asked.first] >= 0.1
        values = {10: 25.0, 60: 3.0, 61: 2.0}
        for metric in asked.metrics[: asked.count]:
            self.asked.append(metric.id)
            metric.value, metric.status = values[metric.id], REFUSED if metric.id == 60 else 0
        return 0


def _rates(nvml: PlayedNvml, monkeypatch: pytest.MonkeyPatch) -> Rates:
    monkeypatch.setattr(counters.time, "perf_counter", lambda: nvml.clock)
    return Counters(nvml, ctypes.c_void_p(1)).rates(0.4, nvml.sleep)


def test_a_window_of_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = PlayedNvml()
    found = _rates(nvml, monkeypatch)
    assert found.watts == pytest.approx(WATTS, rel=0.01)  # both ends are at an update, not between two
    assert 0.4 <= found.seconds <= 0.4 + 2 * counters.LONGEST_UPDATE_S
    assert (found.memory, found.sent, found.received) == (0.25, 2 * 2**20, None)  # the driver refused to give the third
    assert nvml.asked == [10, 60, 61]
    assert not nvml.samples


def test_without_gpm_or_energy_a_number_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _rates(PlayedNvml(gpm=False), monkeypatch)
    assert found.watts == pytest.approx(WATTS, rel=0.01)
    assert (found.memory, found.sent, found.received) == (None,) * 3
    assert _rates(PlayedNvml(energy=False), monkeypatch)[1:3] == (None, 0.25)


def test_nvmls_structures_have_the_size_of_the_header() -> None:
    """nvmlGpmMetric_t has 40 bytes; the metrics of nvmlGpmMetricsGet_t begin after two numbers and two pointers."""
    assert ctypes.sizeof(counters._Metric) == 40
    assert counters._Query.metrics.offset == 24


class _OneRank:
    """Ranks of a single process without a process group."""

    device = torch.device("cpu")

    def gather(self, values: list[float]) -> list[list[float]]:
        return [values]

    def most(self, value: float) -> float:
        return value

    def meet(self) -> None:
        pass

    start_together = synchronize = meet


PEAK = 1e12


@pytest.mark.parametrize("early", [False, True])
def test_the_counters_of_a_call(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 2 ms at 500 W takes 1 J. If the calls end before the window does, there is no number."""

    class Played:
        def rates(self, wait_s: float) -> Rates:
            if early:
                ended.wait(60)
                ended.clear()
            time.sleep(0.3 if early else wait_s)
            return Rates(wait_s, WATTS, 0.5, 1e9, None)

    @contextlib.contextmanager
    def played(uuid: str) -> Iterator[Played]:
        yield Played()

    monkeypatch.setattr(counted, "open_counters", played)
    monkeypatch.setattr(counted, "_uuid", lambda device: "GPU-0")
    monkeypatch.setattr(counted, "_known_loads", lambda ranks: {"idle_watts": 80.0})
    monkeypatch.setattr(counted, "_WINDOW_S", 0.05)
    monkeypatch.setattr(counted, "_ATTEMPTS", 2)
    monkeypatch.setattr(counted, "facts_of", lambda name: SimpleNamespace(memory_bytes_per_s=PEAK))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    ended, ranks = threading.Event(), _OneRank()
    monkeypatch.setattr(ranks, "synchronize", ended.set)
    ms, took_ms = {"a": 2.0, "not timed": None}, list[float]()

    def call(which: int) -> None:
        begin = time.perf_counter()
        time.sleep(2e-3)
        took_ms.append((time.perf_counter() - begin) * 1e3)

    found = counted.count(dict.fromkeys(ms, call), ranks, 2, ms.get)  # type: ignore[arg-type]
    assert list(found) == ["a"]
    one, most_ms = found["a"], 3 * max(took_ms)  # a busy machine sleeps longer
    if early:
        assert one["watts"] is one["joules"] is one["memory_bytes"] is None
        assert one["missing"] == "the calls ended before the counters were read, in 2 attempts"
        assert 2 <= one["call_ms"] < most_ms  # of as many calls as the last attempt made
        return
    assert "missing" not in one
    assert one["joules"] == pytest.approx(WATTS * one["call_ms"] / 1e3)
    assert one["memory_bytes"] == pytest.approx(PEAK / 2 * one["call_ms"] / 1e3)
    assert one["sent_bytes"] == pytest.approx(1e9 * one["call_ms"] / 1e3)
    assert (one["received_bytes"], one["idle_watts"]) == (None, 80.0)
    assert 2 <= one["call_ms"] < most_ms


def test_counters_need_a_gpu_and_an_operator() -> None:
    with pytest.raises(ValueError, match="counters with device='cpu': only GPUs have these counters"):
        options_of(["all_gather_matmul", "--device", "cpu", "--ranks", "2", "--preset", "64x64x64", "--counters"])
    with pytest.raises(ValueError, match="counters=True: inefficiency reads no counters: do not pass it"):
        options_of(["inefficiency", "--device", "cpu", "--ranks", "2", "--counters"])
