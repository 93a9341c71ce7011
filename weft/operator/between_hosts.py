"""The choice of a schedule for a group whose ranks are on several hosts.

Between hosts, a rank cannot address a peer's memory. So only schedules that send data with collectives can run. On CPU,
the first call of a problem family times the candidates in `Problem.between_hosts`. A size that differs by more than a
factor of two from all timed sizes is timed again. On GPUs, and if no candidate is clearly faster than serial, calls run
unfused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from weft import caller, env, plan
from weft.builders import Candidate, NotApplicableError, Problem, named
from weft.builders.registry import cannot_do
from weft.operator import measure
from weft.runtime.executors import Tensors
from weft.runtime.schedule_memory import needs_far
from weft.schedule import Schedule
from weft.symm import Communicator

_CLEARLY, _CLEARLY_US = 0.15, 300.0  # smallest gain over serial (fraction, us), as on one host
_ALIKE = 2  # sizes within this many size buckets share a choice
_taken: weakref.WeakKeyDictionary[Communicator, dict[Hashable, dict[int, str]]] = weakref.WeakKeyDictionary()
"""The measured choices, by problem family and size bucket. "" means serial."""


def choose_between_hosts(
    p: Problem, comm: Communicator, tensors: Tensors, pinned: str | None, *, deadline_s: float | None,
    serial: Callable[[], object] | None, built: Callable[[Candidate], Schedule],
) -> str:  # fmt: skip
    """Return the name of the schedule for a group on several hosts, or "" if calls run unfused. All ranks must make
    this call.

    All ranks return the same name. A pinned schedule that needs another host's memory is replaced by the unfused
    implementation, with a warning.

    built: a function that builds and verifies a candidate's schedule.
    """
    if pinned == "serial":
        return ""
    if pinned is not None and plan.names_schedule(pinned):
        try:
            fault = "" if comm.device.type == "cpu" else "on GPUs only serial runs between hosts"
            fault = fault or _fault(built(named(p, pinned)), comm)
        except NotApplicableError as error:
            raise cannot_do(pinned, p, error) from error
        if fault and not env.quiet():
            caller.warn_once(
                f"schedule={pinned!r}, {p.title}: serial runs instead, because the ranks of the group are on several hosts: {fault}"
            )
        return "" if fault else pinned
    if comm.device.type != "cpu" or not p.has_work:
        return ""
    family, size = p.measured_family
    known, here = _taken.setdefault(comm, {}).setdefault(family, {}), plan.octave_of(size)
    nearest = min(known, key=lambda one: abs(one - here), default=None)
    if nearest is None or abs(nearest - here) > _ALIKE:
        known[here] = _fastest(p, comm, tensors, deadline_s, serial, built)
        return known[here]
    return known[nearest]


def _fastest(
    p: Problem, comm: Communicator, tensors: Tensors, deadline_s: float | None, serial: Callable[[], object] | None,
    built: Callable[[Candidate], Schedule],
) -> str:  # fmt: skip
    usable: dict[str, Any] = {}
    for name in p.between_hosts:
        with contextlib.suppress(NotApplicableError):
            schedule = built(named(p, name))
            if not _fault(schedule, comm):
                usable[name] = schedule
    if not usable:
        return ""
    schedules = {"serial": built(named(p, "serial")), **usable}
    times = measure.measured(p, schedules, comm, tensors, deadline_s, serial, "single", 2)
    best = min(usable, key=lambda name: times[name])
    return best if times["serial"] - times[best] > max(_CLEARLY * times["serial"], _CLEARLY_US) else ""


def _fault(schedule: Schedule, comm: Communicator) -> str:
    """Return a text with the first step, of any rank, that needs another host's memory; "" if there is none."""
    faults = (needs_far(schedule, rank, comm.hosts) for rank in range(comm.world_size))
    return next(filter(None, faults), "")
