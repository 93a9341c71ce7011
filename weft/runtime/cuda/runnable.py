"""Checks, made before a schedule is compiled, that the GPU executor can run its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.errors import ScheduleError
from weft.runtime.cuda.calls import COLLECTIVES
from weft.runtime.cuda.compile import emit
from weft.runtime.cuda.tile_kernels import tiles_call
from weft.schedule import Collective, Region, Schedule, Step
from weft.schedule.expr import value
from weft.schedule.steps import variables_of
from weft.schedule.text import describe


def require_runnable_on_gpus(schedule: Schedule, rank: int) -> None:
    """Raise `ScheduleError` if GPUs cannot run a step of `rank`, or if concurrent additions of several lanes or ranks to
    one buffer could be lost. The error names the step or the buffer.
    """
    for buffer in schedule.buffers:
        if buffer.dtype == "fp64":
            raise ScheduleError(
                f"schedule {schedule.name}: {buffer.name} is fp64, but GPUs reduce in fp32: use CPU processes"
            )
    for lane in schedule.of_rank(rank, expected=False):
        for step in lane.steps:
            for fault in _unknown(step, rank):
                raise ScheduleError(f"schedule {schedule.name}, lane {lane.name}: {describe(step, rank)}: {fault}")
    steps = (inner for step in schedule.walk() for inner in (step, *step.inner))
    if any(access.updates for step in steps for access in step.accesses()):
        _require_nothing_lost(schedule)


def _unknown(step: Step, rank: int) -> Iterator[str]:
    if emit.dispatch(type(step)) is emit.dispatch(object):
        yield f"the GPU executor runs no steps of kind {step.kind!r}: it runs {_entries(emit.registry)}"
    elif isinstance(step, Collective) and step.op not in COLLECTIVES:
        yield f"the GPU executor does not run {step.op}: it runs {', '.join(COLLECTIVES)}"
    elif (kernel := step.tile_kernel) and type(kernel) not in tiles_call.registry:
        yield f"the GPU executor has no kernel {kernel.name}: it has {_entries(tiles_call.registry)}"
    for inner in step.inner or (step,):
        for access in inner.accesses():
            if access.updates and not inner.copies_by and _owner(access.region) not in (None, rank):
                yield (
                    f"it adds to {describe(access.region, rank)}, a peer's memory, where only a copy by kernel may add: compute "
                    "here, then copy with accumulate=True by kernel"
                )
        if inner.copies_by == "dma" and any(access.updates for access in inner.accesses()):
            yield "copy engines cannot add: copy by kernel, or copy and then compute with accumulate=True"


def _owner(region: Region) -> int | None:
    """Return the rank whose memory contains the region; None if the rank is known only at run time."""
    return None if variables_of(region.at) else value(region.at)


def _entries(registry: Mapping[Any, object]) -> str:
    return ", ".join(kind.kind for kind in registry if kind is not object)


def _require_nothing_lost(schedule: Schedule) -> None:
    """Raise `ScheduleError` if a kernel that adds to a buffer without atomics could overwrite what another lane adds at the
    same time.
    """
    updated: dict[tuple[int | None, str], dict[tuple[int, str], bool]] = {}
    for rank in range(schedule.world_size):
        for lane in schedule.of_rank(rank, expected=False):
            for step in (inner for outer in lane.steps for inner in outer.inner or (outer,)):
                for access in step.accesses():
                    if access.updates:
                        of_buffer = updated.setdefault((_owner(access.region), access.region.buffer), {})
                        # Copies by kernel add atomically, so they lose no updates.
                        of_buffer[rank, lane.name] = of_buffer.get((rank, lane.name), True) and bool(step.copies_by)
    for (owner, buffer), lanes in updated.items():
        if len(lanes) > 1 and not all(lanes.values()):
            names = " and ".join(f"lane {lane} of rank {rank}" for rank, lane in lanes)
            raise ScheduleError(
                f"schedule {schedule.name}: {names} add to {buffer} of rank {owner}, so updates could be lost: "
                "add on one lane only, or add only with copies by kernel, which are atomic"
            )
