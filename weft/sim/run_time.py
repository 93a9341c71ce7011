"""The time of one run of a schedule: its simulated time, plus costs that are not simulated.

    queued    one of several consecutive runs, with the CPU ahead of the device
    graph     the same, captured in a CUDA graph and replayed: collectives and the end of a run take longer
    single    a run on idle devices, including the CPU time to issue each step

The added costs are:

    tile_signal_us    for each signal that tiles set
    lanes_run_us      for the synchronisation of the caller's stream with several lanes
    graph_run_us      for this synchronisation in a CUDA graph, in addition to lanes_run_us
    CPU times         in runs in which the CPU reads sizes
"""

from __future__ import annotations

import math

from weft.schedule import Schedule, Tiles
from weft.schedule.kernels import TileKernel
from weft.schedule.steps import depends, of_kind, substitute, walk
from weft.sim.engine import Mode, simulate
from weft.sim.model import Model
from weft.sim.vectorised import values_of_ranks

TORCH_CALLS = 5
"""The number of torch calls per dynamic step of an unfused run. On a machine with H100s, dispatches of 41 to 384
tokens, with 4 such steps, took 581 to 661 us. With this number the model predicts 588 us.
"""

_STEPS_OF_PERMUTATION = 2
"""The number of dynamic steps of an unfused permutation: one computes the order of all rows, and one copies them."""


def run_us(schedule: Schedule, model: Model, mode: Mode, most_us: float = math.inf) -> float:
    """Return the time of one run in microseconds; infinite if the first simulated run takes longer than `most_us`.

    The schedule must be verified or from a weft builder: it is not checked here.
    """
    if mode == "single":
        us = simulate(schedule, model, mode=mode, trusted=True, most_us=most_us).end_us
    else:
        us = simulate(schedule, model, mode=mode, runs=2, trusted=True, most_us=most_us).per_run_us
    us += _signals_of_tiles(schedule) * model.tile_signal_us
    if len(schedule.lanes) > 1:
        us += model.lanes_run_us + (model.graph_run_us if mode == "graph" else 0.0)
    return max(us, reading_host_us(schedule, model))


def dynamic_steps(schedule: Schedule) -> int:
    """Return the number of copies, `Tiles` steps and collectives with dynamic sizes that an unfused run launches.

    Consecutive `Tiles` steps with equal kernels count as at most two steps. The serial schedule sorts rows by expert in
    such steps, one for each source rank. An unfused run sorts the rows from all ranks in two steps.
    """
    held = {contents.buffer for contents in schedule.contents}
    if not held:
        return 0
    kept = _dynamic.get(id(schedule))
    if kept is None:
        if len(_dynamic) >= _MOST_KEPT:
            _dynamic.clear()
        kept = _dynamic[id(schedule)] = schedule, _count_dynamic(schedule, held)
    return kept[1]


_MOST_KEPT = 256
_dynamic: dict[int, tuple[Schedule, int]] = {}
"""A cache, {id of a schedule: (the schedule, its `dynamic_steps`)}: a plan needs the number several times."""


def _count_dynamic(schedule: Schedule, held: set[str]) -> int:
    count = 0
    for lane in schedule.lanes:
        before: TileKernel | None = None
        equal = 0
        for step in walk(lane.steps):
            kernel = step.tile_kernel
            equal = equal + 1 if kernel and kernel == before else 0
            counts = step.copies_by or step.meets or (kernel and equal < _STEPS_OF_PERMUTATION)
            count += bool(counts) and depends(step, held)
            before = kernel
    return count


def reading_host_us(schedule: Schedule, model: Model) -> float:
    """Return the CPU time in us that a run needs because the CPU reads sizes in it; 0 if the CPU reads no sizes, or
    knows them.

    If the CPU reads sizes, it waits in every run, so it is never far enough ahead of the device to hide this time. A
    step with a dynamic size takes `Model.host_late_us`. If the CPU must read sizes before it issues later steps
    (`Schedule.stops_host`), the step takes the CPU time of `TORCH_CALLS` torch calls instead.
    """
    if not schedule.waits_for_sizes:
        return 0.0
    each_us = TORCH_CALLS * model.host_call_us if schedule.stops_host else model.host_late_us
    return model.host_dynamic_us + dynamic_steps(schedule) * each_us


def _signals_of_tiles(schedule: Schedule) -> int:
    """Return the number of signals that tiles of one rank set, for the rank with the most."""
    tiles = [step for lane in schedule.lanes for step in of_kind(lane.steps, Tiles)]
    sets = [(step.extent, len(step.inner_sets)) for step in tiles if step.inner_sets]
    if not sets:
        return 0
    return max(sum(substitute(extent, v) * count for extent, count in sets) for v in values_of_ranks(schedule))
