"""Predictions: the time of each candidate on the model of a machine.

A prediction depends on the mode:

    queued   a run among several consecutive runs
    graph    as queued, but collectives and the end of a run take longer
    single   a run on idle devices, with the CPU time of each step

If the CPU reads sizes in every run, a run takes at least the CPU time to issue it.

Every schedule is built, but not every schedule is simulated. A lower bound of a run's time is the time of its longest
lane, with each step timed alone. For a single run, the CPU time of all steps is another bound. Schedules are simulated
in ascending order of their bounds. A schedule is skipped if its bound exceeds `HOPELESS` times the best time so far.
Equal schedules with different names are simulated once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias, get_args

from weft.builders import Candidate, NotApplicableError, Problem, builders_of, candidates, named
from weft.builders.registry import outside_builders
from weft.errors import ScheduleError
from weft.plan.counts import Counts, Priced
from weft.schedule import ITEM_BYTES, Collective, Compute, Schedule, Step
from weft.schedule.verify import check_steps
from weft.sim import Inefficiencies, Model, inefficiencies
from weft.sim.costs import kept_cost
from weft.sim.losses import gemms_us
from weft.sim.memory import too_large
from weft.sim.model import MatmulShape
from weft.sim.run_time import Mode, dynamic_steps, reading_host_us, run_us
from weft.words import in_us

MODES: tuple[Mode, ...] = get_args(Mode)

AT_LEAST = "takes at least"
"""The prefix of `Row.why_not` for a candidate that was not simulated because it cannot be the fastest."""

SAME_AS = "the same schedule as "
"""The prefix of `Row.why_not` for a candidate that was simulated under another name."""

ROUGH = "rounds at every step: larger rounding error"
"""`Row.why_not` of a candidate that is only taken if pinned, because of its rounding (`Row.rough`)."""

HOPELESS = 2.5
"""Schedules whose lower bound exceeds this multiple of the fastest prediction are not simulated."""
HOPELESS_OF_MANY, HOPELESS_US = 1.1, 10.0
"""The limits for more than `_MANY_RANKS` ranks, in place of `HOPELESS`, because their simulations take long. The first
is a multiple of the fastest time that can be chosen, the second a difference from this time in us. Both are above the
margins within which the planner prefers simpler schedules.
"""
HOPELESS_FIRST = 1.5
"""The simulation of a schedule stops if its first run exceeds the limits `HOPELESS_OF_MANY` and `HOPELESS_US` by this factor.
Later runs are rarely faster.
"""

Progress: TypeAlias = Callable[[str, float], None]
"""A function that is called before each piece of work: (name of the work, fraction of all work done since the last
call).
"""


@dataclass(frozen=True)
class Row:
    """The results for one candidate.

    If it has no predicted time, `why_not` has the reason: it does not support the problem, or cannot be the fastest.
    """

    candidate: Candidate
    predicted_us: float | None = None
    measured_us: float | None = None
    why_not: str = ""
    """The reason why the candidate was not chosen; "" for the chosen candidate."""
    gemms: int = 0
    steps: int = 0
    """The number of steps of a rank, in all lanes."""
    collectives: int = 0
    """The number of NCCL collectives of a rank, in all lanes."""
    lanes: int = 1
    copies_by_kernel: int = 0
    """The number of copies by kernel on copy lanes."""
    reads_on_host: bool = False
    """True if the CPU reads sizes from the device during the run. A CUDA graph cannot capture such a run."""
    stops_host: bool = False
    """True if the CPU waits for sizes from the device before it issues later steps, so that the device's queue runs
    empty.
    """
    dynamic: int = 0
    """The number of copies, tiles and collectives with dynamic sizes."""
    rough: bool = False
    """True if partial sums are rounded to 16 bits or fewer, and serial's are not. The error is then larger than that of
    one GEMM, so such a schedule is used only if it is pinned.
    """
    stages: bool = False
    """True if kernels send or signal while they compute, by tiles or by stores in peers' memory. Predictions are least
    accurate for such schedules.
    """
    own_gemms: bool = False
    """True if weft's kernels compute the GEMMs. The comparison with serial, which uses cuBLAS, is then less certain."""
    matmuls: frozenset[MatmulShape] = frozenset()
    """The distinct cuBLAS GEMMs of a rank."""
    algorithms: tuple[str, ...] = ()
    """The algorithms that the simulator uses for the collectives, such as "all_gather by ring"."""
    problem: Problem | None = field(default=None, repr=False)
    model: Model | None = field(default=None, repr=False)

    @property
    def us(self) -> float | None:
        """The measured time in us if there is one, otherwise the predicted time; None if there is neither."""
        return self.predicted_us if self.measured_us is None else self.measured_us

    @property
    def host_us(self) -> float:
        """The approximate CPU time to issue a run, in us.

        Costs are multiples of the CPU time of a cuBLAS GEMM. A collective costs 1.5. In schedules with several lanes,
        each step (such as a signal or a copy) costs another 0.1. A run of any schedule except the serial schedule costs 0.6 more.
        Steps with dynamic sizes are issued from Python, and each takes `Model.host_late_us`.

        These numbers were fitted to about 45 shapes on two H100s (benchmarks/results/h100-never-slower.jsonl at commit
        6ab48730). On the 84 other shapes in that file's present version, measured times are 1.5 to 2.5 times the
        predicted times. The measured ratio to serial's CPU time is 0.83 to 1.07 times the predicted ratio (medians of
        five operators).
        """
        if self.model is None:
            return 0.0
        calls = self.gemms + 1.5 * self.collectives + (0.1 * self.steps if self.lanes > 1 else 0.0)
        calls += 0.6 * (self.candidate.name != "serial")
        if self.dynamic:
            return self.model.host_dynamic_us + self.dynamic * self.model.host_late_us
        return calls * self.model.host_call_us

    @cached_property
    def losses(self) -> Inefficiencies | None:
        """The losses of a queued run by decomposition (GEMMs are cut into pieces) and by contention (GEMMs and copies run
        concurrently), and its exposed communication. None without GEMMs.
        """
        if self.predicted_us is None or self.problem is None or self.model is None or not self.problem.has_work:
            return None
        if not gemms_us(self.problem, self.model):
            return None
        return inefficiencies(_schedule(self.problem, self.candidate), self.problem, self.model)


