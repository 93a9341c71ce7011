"""What this host can still give: memory, as the kernel and the container's limit see it."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes that can be taken without swapping, and without the container being killed for it."""
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
    """The number in a file; None without a file, a number ("max": no limit) or the right to read it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
