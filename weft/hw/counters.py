"""Energy and traffic of a GPU while it works, from NVIDIA's driver (NVML). The module changes no setting of the GPU.

Energy comes from the driver's total in millijoules. The traffic of memory and NVLink comes from NVML's GPM counters.
Hopper and later GPUs have these counters, and reading them needs no administrator rights. All values are means of the
whole GPU, including other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from weft.hw.nvml import library

_DRAM, _RECEIVED, _SENT = 10, 60, 61  # percent of the peak; MiB/s of all NVLinks
_METRICS = (_DRAM, _RECEIVED, _SENT)
_MIB = 1 << 20
LONGEST_UPDATE_S = 0.12
"""The longest wait for an update of the total energy. Drivers update it at least ten times per second."""
_POLL_S = 0.001


class Rates(NamedTuple):
    """Means over a window of `seconds`. A number is None if the driver does not provide it.

    watts: the mean power.
    memory: the fraction of the memory's peak bandwidth, read and write together.
    sent, received: bytes/s over NVLink, with the protocol's overhead.
    """

    seconds: float
    watts: float | None
    memory: float | None
    sent: float | None
    received: float | None


class _Metric(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint), ("status", ctypes.c_int), ("value", ctypes.c_double), ("names", ctypes.c_char_p * 3),
    )  # fmt: skip


class _Query(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint), ("count", ctypes.c_uint), ("first", ctypes.c_void_p), ("second", ctypes.c_void_p),
        ("metrics", _Metric * len(_METRICS)),
    )  # fmt: skip


class _Support(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint), ("supported", ctypes.c_uint))


class Counters:
    """The counters of one GPU. To get an object, call `open_counters`."""

    def __init__(self, nvml: Any, handle: ctypes.c_void_p) -> None:
        self._nvml, self._handle = nvml, handle
        support = _Support(1, 0)
        with contextlib.suppress(AttributeError):  # an older driver
            nvml.nvmlGpmQueryDeviceSupport(handle, ctypes.byref(support))
        self.gpm = bool(support.supported)

    def rates(self, wait_s: float, sleep: Callable[[float], None] = time.sleep) -> Rates:
        """Wait `wait_s` seconds, and return the rates of that time.

        The window begins and ends when the driver updates the total energy, so it is up to 0.24 s longer than `wait_s`.

        sleep: a function that waits some seconds.
        """
        with self._sample() as first, self._sample() as second:
            start_s, start_mj = self._updated(sleep)
            gpm_s = self._take(first)
            sleep(wait_s)
            end_s, end_mj = self._updated(sleep)
            self._take(second)
            watts = None
            if start_mj is not None and end_mj is not None and end_mj > start_mj:
                watts = (end_mj - start_mj) / 1e3 / (end_s - start_s)
            memory, received, sent = self._read(first, second) if gpm_s is not None else (None, None, None)
        return Rates(
            end_s - start_s,
            watts,
            None if memory is None else memory / 100,
            None if sent is None else sent * _MIB,
            None if received is None else received * _MIB,
        )

    def _energy(self) -> int | None:
        """Return the total energy since the driver was loaded, in millijoules."""
        found = ctypes.c_ulonglong()
        return (
            None if self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(found)) else found.value
        )

    def _updated(self, sleep: Callable[[float], None]) -> tuple[float, int | None]:
        """Return (time, total energy in millijoules) at the driver's next update of the energy, or after
        `LONGEST_UPDATE_S`.
        """
        before, until = self._energy(), time.perf_counter() + LONGEST_UPDATE_S
        while (now := self._energy()) == before and now is not None and time.perf_counter() < until:
            sleep(_POLL_S)
        return time.perf_counter(), now

    @contextlib.contextmanager
    def _sample(self) -> Iterator[ctypes.c_void_p]:
        sample = ctypes.c_void_p()
        if self.gpm and self._nvml.nvmlGpmSampleAlloc(ctypes.byref(sample)):
            self.gpm = False
        try:
            yield sample
        finally:
            if sample:
                self._nvml.nvmlGpmSampleFree(sample)

    def _take(self, sample: ctypes.c_void_p) -> float | None:
        if not self.gpm or self._nvml.nvmlGpmSampleGet(self._handle, sample):
            return None
        return time.perf_counter()

    def _read(self, first: ctypes.c_void_p, second: ctypes.c_void_p) -> tuple[float | None, ...]:
        query = _Query(1, len(_METRICS), first, second)
        for metric, number in zip(query.metrics, _METRICS, strict=True):
            metric.id = number
        if self._nvml.nvmlGpmMetricsGet(ctypes.byref(query)):
            return (None,) * len(_METRICS)
        return tuple(None if metric.status else metric.value for metric in query.metrics)


@contextlib.contextmanager
def open_counters(uuid: str) -> Iterator[Counters]:
    """Yield the counters of the GPU with this UUID, such as "GPU-0e8d2a6c-...".

    Raises `OSError` if there is no NVML, or no GPU with this UUID.
    """
    with library() as nvml:
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            raise OSError(f"the driver has no GPU {uuid}: `nvidia-smi -L` lists the GPUs")
        yield Counters(nvml, handle)