@dataclass(frozen=True)
class _Built:
    """A candidate with its schedule. If it has no schedule, `row.why_not` has the reason.

    lanes: for each lane of rank 0, {step with the sizes of its operands: number of occurrences}.
    even: True if sizes are known to be equal on all ranks.
    """

    row: Row
    schedule: Schedule | None = None
    lanes: tuple[Counter[Priced], ...] = ()
    even: bool = False


def predict(schedule: Schedule, model: Model, mode: Mode, at_least_us: float = 0.0, most_us: float = math.inf) -> float:
    """Return the predicted time of one run in us, but at least `at_least_us`.

    In mode "single", one run is simulated, otherwise two consecutive runs. If the first run takes longer than
    `most_us`, stop the simulation and return infinity.
    """
    return max(at_least_us, run_us(schedule, model, mode, most_us))


def least_us(problem: Problem, model: Model) -> float:
    """Return a lower bound in us for all schedules: the time of the undivided GEMMs.

    The bound uses whole GEMMs, because in a run the pieces of a GEMM are not faster than the whole GEMM. The predicted
    times of the pieces may sum to less, because short GEMMs are measured at a higher clock.
    """
    return gemms_us(problem, model, launches=False)


def library_gemms(problem: Problem) -> tuple[MatmulShape, ...]:
    """Return the cuBLAS GEMMs of a rank in the serial schedule, the largest first."""
    (serial,) = candidates(problem, ("serial",))
    return tuple(sorted(_examined(serial, serial.build()).row.matmuls, reverse=True))


def predicted_rows(
    problem: Problem,
    model: Model,
    mode: Mode,
    needed: frozenset[str],
    progress: Progress,
    among: frozenset[str] | None = None,
    *,
    every: bool = False,
) -> tuple[list[Row], dict[str, Schedule]]:
    """Return the results for each candidate, as a list of `Row`, and the schedules of the candidates, by name.

    needed: the names of candidates to simulate in any case.
    among: the names of candidates to consider. Default: all.
    every: True to simulate all candidates that fit in memory, even if they cannot be the fastest.
    """
    built = [
        replace(one, row=replace(one.row, why_not=why), schedule=None)
        if one.row.candidate.name not in needed and one.schedule is not None and (why := too_large(one.schedule, model))
        else one
        for one in _built(problem, progress, needed, among)
    ]
    schedules = {one.row.candidate.name: one.schedule for one in built if one.schedule is not None}
    if not problem.has_work:
        times: dict[str, float | str] = dict.fromkeys(schedules, 0.0)
    else:
        simulated = frozenset(schedules) if every else needed
        times = _times(problem, built, model, mode, simulated, progress)
    rows = [
        replace(
            one.row,
            problem=problem,
            model=model,
            rough=one.row.rough and not problem.rounds_sums,
            algorithms=_algorithms(one, model, problem.world_size),
        )
        for one in built
    ]
    return [_timed(row, times.get(row.candidate.name)) for row in rows], schedules


# -- schedules

_kept: dict[tuple, list[_Built]] = {}


