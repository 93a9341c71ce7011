"""Shared code of the tests of several processes: it runs on the ranks, so it must be importable by name."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from weft import symm


def assert_deadline(errors: list[tuple[str, str]], text: str) -> None:
    """Check the errors of ranks: the first to miss the deadline reports it, and others may be notified before their own
    deadline."""
    kinds = {kind for kind, _ in errors}
    assert "DeadlineError" in kinds
    assert kinds <= {"DeadlineError", "PoisonedGroupError"}
    for _, said in errors:
        assert re.search(text, said), f"{text!r} is not in {said!r}"


def traces() -> dict[str, list[str]]:
    """Return the traces that symmetric memory could leave in this process or under a name; all empty if nothing is open."""
    descriptors = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            descriptors.append(os.readlink(f"/proc/self/fd/{entry}"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {
        "memfd descriptors": [name for name in descriptors if "memfd" in name],
        "memfd mappings": [line for line in maps if "/memfd:weft" in line],
        "named sockets": [line for line in sockets if "@" in line[-1] and f"socket:[{line[6]}]" in descriptors],
        "shared memory files": [name for name in os.listdir("/dev/shm") if "weft" in name],
    }


def barrier(signal: symm.Signal, round_: int) -> None:
    """Return when every rank of the signal's group has called this for `round_` (1, 2, ...)."""
    size = signal.comm.world_size
    for peer in range(size):
        signal.add(1, peer=peer)
    signal.wait(round_ * size)
