"""A lower bound on the time of all schedules of a problem on a modelled machine.

    bound       the larger of `compute` and `links`
    compute     the time of the serial schedule's GEMMs on the slowest rank, if nothing else runs. If the operator pools
                embeddings instead: the time of the pooling at full memory bandwidth, or on all compute units, whichever is longer
    links       `sent` + `exchanged`: the time in which links carry the data of the serial schedule
    sent        the sum of the times of all collectives except all-to-alls. The time of each is the maximum, over ranks and
                hosts, of (bytes that must leave or enter) / (bandwidth of the links by which routes leave or enter)
    exchanged   for all all-to-alls together: the time that the link with the most bytes needs. This is a bound for all
                schedules: all send these bytes over the same routes

Latencies, launches and memory traffic are not included.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from weft.builders import Problem
from weft.schedule import Collective
from weft.sim.losses import gemms_us, serial_of
from weft.sim.lower import lower
from weft.sim.lowered import LoweredSchedule, Work
from weft.sim.model import Model


@dataclass(frozen=True)
class Bound:
    compute_us: float
    links_us: float

    @property
    def us(self) -> float:
        return max(self.compute_us, self.links_us)


def bound(problem: Problem, model: Model) -> Bound:
    """Return a lower bound on the time of every schedule of `problem` on `model`."""
    return bound_of(lower(serial_of(problem), model), gemms_us(problem, model, launches=False))


def bound_of(serial: LoweredSchedule, gemms_us: float = 0.0) -> Bound:
    """Return a lower bound on the time of every schedule of a problem.

    serial: the problem's serial schedule, lowered by `weft.sim.lower`.
    gemms_us: the time of its GEMMs if nothing else runs; 0 if it has no GEMMs.
    """
    works = [
        (origin.step, task)
        for lane in serial.lanes
        for task, origin in zip(lane.tasks, lane.origins, strict=True)
        if isinstance(task, Work)
    ]
    # Pooling may take longer than its resources need, because memory and units overlap only partly. Other schedules may
    # lose less of this time, so it is no bound.
    pooling = [
        task.work_us * max((share for _, share in serial.loads[task.load].share), default=0.0)
        for step, task in works
        if any(inner.kind == "compute" for inner in step.inner)
    ]
    leaving_us: defaultdict[int, float] = defaultdict(float)  # by collective
    busy_us: defaultdict[int, float] = defaultdict(float)  # by link
    for step, task in works:
        if isinstance(step, Collective) and step.op not in ("all_to_all", "exchange"):
            leaving_us[id(step)] = max(leaving_us[id(step)], task.least_us)
        elif isinstance(step, Collective):
            for number, share in serial.loads[task.load].share:
                if number in serial.links:
                    busy_us[number] += share * task.work_us
    links_us = sum(leaving_us.values()) + max(busy_us.values(), default=0.0)
    return Bound(gemms_us or max(pooling, default=0.0), links_us)
