"""Decomposition and contention losses of a schedule.

    decomposition   for GEMMs: the time of the schedule's GEMMs, each alone, / the time of the undivided cuBLAS GEMMs.
                    For communication: the time of the schedule's communication without computation / the time of the
                    fastest undivided communication
    contention      the time of steps in the schedule / the time of the same steps alone
    exposed         the time in which a rank does not compute
    ideal           the time with perfect overlap: the longer of the times of the undivided GEMMs and the undivided
                    communication

The operator's serial schedule defines the undivided GEMMs and communication.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV and figure 6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from weft.builders import Problem, candidates
from weft.builders.operands import peer
from weft.builders.problems.experts import ExpertsProblem
from weft.schedule import RANK, Collective, Draft, Schedule, lookup
from weft.schedule.steps import of_kind, substitute
from weft.sim.engine import replayed, simulate
from weft.sim.lower import lower
from weft.sim.lowered import LoweredSchedule, Work
from weft.sim.model import Model
from weft.sim.result import Simulated
from weft.sim.vectorised import values_of_ranks


@dataclass(frozen=True)
class Inefficiencies:
    """The losses of a schedule, as factors (1 means no loss), and the times from which they are computed.

    end_us: the time of the run. exposed_us: the part of it in which a rank does not compute.
    gemm_us, communication_us: the time of the undivided GEMMs alone, and of the undivided communication alone.
    ideal_us: the longer of these two times.
    gemm_decomposition, communication_decomposition: the time of the pieces, without concurrent work, divided by the
        time of the undivided operation. `communication_decomposition` is below 1 if the chunks take less time.
    gemm_contention, communication_contention: the time of the pieces in the schedule, divided by their time without
        concurrent work.
    """

    end_us: float
    ideal_us: float
    gemm_us: float
    communication_us: float
    gemm_decomposition: float
    communication_decomposition: float
    gemm_contention: float
    communication_contention: float
    exposed_us: float

    @property
    def over_ideal(self) -> float:
        """The time of the run divided by the ideal time."""
        return self.end_us / self.ideal_us


def inefficiencies(schedule: Schedule, problem: Problem, model: Model) -> Inefficiencies:
    """Return the losses of one run of `schedule`, a schedule of `problem`, in a series of consecutive runs. Losses of
    GEMMs are the losses of the rank that computes longest.
    """
    together = simulate(schedule, model, trusted=True)
    library_us = gemms_us(problem, model)
    alone_us, beside_us = _matmuls(together)
    whole_us = communication_us(problem, model)
    decomposed, contended = 1.0, 1.0
    if any(together.intervals_us("peer").values()):
        undisturbed = replayed(together.program.only_communication())
        decomposed = undisturbed.end_us / whole_us
        contended = _total(together) / _total(undisturbed)
    return Inefficiencies(
        end_us=together.end_us,
        ideal_us=max(library_us, whole_us),
        gemm_us=library_us,
        communication_us=whole_us,
        gemm_decomposition=alone_us / library_us,
        communication_decomposition=decomposed,
        gemm_contention=beside_us / alone_us,
        communication_contention=contended,
        exposed_us=together.exposed_us,
    )


@lru_cache(maxsize=8)  # called for each candidate of a problem
def gemms_us(problem: Problem, model: Model, *, launches: bool = True) -> float:
    """Return the time in us of the serial schedule's GEMMs, each alone, on the slowest rank. For experts, this is the
    time of torch's grouped GEMM or of weft's kernel, whichever is faster.

    launches: True to include the time of launches.
    """
    models = [model]
    if isinstance(problem, ExpertsProblem):
        models.append(replace(model, library_grouped=(model.grouped_efficiency, 1.0)))
    return min(max(_alone_us(lower(serial_of(problem), one), launches).values()) for one in models)


@lru_cache(maxsize=8)
def communication_us(problem: Problem, model: Model) -> float:
    """Return the time in us of the undivided communication without computation: by NCCL's collectives, or by copy
    engines that copy to all peers concurrently if that is possible and faster.
    """
    if problem.world_size == 1:
        return 0.0
    serial = serial_of(problem)
    times = [replayed(lower(serial, model).only_communication()).end_us]
    collectives = [step for lane in serial.lanes for step in of_kind(lane.steps, Collective)]
    if all(one.op in ("all_gather", "exchange") for one in collectives):
        times.append(simulate(_by_engines(serial, collectives), model, trusted=True).end_us)
    return min(times)


@lru_cache(maxsize=8)
def serial_of(problem: Problem) -> Schedule:
    """Return the serial schedule of `problem`."""
    return candidates(problem, ("serial",))[0].build()


def _by_engines(serial: Schedule, collectives: list[Collective]) -> Schedule:
    """Return a schedule in which copy engines send the bytes of `collectives` to all peers concurrently. It copies to
    arbitrary addresses: use it only for its time.
    """
    world = serial.world_size
    values = values_of_ranks(serial)
    d = Draft("puts", world)
    for i, one in enumerate(collectives):
        source = serial.buffer(one.src.buffer)
        sent: list[list[int]] = [
            [substitute(one.sent[to] if one.sent else one.src.rows, values[rank]) for to in range(world)]
            for rank in range(world)
        ]
        room = max(map(max, sent))
        x = d.buffer(f"x{i}", room, source.cols, source.dtype, "scratch")
        box = d.buffer(f"box{i}", room, source.cols, source.dtype, "symmetric")
        for distance in range(1, world):
            rows = (0, lookup([sent[rank][(rank + distance) % world] for rank in range(world)], RANK))
            to = peer(world, distance)
            d.lane(f"to +{distance}", "copy").copy(x.part(rows=rows), box.part(rows=rows, at=to))
    return d.schedule()


def _matmuls(result: Simulated) -> tuple[float, float]:
    """Return (sum of the matmuls' times alone, sum of their times in the simulation) for the rank whose matmuls take
    longest alone.
    """
    alone = _alone_us(result.program, launches=True)
    return max(
        (alone[rank], sum(end - start for start, end in ran)) for rank, ran in result.intervals_us("matmul").items()
    )


def _alone_us(program: LoweredSchedule, launches: bool) -> dict[int, float]:
    """Return {rank: sum of the times in us of its matmuls, each alone}.

    launches: True to include the time of their launches.
    """
    us = dict.fromkeys(program.ranks, 0.0)
    for lane in program.lanes:
        for task in lane.tasks:
            if isinstance(task, Work) and task.what == "matmul":
                us[lane.rank] += task.work_us + (task.latency_us if launches else 0.0)
    return us


def _total(result: Simulated) -> float:
    return sum(end - start for intervals in result.intervals_us("peer").values() for start, end in intervals)
