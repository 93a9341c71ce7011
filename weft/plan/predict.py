"""What each candidate takes on the model of a machine: every schedule is built, and simulated unless it is hopeless.

A prediction is the time of a run that follows another one ("queued"; "graph", where kernels take the part of stream
operations), or of a run that begins on idle devices, with the host's time for each step ("single").

A run cannot be shorter than the steps of one lane, each alone, and a single one not than the host needs to issue its steps.
So schedules are simulated by rising bounds, and those not at all of which the bound is no better than the best single run so
far, or `HOPELESS` times the best of those in a row: what comes near is shown with its time. Equal schedules under two names
are simulated once. Those of the last problem are kept, as a problem is often decided several times: for calls and for graphs,
before and after its GEMMs were measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from weft.schedule import (
    ITEM_BYTES,
    MATMULS,
    Buffer,
    Candidate,
    Collective,
    Compute,
    Copy,
    For,
    NotApplicableError,
    Problem,
    Schedule,
    Step,
    Tiles,
    builders_of,
    candidates,
)
from weft.schedule.schedule import is_empty
from weft.schedule.steps import unrolled
from weft.sim import Inefficiencies, Model, Simulated, inefficiencies, simulate
from weft.sim.costs import Operand, cost
from weft.sim.losses import gemms_us
from weft.sim.lower import Work
from weft.sim.model import MatmulShape
from weft.sim.numbers import values_of_ranks

Mode: TypeAlias = Literal["queued", "graph", "single"]
MODES: tuple[Mode, ...] = get_args(Mode)

AT_LEAST = "takes at least"
"""How `Row.why_not` begins for a candidate that was not simulated, because it cannot be the fastest."""

HOPELESS = 2.5
"""Times the fastest prediction: what takes longer for certain is not simulated."""

Progress: TypeAlias = Callable[[str, float], None]
"""Told what is done next, and which part of everything was done before."""


@dataclass(frozen=True)
class Row:
    """What is known of one candidate. Without a predicted time it has no schedule, or cannot be the fastest: `why_not`."""

    candidate: Candidate
    predicted_us: float | None = None
    measured_us: float | None = None
    why_not: str = ""
    """Empty for the one that is taken."""
    gemms: int = 0
    steps: int = 0
    """Of a rank, all lanes together."""
    copies_by_kernel: int = 0
    """On lanes beside the computing ones."""
    reads_on_host: bool = False
    """Whether no CUDA graph can capture it, as the host takes sizes from the device in between."""
    rough: bool = False
    """Whether it adds up in 16 bits or fewer, and so errs more than one GEMM: it is taken only if it is pinned."""
    matmuls: frozenset[MatmulShape] = frozenset()
    """The different GEMMs of a rank that are the library's."""
    problem: Problem | None = field(default=None, repr=False)
    model: Model | None = field(default=None, repr=False)

    @property
    def us(self) -> float | None:
        return self.predicted_us if self.measured_us is None else self.measured_us

    @cached_property
    def losses(self) -> Inefficiencies | None:
        """Of a queued run: what decomposition and contention cost, and how much communication nothing hides."""
        if self.predicted_us is None or self.problem is None or self.model is None or not self.problem.has_work:
            return None
        return inefficiencies(_schedule(self.problem, self.candidate), self.problem, self.model)


@dataclass(frozen=True)
class _Priced:
    """A step of a rank, without its place: what its cost depends on."""

    step: Compute | Copy | Collective
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class _Built:
    """A candidate with its schedule, or in `row.why_not` why it has none; and of each lane of a rank how often it has which
    step."""

    row: Row
    schedule: Schedule | None = None
    lanes: tuple[Counter[_Priced], ...] = ()


def predict(schedule: Schedule, model: Model, mode: Mode, at_least_us: float = 0.0) -> float:
    """Microseconds of one run, and no less than that many."""
    if mode == "single":
        us = simulate(schedule, model, mode=mode).end_us
    else:
        us = simulate(schedule, model, mode=mode, runs=2).per_run_us
    us += model.graph_run_us if mode == "graph" and schedule.signals else 0.0
    return max(at_least_us, us + (model.kernel_copy_beside_us if _kernels_copy_beside_gemms(schedule) else 0.0))


def _kernels_copy_beside_gemms(schedule: Schedule) -> bool:
    multiplies = any(isinstance(step, Compute) and step.op in MATMULS for step in _steps(schedule))
    copying = (step for lane in schedule.lanes if lane.resource == "copy" for step in lane.steps)
    return multiplies and any(isinstance(step, Copy) and step.by == "kernel" for step in copying)


