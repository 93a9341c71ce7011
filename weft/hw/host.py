"""The memory of this host, and the available part of it, according to Linux and to the container's limit."""

from __future__ import annotations

import functools
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@functools.cache
def total_memory_bytes() -> int:
    """Return the bytes of memory and swap. Linux refuses larger allocations by default."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("MemTotal:", "SwapTotal:")))


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Return the bytes that can be allocated without swapping, and without exceeding the container's limit."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = 1024 * int(line.split()[1])
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, now = _number(cgroup / limit), _number(cgroup / used)
        if most is not None and now is not None:
            free = min(free, most - now)
    return max(0, free)


def _number(path: Path) -> int | None:
    """Return the number in a file. Return None if the file cannot be read, or contains no number ("max" means no
    limit).
    """
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
