"""The choice: every candidate is simulated on the model of the machine, and the fastest is taken if it is clearly faster
than the serial schedule.

A prediction is the time of a run that follows another one ("queued", and "graph", in which the host takes no part either),
or of a run that begins on idle devices, with the host's time for each step ("single"). Where times have been measured
(`weft.plan.autotune`) they are compared instead, among themselves.

Building a schedule costs more than simulating it queued, so only simulations of single runs, which also need an order of
issue, are pruned: a run cannot be shorter than the steps of its longest lane, each alone, nor than the host needs to issue
its steps, and a candidate of which that is no better than the best so far is not simulated. Equal schedules under two names
are simulated once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from weft import env
from weft.plan import pin
from weft.schedule import (
    ITEM_BYTES,
    Candidate,
    Compute,
    Copy,
    NotApplicableError,
    Problem,
    Schedule,
    builders_of,
    candidates,
)
from weft.sim import Inefficiencies, Model, Simulated, inefficiencies, simulate
from weft.sim.lower import Work

Mode: TypeAlias = Literal["queued", "graph", "single"]
MODES: tuple[Mode, ...] = get_args(Mode)

CLEARLY, CLEARLY_LONG, LONG_US = 0.03, 0.06, 2000.0
CLEARLY_US: dict[Mode, float] = {"queued": 2.0, "graph": 5.0, "single": 2.0}
"""By how much another schedule must beat serial to be taken: in parts of serial's time (the larger part from LONG_US on) and in
microseconds, whichever is more. Long GEMMs run at the power limit, and what overlaps them lowers their clock: of a gain of 3
to 6% nothing was left, measured on H200. In a graph signals are kernels, of which the model knows nothing: 2 to 5 us a run."""

ALIKE = 0.06
"""Predictions that differ by less, in parts, are one to the planner: of these it takes the schedule with the fewest GEMMs, of
those the one with the fewest steps, and then the one in which copies leave the compute units alone."""

AT_LEAST = "takes at least"
"""How `Row.why_not` begins for a candidate that was not simulated, because it cannot be the fastest."""

_KEPT = 4096
"""Choices that are remembered: more than the shapes of a model, fewer than those of a service with every length."""


class NoOverlapWarning(UserWarning):
    """An operator runs without overlap, where overlap was possible."""


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
    rough: bool = False
    """Whether it adds up in 16 bits or fewer, and so errs more than one GEMM: it is taken only if it is pinned."""
    problem: Problem | None = field(default=None, repr=False)
    model: Model | None = field(default=None, repr=False)

    @property
    def us(self) -> float | None:
        return self.predicted_us if self.measured_us is None else self.measured_us

    @cached_property
    def losses(self) -> Inefficiencies | None:
        """Of a queued run: what decomposition and contention cost, and how much communication nothing hides."""
        if self.predicted_us is None or self.problem is None or self.model is None or not _has_work(self.problem):
            return None
        return inefficiencies(self.candidate.build(), self.problem, self.model)


@dataclass(frozen=True)
class Choice:
    problem: Problem
    mode: Mode
    candidate: Candidate
    schedule: Schedule
    predicted_us: float
    measured_us: float | None
    reason: str
    rows: tuple[Row, ...]
    """All candidates, the fastest first."""

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.candidate.name == name)

    def __str__(self) -> str:
        return self.reason


_choices: dict[tuple, tuple[Model, Choice]] = {}


def choose(
    problem: Problem,
    model: Model,
    *,
    mode: Mode = "queued",
    pinned: str | None = None,
    measured: Mapping[str, float] | None = None,
) -> Choice:
    """How to do `problem` on `model`; remembered for this very model.

    pinned: take the candidate of this name; by default the one that `weft.plan.use` names.
    measured: microseconds by candidate, serial among them: then the choice is between these.

    Warns (`NoOverlapWarning`), once in a process, when serial is taken though there are others. `ValueError` for a mode or
    name that is not known; `NotApplicableError`, which is one too, if the pinned one cannot do this.
    """
    pinned = pinned or pin.pinned()
    times = tuple(measured.items()) if measured else ()
    key = (problem, id(model), mode, pinned, times, builders_of(type(problem)))
    found = _choices.get(key)
    if found is not None:
        return found[1]
    choice = decide(problem, model, mode=mode, pinned=pinned, measured=measured)
    if len(_choices) >= _KEPT:
        _choices.pop(next(iter(_choices)), None)
    _choices[key] = model, choice  # holding the model keeps its id from being given to another
    if pinned is None:
        _warn_once(choice)
    return choice


def decide(
    problem: Problem,
    model: Model,
    *,
    mode: Mode,
    pinned: str | None = None,
    measured: Mapping[str, float] | None = None,
) -> Choice:
    """As `choose`, without memory, warning, or a look at `weft.plan.use`."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not known; use one of {', '.join(MODES)}")
    measured = measured or {}
    for name in measured:
        pin.named(problem, name)
    if pinned is not None:
        return _pinned_choice(problem, model, mode, pin.named(problem, pinned), measured)
    if measured and "serial" not in measured:
        raise ValueError(f"measured={dict(measured)}: measure serial too, it is what the others are compared with")
    rows, schedules = _predicted(problem, model, mode)
    rows = [replace(row, measured_us=measured.get(row.candidate.name)) for row in rows]
    chosen, reason = _best(rows, mode, bool(measured))
    rows = [replace(row, why_not=row.why_not or _why_not(row, chosen, bool(measured))) for row in rows]
    rows.sort(key=lambda row: (row.us is None, row.us or 0.0))
    assert chosen.predicted_us is not None
    return Choice(problem, mode, chosen.candidate, schedules[chosen.candidate.name], chosen.predicted_us,
                  chosen.measured_us, reason, tuple(rows))  # fmt: skip