def least_us(problem: Problem, model: Model) -> float:
    """No schedule is faster than the GEMMs whole: pieces that are predicted to be, by measured times of small GEMMs at a
    higher clock, are not."""
    return gemms_us(problem, model, launches=False)


def library_gemms(problem: Problem) -> tuple[MatmulShape, ...]:
    """The whole GEMMs of a rank that are the library's, the largest first: those of the serial schedule."""
    (serial,) = candidates(problem, ("serial",))
    return tuple(sorted(_examined(serial, serial.build()).row.matmuls, reverse=True))


def predicted_rows(
    problem: Problem, model: Model, mode: Mode, needed: frozenset[str], progress: Progress
) -> tuple[list[Row], dict[str, Schedule]]:
    """A row for each candidate, and the schedules by name. needed: those that are simulated in any case."""
    built = _built(problem, progress)
    schedules = {one.row.candidate.name: one.schedule for one in built if one.schedule is not None}
    if not problem.has_work:
        times: dict[str, float | str] = dict.fromkeys(schedules, 0.0)
    elif mode == "single":
        times = _single_times(schedules, model, needed, progress)
    else:
        times = _times_in_a_row(problem, built, model, mode, needed, progress)
    rows = [replace(one.row, problem=problem, model=model) for one in built]
    return [_timed(row, times.get(row.candidate.name)) for row in rows], schedules


# -- schedules

_kept: dict[tuple, list[_Built]] = {}


def _built(problem: Problem, progress: Progress) -> list[_Built]:
    """All candidates, those with the same schedule after the first one without it."""
    key = (problem, builders_of(type(problem)))
    if (kept := _kept.get(key)) is not None:
        return kept
    found: list[_Built] = []
    first: dict[Schedule, str] = {}
    known = candidates(problem)
    for candidate in known:
        progress(f"building {candidate.name}", 0.5 / len(known))
        try:
            schedule = candidate.build()
        except NotApplicableError as error:
            found.append(_Built(Row(candidate, why_not=str(error))))
            continue
        if (same := first.setdefault(schedule, candidate.name)) != candidate.name:
            found.append(_Built(Row(candidate, why_not=f"the same schedule as {same}")))
            continue
        found.append(_examined(candidate, schedule))
    _kept.clear()
    _kept[key] = found
    return found


def _schedule(problem: Problem, candidate: Candidate) -> Schedule:
    kept = _kept.get((problem, builders_of(type(problem))), [])
    found = next((one.schedule for one in kept if one.row.candidate.name == candidate.name), None)
    return found or candidate.build()


def _examined(candidate: Candidate, schedule: Schedule) -> _Built:
    # Of rank 0, as others differ in empty steps at most. What a tile does is left out: it takes long to write in numbers.
    values, grouped = values_of_ranks(schedule)[0], _with_matmul(schedule)
    in_numbers = [(lane, unrolled(_without_bodies(lane.steps), values)) for lane in schedule.lanes]
    lanes = [(lane.resource, [step for step in steps if not is_empty(step)]) for lane, steps in in_numbers]
    steps = [(resource, step) for resource, of_lane in lanes for step in of_lane]
    buffers = {buffer.name: buffer for buffer in schedule.buffers}
    matmuls = [step for _, step in steps if isinstance(step, Compute) and step.op in MATMULS]
    row = Row(
        candidate,
        gemms=len(matmuls) + sum(isinstance(step, Tiles) and step.kernel in grouped for _, step in steps),
        steps=len(steps),
        copies_by_kernel=sum(on == "copy" and isinstance(step, Copy) and step.by == "kernel" for on, step in steps),
        reads_on_host=schedule.reads_on_host,
        rough=any(
            isinstance(step, Compute) and step.accumulate and ITEM_BYTES[buffers[step.out.buffer].dtype] <= 2
            for _, step in steps
        ),
        matmuls=frozenset(_shape(step, buffers) for step in matmuls),
    )
    return _Built(row, schedule, tuple(_counted(of_lane, buffers, schedule.world_size) for _, of_lane in lanes))


