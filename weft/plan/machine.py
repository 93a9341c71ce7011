"""The name of this machine and the installed versions. Measured numbers are valid only for the same machine and
versions.
"""

from __future__ import annotations

import os
import platform
import re
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from weft.hw import Machine, machine_of
from weft.hw.nvml import first_name

_NVIDIA = Path("/proc/driver/nvidia")
_PACKAGES = ("weft", "torch", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def machine_name(driver: Path = _NVIDIA) -> str:
    """Return the first GPU's name from its driver ("NVIDIA H200"), or the CPU's name and cores ("Xeon ..., 2 cores")."""
    for information in sorted(driver.glob("gpus/*/information")):
        if found := re.search(r"^Model:\s*(.+?)\s*$", information.read_text(errors="replace"), re.MULTILINE):
            return found[1]
    if driver == _NVIDIA and (name := first_name()):  # NVML, because containers may lack the driver's files
        return name
    cores = len(os.sched_getaffinity(0))
    return f"{cpu_name()}, {cores} core{'s' if cores > 1 else ''}"


def machine_here(driver: Path = _NVIDIA) -> Machine | None:
    """Return the machine that this process runs on, from a machine file or derived from the driver's numbers.

    Return None for unknown machines, such as CPUs."""
    return machine_of(machine_name(driver))


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return {name: version} of everything that affects performance: packages and the GPU driver."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    driver = _NVIDIA / "version"
    if driver.exists() and (number := re.search(r"\b\d+\.\d+(\.\d+)?\b", driver.read_text())):
        found["driver"] = number[0]
    return found


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"^model name\s*:\s*(.+?)\s*$", cpuinfo.read_text(), re.MULTILINE)):
        return found[1]
    return platform.machine()
