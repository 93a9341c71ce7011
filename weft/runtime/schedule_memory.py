"""The layout of the memory that weft allocates for a schedule: symmetric buffers and counters, at the same offsets on every
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch

from weft.errors import DisagreementError, ScheduleError
from weft.schedule import Lane, Schedule, Send, Set, Step, Tiles, value
from weft.schedule.steps import ITEM_BYTES
from weft.schedule.steps.loops import counted
from weft.schedule.text import describe, fingerprint
from weft.symm import Communicator

Tensors: TypeAlias = dict[str, torch.Tensor]
"""Tensors, by buffer."""
TORCH_DTYPE = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64, "fp8": torch.float8_e4m3fn,
    "int64": torch.int64, "int32": torch.int32,
}  # fmt: skip
ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a schedule's symmetric memory: the byte offset of each buffer, and for each array of signals the index of
    its first counter.
    """

    buffers: dict[str, int]
    buffer_bytes: int
    counters: dict[str, int]
    n_counters: int


def layout_of(schedule: Schedule) -> Layout:
    buffers, end = {}, 0
    for buffer in schedule.buffers:
        if buffer.role == "symmetric":
            assert isinstance(buffer.rows, int)
            buffers[buffer.name] = end
            end += -(-buffer.rows * buffer.cols * ITEM_BYTES[buffer.dtype] // ALIGNMENT) * ALIGNMENT
    counters, count = {}, 0
    for signals in schedule.signals:
        counters[signals.name] = count
        count += signals.count
    return Layout(buffers, end, counters, count)


def agree_on_schedule(schedule: Schedule, comm: Communicator) -> None:
    """Raise `DisagreementError` if ranks have different schedules. Raise `ScheduleError` if a step needs memory of a rank on
    another host, because such memory is not mapped. All ranks must make this call, and all raise.
    """
    mine = (schedule.name, fingerprint(schedule))
    found = comm.all_gather((mine, _not_mapped(schedule, comm)), what="schedules to run")
    for rank, (theirs, _) in enumerate(found):
        if theirs != mine:
            raise DisagreementError(
                f"rank {comm.rank} runs schedule {mine[0]} (hash {mine[1][:8]}), but rank {rank} runs {theirs[0]} "
                f"(hash {theirs[1][:8]}): pass the same shapes, dtypes and schedule on every rank"
            )
    if faults := [fault for _, fault in found if fault]:
        raise ScheduleError(f"schedule {schedule.name}, {faults[0]}")


def _not_mapped(schedule: Schedule, comm: Communicator) -> str:
    """Return an error text, with the fix, for the first step of this rank that needs memory of another host; "" if there is
    none.
    """
    if comm.all_mapped:
        return ""
    if comm.device.type != "cpu":
        fault = needs_far(schedule, comm.rank, comm.hosts, on_gpus=True)
        return f"{fault}: use collective steps" if fault else ""
    found = _first_far(schedule, comm.rank, comm.hosts, on_gpus=False)
    return f"{needs_far(schedule, comm.rank, comm.hosts)}: {_instead(*found[1:])}" if found else ""


def needs_far(schedule: Schedule, rank: int, hosts: Sequence[str], on_gpus: bool = False) -> str:
    """Return an error text for the first step of `rank` that needs memory of another rank, if that memory is not mapped on
    `rank`. Return "" if there is no such step.

    hosts: the host of each rank, at least two different hosts.
    on_gpus: False for CPU ranks: memory is mapped within a host, and lanes send their signals to other hosts as messages.
        True for GPUs: memory of no other rank is mapped, and there are no messages.
    """
    found = _first_far(schedule, rank, hosts, on_gpus)
    if found is None:
        return ""
    lane, step, other = found
    why = f"memory of rank {other}, on host {hosts[other]}, is not mapped on rank {rank}"
    return f"lane {lane.name}: {describe(step, rank)}: {why}"


def _first_far(schedule: Schedule, rank: int, hosts: Sequence[str], on_gpus: bool) -> tuple[Lane, Step, int] | None:
    """Return (lane, step, other rank) for the first step of `rank` that needs memory of another rank, if that memory is not
    mapped on `rank`. Return None if there is no such step.

    hosts: the host of each rank. on_gpus: False for CPU ranks, True for GPUs (`needs_far` says what each can reach).
    """
    for lane in schedule.of_rank(rank):
        for step in lane.steps:
            for other in sorted(_touched(step, on_gpus)):
                if other != rank if on_gpus else hosts[other] != hosts[rank]:
                    return lane, step, other
    return None


def _instead(step: Step, other: int) -> str:
    """Return advice for an error text: how to change `step`, which needs memory of rank `other` on another host."""
    if any(access.region.at == other and not access.writes for access in step.accesses()):
        return f"let rank {other} send it, with lane.send(src, dst)"
    if step.copies_by:
        return "write lane.send(src, dst) instead of the copy"
    return "compute into memory of this host, then write lane.send(src, dst)"


def _touched(step: Step, on_gpus: bool) -> set[int]:
    """Return the ranks whose memory a step of fixed sizes reads or writes. Ignore collectives.

    on_gpus: True to include also the ranks to which the step sends data, and the ranks whose signals it sets.
    """
    leaves = step.meets or (isinstance(step, Send) and not on_gpus)  # without access to memory of other ranks
    parts = step.inner if step.tile_kernel else () if leaves else (step,)
    places = [region.at for part in parts for region in part.regions]
    if step.tile_kernel:
        places = [at for place in places for (at,), _ in counted(cast(Tiles, step), place)]
    if on_gpus or not isinstance(step, Set):  # a lane sends its signals; a kernel cannot
        places += [at for at, _, _ in step.sets()]
    return {value(at) for at in places}
