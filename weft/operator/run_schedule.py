"""weft.run_schedule: a user's schedule on the ranks of a group, without an operator around it.

Executors are made at the first call with a schedule, and cached like the executors of operators (`weft.operator.cache`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from weft import env, symm
from weft.arguments import check_tensor
from weft.operator.agreement import agreement_on
from weft.operator.cache import Table
from weft.operator.calls import check_options
from weft.operator.compiled_operator import whole
from weft.operator.select import verify_once
from weft.operator.together import agree, together
from weft.runtime.capture import is_captured
from weft.runtime.device import synchronize
from weft.runtime.executor import Executor
from weft.runtime.executors import executor as executor_of
from weft.runtime.opaque import opaque
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.schedule import Buffer, Schedule
from weft.schedule.text import fingerprint
from weft.symm import Communicator
from weft.symm.groups import group_of
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
    tensors: by name, this rank's tensor for every input and output buffer: [rows, columns] and dtype of the buffer, all on one
        device. Rows must be contiguous; a tensor that only GEMMs use may also be the transpose of such a tensor. Outputs are
        overwritten. For an output with a dynamic number of rows, pass a function from that number to a tensor; on GPUs, also a
        tensor with at least as many rows.
    group: the process group, or its name. Every rank makes the call.
    deadline_s: the longest wait for another rank, in seconds (default `WEFT_DEADLINE_S`).
    timeline: receives a span for every step of this rank; on GPUs the call then synchronises.

    Returns the outputs by name. On GPUs they are valid in stream order.

    The first call with a schedule is collective: ranks compare their schedules, run `weft.schedule.verify` and allocate memory.
    Later calls with an equal schedule reuse the memory. A CUDA graph can capture a call after the first one.

    Memory: the schedule's symmetric and scratch buffers, kept for later calls until the group is destroyed. On CPU all schedules
    of a group share the memory that the largest one needs. On GPUs each schedule has its own memory, and at most 64 schedules are
    kept: the least recently run is dropped.

    Raises `RefusedError` on every rank, before anything is written, if a rank's input is bad: a missing or an unknown buffer, a
    wrong shape, dtype, device or layout, a tensor that needs a gradient, or a schedule for another number of ranks. On GPUs, in
    later calls of a schedule, the group fails instead if a peer has begun its run. `ValueError` for bad input in a group of one
    rank, and for a bad group. `DisagreementError` if ranks pass different schedules. `ScheduleError` if `verify` finds a fault,
    or if the device cannot run a step. Other errors make the group fail on all ranks: `DeadlineError`, `PeerLostError`,
    `OutOfSharedMemoryError`, or the error of a step.
    """
    group = group_of(group)
    like = (
        next((t for t in tensors.values() if isinstance(t, torch.Tensor)), None)
        if isinstance(tensors, Mapping)
        else None
    )
    with together(_NAME, group, like, deadline_s):
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
        device = _checked(schedule, tensors, group.rank())
        compiled = _compiled(schedule, group, device, deadline_s)
        if (digest := agreement_on(device).digest(group)) is not None:
            digest.note(compiled.number, compiled.what)
        made = _run(compiled.executor, dict(tensors), deadline_s, timeline)
        return {b.name: made.get(b.name, tensors[b.name]) for b in schedule.buffers if b.role == "output"}


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


def _checked(schedule: Schedule, tensors: Any, rank: int) -> torch.device:
    """Return the device of the tensors. Raise `ValueError` if they do not match the schedule."""
    given = {b.name: b for b in schedule.buffers_of_rank(rank, expected=False) if b.role in ("input", "output")}
    names = ", ".join(given)
    if not isinstance(tensors, Mapping):
        raise ValueError(f"tensors is {kind(tensors)}: pass a dict with a tensor for each of {names}")
    if missing := [name for name in given if name not in tensors]:
        raise ValueError(
            f"tensors lacks {', '.join(missing)}: pass one tensor for each of {names}, the buffers of schedule "
            f"{schedule.name}"
        )
    if unknown := [str(name) for name in tensors if name not in given]:
        own = [b.name for b in schedule.buffers if b.name in unknown]
        why = f"; {', '.join(own)}: the run allocates it" if own else ""
        raise ValueError(
            f"tensors has {', '.join(unknown)}, which is not an input or output of schedule {schedule.name}{why}: "
            f"pass {names}"
        )
    plain = {name: t for name, t in tensors.items() if not _is_function(given[name], t)}
    for name, t in plain.items():
        check_tensor(f"tensors[{name!r}]", t)
    device = next((t.device for t in plain.values()), None)
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensors are on {device}: pass at least one tensor on a GPU or on the CPU")
    begins: dict[int, str] = {}
    for name, t in plain.items():
        _check(given[name], t, device)
        if t.numel():
            other = begins.setdefault(t.data_ptr(), name)
            if other != name and "output" in (given[name].role, given[other].role):
                raise ValueError(f"{other} and {name} share memory: pass a separate output, torch.empty_like({name})")
    return device


def _is_function(buffer: Buffer, t: Any) -> bool:
    return (
        buffer.role == "output" and not isinstance(buffer.rows, int) and callable(t) and not isinstance(t, torch.Tensor)
    )


def _check(buffer: Buffer, t: torch.Tensor, device: torch.device) -> None:
    name, dtype = buffer.name, TORCH_DTYPE[buffer.dtype]
    # Dynamic numbers of rows are checked in the run.
    rows = buffer.rows if isinstance(buffer.rows, int) else t.shape[0] if t.dim() else 0
    if tuple(t.shape) != (rows, buffer.cols) or t.dtype != dtype or t.device != device:
        wanted = f"({buffer.rows}, {buffer.cols}) {dtype} on {device}"
        raise ValueError(f"{name} is {tuple(t.shape)} {t.dtype} on {t.device}: pass {wanted}")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient, but schedules are forward only: call under torch.no_grad(), or pass "
            f"{name}.detach()"
        )
    if isinstance(t, FakeTensor):
        raise ValueError(f"{name} is a FakeTensor, which has no memory: pass a tensor with values")
    if not t.numel():
        return
    if not t.untyped_storage().nbytes():
        raise ValueError(f"{name} has no memory: its storage was freed; pass it while it has values")
    if t.is_neg():
        raise ValueError(f"{name} is a negated view (is_neg): pass {name}.resolve_neg()")
