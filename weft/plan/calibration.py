"""Calibration: measure on this machine the numbers that machine files contain. There are three groups of numbers.

    GEMMs         on a coarse grid of sizes first, then on finer grids while time remains. The model corrects its
                  formula by its errors at the nearest grid points
    transfers     copies by copy engine and by kernel, and NCCL's all-gather, for several sizes. The model interpolates
    other         launches, signals, the CPU time of a step, rows of a two-dimensional copy, a GEMM concurrent with a copy

This module does not depend on the device: `calibrate` gets all times from a `Measure`. The numbers are saved
with the installed versions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from weft.plan import saved, store
from weft.plan.machine import versions
from weft.schedule import ITEM_BYTES
from weft.sim import Model
from weft.sim.machines import disturbance, share_held
from weft.sim.model import Transfer, interpolated

_MOST_US = 20_000.0
"""The longest GEMM that is measured, in us: about 15 TFLOP on a GPU. Longer GEMMs could not be repeated within the budget.
"""
_MOST_BYTES = 4 << 30
_AGAIN = "run `weft plan calibrate` again"
_COPIES = tuple(4**i for i in range(8, 16))  # 64 KiB to 1 GiB
_ROWS = ((1024, 4096), (8192, 2048))  # (rows, bytes per row)
_CUBES = (8192, 4096, 2048, 1024, 512, 256)


class Measure(Protocol):
    """The measurements that `calibrate` needs from a device. All ranks call the same methods in the same order, and get the
    slowest rank's results.

    Unless a method says otherwise, times are in microseconds, for work that is queued back to back on warm devices.
    """

    machine: str
    world_size: int
    copy_units: int  # number of programs of the copy kernel in schedules

    def elapsed_s(self) -> float:
        """Return the seconds since the measurement began, equal on all ranks."""

    def gemm_us(self, m: int, n: int, k: int, dtype: str) -> float:
        """Return the time of [m, k] @ [k, n] by cuBLAS on random data, including the launch."""

    def launch_us(self) -> float:
        """Return the time from the end of a kernel to the start of the next, averaged over many empty kernels."""

    def host_step_us(self) -> float:
        """Return the CPU time to issue one step of a schedule."""

    def copy_us(self, count: int) -> float:
        """Return the time of one of several consecutive copies of `count` bytes to a peer by copy engine.

        All ranks copy at the same time.
        """

    def copy_rows_us(self, rows: int, row_bytes: int) -> float:
        """Return the time of a 2D copy of `rows` rows of `row_bytes` bytes, from a source whose rows are twice as wide."""

    def kernel_copy_us(self, count: int, put: bool) -> float:
        """Return the time of a copy of `count` bytes by weft's copy kernel, including the launch.

        put: True to store to a peer, False to load from a peer.
        """

    def all_gather_us(self, count: int) -> float:
        """Return the time of an NCCL all-gather in which every rank receives `count` bytes from its peers."""

    def signal_us(self, remote: bool) -> float:
        """Return the time from a set of a signal to the end of the wait for the signal.

        remote: True if another rank waits, False if another lane of this rank waits.
        """

    def gemm_beside_copy_us(
        self, m: int, n: int, k: int, dtype: str, by: Literal["dma", "kernel"]
    ) -> tuple[float, float]:
        """Return (time of the GEMM, bytes/us of each copy) while every rank continuously copies to a peer.

        by: "dma" for copies by copy engine, "kernel" for copies by kernel.
        """


@dataclass(frozen=True)
class Calibration:
    """The numbers that `calibrate` has measured on a machine. `apply` inserts them into a model. Times are in us.

    machine, world_size, date, versions: where and when the numbers were measured, and with which software.
    gemms: (m, n, k, dtype, time) of each GEMM, including its launch.
    launch_us, host_step_us: the time between two kernels, and the CPU time to issue a step.
    copy_units: the number of programs of the measured copy kernels.
    copies, puts, gets: (bytes, time) of copies by copy engine, and of copies by kernel to and from a peer.
    copy_rows: (rows, bytes per row, time) of 2D copies by copy engine.
    all_gathers: (bytes received by a rank, time) of NCCL's all-gathers.
    signal_local_us, signal_remote_us: the time from a set to the end of the wait, within a rank and between ranks.
    beside: (kind of copy, GEMM's time over its time alone, bytes/us of the copies) for concurrent copies.
    """

    machine: str
    world_size: int
    date: str
    versions: Mapping[str, str]
    gemms: tuple[tuple[int, int, int, str, float], ...]  # m, n, k, dtype, us
    launch_us: float
    host_step_us: float
    copy_units: int = 1
    copies: tuple[tuple[int, float], ...] = ()  # bytes, us
    copy_rows: tuple[tuple[int, int, float], ...] = ()  # rows, bytes per row, us
    puts: tuple[tuple[int, float], ...] = ()
    gets: tuple[tuple[int, float], ...] = ()
    all_gathers: tuple[tuple[int, float], ...] = ()  # bytes received, us
    signal_local_us: float = 0.0
    signal_remote_us: float = 0.0
    beside: tuple[tuple[str, float, float], ...] = ()  # kind of copy, GEMM's time over its time alone, copies' bytes/us

    def apply(self, model: Model) -> Model:
        """Return `model` with these numbers. Raise `ValueError` if they were measured with another number of ranks, or
        are implausible.
        """
        if model.world_size != self.world_size:
            raise ValueError(
                f"the calibration is for {self.world_size} ranks, but the simulator's model has "
                f"{model.world_size}: calibrate with {model.world_size} ranks"
            )
        changed: dict[str, Any] = {
            "launch_us": self.launch_us,
            "host_step_us": self.host_step_us,
            "measured_us": {(m, n, k, dtype): us for m, n, k, dtype, us in self.gemms},
        }
        if self.copies:
            changed |= self._transfers(model)
        return replace(model, **changed)

    def _transfers(self, model: Model) -> dict[str, Any]:
        if missing := [name for name in ("puts", "gets", "all_gathers") if not getattr(self, name)]:
            raise ValueError(f"the calibration has times of copies, but lacks {', '.join(missing)}: {_AGAIN}")
        latency, rate = fit_line(self.copies, "copies by engine")
        collective_latency, collective_rate = fit_line(self.all_gathers, "all-gathers")
        curves: dict[Transfer, tuple[tuple[float, float], ...]] = {
            "copy": self.copies, "put": self.puts, "get": self.gets, "all_gather": self.all_gathers
        }  # fmt: skip
        rows = [max(0.0, us - interpolated(self.copies, n * size)) / n for n, size, us in self.copy_rows]
        changed: dict[str, Any] = {
            "measured_transfers_us": curves,
            "copy_latency_us": latency,
            "copy_bytes_per_us": rate,
            "copy_row_us": float(np.median(rows)) if rows else model.copy_row_us,
            # A link is at least as fast as the copies that were measured over it.
            "wiring": model.wiring.at_least(_fastest(self.copies)),
            "kernel_copy_units": self.copy_units,
            "put_bytes_per_us": ((self.copy_units, _fastest(self.puts)),),
            "get_bytes_per_us": ((self.copy_units, _fastest(self.gets)),),
            "collective_latency_us": collective_latency,
            "collective_bytes_per_us": collective_rate,
            "signal_local_us": self.signal_local_us,
            "signal_remote_us": self.signal_remote_us,
        }
        copying = replace(model, **changed)
        for by, slowdown, bytes_per_us in self.beside:
            name = "copy_disturbance" if by == "dma" else "kernel_copy_disturbance"
            held = 0.0 if by == "dma" else share_held(copying, bytes_per_us)
            changed[name] = disturbance(slowdown, held, bytes_per_us)
        return changed

    def save(self) -> Path:
        """Save the calibration where `find` looks for it, and return the path. Call this on one rank only."""
        path = store.path_of("calibration", self.machine, self.world_size)
        store.write(path, asdict(self))
        return path


def find(machine: str, world_size: int) -> Calibration | None:
    """Return the saved calibration of this machine and number of ranks; None if there is none.

    Raises `ValueError` if the calibration was measured with other versions of packages or driver, and `UnreadableError`
    if its file is broken. The error texts give the fix.
    """
    return saved.load(Calibration, "calibration", machine, world_size, _HOLDS, _AGAIN)


def calibrate(
    measure: Measure,
    base: Model,
    *,
    dtypes: Sequence[str] = ("bf16",),
    budget_s: float = 100.0,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure the numbers of a machine model on this machine. All ranks must make this call, and get the same results.

    Args:
        base: the model from the machine file. GEMMs that take more than 20 ms on this model are skipped.
        budget_s: the time in seconds after which no GEMM is started. The coarse grid is always measured.
        say: a function that is called with the name of the next measurement.
    """
    launch = measure.launch_us()
    found: dict[str, Any] = {"launch_us": launch, "host_step_us": measure.host_step_us()}
    if measure.world_size > 1:
        found |= _communication(measure, base, say)
    gemms: dict[tuple[int, int, int, str], float] = {}
    if measure.world_size > 1:
        found["beside"], cube = _beside(measure, base, dtypes[0], say)
        gemms.update(cube)
    for level in range(3):
        say(f"GEMMs, {('coarse grid', 'powers of two', 'steps of 1.5')[level]}")
        for point in gemm_points(base, dtypes, level):
            if level and measure.elapsed_s() >= budget_s:
                break
            if point not in gemms:
                gemms[point] = measure.gemm_us(*point)
    points = tuple((*point, us) for point, us in sorted(gemms.items()))
    return Calibration(measure.machine, measure.world_size, store.today(), versions(), points, **found)


def gemm_points(base: Model, dtypes: Sequence[str], level: int) -> list[tuple[int, int, int, str]]:
    """Return (m, n, k, dtype) of the GEMMs on grid `level`, in random order, so that an unfinished level covers the
    whole range of sizes.

    Sizes grow by a factor of 4 at level 0, and by a factor of 2 at level 1. Level 2 adds 1.5 times the sizes of level
    1. GEMMs that take more than 20 ms or 4 GiB are omitted.
    """
    axes = (_axis(16, 32768, level), _axis(256, 32768, level), _axis(256, 16384, level))
    points = [
        (m, n, k, dtype)
        for m, n, k in itertools.product(*axes)
        for dtype in dtypes
        if base.matmul_us(m, n, k, dtype) <= _MOST_US and (m * k + k * n + m * n) * ITEM_BYTES[dtype] <= _MOST_BYTES
    ]
    random.Random(level).shuffle(points)
    return points


def fit_line(points: Iterable[tuple[int, float]], what: str) -> tuple[float, float]:
    """Fit time = latency + bytes / rate by least squares of relative errors. Return (latency in us, rate in bytes/us).

    points: (bytes, measured time in us) of each transfer. The returned latency is at most the shortest of these times.
    what: the name of the transfer in the error.
    """
    count, us = np.array(sorted(points), float).T
    (latency, per_byte), *_ = np.linalg.lstsq(np.stack([1 / us, count / us], 1), np.ones_like(us), rcond=None)
    if latency < 0:  # measurement noise
        latency, per_byte = 0.0, float(us @ count / (count @ count))
    if per_byte <= 0:
        sizes = ", ".join(f"{nbytes:.0f} bytes in {time:g} us" for nbytes, time in zip(count, us, strict=True))
        raise ValueError(
            f"the measured times of {what} do not grow with the number of bytes ({sizes}), so the machine was probably busy: "
            "calibrate again"
        )
    return min(float(latency), float(us.min())), 1 / float(per_byte)


def _fastest(copies: Iterable[tuple[int, float]]) -> float:
    """Return the highest rate of `copies` in bytes/us."""
    return max(count / us for count, us in copies)


def _axis(first: int, last: int, level: int) -> Iterator[int]:
    size = first
    while size <= last:
        yield size
        if level == 2 and size * 3 // 2 <= last:
            yield size * 3 // 2
        size *= 2 if level else 4


def _communication(measure: Measure, base: Model, say: Callable[[str], None]) -> dict[str, Any]:
    most = _MOST_US * min(base.copy_bytes_per_us, base.collective_bytes_per_us)
    sizes = [count for count in _COPIES if count <= most]
    say("copies by engine")
    copies = tuple((size, measure.copy_us(size)) for size in sizes)
    rows = tuple((n, size, measure.copy_rows_us(n, size)) for n, size in _ROWS)
    say("copies by kernel")
    puts = tuple((size, measure.kernel_copy_us(size, True)) for size in sizes)
    gets = tuple((size, measure.kernel_copy_us(size, False)) for size in sizes)
    say("all-gathers")
    gathers = tuple((size, measure.all_gather_us(size)) for size in sizes)
    say("signals")
    return {
        "copy_units": measure.copy_units, "copies": copies, "copy_rows": rows, "puts": puts, "gets": gets,
        "all_gathers": gathers, "signal_local_us": measure.signal_us(False), "signal_remote_us": measure.signal_us(True),
    }  # fmt: skip


def _beside(
    measure: Measure, base: Model, dtype: str, say: Callable[[str], None]
) -> tuple[tuple[tuple[str, float, float], ...], dict[tuple[int, int, int, str], float]]:
    """Measure how much concurrent copies slow down a GEMM. The GEMM is the largest with M = N = K that takes at most 20
    ms.

    Return (slowdowns, {GEMM: its time in us without copies}).

    slowdowns: (kind of copy, GEMM's time over its time without copies, rate of the copies in bytes/us) for the kinds
        "dma" and "kernel".
    """
    say("a GEMM concurrent with copies")
    size = next((c for c in _CUBES if base.matmul_us(c, c, c, dtype) <= _MOST_US), _CUBES[-1])
    cube = (size, size, size, dtype)
    before = measure.gemm_us(*cube)
    beside = [(by, *measure.gemm_beside_copy_us(*cube, by)) for by in ("dma", "kernel")]
    alone = (before + measure.gemm_us(*cube)) / 2
    return tuple((by, us / alone, rate) for by, us, rate in beside), {cube: alone}


_CURVE = saved.rows_of(saved.is_whole, store.is_positive)
_HOLDS: dict[str, Callable[[Any], bool]] = {
    "machine": saved.is_text,
    "world_size": saved.is_whole,
    "date": saved.is_text,
    "versions": saved.are_versions,
    "gemms": saved.rows_of(saved.is_whole, saved.is_whole, saved.is_whole, saved.one_of(ITEM_BYTES), store.is_positive),
    "launch_us": saved.is_time_or_0,
    "host_step_us": saved.is_time_or_0,
    "copy_units": saved.is_whole,
    "copies": _CURVE,
    "copy_rows": saved.rows_of(saved.is_whole, saved.is_whole, store.is_positive),
    "puts": _CURVE,
    "gets": _CURVE,
    "all_gathers": _CURVE,
    "signal_local_us": saved.is_time_or_0,
    "signal_remote_us": saved.is_time_or_0,
    "beside": saved.rows_of(saved.one_of(("dma", "kernel")), store.is_positive, store.is_positive),
}
"""{field of a saved calibration: function that returns True for a valid JSON value}"""
