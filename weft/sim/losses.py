"""Where a schedule's time goes: what it loses by cutting operations up, and what they lose by running beside each other.

    decomposition   a schedule's GEMMs one after the other, each alone, over the one library GEMM;
                    its communication alone, nothing computing, over the fastest way to do it whole
    contention      what the same steps take in the schedule, over what they take alone
    exposed         time in which a rank has nothing to compute
    ideal           max(library GEMM, communication done whole): nothing cut, nothing disturbed, all hidden

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV and figure 6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.schedule import RANK, Collective, Copy, Draft, For, Problem, Schedule, Set, Step, Wait, lookup
from weft.schedule.operands import peer, starts
from weft.sim.engine import simulate
from weft.sim.lower import Work
from weft.sim.model import Model
from weft.sim.result import Simulated


@dataclass(frozen=True)
class Inefficiencies:
    """Losses are factors, 1 being none; the decomposition of communication is below 1 where cutting it up is faster."""

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
        return self.end_us / self.ideal_us


def inefficiencies(schedule: Schedule, problem: Problem, model: Model) -> Inefficiencies:
    """Of one queued run of `schedule`, which does `problem`; of the rank that computes longest."""
    together = simulate(schedule, model)
    library_us = sum(model.matmul_us(problem.m, n, problem.k, problem.dtype) for n in problem.n)
    alone_us, beside_us = _matmuls(together)
    whole_us = communication_us(problem, model)
    decomposed, contended = 1.0, 1.0
    if any(together.intervals_us("peer").values()):
        undisturbed = simulate(_only_communication(schedule), model)
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


def communication_us(problem: Problem, model: Model) -> float:
    """Of the gather alone, whole: by the library, or by copy engines to all peers at once, whichever is faster."""
    if problem.world_size == 1:
        return 0.0
    library, engines = Draft("gather", problem.world_size), Draft("puts", problem.world_size)
    for draft in (library, engines):
        x = draft.buffer("x", lookup(problem.rows, RANK), problem.k, problem.dtype, "input")
        box = draft.buffer("box", problem.m, problem.k, problem.dtype, "symmetric")
        if draft is library:
            draft.lane("gather").all_gather(x.part(), box.part())
        else:
            rows = (lookup(starts(problem.rows), RANK), lookup(problem.rows, RANK))
            for distance in range(1, problem.world_size):
                to = peer(problem.world_size, distance)
                draft.lane(f"to +{distance}", "copy").copy(x.part(), box.part(rows=rows, at=to))
    return min(simulate(draft.schedule(), model).end_us for draft in (library, engines))


def _matmuls(result: Simulated) -> tuple[float, float]:
    """(each alone, as they ran) of the rank whose matmuls take longest alone."""
    by_rank: list[tuple[float, float]] = []
    for rank, ran in result.intervals_us("matmul").items():
        tasks = [task for lane in result.program.lanes if lane.rank == rank for task in lane.tasks]
        alone = sum(t.latency_us + t.work_us for t in tasks if isinstance(t, Work) and t.what == "matmul")
        by_rank.append((alone, sum(end - start for start, end in ran)))
    return max(by_rank)


def _total(result: Simulated) -> float:
    return sum(end - start for intervals in result.intervals_us("peer").values() for start, end in intervals)


def _only_communication(schedule: Schedule) -> Schedule:
    return replace(schedule, lanes=tuple(replace(lane, steps=_communicating(lane.steps)) for lane in schedule.lanes))


def _communicating(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    kept: list[Step] = []
    for step in steps:
        if isinstance(step, For):
            kept.append(replace(step, body=_communicating(step.body)))
        elif isinstance(step, Set | Wait | Collective) or (isinstance(step, Copy) and step.src.at != step.dst.at):
            kept.append(step)
    return tuple(kept)
