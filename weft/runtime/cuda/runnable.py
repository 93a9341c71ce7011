"""What an executor cannot run is said by name when a schedule is compiled, and not by wrong results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.errors import ScheduleError
from weft.runtime.cuda.calls import COLLECTIVES
from weft.runtime.cuda.compile import emit, emit_tiles
from weft.schedule import Collective, Compute, Copy, Lane, Reduce, Schedule, Step, Tiles
from weft.schedule.expr import value
from weft.schedule.steps import variables_of
from weft.schedule.text import describe


def require_runnable_on_gpus(schedule: Schedule, rank: int) -> None:
    """`ScheduleError` with the step of `rank` that streams, copy engines and kernels have no way to do."""
    updated: dict[str, str] = {}
    for lane in schedule.of_rank(rank, expected=False):
        for step in lane.steps:
            for fault in (*_unknown(step, rank), *_updated_twice(step, lane, updated)):
                raise ScheduleError(f"schedule {schedule.name}, lane {lane.name}: {describe(step, rank)}: {fault}")


def _unknown(step: Step, rank: int) -> Iterator[str]:
    if emit.dispatch(type(step)) is emit.dispatch(object):
        yield f"the GPU executor runs no steps of kind {step.kind!r}: it runs {_entries(emit.registry)}"
    elif isinstance(step, Collective) and step.op not in COLLECTIVES:
        yield f"the GPU executor knows no {step.op}: it knows {', '.join(COLLECTIVES)}"
    elif isinstance(step, Compute | Reduce):
        for region in (access.region for access in step.accesses()):
            if not variables_of(region.at) and value(region.at) != rank:
                yield f"{describe(region, rank)} is a peer's, and the library's kernels compute in memory of their own GPU: copy it"
    elif isinstance(step, Tiles) and emit_tiles.dispatch(type(step.kernel)) is emit_tiles.dispatch(object):
        yield f"the GPU executor has no kernel {step.kernel.name}: it has {_entries(emit_tiles.registry)}"
    for inner in step.inner or (step,):
        if isinstance(inner, Copy) and inner.accumulate:
            yield "the GPU executor's copies do not add: copy, then compute with accumulate=True"


def _entries(registry: Mapping[Any, object]) -> str:
    return ", ".join(kind.kind for kind in registry if kind is not object)


def _updated_twice(step: Step, lane: Lane, updated: dict[str, str]) -> Iterator[str]:
    """updated: by buffer, the lane that adds to it."""
    for access in step.accesses():
        other = updated.setdefault(access.region.buffer, lane.name) if access.updates else lane.name
        if other != lane.name:
            yield f"lane {other} adds to {access.region.buffer} too, and kernels of two streams would lose what one adds: use one"
