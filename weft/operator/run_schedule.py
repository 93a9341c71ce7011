"""`weft.run_schedule`: run a user's schedule on the ranks of a group, without an operator.

The first call with a schedule makes an executor, which is cached like the executors of operators
(`weft.operator.cache`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from weft import symm
from weft.errors import RefusedError
from weft.operator.agreement import agreement_on
from weft.operator.cache import Table
from weft.operator.calls import check_options
from weft.operator.compiled_operator import whole
from weft.operator.schedule_tensors import checked_tensors
from weft.operator.select import verify_once
from weft.operator.together import agree, together
from weft.runtime.capture import is_captured
from weft.runtime.executor import Executor
from weft.runtime.executors import executor as executor_of
from weft.runtime.opaque import opaque
from weft.schedule import Schedule
from weft.schedule.text import fingerprint
from weft.symm import Communicator
from weft.symm.device import synchronize
from weft.symm.groups import backend_device, group_of
from weft.timeline import Timeline
from weft.words import counted, kind

_NAME = "run_schedule"
_fingerprints: dict[int, str] = {}
"""Fingerprints by id(schedule), while the schedule exists. Computing a fingerprint takes longer than a small run."""


@opaque
def run_schedule(
    schedule: Schedule,
    tensors: Mapping[str, torch.Tensor | Callable[[int], torch.Tensor]],
    group: dist.ProcessGroup | str,
    *,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> dict[str, torch.Tensor]:
    """Run your own schedule once, on the ranks of `group`: GPUs, or CPU processes. Not differentiable.

        y = weft.run_schedule(schedule, {"x": x, "w": w, "y": torch.empty(64, 16)}, group)["y"]

    schedule: the schedule of all ranks, made with `weft.schedule.Draft`, for the group's world size. Pass the same
        schedule on every rank.
    tensors: this rank's tensor for every input and output buffer, by name. Each is [rows, columns] with the buffer's
        dtype, and all are on one device. Rows must be contiguous. A tensor that only GEMMs use may also be the
        transpose of a tensor with contiguous rows. An output must not overlap any other tensor in memory. Outputs are
        overwritten, and autograd is notified as for torch's out= tensors. If an output's number of rows is dynamic
        (known only during the run), pass a function that takes the number of rows and returns a new tensor. On GPUs you
        can also pass a tensor with at least this number of rows. If an input's number of rows is dynamic, you can pass
        a tensor with more rows. The additional rows are not read.
    group: the process group, or its name. All ranks must make the call.
    deadline_s: the longest wait for another rank, in seconds (default `WEFT_DEADLINE_S`).
    timeline: receives a span for every step of this rank. On GPUs the call then synchronises with the device.

    Returns the outputs by name. On GPUs they are valid in stream order.

    At the first call with a schedule, ranks compare their schedules, run `weft.schedule.verify` and allocate memory.
    Later calls with an equal schedule reuse the memory. A CUDA graph can capture any call after the first.
    torch.compile breaks the graph at this call, and raises `Unsupported` with fullgraph=True: call it outside of the
    compiled function.

    Memory: the schedule's symmetric and scratch buffers, kept until the group is destroyed. On CPU all schedules of a
        group share the memory of the largest schedule. On GPUs each schedule has its own memory, so a group keeps at
        most 64 schedules, and drops the least recently used.

    Raises:

    - `RefusedError` on every rank, before anything is written, if any rank's input is bad. Examples are a missing or
      unknown buffer, or a schedule for another world size. A tensor is bad if it has a wrong shape, dtype, device or
      layout, requires a gradient, was freed, or overlaps an output. On GPUs, at later calls of a schedule, the group
      fails instead if a peer has already begun its run.
    - `ValueError` for bad input if the group has one rank, and for a bad group.
    - `DisagreementError` if ranks pass different schedules.
    - `ScheduleError` if `verify` finds a fault, or if the device cannot run a step. CPU ranks also raise it if a dynamic
      size is negative, is too large, or exceeds the rows of an input.
    - `DeadlineError`, `PeerLostError`, `OutOfSharedMemoryError`, or the error of a step's function. The group then
      fails on all ranks.
    """
    group = group_of(group)
    with together(_NAME, group, lambda: _device_of(tensors, group), deadline_s):
        deadline_s = check_options(deadline_s, timeline)
        if not isinstance(schedule, Schedule):
            raise ValueError(
                f"schedule is {kind(schedule)}: pass a weft.schedule.Schedule, which Draft.schedule() returns"
            )
        if schedule.world_size != group.size():
            raise ValueError(
                f"schedule {schedule.name} is for {counted(schedule.world_size, 'rank')}, but the group has "
                f"{group.size()}: build it for {group.size()}, or pass a group of {schedule.world_size}"
            )
        given, device = checked_tensors(schedule, tensors, group.rank())
        compiled = _compiled(schedule, group, device, deadline_s)
        if (digest := agreement_on(device).digest(group)) is not None:
            digest.note(compiled.number, compiled.what)
        outputs = [b.name for b in schedule.buffers if b.role == "output"]
        try:
            made = _run(compiled.executor, given, deadline_s, timeline)
        except RefusedError:
            raise
        except BaseException:
            _note_writes(given[name] for name in outputs)
            raise
        results = {name: made.get(name, given[name]) for name in outputs}
        _note_writes(results.values())
        return results


def _note_writes(outputs: Iterable[Any]) -> None:
    """Increment the version counters of outputs. If autograd had saved an output that this run has overwritten,
    backward then raises an error.
    """
    torch.autograd.graph.increment_version([t for t in outputs if isinstance(t, torch.Tensor)])


def _device_of(tensors: Any, group: dist.ProcessGroup) -> torch.device:
    """Return the device of the first usable tensor; without such a tensor, the device of the group's backend."""
    with contextlib.suppress(Exception):
        for t in tensors.values():
            if isinstance(t, torch.Tensor) and t.device.type in ("cpu", "cuda"):
                return t.device
    return backend_device(group)


