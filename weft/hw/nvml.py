"""Numbers of a GPU from NVIDIA's driver, through its library NVML. This module does not import torch.

From these numbers, `weft.hw.here` derives the planner's numbers for a machine without a machine file. The driver does not
provide the datasheet's bf16 rate. So this rate is computed as number of multiprocessors x highest clock x FLOP per cycle of
a multiprocessor. The last factor depends on the compute capability.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

_FLOPS_PER_CYCLE = {(7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192}
"""{compute capability: dense 16-bit FLOP per cycle of a multiprocessor}. A missing capability uses the nearest older entry."""
_CORES = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
"""{compute capability: cores of a multiprocessor}; 128 for other capabilities."""
_PER_NVLINK = {(7, 0): 25e9, (8, 6): 14.1e9, (8, 9): 25e9, (10, 0): 50e9}
"""{compute capability: bytes/s of one NVLink in one direction}. A missing capability uses the nearest older entry."""
_PCIE_PER_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_MOST_NVLINKS = 18


@dataclass(frozen=True)
class DriverFacts:
    """The driver's numbers of one GPU, in SI units. A number is 0 if the driver does not provide it."""

    name: str
    multiprocessors: int
    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """The bandwidth to all peers together, in one direction: of all NVLinks, or of PCIe."""
    nvlinks: int


@lru_cache(maxsize=8)
def facts_of(name: str) -> DriverFacts | None:
    """Return the driver's numbers of the first GPU of this name; None without NVML or without such a GPU."""
    with contextlib.suppress(OSError, AttributeError, ValueError), library() as nvml:
        for handle in _devices(nvml):
            if _name(nvml, handle) == name:
                return _facts(nvml, handle, name)
    return None


@lru_cache(maxsize=1)
def first_name() -> str:
    """Return the name of the first GPU; "" without NVML or without a GPU."""
    with contextlib.suppress(OSError, AttributeError, ValueError), library() as nvml:
        for handle in _devices(nvml):
            return _name(nvml, handle)
    return ""


@contextlib.contextmanager
def library() -> Iterator[ctypes.CDLL]:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml.nvmlInit_v2():
        raise OSError("NVML cannot be initialised: check the driver with nvidia-smi")
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _devices(nvml: ctypes.CDLL) -> Iterator[ctypes.c_void_p]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            yield handle


def _name(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(96)
    return "" if nvml.nvmlDeviceGetName(handle, text, len(text)) else text.value.decode(errors="replace")


def _facts(nvml: ctypes.CDLL, handle: ctypes.c_void_p, name: str) -> DriverFacts:
    def number(function: Callable[..., int], *arguments: int) -> int:
        found = ctypes.c_uint()
        return 0 if function(handle, *arguments, ctypes.byref(found)) else found.value

    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    capability = major.value, minor.value
    units = number(nvml.nvmlDeviceGetNumGpuCores) // _CORES.get(capability, 128)
    clock_mhz, memory_mhz = (number(nvml.nvmlDeviceGetMaxClockInfo, kind) for kind in (_SM_CLOCK, _MEMORY_CLOCK))
    active = [link for link in range(_MOST_NVLINKS) if number(nvml.nvmlDeviceGetNvLinkState, link)]
    link = len(active) * _of_capability(_PER_NVLINK, capability)
    if not link:
        lanes = number(nvml.nvmlDeviceGetMaxPcieLinkWidth)
        link = lanes * _PCIE_PER_LANE.get(number(nvml.nvmlDeviceGetMaxPcieLinkGeneration), 0.0)
    return DriverFacts(
        name=name,
        multiprocessors=units,
        flops_per_s=units * clock_mhz * 1e6 * _of_capability(_FLOPS_PER_CYCLE, capability),
        memory_bytes=_memory(nvml, handle),
        memory_bytes_per_s=2e6 * memory_mhz * number(nvml.nvmlDeviceGetMemoryBusWidth) / 8,  # two transfers a cycle
        link_bytes_per_s=link,
        nvlinks=len(active),
    )


def _memory(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> int:
    memory = (ctypes.c_ulonglong * 3)()  # total, free, used
    return 0 if nvml.nvmlDeviceGetMemoryInfo(handle, memory) else memory[0]


def _of_capability(known: Mapping[tuple[int, int], float], capability: tuple[int, int]) -> float:
    return max(one for one in known.items() if one[0] <= max(capability, min(known)))[1]
