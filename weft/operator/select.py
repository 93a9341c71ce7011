"""The choice of a schedule for a call.

    pinned by name       this schedule
    "heuristic"          the pick of the static heuristic in the FiCCO paper (`weft.plan.heuristic`)
    default              the planner's choice on a machine that weft knows; on an unknown machine, the fastest in a measurement
    "autotune"           the fastest in a measurement, on every machine

weft knows a machine if it has a performance model of it (`weft.operator.this_machine`): every NVIDIA GPU, and AMD GPUs
with a machine file. On a known machine, the first call with weights of a new shape times their GEMMs
(`weft.plan.gemms`), which takes about 60 ms of device time. After that, the planner needs milliseconds for a new number
of rows (`weft.plan.nearby`). "autotune" also times whole schedules. Later calls use cached times instead of
predictions, with or without "autotune".

All ranks must use the same schedule. So ranks compare pinned names, use the plan of one rank, and compare schedules by
the slowest rank's times. If ranks have different models of GPUs, all use the plan of the rank with the slowest GPU
(`this_machine.planning_rank`).

On a known machine "autotune" measures the time that the planner predicts: the mean of several calls in a row, while the
CPU is ahead of the GPU (mode "queued"). Under CUDA graphs the CPU does not delay the GPU either, so these times are
also used for graphs. But collectives take longer in a graph than in these measurements. So for graphs, the measured
times of schedules with collectives are too short. The error is largest for the serial schedule. weft does not capture
graphs to measure them: after a capture, NCCL or cuBLAS may launch differently until the process ends. On an unknown
machine single calls are timed, including CPU time.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar, cast

import torch

from weft import caller, env, plan
from weft.builders import Candidate, NotApplicableError, Problem, candidates, named
from weft.builders.registry import cannot_do
from weft.errors import ScheduleError
from weft.operator import measure, this_machine
from weft.operator.between_hosts import choose_between_hosts
from weft.plan.choose import decide, warn_once
from weft.plan.nearby import CONTENDERS
from weft.runtime.executor import Executor
from weft.runtime.executors import Tensors, executor
from weft.schedule import Schedule
from weft.schedule.verify import verify
from weft.sim import Model
from weft.symm import Communicator

_MOST_NEAR = 1024
_ALIKE = 2  # size buckets: a choice by measurement applies to sizes from half to twice the measured size
_MODES: tuple[plan.Mode, plan.Mode] = ("queued", "graph")
_ROUNDS_TO_CONFIRM = 3
_CLEARLY, _CLEARLY_US = {"cpu": 0.15, "cuda": 0.07}, {"cpu": 300.0, "cuda": 0.0}
"""The smallest saving for which a schedule replaces serial, by type of device: a fraction of serial's time, and
microseconds. Both must be exceeded.

