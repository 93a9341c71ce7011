"""Shared code of the tests of several processes: it runs on the ranks, so it must be importable by name."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from weft import symm
from weft.errors import WeftError
from weft.operator import measure
from weft.symm.communicator import Communicator


def assert_deadline(errors: list[tuple[str, str]], text: str) -> None:
    """Check the errors of ranks: the first to miss the deadline reports it, and others may be notified before their own
    deadline."""
    kinds = {kind for kind, _ in errors}
    assert "DeadlineError" in kinds
    assert kinds <= {"DeadlineError", "PoisonedGroupError"}
    for _, said in errors:
        assert re.search(text, said), f"{text!r} is not in {said!r}"


def assert_over(answers: Iterable[tuple[str, str]]) -> None:
    """Check the errors of calls on a group that has failed."""
    for kind, text in answers:
        assert kind == "PoisonedGroupError"
        assert "make a new process group" in text


def wait_for_failure(comm: Communicator) -> None:
    """Do nothing until this rank is notified that its group failed."""
    until = time.monotonic() + 30
    with contextlib.suppress(WeftError):
        while time.monotonic() < until:
            comm.check()
            time.sleep(0.01)
        raise AssertionError("the group did not fail")


class CallingRecorder:
    """A stand-in for CUDA graphs: a replay makes the same call again, into the same memory."""

    def __init__(self, ranks: Any) -> None: ...

    def capture(self, call: Any, which: int) -> Any:
        output = call(which)

        class Graph:
            def replay(self) -> None:
                found = call(which)
                if isinstance(output, torch.Tensor):
                    output.copy_(found)

        return Graph(), output


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


def measure_briefly(_: object) -> None:
    """From now on time each schedule by one call. No test depends on which schedule is the fastest here."""
    measure._REPETITIONS = 1


def barrier(signal: symm.Signal, round_: int) -> None:
    """Return when every rank of the signal's group has called this for `round_` (1, 2, ...)."""
    size = signal.comm.world_size
    for peer in range(size):
        signal.add(1, peer=peer)
    signal.wait(round_ * size)
