"""The time of one run of a schedule: the simulated time, and costs that are not simulated.

    queued    a run after another one, with the host ahead
    graph     the same, captured and replayed: collectives and the end of a run take longer
    single    a run on idle devices, with the host's time for each step

Not simulated, and added here: signals that tiles set (`tile_signal_us`), the way from the caller's stream to several lanes and back
(`lanes_run_us`, in graphs also `graph_run_us`), and the host of a run that reads sizes, which waits in every run.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from weft.schedule import Schedule, Tiles
from weft.schedule.steps import depends, of_kind, substitute
from weft.sim.engine import simulate
from weft.sim.model import Model
from weft.sim.vectorised import values_of_ranks

Mode: TypeAlias = Literal["queued", "graph", "single"]

TORCH_CALLS = 5
"""torch calls for a dynamic step of an unfused run. On an H100's host, dispatches of 41 to 384 tokens take 581 to 661 us in 4
such steps, and 588 us by this number."""


def run_us(schedule: Schedule, model: Model, mode: Mode) -> float:
    """Return the microseconds of one run of a schedule that needs no check: verified, or made by weft's own builders."""
    if mode == "single":
        us = simulate(schedule, model, mode=mode, trusted=True).end_us
    else:
        us = simulate(schedule, model, mode=mode, runs=2, trusted=True).per_run_us
    us += _signals_of_tiles(schedule) * model.tile_signal_us
    if len(schedule.lanes) > 1:
        us += model.lanes_run_us + (model.graph_run_us if mode == "graph" else 0.0)
    return max(us, _reading_host_us(schedule, model)) if schedule.reads_on_host else us


def dynamic_steps(schedule: Schedule) -> int:
    """Return the number of copies, tiles and collectives with dynamic sizes."""
    held = {contents.buffer for contents in schedule.contents}
    if not held:
        return 0
    return sum(depends(step, held) for step in schedule.walk() if step.copies_by or step.meets or step.tile_kernel)


def _reading_host_us(schedule: Schedule, model: Model) -> float:
    """Return the host time to issue a run in which it reads sizes.

    The host waits in every run, so that it is never far enough ahead of the device to hide this time. A schedule in which it
    waits before all else runs as torch calls, and each of its dynamic steps takes several of them.
    """
    each_us = TORCH_CALLS * model.host_call_us if schedule.stops_host else model.host_late_us
    return model.host_dynamic_us + dynamic_steps(schedule) * each_us


def _signals_of_tiles(schedule: Schedule) -> int:
    """Return the number of signals that tiles set, on the rank whose tiles set the most."""
    tiles = [step for lane in schedule.lanes for step in of_kind(lane.steps, Tiles)]
    sets = [(step.extent, len(step.inner_sets)) for step in tiles if step.inner_sets]
    if not sets:
        return 0
    return max(sum(substitute(extent, v) * count for extent, count in sets) for v in values_of_ranks(schedule))