def _run(
    executor: Executor, tensors: dict[str, Any], deadline_s: float | None, timeline: Timeline | None
) -> dict[str, Any]:
    device = next(t.device.type for t in tensors.values() if isinstance(t, torch.Tensor))
    if torch.is_autocast_enabled(device):  # autocast is per thread, so it would change only one lane's GEMMs
        with torch.autocast(device, enabled=False):
            return executor.run(tensors, deadline_s=deadline_s, timeline=timeline)
    return executor.run(tensors, deadline_s=deadline_s, timeline=timeline)


class _Compiled:
    """The executor of a user's schedule on a group, with the attributes of a cache entry (`weft.operator.cache.Entry`)."""

    family, came_back, runs_unfused, called_at, key = None, False, False, 0, None

    def __init__(self, schedule: Schedule, comm: Communicator, number: int, what: str) -> None:
        self.comm, self.number, self.what = comm, number, what
        self.executor: Executor = executor_of(schedule, comm, what=f"weft.{_NAME}")

    @property
    def stale(self) -> bool:
        return self.comm.closed or self.executor.gone

    @property
    def captured(self) -> bool:
        return self.executor.was_captured

    @property
    def light(self) -> bool:
        return self.executor.shared

    @property
    def nbytes(self) -> int:
        return self.executor.nbytes

    def capturing(self) -> bool:
        return is_captured(self.comm.device)

    def close(self) -> None:
        if not self.stale:
            synchronize(self.comm.device)
            self.executor.close()


_table: Table[_Compiled] = Table()


def _compiled(
    schedule: Schedule, group: dist.ProcessGroup, device: torch.device, deadline_s: float | None
) -> _Compiled:
    """Return the cached executor of an equal schedule, or make an executor. All ranks must make this call together."""
    digest, what = _fingerprint(schedule), f"schedule {schedule.name}"
    key = digest, device
    found = _table.find(group, key)
    if found is not None:
        return found

    def check() -> tuple[str, str, tuple[int, int]]:
        if is_captured(device):
            raise ValueError(
                f"the first run of {what} sets up memory and kernels, which a CUDA graph cannot capture: run it once before "
                "capturing it"
            )
        return what, f"{what}, fingerprint {digest[:16]}", (0, 0)

    agree(_NAME, group, device, check, deadline_s, "pass the same schedule on every rank")
    verify_once(schedule, device)
    comm = symm.communicator(group, device)
    with symm.set_up_within(comm.deadline_s if deadline_s is None else deadline_s), whole(comm, f"setting up {what}"):
        made = _Compiled(schedule, comm, int(digest[:16], 16), what)
    return _table.keep(group, key, made)


def _fingerprint(schedule: Schedule) -> str:
    found = _fingerprints.get(id(schedule))
    if found is None:
        found = _fingerprints[id(schedule)] = fingerprint(schedule)
        weakref.finalize(schedule, _fingerprints.pop, id(schedule), None).atexit = False
    return found
