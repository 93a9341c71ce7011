"""weft.run_schedule: a user's schedule on the ranks of a group, without an operator around it.

Executors are made at the first call with a schedule, and cached like the executors of operators (`weft.operator.cache`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from weft import env, symm
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
_fingerprints: dict[
    int, str
] = {}  # by id while the schedule lives: hashing it at every call takes longer than a small run


@opaque
def run_schedule(
    schedule: Schedule,
    tensors: Mapping[str, torch.Tensor | Callable[[int], torch.Tensor]],
    group: dist.ProcessGroup | str,
    *,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> dict[str, torch.Tensor]:
    """Run your own schedule once, on the ranks of `group`: GPUs, or CPU processes. Forward only.

        y = weft.run_schedule(schedule, {"x": x, "w": w, "y": torch.empty(64, 16)}, group)["y"]

    schedule: the schedule of all ranks, made by `weft.schedule.Draft`: equal on every rank, and for the world size of `group`.
    tensors: this rank's tensor for every input and output buffer, by name: [rows, columns] and dtype of the buffer, all
        on one device. Rows must be contiguous; a tensor that only GEMMs use may also be the transpose of such a tensor.
        An output must not overlap any other tensor in memory. It is overwritten, and autograd is notified as for
        torch's out= tensors. For an output with a dynamic number of rows, pass a function from that number to a new
        tensor with so many rows. On GPUs, a tensor with at least as many rows will do too.
    group: the process group, or its name. Every rank makes the call.
    deadline_s: the longest wait for another rank, in seconds (default `WEFT_DEADLINE_S`).
    timeline: receives a span for every step of this rank; on GPUs the call then synchronises.

    Returns the outputs by name. On GPUs they are valid in stream order.

    The first call with a schedule is collective: ranks compare their schedules, run `weft.schedule.verify` and allocate memory.
    Later calls with an equal schedule reuse the memory. A CUDA graph can capture a call after the first one. torch.compile breaks
    its graph at this call, and so raises `Unsupported` with fullgraph=True: call it outside of the compiled function.

    Memory: the schedule's symmetric and scratch buffers, kept for later calls until the group is destroyed. On CPU all schedules
    of a group share the memory that the largest one needs. On GPUs each schedule has its own memory, and at most 64 schedules are
    kept: the least recently run is dropped.

    Raises `RefusedError` on every rank, before anything is written, if a rank's input is bad. Buffers may be missing or
    unknown. A tensor may have a wrong shape, dtype, device or layout, need a gradient, or be freed, and an output's
    memory may overlap another tensor. The schedule may be for another number of ranks. On GPUs, in later calls of a
    schedule, the group fails instead if a peer has begun its run. `ValueError` for bad input in a group of one rank,
    and for a bad group. `DisagreementError` if ranks pass different schedules. `ScheduleError` if `verify` finds a
    fault, or if the device cannot run a step. Other errors make the group fail on all ranks: `DeadlineError`,
    `PeerLostError`, `OutOfSharedMemoryError`, or the error of a step. A step's function may raise, or return a wrong
    tensor (`ValueError` with its name and both sizes). On CPU a size may be negative (`ScheduleError` with the rank
    that wrote it).
    """
    group = group_of(group)
    with together(_NAME, group, lambda: _device_of(tensors, group), deadline_s):
        deadline_s = check_options(deadline_s, timeline)
        if not isinstance(schedule, Schedule):
            raise ValueError(
                f"schedule is {kind(schedule)}: pass a weft.schedule.Schedule, such as Draft.schedule() returns"
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
    """Increment the version counters, by which autograd finds tensors that were written after it had saved them."""
    torch.autograd.graph.increment_version([t for t in outputs if isinstance(t, torch.Tensor)])


def _device_of(tensors: Any, group: dist.ProcessGroup) -> torch.device:
    """Return the device of the tensors. If they do not determine it, return the group's, on which peers receive the refusal."""
    with contextlib.suppress(Exception):
        for t in tensors.values():
            if isinstance(t, torch.Tensor) and t.device.type in ("cpu", "cuda"):
                return t.device
    return backend_device(group)


def _run(
    executor: Executor, tensors: dict[str, Any], deadline_s: float | None, timeline: Timeline | None
) -> dict[str, Any]:
    device = next(t.device.type for t in tensors.values() if isinstance(t, torch.Tensor))
    if torch.is_autocast_enabled(device):  # it would change the arithmetic of only one lane
        with torch.autocast(device, enabled=False):
            return executor.run(tensors, deadline_s=deadline_s, timeline=timeline)
    return executor.run(tensors, deadline_s=deadline_s, timeline=timeline)


class _Compiled:
    """The executor of a schedule on a group, as the cache keeps it."""

    family, came_back, called_at, key = None, False, 0, None

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
    """Find or make the executor of an equal schedule. Making one is collective."""
    digest, what = _fingerprint(schedule), f"schedule {schedule.name}"
    key = digest, device
    found = _table.find(group, key)
    if found is not None:
        return found

    def check() -> tuple[str, str, int]:
        if is_captured(device):
            raise ValueError(f"run {what} once before capturing it in a CUDA graph")
        return what, f"{what}, fingerprint {digest[:16]}", 0

    agree(_NAME, group, device, check, deadline_s, "pass the same schedule on every rank")
    verify_once(schedule, device)
    with symm.set_up_within(env.deadline_s() if deadline_s is None else deadline_s):
        comm = symm.communicator(group, device)
        with whole(comm, f"setting up {what}"):
            made = _Compiled(schedule, comm, int(digest[:16], 16), what)
    return _table.keep(group, key, made)


def _fingerprint(schedule: Schedule) -> str:
    found = _fingerprints.get(id(schedule))
    if found is None:
        found = _fingerprints[id(schedule)] = fingerprint(schedule)
        weakref.finalize(schedule, _fingerprints.pop, id(schedule), None).atexit = False
    return found