A few timed runs cannot resolve a smaller gain. In a user's program, threads that have slept for long wake more slowly
than in these runs. If ranks share cores, times vary by a tenth from run to run.
"""


def check_name(name: str, p: Problem) -> None:
    """Raise `ValueError` unless `name` is a schedule that supports `p`, "autotune" or "heuristic"."""
    if plan.names_schedule(name):
        candidate = named(p, name)
        try:
            candidate.build()
        except NotApplicableError as error:
            raise cannot_do(name, p, error) from error


def wanted_schedule(name: str | None, p: Problem) -> str:
    """Return a text that names the pinned schedule, for the comparison between ranks. Without a pinned schedule, the
    text lists the builders that the user has registered (`weft.builders.builder`).
    """
    said = f"schedule {name or 'chosen'}"
    if plan.names_schedule(name):
        return said
    others = [candidate.name for candidate in plan.candidates_from_outside(p)]
    return f"{said}, with registered builders that are not weft's own: {', '.join(others)}" if others else said


@dataclass(frozen=True)
class Chosen:
    """The executors of the chosen schedules: one for usual calls, one for calls under CUDA graph capture. None in place of an
    executor means that such calls run unfused.
    """

    usual: Executor | None
    captured: Executor | None
    names: tuple[str, str] = ("serial", "serial")
    """The names of the schedules for usual and for captured calls."""

    @property
    def was_captured(self) -> bool:
        return any(one.was_captured for one in self.executors())

    @property
    def nbytes(self) -> int:
        """The symmetric GPU memory of the executors in bytes."""
        return sum(one.nbytes for one in self.executors())

    def close(self) -> None:
        for one in self.executors():
            one.close()

    def executors(self) -> list[Executor]:
        return list({id(one): one for one in (self.usual, self.captured) if one is not None}.values())


def choose(
    p: Problem,
    comm: Communicator,
    tensors: Tensors,
    pinned: str | None,
    *,
    deadline_s: float | None,
    serial: Callable[[], object] | None = None,
    remembered: bool = False,
    what: str = "",
) -> Chosen:
    """Choose a schedule for `p`, and return its executors on this rank. All ranks must make this call.

    A group on several hosts runs unfused, or by a schedule of collectives and messages (`weft.operator.between_hosts`).

    Raises `ScheduleError` on every rank if a user's builder made the chosen schedule, and `verify` finds a fault in it.

    tensors: the tensors of the first call, on which candidates are measured and warmed up.
    pinned: a schedule's name, "autotune", "heuristic" or None.
    serial: a function that runs the operator unfused, to be timed. None: an executor runs the serial schedule.
    remembered: True if any rank has cached times of exactly this problem.
    what: the call, for messages.
    """
    like, measured = p.chosen_like, tensors
    if like is not p:
        measured = {b.name: tensors[b.name] for b in named(like, "serial").build().buffers if b.name in tensors}
    if not comm.all_mapped:
        made_of = partial(_built, p, comm=comm)
        pinned = choose_between_hosts(p, comm, tensors, pinned, deadline_s=deadline_s, serial=serial, built=made_of)
        if not pinned:
            return Chosen(None, None)
    if pinned == plan.HEURISTIC:
        pinned = _by_heuristic(p, comm, deadline_s)
    if pinned not in (None, plan.AUTOTUNE):
        names = (pinned, pinned)
    elif pinned is None and comm.device.type == "cuda" and not p.tried_on_gpus:
        names = "serial", "serial"
    else:
        this_machine.know_machine(comm, deadline_s)
        if pinned is not None or remembered or not p.has_work:
            names = _names(like, comm, measured, pinned, deadline_s, serial)
        else:
            names = _names_near(like, comm, measured, deadline_s, serial)
    try:
        schedules = _schedules(p, names, comm)
    except NotApplicableError as error:  # the choice for neighbouring sizes does not support this size
        if pinned is not None:
            raise cannot_do(pinned, p, error) from error
        schedules = _schedules(p, names := _names_near(like, comm, measured, deadline_s, serial, itself=True), comm)
    captured = names[1] if names[1] in schedules and not schedules[names[1]].reads_on_host else None
    made = {
        name: executor(schedules[name], comm, p, measure.shared_name(p, named(p, name)), what)
        for name in schedules
        if name in (names[0], captured)
    }
    chosen = Chosen(made.get(names[0]), None if captured is None else made[captured], (names[0], captured or "serial"))
    if chosen.captured is not None and chosen.captured is not chosen.usual:
        chosen.captured.run(tensors, deadline_s=deadline_s)  # the first run must not be captured
    return chosen


_said: set[str] = set()


def _by_heuristic(p: Problem, comm: Communicator, deadline_s: float | None) -> str | None:
    """Return the name of the schedule that FiCCO's heuristic picks on the first rank. All ranks must make this call.

    Return None if the schedule cannot run, and warn once per operator and reason.
    """
    mine = plan.pick_here(p, this_machine.device_name(comm.device))
    picked, why = comm.all_gather(mine, what=f"the heuristic's picks for {p}", deadline_s=deadline_s)[0]
    text = f'schedule="heuristic", {p.title}: FiCCO\'s heuristic is not followed, because {why}; weft uses its default choice'
    if picked is None and text not in _said and not env.quiet():
        _said.add(text)
        caller.warn(text)
    return picked


def _schedules(p: Problem, names: Names, comm: Communicator) -> dict[str, Schedule]:
    return {name: _built(p, named(p, name), comm) for name in dict.fromkeys(names) if name != "serial"}


T = TypeVar("T")
Names: TypeAlias = tuple[str, str]
"""The names of the schedules for calls and for captured calls."""


def _names(
    p: Problem, comm: Communicator, tensors: Tensors, pinned: str | None, deadline_s: float | None, serial: Callable[[], object] |
    None
) -> Names:  # fmt: skip
    """Choose a schedule for usual calls and a schedule for calls under CUDA graph capture, for exactly the sizes of `p`. Return
    their names.

    pinned: None or "autotune".
    """
    if pinned is not None:
        measure.measure_gemms(p, comm, tensors, deadline_s)
    model = this_machine.machine_model(comm.device, p.world_size)
    if pinned is not None:
        _tune(p, comm, tensors, model, deadline_s, serial)
    mine: Any = None
    if model is not None:
        mine = tuple(planned(p, model, comm.device, mode, pinned).candidate.name for mode in _MODES)
    names: Names | None = _planned_for_all(mine, p, comm, f"choices for {p}", deadline_s)
    return names or _fastest(p, comm, tensors, deadline_s, serial)


def _planned_for_all(mine: T, p: Problem, comm: Communicator, what: str, deadline_s: float | None) -> T:
    """Return the plan of the planning rank (`this_machine.planning_rank`), which all ranks use. All ranks must make
    this call.

    Ranks may have different calibrations or machine files, so their plans may differ.

    mine: this rank's plan. what: the plan, for error texts.
    """
    found: list[T] = comm.all_gather(mine, what=what, deadline_s=deadline_s)
    return found[this_machine.planning_rank(p, comm, deadline_s)]


class _Measured:
    """The schedules that were chosen by measurement, for problems that differ only in size (`Problem.measured_family`).

    names: {size bucket: the chosen schedules}.
    contenders: the serial schedule, and the schedules that were fastest in the first measurement. Only these are measured for
        other sizes. Empty before the first measurement.
    """

    def __init__(self) -> None:
        self.names: dict[int, Names] = {}
        self.contenders: frozenset[str] = frozenset()


class _Near:
    """The schedules that were chosen on a group. Calls of similar size share a choice.

    names: the chosen schedules, by (problem family, size bucket, True if users' builders are registered, True if the
        choice is for one size only).
    measured: the choices by measurement, by (problem family, True if users' builders are registered).
    timed: {problem family: largest size whose GEMMs have been timed}.
    """

    def __init__(self) -> None:
        self.names: dict[Any, Names] = {}
        self.measured: defaultdict[Any, _Measured] = defaultdict(_Measured)
        self.timed: dict[Any, float] = {}


_near: weakref.WeakKeyDictionary[Communicator, _Near] = weakref.WeakKeyDictionary()


def _names_near(
    p: Problem, comm: Communicator, tensors: Tensors, deadline_s: float | None, serial: Callable[[], object] | None, *,
    itself: bool = False,
) -> Names:  # fmt: skip
    """Return the names of the schedules for a call of `p`: one for usual calls, one for captured calls. Sizes of the
    same size bucket share these schedules. The first call for a bucket chooses the schedules. All ranks must make this
    first call together.

    itself: True to choose for exactly this size.
    """
    near = _near.setdefault(comm, _Near())
    measure.measure_ladder(p, comm, tensors, deadline_s, near.timed)
    from_outside = bool(plan.candidates_from_outside(p))
    key = (p if itself else p.family[0], plan.octave(p), from_outside, itself)
    if key not in near.names:
        if len(near.names) >= _MOST_NEAR:  # each uneven shape forms a separate family
            near.names.clear()
            near.measured.clear()
        model, mine = this_machine.machine_model(comm.device, p.world_size), cast(Any, None)
        if model is not None:
            base = this_machine.calibrated_model(comm.device, p.world_size)
            mine = plan.names_near(p, model, _MODES, base, itself=itself)
        names: Names | None = _planned_for_all(mine, p, comm, f"choices for {p}", deadline_s)
        if names is None:
            family, size = p.measured_family
            measured, here = near.measured[p if itself else family, from_outside], plan.octave_of(size)
            nearest = min(measured.names, key=lambda one: abs(one - here), default=None)
            if nearest is None or abs(nearest - here) > _ALIKE:
                nearest, measured.names[here] = here, _fastest(p, comm, tensors, deadline_s, serial, measured)
            names = measured.names[nearest]
        near.names[key] = names
    return near.names[key]


def remembers(p: Problem, device: torch.device) -> bool:
    """True if this rank has measured times of schedules for exactly this problem, in memory or on disk."""
    # Times of graphs are stored with the times of queued calls.
    return bool(plan.known_times(p.chosen_like, this_machine.device_name(device), "graph"))


def planned(p: Problem, model: Model, device: torch.device, mode: plan.Mode, pinned: str | None = None) -> plan.Choice:
    """Return the schedule that the planner chooses for a call, as `weft.plan.explain` shows it. Cached times of this machine
    override predictions.

    pinned: the name of the pinned schedule, as for `weft.plan.choose`; None if no schedule is pinned.
    """
    return plan.choose(
        p, model, mode=mode, pinned=pinned, measured=plan.known_times(p, this_machine.device_name(device), mode)
    )


def _built(p: Problem, candidate: Candidate, comm: Communicator) -> Schedule:
    schedule = candidate.build()
    if plan.from_outside(p, candidate):
        try:
            verify_once(schedule, comm.device)
        except ScheduleError as error:
            raise ScheduleError(f"builder {candidate.name}, for {p.title} of {p.text}: {error}") from error
    return schedule


@lru_cache(maxsize=64)
def verify_once(schedule: Schedule, device: torch.device) -> None:
    if device.type == "cuda":
        verify(schedule, compute_units=torch.cuda.get_device_properties(device).multi_processor_count)
    else:
        verify(schedule)


def _tune(
    p: Problem,
    comm: Communicator,
    tensors: Tensors,
    model: Model | None,
    deadline_s: float | None,
    serial: Callable[[], object] | None,
) -> None:
    """Measure the schedules that the planner predicts to be fast, unless times of this problem are cached. Do nothing if the
    rank that plans has no model of the machine. All ranks must make this call.
    """
    names: list[str] | None = None
    if model is not None:
        # All ranks measure one rank's list, because the list depends on GEMM times, which may differ between processes.
        names = list(plan.known_times(p, this_machine.device_name(comm.device), "queued") or ())
        if not names:
            choices = [decide(p, model, mode=mode) for mode in _MODES]
            names = list(dict.fromkeys(one.name for choice in choices for one in plan.promising(choice)))
    names = _planned_for_all(names, p, comm, f"candidates for {p}", deadline_s)
    if names is not None:
        schedules = {name: _built(p, named(p, name), comm) for name in names}
        measure.measured(p, schedules, comm, tensors, deadline_s, serial, "queued", 3)


def _fastest(
    p: Problem, comm: Communicator, tensors: Tensors, deadline_s: float | None, serial: Callable[[], object] | None,
    family: _Measured | None = None,
) -> tuple[str, str]:  # fmt: skip
    """Return the names of the fastest schedule for usual calls and of the fastest for captured calls, by measured or cached
    times. All ranks must make this call.

    Candidates are the serial schedule, the schedules worth running (`Problem.worth_running`), and users' schedules. The
    serial schedule is chosen unless another schedule is clearly faster. For captured calls, only schedules that can be
    captured are compared.

    family: the results for other sizes of this problem. The first call with a `family` stores its contenders in it: the
        serial schedule and the fastest candidates. Later calls compare only these.
    """
    schedules, known = {}, frozenset[str]() if family is None else family.contenders
    for candidate in candidates(p):
        if candidate.name in known if known else p.worth_running(candidate) or plan.from_outside(p, candidate):
            comm.check()  # building all candidates may take seconds, in which a peer may fail
            with contextlib.suppress(NotApplicableError):
                schedules[candidate.name] = _built(p, candidate, comm)
    times = measure.measured(p, schedules, comm, tensors, deadline_s, serial, "single", 1 if known else 2)
    if family is not None and not known:
        family.contenders = frozenset(["serial", *sorted(times, key=times.__getitem__)[:CONTENDERS]])

    device = comm.device.type
    confirmed: dict[str, dict[str, float]] = {}

    def best(times: dict[str, float]) -> str:
        fastest = min(times, key=times.__getitem__)
        if "serial" not in times:
            return fastest
        needed_us = max(_CLEARLY[device] * times["serial"], _CLEARLY_US[device])
        return "serial" if times["serial"] - times[fastest] <= needed_us else fastest

    def compared(times: dict[str, float]) -> dict[str, float]:
        """Return the times to choose by, which are of one measurement. If a schedule appears faster than serial, both are timed
        again, because another program may have slowed serial's few calls.
        """
        fastest = best(times)
        if fastest == "serial" or "serial" not in times:
            return times
        if fastest not in confirmed:
            pair = {name: schedules[name] for name in ("serial", fastest)}
            confirmed[fastest] = measure.measured(
                p, pair, comm, tensors, deadline_s, serial, "single", _ROUNDS_TO_CONFIRM, anew=True
            )
        return confirmed[fastest]

    capturable = {name: us for name, us in times.items() if not schedules[name].reads_on_host}
    of_usual = compared(times)
    usual, captured = best(of_usual), best(compared(capturable or times))
    others = [name for name in of_usual if name != "serial"]
    if usual == "serial" and others and comm.rank == 0:  # all ranks have the same times, so one warning is enough
        other = min(others, key=of_usual.__getitem__)
        least = f" and by {_CLEARLY_US[device]:g} us" if _CLEARLY_US[device] else ""
        text = (
            f"serial takes {of_usual['serial']:.0f} us, and the fastest other schedule, {other}, takes {of_usual[other]:.0f} us "
            f"(measured). A schedule replaces serial only if it is faster by {_CLEARLY[device]:.0%}{least}"
        )
        warn_once(p, None if device == "cpu" else "single", text)
    return usual, captured