def predict(schedule: Schedule, model: Model, mode: Mode, at_least_us: float = 0.0) -> float:
    """Microseconds of one run, and no less than that many."""
    if mode == "single":
        return max(at_least_us, simulate(schedule, model, mode="single").end_us)
    return max(at_least_us, simulate(schedule, model, runs=2).per_run_us)


def least_us(problem: Problem, model: Model) -> float:
    """No schedule is faster than the GEMMs whole: pieces that are predicted to be, by measured times of small GEMMs at a
    higher clock, are not."""
    return sum(model.matmul(problem.m, n, problem.k, problem.dtype).time_us for n in problem.n)


def _pinned_choice(
    problem: Problem, model: Model, mode: Mode, candidate: Candidate, measured: Mapping[str, float]
) -> Choice:
    try:
        schedule = candidate.build()
    except NotApplicableError as error:
        raise NotApplicableError(f"{candidate.name} cannot do {problem}: {error}") from error
    us = predict(schedule, model, mode, least_us(problem, model)) if _has_work(problem) else 0.0
    row = Row(candidate, us, measured.get(candidate.name), problem=problem, model=model)
    return Choice(problem, mode, candidate, schedule, us, row.measured_us, f"{candidate.name} is pinned", (row,))


def _predicted(problem: Problem, model: Model, mode: Mode) -> tuple[list[Row], dict[str, Schedule]]:
    """A row for each candidate, those with the same schedule after the first one without its own simulation."""
    rows: list[Row] = []
    schedules: dict[str, Schedule] = {}
    first: dict[Schedule, str] = {}
    for candidate in candidates(problem):
        try:
            schedule = candidate.build()
        except NotApplicableError as error:
            rows.append(Row(candidate, why_not=str(error)))
            continue
        if (same := first.setdefault(schedule, candidate.name)) != candidate.name:
            rows.append(Row(candidate, why_not=f"the same schedule as {same}"))
            continue
        schedules[candidate.name] = schedule
        rows.append(_row(candidate, schedule, problem, model))
    if not _has_work(problem):
        times: dict[str, float | str] = dict.fromkeys(schedules, 0.0)
    elif mode == "single":
        times = _single_times(schedules, model)
    else:
        least = least_us(problem, model)
        times = {name: predict(schedule, model, mode, least) for name, schedule in schedules.items()}
    return [_timed(row, times.get(row.candidate.name)) for row in rows], schedules


def _row(candidate: Candidate, schedule: Schedule, problem: Problem, model: Model) -> Row:
    lanes = schedule.of_rank(0)  # other ranks differ in empty steps at most
    steps = [(lane.resource, step) for lane in lanes for step in lane.steps]
    return Row(
        candidate,
        gemms=sum(isinstance(step, Compute) and step.op == "matmul" for _, step in steps),
        steps=len(steps),
        copies_by_kernel=sum(on == "copy" and isinstance(step, Copy) and step.by == "kernel" for on, step in steps),
        rough=_is_rough(schedule),
        problem=problem,
        model=model,
    )


def _is_rough(schedule: Schedule) -> bool:
    small = {buffer.name for buffer in schedule.buffers if ITEM_BYTES[buffer.dtype] <= 2}
    steps = (step for lane in schedule.of_rank(0) for step in lane.steps)
    return any(isinstance(step, Compute) and step.accumulate and step.out.buffer in small for step in steps)


def _timed(row: Row, time: float | str | None) -> Row:
    if isinstance(time, str):
        return replace(row, why_not=time)
    return row if time is None else replace(row, predicted_us=time)