def _built(
    problem: Problem, progress: Progress, needed: frozenset[str] = frozenset(), among: frozenset[str] | None = None
) -> list[_Built]:
    """Build the candidates in `among` (default: all that calls may use) and in `needed`.

    Of candidates with equal schedules, only the first keeps its schedule. Schedules of users' builders are checked,
    because the simulator does not notice inconsistent steps.
    """
    outside = outside_builders(type(problem))
    known = [one for one in candidates(problem) if (problem.takes(one) if among is None else one.name in among)]
    wanted = needed | (among or frozenset())
    known += [named(problem, name) for name in sorted(wanted - {candidate.name for candidate in known})]
    key = (problem, builders_of(type(problem)), tuple(candidate.name for candidate in known))
    if (kept := _kept.get(key)) is not None:
        return kept
    found: list[_Built] = []
    first: dict[tuple, list[tuple[Schedule, str]]] = {}  # `_quick_key` of a schedule -> (schedule, name)
    for number, candidate in enumerate(known, 1):
        progress(f"building {number} of {len(known)}: {candidate.name}", 0.5 / len(known))
        try:
            schedule = candidate.build()
            if candidate.builder in outside:
                check_steps(schedule)
        except (NotApplicableError, ScheduleError) as error:
            found.append(_Built(Row(candidate, why_not=str(error))))
            continue
        like = first.setdefault(_quick_key(schedule), [])
        if same := next((name for other, name in like if other == schedule), ""):
            found.append(_Built(Row(candidate, why_not=f"{SAME_AS}{same}")))
            continue
        like.append((schedule, candidate.name))
        found.append(_examined(candidate, schedule))
    _kept.clear()
    _kept[key] = found
    return found


def _quick_key(schedule: Schedule) -> tuple:
    """Return a hash key that is cheap to compute. Equal schedules have equal keys, and different schedules rarely have
    equal keys.
    """
    ends = tuple(
        (lane.name, lane.resource, len(lane.steps), lane.steps[:3], lane.steps[-3:]) for lane in schedule.lanes
    )
    return schedule.name, schedule.world_size, schedule.buffers, schedule.signals, ends


def _schedule(problem: Problem, candidate: Candidate) -> Schedule:
    kept = [one for key, built in _kept.items() if key[:2] == (problem, builders_of(type(problem))) for one in built]
    found = next((one.schedule for one in kept if one.row.candidate.name == candidate.name), None)
    return found or candidate.build()


def _examined(candidate: Candidate, schedule: Schedule) -> _Built:
    # Look only at rank 0: ranks differ at most in empty steps. Omit the bodies of tiles, because evaluating them takes
    # long.
    counts = Counts(schedule)
    lanes = [(lane.resource, counts.of_lane(lane.steps)) for lane in schedule.lanes]
    each = [(on, priced.step, priced.operands, times) for on, lane in lanes for priced, times in lane.items()]
    matmuls = [(operands, times) for _, step, operands, times in each if step.multiplies]
    row = Row(
        candidate,
        gemms=sum(times for _, times in matmuls) + counts.grouped,
        steps=counts.steps,
        lanes=len(lanes),
        collectives=sum(times for _, step, _, times in each if step.meets),
        copies_by_kernel=sum(times for on, step, _, times in each if on == "copy" and step.copies_by == "kernel"),
        reads_on_host=schedule.reads_on_host,
        dynamic=dynamic_steps(schedule),
        stops_host=schedule.stops_host,
        rough=any(
            isinstance(inner, Compute)
            and (inner.accumulate or inner.op == "addmm")
            and ITEM_BYTES[schedule.buffer(inner.regions[-1].buffer).dtype] <= 2
            for step in schedule.walk()
            for inner in (step, *step.inner)
        ),
        stages=any(map(_stages, schedule.walk()))
        or any(step.multiplies and ops[-1].at != 0 for _, step, ops, _ in each),
        own_gemms=counts.grouped > 0,
        matmuls=frozenset((o[-1].rows, o[-1].cols, o[0].cols, o[0].dtype) for o, _ in matmuls),
    )
    return _Built(row, schedule, tuple(lane for _, lane in lanes), counts.even)


def _stages(step: Step) -> bool:
    """True if the step is a kernel that sends or signals while it computes (`Row.stages`)."""
    kinds = {inner.kind for inner in step.inner if step.tile_kernel}
    return {"compute", "copy"} <= kinds or ("set" in kinds and any(inner.multiplies for inner in step.inner))


# -- times


def _timed(row: Row, time: float | str | None) -> Row:
    if isinstance(time, str):
        return replace(row, why_not=time)
    return row if time is None else replace(row, predicted_us=time)


