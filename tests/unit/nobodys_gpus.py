"""GPUs without a machine file, for tests of self-calibration: their numbers, their measurements, and a group of two
such ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.hw import Machine, machine_of
from weft.operator import self_calibrate, this_machine
from weft.operator.self_calibrate import _Stand
from weft.plan import self_calibration
from weft.plan.machine import versions
from weft.plan.self_calibration import ProbeSizes, SelfCalibration, sizes_for
from weft.sim import model_of

NAME = "NVIDIA Nobody's 1"
TODAY = datetime.now(UTC).date()


def machine() -> Machine:
    found = machine_of(NAME)
    assert found is not None
    assert found.about
    return found


BASE = model_of(machine(), 2)
SIZES = sizes_for(BASE)
SLOW_US = 10 * BASE.host_step_us
_FROM_DRIVER = f"the launch of a step stays at the derived {BASE.host_step_us:.3g} us"
SLOW = f"{_FROM_DRIVER}: the measured {SLOW_US:.3g} us differs by more than 2x"
RATES = ("copy_bytes_per_us", "put_bytes_per_us", "get_bytes_per_us")
TIMES = ("signal_remote_us", "signal_local_us", "host_step_us")


def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use an empty cache on disk and in memory. For fixtures."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("WEFT_SELF_CALIBRATION", raising=False)
    monkeypatch.setattr(self_calibration, "_known", {})
    monkeypatch.setattr("weft.caller._said", set())
    this_machine.model_by_name.cache_clear()
    yield
    this_machine.model_by_name.cache_clear()


def made(factor: float = 1.1, **changes: Any) -> SelfCalibration:
    """Return a self-calibration in which each number is `factor` times the derived number."""
    kernel = replace(BASE, kernel_copy_units=64)
    rates = (BASE.copy_bytes_per_us, kernel.kernel_copy_bytes_per_us(True), kernel.kernel_copy_bytes_per_us(False))
    numbers: dict[str, Any] = {name: factor * rate for name, rate in zip(RATES, rates, strict=True)}
    numbers |= {name: factor * getattr(BASE, name) for name in TIMES}
    numbers["gemms"] = tuple((*shape, factor * BASE.matmul_us(*shape)) for shape in SIZES.gemms)
    numbers |= {"machine": NAME, "world_size": 2, "date": TODAY.isoformat(), "versions": versions(), "copy_units": 64}
    return SelfCalibration(**(numbers | changes))


class Measured:
    """Measurements that return the numbers of `made(1.1)`. took_s: the pretended duration of each measurement."""

    machine, world_size, copy_units = NAME, 2, 64

    def __init__(self, took_s: float = 0.1) -> None:
        self.took_s, self.truth = took_s, made()
        self.asked: list[str] = []

    def _answer(self, what: str, value: float | None) -> float:
        self.asked.append(what)
        assert value is not None
        return value

    def elapsed_s(self) -> float:
        return self.took_s * len(self.asked)

    def copy_us(self, count: int) -> float:
        return self._answer("copy", count / (self.truth.copy_bytes_per_us or 1))

    def kernel_copy_us(self, count: int, put: bool) -> float:
        rate = self.truth.put_bytes_per_us if put else self.truth.get_bytes_per_us
        return self._answer("put" if put else "get", count / (rate or 1))

    def gemm_us(self, m: int, n: int, k: int, dtype: str) -> float:
        (us,) = [us for *shape, us in self.truth.gemms if shape == [m, n, k, dtype]]
        return self._answer("gemm", us)

    def signal_us(self, remote: bool) -> float:
        return self._answer("signal", self.truth.signal_remote_us if remote else self.truth.signal_local_us)

    def host_step_us(self) -> float:
        return self._answer("host", self.truth.host_step_us)


class Ranks:
    """This rank's view of a group of two ranks: a communicator for `self_calibrate`. The other rank sends what this
    rank would send in its place, changed by `other`.
    """

    def __init__(self, rank: int = 0, other: Callable[[_Stand], _Stand] = lambda mine: mine, **changes: Any) -> None:
        self.rank, self.world_size, self.device, self.all_mapped = rank, 2, torch.device("cpu"), True
        self.other, self.changes, self.said = other, changes, list[str]()
        self.measured = 0
        self.of_first: SelfCalibration | None = None
        for name, value in changes.items():
            setattr(self, name, value)

    def again(self) -> Ranks:
        return Ranks(self.rank, self.other, **self.changes)

    def all_gather(self, mine: Any, *, what: str) -> list[Any]:
        self.said.append(what)
        if isinstance(mine, _Stand):
            first = mine if self.rank == 0 or mine.unable else mine._replace(sizes=SIZES)
            theirs: Any = self.other(first._replace(gpu=str(1 - self.rank), known=None))
        else:
            theirs = self.of_first
        return [mine, theirs] if self.rank == 0 else [theirs, mine]

    def measures(self, comm: Any, sizes: ProbeSizes) -> AbstractContextManager[Any]:
        self.measured += 1
        return nullcontext(Measured())

    def call(self, monkeypatch: pytest.MonkeyPatch, name: str = NAME) -> Ranks:
        """Self-calibrate, as a group's first choice of a schedule does. The result is true if numbers were adopted."""
        monkeypatch.setitem(self_calibrate.MEASURES, "cpu", self.measures)
        self.adopted = self_calibrate.self_calibrate(self, name)  # type: ignore[arg-type]
        return self

    def __bool__(self) -> bool:
        return self.adopted