def _single_times(schedules: dict[str, Schedule], model: Model) -> dict[str, float | str]:
    """Microseconds of single runs, or why there is no need to know; those first that do best when queued."""
    queued = {name: simulate(schedule, model) for name, schedule in schedules.items()}
    best = float("inf")
    times: dict[str, float | str] = {}
    for name in sorted(queued, key=lambda name: (name != "serial", queued[name].end_us)):
        bound = _least_us(queued[name], model)
        if bound >= best:
            times[name] = f"{AT_LEAST} {bound:.1f} us"
            continue
        times[name] = us = predict(schedules[name], model, "single")
        best = min(best, us)
    return times


def _least_us(queued: Simulated, model: Model) -> float:
    """A single run is no shorter: the longest lane's steps each alone, and the host's time for a rank's steps."""
    program = queued.program
    alone = max(sum(t.latency_us + t.work_us for t in lane.tasks if isinstance(t, Work)) for lane in program.lanes)
    steps = max(sum(len(lane.tasks) for lane in program.lanes if lane.rank == rank) for rank in program.ranks)
    return max(alone, steps * model.host_step_us)


def _best(rows: list[Row], mode: Mode, measured: bool) -> tuple[Row, str]:
    """The row to take, and the reason in a sentence."""
    timed = [
        row for row in rows if row.us is not None and not row.rough and (row.measured_us is not None or not measured)
    ]
    serial = next((row for row in timed if row.candidate.name == "serial"), None)
    fastest = min(timed, key=lambda row: row.us or 0.0)
    how = "measured" if measured else "predicted"
    assert fastest.us is not None
    if serial is None or serial.us is None:
        return (
            fastest,
            f"{fastest.candidate.name} is the fastest: {fastest.us:.1f} us {how}; there is no serial schedule",
        )
    if fastest is serial:
        others = [row.us for row in timed if row is not serial and row.us is not None]
        pruned = any(row.why_not.startswith(AT_LEAST) for row in rows)
        than = "; all others take longer for certain" if pruned else "; nothing else can do this"
        than = f", the best other one {min(others):.1f} us" if others else than
        return serial, f"serial is the fastest: {serial.us:.1f} us {how}{than}"
    clearly, clearly_us = (CLEARLY if serial.us < LONG_US else CLEARLY_LONG), CLEARLY_US[mode]
    if serial.us - fastest.us < max(clearly * serial.us, clearly_us):
        return serial, (
            f"nothing is clearly faster than serial, {serial.us:.1f} us {how}: {fastest.candidate.name} at "
            f"{fastest.us:.1f} us is not by {clearly:.0%} and {clearly_us:g} us"
        )
    best, among = fastest, "is the fastest"
    if not measured:
        alike = [row for row in timed if row is not serial and (row.us or 0.0) <= fastest.us * (1 + ALIKE)]
        best = min(alike, key=lambda row: (row.gemms, row.steps, row.copies_by_kernel, row.us))
        if best is not fastest:
            among = f"is the simplest of {len(alike)} that are fastest, within {ALIKE:.0%} of each other"
    assert best.us is not None
    return best, (
        f"{best.candidate.name} {among}: {best.us:.1f} us {how}, {1 - best.us / serial.us:.0%} less than serial's "
        f"{serial.us:.1f} us"
    )


def _why_not(row: Row, chosen: Row, measured: bool) -> str:
    if row is chosen or row.us is None or chosen.us is None:
        return ""
    if measured and row.measured_us is None:
        return "not measured"
    if row.rough:
        return "rounds at every step, errs more"
    if row.us < chosen.us:
        serial = chosen.candidate.name == "serial"
        return (
            "not clearly faster than serial" if serial else f"{row.gemms} GEMMs, {row.steps} steps, not clearly faster"
        )
    return f"{row.us / chosen.us - 1:.1%} slower" if chosen.us else ""


def _has_work(problem: Problem) -> bool:
    return problem.m > 0 and problem.k > 0 and sum(problem.n) > 0


_warned = False


def _warn_once(choice: Choice) -> None:
    global _warned
    others = [row for row in choice.rows if row.us is not None and row.candidate.name != "serial"]
    if _warned or choice.candidate.name != "serial" or not others or env.quiet():
        return
    _warned = True
    p = choice.problem
    warnings.warn(
        f"weft runs {p.name} without overlap, [{p.m}, {p.k}] @ [{p.k}, {'+'.join(map(str, p.n))}] {p.dtype} on "
        f"{p.world_size} ranks, {choice.mode}: {choice.reason}. Said once in a process; WEFT_QUIET=1 says nothing, "
        "weft.plan.explain everything",
        NoOverlapWarning,
        stacklevel=3,
    )