def _times(
    problem: Problem, built: list[_Built], model: Model, mode: Mode, needed: frozenset[str], progress: Progress
) -> dict[str, float | str]:
    """Return {name: time in us, or the reason for not simulating the candidate}.

    A candidate is not simulated if its lower bound is far above the best time so far. In mode "graph", the bounds of
    capturable candidates are compared only with times of capturable candidates.
    """
    least = 0.0 if mode == "single" else least_us(problem, model)
    there = {one.row.candidate.name: (one, one.schedule) for one in built if one.schedule is not None}
    bounds = {name: max(least, _least_us(one, model, mode)) for name, (one, _) in there.items()}
    few = problem.world_size <= _MANY_RANKS
    best, best_captured = float("inf"), float("inf")
    most_host_us = 0.0  # the largest CPU time that a choice may have; known after serial, which is simulated first
    times: dict[str, float | str] = {}
    for number, name in enumerate(
        sorted(bounds, key=lambda name: (name not in needed, name != "serial", bounds[name])), 1
    ):
        progress(f"simulating {number} of {len(bounds)}: {name}", 0.5 / len(bounds))
        one, schedule = there[name]
        rough = one.row.rough and not problem.rounds_sums
        if not few and rough and name not in needed:
            times[name] = ROUGH  # no choice needs its time; it would only be shown
            continue
        fastest = best_captured if mode == "graph" and not one.row.reads_on_host else best
        hopeless = HOPELESS * fastest if few else HOPELESS_OF_MANY * fastest + HOPELESS_US
        if bounds[name] > hopeless and name not in needed:
            times[name] = f"{AT_LEAST} {in_us(bounds[name])}"
            continue
        host_us = replace(one.row, model=model).host_us if mode == "queued" and not one.row.reads_on_host else 0.0
        if not few and host_us > max(hopeless, most_host_us) and name not in needed:
            # A call takes at least its CPU time, so the candidate cannot be the fastest.
            times[name] = f"{AT_LEAST} {in_us(host_us)} of CPU time"
            continue
        most_us = math.inf if few or name in needed else HOPELESS_FIRST * hopeless
        us = predict(schedule, model, mode, least, most_us)
        if us == math.inf:
            times[name] = f"{AT_LEAST} {in_us(hopeless)}"
            continue
        times[name] = us
        if name == "serial":
            most_host_us = max(us, replace(one.row, model=model).host_us)
        if not few and (rough or host_us > max(us, most_host_us)):
            continue  # it cannot be chosen, so its time is no limit for others
        best = min(best, us)
        best_captured = best_captured if one.row.reads_on_host else min(best_captured, us)
    return times


def _algorithms(built: _Built, model: Model, world: int) -> tuple[str, ...]:
    """Return the algorithms of the candidate's collectives (`Row.algorithms`)."""
    if not built.row.collectives:
        return ()
    found: dict[str, None] = {}
    for step, operands in ((one.step, one.operands) for lane in built.lanes for one in lane):
        if isinstance(step, Collective) and (name := kept_cost(model, world, step, operands).algorithm):
            found[f"{step.op} by {name}"] = None
    return tuple(found)


def _least_us(built: _Built, model: Model, mode: Mode) -> float:
    """Return a lower bound on the time of a run, in us: the bound of `_lanes_us`. In mode "single", return the CPU time
    of all steps if this is longer.

    For more than `_MANY_RANKS` ranks, if the CPU reads sizes, the CPU time of a run is another bound.
    """
    assert built.schedule is not None
    host_us = built.row.steps * model.host_step_us if mode == "single" else 0.0
    if built.schedule.world_size > _MANY_RANKS:
        host_us = max(host_us, reading_host_us(built.schedule, model))
    return max(host_us, _lanes_us(built, model))


_MANY_RANKS = 8
"""The number of ranks above which lower bounds include the bytes on links, and the CPU time of reading sizes. This saves
more simulation time than it costs. With fewer ranks, more candidates are simulated, so that plans show their times.
"""


def _lanes_us(built: _Built, model: Model) -> float:
    """Return a lower bound on the time of a run, in us: the time of rank 0's longest lane, with each step timed alone.

    With more than `_MANY_RANKS` ranks there is a second bound: the time for which a rank's busiest resource, such as
    its links, is in use. If all ranks behave alike (`built.even`), peers use rank 0's resources as much as rank 0 uses
    the peers' resources. So rank 0's uses of peers' resources count too. Otherwise only its uses of its own resources
    count.
    """
    assert built.schedule is not None
    world, longest = built.schedule.world_size, 0.0
    busy_us: dict[str, float] = {}
    for lane in built.lanes:
        us = 0.0
        for priced, times in lane.items():
            found = kept_cost(model, world, priced.step, priced.operands)
            # Without the latency of copies by kernel, because one kernel may do several copies.
            us += times * (found.work_us + (0.0 if priced.step.copies_by == "kernel" else found.latency_us))
            for use in found.uses if world > _MANY_RANKS else ():
                kind, at = use.place
                if use.how == "share" and (built.even or at == 0):
                    busy_us[kind] = busy_us.get(kind, 0.0) + times * use.amount * found.work_us
        longest = max(longest, us)
    return max(longest, *busy_us.values(), 0.0)
