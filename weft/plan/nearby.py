"""Choices that nearby sizes share. A new M with known weights then costs a table lookup or a few simulations.

The sizes of a problem family (`Problem.family`) are grouped into buckets of half an octave: from s to sqrt(2) * s. A
schedule is chosen for the middle size of each bucket. If serial is faster than this schedule at the size of the first
call, a schedule is chosen for that size instead.

For the first bucket of a family all candidates are considered. For other buckets, only two groups of candidates are
considered: the fastest of the first bucket, and the candidates that are promising at any size
(`Problem.worth_running`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from weft.builders import Problem, builders_of, candidates
from weft.plan.choose import CLEARLY, Choice, choose
from weft.sim import Mode, Model

T = TypeVar("T")

CONTENDERS = 2
"""The number of schedules that plans for later sizes of a problem consider, in each mode: the fastest at the first size. The
plan for the first size considers all schedules.
"""
LONG_US = 300.0
_PER_OCTAVE = 2
_MOST_FAMILIES = 256


@dataclass
class _Family:
    base: Model  # keeps the model alive, so that its id is not reused
    contenders: frozenset[str]
    names: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """{size bucket: name of the schedule for each mode}"""


_families: dict[Hashable, _Family] = {}


def _choices(
    problem: Problem, model: Model, modes: tuple[Mode, ...], among: frozenset[str] | None, near: bool
) -> list[Choice]:
    """Return the choice for each mode.

    If the choice for the first mode is clear, the other modes take it without planning. A choice is clear if it is clearly faster
    than the serial schedule, and takes so long that the differences between the modes matter little.

    among: the names of the candidates to consider; None for all. near: True if the choice also applies to nearby sizes.
    """
    found: list[Choice] = []
    for mode in modes:
        if found and _is_clear(found[0]):
            found.append(found[0])
        else:
            found.append(choose(problem, model, mode=mode, among=among, near=near))
    return found


def _is_clear(choice: Choice) -> bool:
    serial = next((row.us for row in choice.rows if row.candidate.name == "serial" and row.us), 0.0)
    return (
        choice.predicted_us > LONG_US
        and not choice.schedule.reads_on_host
        and (choice.candidate.name == "serial" or choice.predicted_us < (1 - CLEARLY) * serial)
    )


def octave(problem: Problem) -> int:
    """Return the number of the size bucket that contains the problem's size."""
    return octave_of(problem.family[1])


def octave_of(size: float) -> int:
    """Return the number of the size bucket that contains `size`. A bucket spans a factor of sqrt(2). Size 0 is in
    bucket 0.
    """
    return round(_PER_OCTAVE * math.log2(size)) if size > 0 else 0


def typical(problem: Problem) -> Problem:
    """Return the problem at the middle of the size bucket of `problem`. The bucket's schedule is chosen for this size."""
    return problem.resized(2 ** (octave(problem) / _PER_OCTAVE))


def between(known: Mapping[int, T], here: int) -> T | None:
    """Return the choice of the nearest planned buckets below and above bucket `here`, if both are the same; otherwise
    None.

    known: {bucket: its choice} of the buckets that have been planned.

    If times are linear in the number of rows, the faster of two schedules changes at most once. So buckets in between
    have the same choice.
    """
    below = max((one for one in known if one <= here), default=None)
    above = min((one for one in known if one >= here), default=None)
    if below is None or above is None or known[below] != known[above]:
        return None
    return known[below]


def names_near(
    problem: Problem, model: Model, modes: tuple[Mode, ...], base: Model | None = None, *, itself: bool = False
) -> tuple[str, ...]:
    """Return the name of the schedule for `problem` in each of `modes`.

    base: the model without the GEMM times that this process has measured. Choices are cached by `base`, so they stay
        cached when more GEMMs are timed.
    itself: True to choose for exactly this size, not for its bucket.
    """
    family, base = problem.family[0], base or model
    key = (family, id(base), modes, builders_of(type(problem)))
    here = octave(problem)
    planned = problem if itself else typical(problem)
    known = _families.get(key)
    if known is not None and not itself and here in known.names:
        return known.names[here]
    choices = _choices(planned, model, modes, None if known is None else known.contenders, not itself)
    if known is None:
        near = {row.candidate.name for choice in choices for row in choice.rows[:CONTENDERS]}
        near |= {choice.candidate.name for choice in choices}
        near |= {candidate.name for candidate in candidates(problem) if problem.worth_running(candidate)}
        if len(_families) >= _MOST_FAMILIES:
            _families.pop(next(iter(_families)))
        known = _families[key] = _Family(base, frozenset(near))
    if itself:
        return tuple(choice.candidate.name for choice in choices)
    known.names[here] = names = tuple(
        _name_at(problem, model, mode, choice, known.contenders) for mode, choice in zip(modes, choices, strict=True)
    )
    return names


def _name_at(problem: Problem, model: Model, mode: Mode, choice: Choice, contenders: frozenset[str]) -> str:
    """Return the name of the schedule for `problem`, given the `choice` for the middle size of its bucket.

    If the serial schedule is faster than this choice, choose among the candidates `contenders` for exactly this size instead.
    """
    name = choice.candidate.name
    if name == "serial" or problem == choice.problem:
        return name
    pair = frozenset((name, "serial"))
    if choose(problem, model, mode=mode, among=pair, near=True).candidate.name == name:
        return name
    return choose(problem, model, mode=mode, among=contenders, near=True).candidate.name