def _without_bodies(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return tuple(
        replace(step, body=_without_bodies(step.body) if isinstance(step, For) else ())
        if isinstance(step, For | Tiles)
        else step
        for step in steps
    )


def _with_matmul(schedule: Schedule) -> set[str]:
    """The kernels whose tiles multiply."""
    return {
        step.kernel
        for step in _steps(schedule)
        if isinstance(step, Tiles) and any(isinstance(one, Compute) and one.op == "matmul" for one in step.body)
    }


def _steps(schedule: Schedule) -> Iterator[Step]:
    """Once each, however often loops turn, and loops too."""
    left = [step for lane in schedule.lanes for step in lane.steps]
    while left:
        step = left.pop()
        left += step.body if isinstance(step, For) else ()
        yield step


def _shape(step: Compute, buffers: Mapping[str, Buffer]) -> MatmulShape:
    a, out = step.inputs[0], step.out
    return int(out.rows), int(out.cols), int(a.cols), buffers[a.buffer].dtype


def _counted(steps: Sequence[Step], buffers: Mapping[str, Buffer], world_size: int) -> Counter[_Priced]:
    """Of a lane of rank 0."""
    counts: Counter[_Priced] = Counter()
    plain: dict[tuple, _Priced] = {}
    for step in steps:
        if isinstance(step, Compute | Copy | Collective):
            regions = (*step.inputs, step.out) if isinstance(step, Compute) else (step.src, step.dst)
            operands = tuple(
                Operand(
                    int(r.rows),
                    int(r.cols),
                    buffers[r.buffer].dtype,
                    int(r.at) % world_size,
                    r.cols == buffers[r.buffer].cols,
                )
                for r in regions
            )
            if isinstance(step, Collective) and step.sent:
                operands += tuple(operands[0]._replace(rows=int(n), at=to) for to, n in enumerate(step.sent))
            kind = (type(step), *(getattr(step, name, None) for name in ("op", "by", "accumulate")), operands)
            counts[plain.setdefault(kind, _Priced(step, operands))] += 1
    return counts


# -- times


def _timed(row: Row, time: float | str | None) -> Row:
    if isinstance(time, str):
        return replace(row, why_not=time)
    return row if time is None else replace(row, predicted_us=time)


def _times_in_a_row(
    problem: Problem, built: list[_Built], model: Model, mode: Mode, needed: frozenset[str], progress: Progress
) -> dict[str, float | str]:
    """Microseconds of queued or captured runs, or why there is no need to know: compared with those of candidates that graphs
    can capture, too, where it is one."""
    least = least_us(problem, model)
    bounds = {one.row.candidate.name: max(least, _lanes_us(one, model)) for one in built if one.schedule is not None}
    schedules = {one.row.candidate.name: one.schedule for one in built if one.schedule is not None}
    on_host = {one.row.candidate.name: one.row.reads_on_host for one in built}
    best, best_captured = float("inf"), float("inf")
    times: dict[str, float | str] = {}
    for name in sorted(bounds, key=lambda name: (name not in needed, bounds[name])):
        progress(f"simulating {name}", 0.5 / len(bounds))
        if bounds[name] > HOPELESS * (best if on_host[name] else best_captured) and name not in needed:
            times[name] = f"{AT_LEAST} {bounds[name]:.1f} us"
            continue
        times[name] = us = predict(schedules[name], model, mode, least)
        best = min(best, us)
        best_captured = best_captured if on_host[name] else min(best_captured, us)
    return times


def _lanes_us(built: _Built, model: Model) -> float:
    """A run is no shorter: the longest lane's steps, each alone. Latencies of copies by kernel are not counted, since one
    kernel may do several of them."""
    assert built.schedule is not None
    longest = 0.0
    for lane in built.lanes:
        us = 0.0
        for priced, times in lane.items():
            found = cost(model, built.schedule.world_size, priced.step, priced.operands)
            one_kernel = isinstance(priced.step, Copy) and priced.step.by == "kernel"
            us += times * (found.work_us + (0.0 if one_kernel else found.latency_us))
        longest = max(longest, us)
    return longest


def _single_times(
    schedules: dict[str, Schedule], model: Model, needed: frozenset[str], progress: Progress
) -> dict[str, float | str]:
    """Microseconds of single runs, or why there is no need to know; those first that do best when queued."""
    queued = {name: simulate(schedule, model) for name, schedule in schedules.items()}
    best = float("inf")
    times: dict[str, float | str] = {}
    for name in sorted(queued, key=lambda name: (name not in needed, queued[name].end_us)):
        progress(f"simulating {name}", 0.5 / len(queued))
        bound = _least_single_us(queued[name], model)
        if bound >= best and name not in needed:
            times[name] = f"{AT_LEAST} {bound:.1f} us"
            continue
        times[name] = us = predict(schedules[name], model, "single")
        best = min(best, us)
    return times


def _least_single_us(queued: Simulated, model: Model) -> float:
    """A single run is no shorter: the longest lane's steps each alone, and the host's time for a rank's steps."""
    program = queued.program
    alone = max(sum(t.latency_us + t.work_us for t in lane.tasks if isinstance(t, Work)) for lane in program.lanes)
    steps = max(sum(len(lane.tasks) for lane in program.lanes if lane.rank == rank) for rank in program.ranks)
    return max(alone, steps * model.host_step_us)
