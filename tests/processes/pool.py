"""Code that tests of several processes share. It runs on the ranks, so it must be importable by name."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.on_ranks import assert_errors, descriptors

from weft import symm
from weft.errors import WeftError
from weft.operator import measure
from weft.symm.communicator import Communicator


def assert_deadline(errors: list[tuple[str, str]], text: str) -> None:
    """Check the errors of the ranks. The first rank that misses the deadline reports it. Others may be notified before
    their own deadline.
    """
    kinds = {kind for kind, _ in errors}
    assert "DeadlineError" in kinds
    assert kinds <= {"DeadlineError", "PoisonedGroupError"}
    for _, said in errors:
        assert re.search(text, said), f"{text!r} is not in {said!r}"


def assert_left(errors: list[tuple[str, str]]) -> None:
    """Check the errors of all ranks except rank 1, which has left the group."""
    assert_errors(errors[:1] + errors[2:], ("PeerLostError", "PoisonedGroupError"), "rank 1", "has left the group")


def assert_over(answers: Iterable[tuple[str, str]]) -> None:
    """Check the errors of calls on a group that has failed."""
    assert_errors(answers, "PoisonedGroupError", "make a new process group")


def wait_for_failure(comm: Communicator) -> None:
    """Wait until this rank is notified that its group has failed."""
    until = time.monotonic() + 30
    with contextlib.suppress(WeftError):
        while time.monotonic() < until:
            comm.check()
            time.sleep(0.01)
        raise AssertionError("the group did not fail")


def misbehave(doing: str, comm: Communicator) -> None:
    """Raise, interrupt this rank with Ctrl-C, kill it or leave the group. Else wait until the others have given up."""
    if doing == "raise":
        raise ArithmeticError("on purpose")
    if doing == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if doing == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if doing == "leave":
        comm.close()
    else:
        wait_for_failure(comm)


def failure_of(call: Callable[[], object]) -> tuple[str, str]:
    """Return the type and the text of the error that `call` raises, or two empty strings. The rank takes Ctrl-C, which
    ranks of a pool ignore.
    """
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)
    finally:
        signal.signal(signal.SIGINT, ignored)
    return "", ""


class CallingRecorder:
    """A replacement for CUDA graphs: a replay makes the same call again, into the same memory."""

    def __init__(self, ranks: Any) -> None: ...

    def capture(self, call: Any, which: int) -> Any:
        output = call(which)

        class Graph:
            def replay(self) -> None:
                found = call(which)
                if isinstance(output, torch.Tensor):
                    output.copy_(found)

        return Graph(), output


def traces(before: Mapping[str, list[str]] | None = None) -> dict[str, list[str]]:
    """Return the traces that symmetric memory could leave in this process or in the file system. All are empty if
    nothing is open.

    before: earlier traces, to leave out. Earlier tests in this process may have left communicators, which Python may
        free at any moment. So compare traces, not numbers of traces.
    """
    opened = [name for _, name in descriptors()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    found = {
        "memfd descriptors": [name for name in opened if "memfd" in name],
        "memfd mappings": [line for line in maps if "/memfd:weft" in line],  # with the inode, which is never used again
        # Without the number of references, which changes.
        "named sockets": [
            f"{line[6]} {line[-1]}" for line in sockets if "@" in line[-1] and f"socket:[{line[6]}]" in opened
        ],
        "shared memory files": [name for name in os.listdir("/dev/shm") if "weft" in name],
    }
    return {what: [one for one in of if one not in (before or {}).get(what, ())] for what, of in found.items()}


def hurry(_: object) -> None:
    """Time each schedule by a single call, and collect garbage rarely. Tests must not depend on which schedule is the
    fastest.
    """
    measure._REPETITIONS = 1
    gc.set_threshold(50_000, 20, 50)


def run_with_one_wrong(
    group: dist.ProcessGroup, variants: Any, options: Any, is_wrong: Callable[[str, str | None], bool], row: Any
) -> str:
    """Run a benchmark in which the variants selected by `is_wrong` have a wrong row on rank 1. Return the error.

    row: returns the index of the row in the results of a workload's call.
    """
    from weft.bench.core.run import run_rank  # imported here, because few tests need it

    correct = variants.weft

    def spoiling(self: Any, variant: str, schedule: str | None) -> Any:
        call = correct(self, variant, schedule)

        def spoiled(which: int) -> torch.Tensor:
            y = call(which)
            y[row(self, which)] += 1
            return y

        return spoiled if is_wrong(variant, schedule) and self.ranks.rank == 1 else call

    with mock.patch.object(variants, "weft", spoiling):
        try:
            run_rank(group.rank(), group.size(), options)
        except RuntimeError as error:
            return str(error)
    return "nothing"


def barrier(signal: symm.Signal, round_: int) -> None:
    """Wait until every rank of the signal's group has called this for `round_` (1, 2, ...)."""
    size = signal.comm.world_size
    for peer in range(size):
        signal.add(1, peer=peer)
    signal.wait(round_ * size)
