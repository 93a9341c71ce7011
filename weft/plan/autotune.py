"""Autotuning: run the most promising candidates, and choose the fastest by the slowest rank's times.

Candidates run in turn, so that a GPU whose clock drops slows all of them equally. A candidate's time is its median.
Times are cached in memory and on disk. Cached times apply only to the same machine and the same versions of packages
and driver, and only if the schedules of users' builders have not changed.

Either all ranks measure, or no rank measures. So cached times are used only if all ranks have them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from weft.builders import Candidate, NotApplicableError, Problem, builders_of, candidates
from weft.builders.registry import outside_builders
from weft.caller import warn_once
from weft.errors import UnreadableError
from weft.plan import store
from weft.plan.choose import Choice
from weft.plan.machine import versions
from weft.schedule import Schedule
from weft.schedule.text import to_json
from weft.sim import Mode

_ALWAYS = ("serial", "gather")
"""The builders whose schedules are always measured: the baselines without overlap."""

_known: dict[str, dict[str, float]] = {}


def promising(choice: Choice, count: int = 6) -> list[Candidate]:
    """Return the candidates to run: the `count` candidates with the shortest predicted times, and all candidates of the
    builders `serial` and `gather`, which do not overlap.

    Candidates that round partial sums (`Row.rough`) do not count among the fastest. In mode "graph", neither do
    candidates that cannot be captured.
    """
    timed = [row for row in choice.rows if row.predicted_us is not None]
    usable = [row for row in timed if not row.rough and not (choice.mode == "graph" and row.reads_on_host)]
    fastest = sorted(usable, key=lambda row: row.predicted_us or 0.0)[:count]
    others = [row for row in timed if row.candidate.builder in _ALWAYS and row not in fastest]
    return [row.candidate for row in fastest + others]


def autotune(
    problem: Problem,
    candidates: Sequence[Candidate],
    run: Callable[[Candidate], float],
    agree: Callable[[list[float]], list[float]],
    *,
    machine: str,
    mode: Mode = "queued",
    rounds: int = 3,
) -> dict[str, float]:
    """Measure candidates. Return {name: time in us} for `choose(..., measured=...)`. All ranks must make this call.

    Args:
        run: a function that all ranks call together. It runs a candidate and returns the time on this rank in us.
        agree: a function that all ranks call together, with a list of numbers. It returns the maximum of each number
            over all ranks.
        machine: the name under which times are cached, such as `weft.plan.machine.machine_name()` or the device's name.
        rounds: how often each candidate runs.
    """
    if rounds < 1 or not candidates:
        raise ValueError(f"rounds={rounds}, {len(candidates)} candidates: pass at least 1 round and 1 candidate")
    names = [candidate.name for candidate in candidates]
    found = remembered(problem, machine, mode)
    missing = any(name not in found for name in names)
    if not agree([float(missing)])[0]:
        return dict(zip(names, agree([found[name] for name in names]), strict=True))
    times: list[list[float]] = []
    for _ in range(rounds):
        times.append(agree([run(candidate) for candidate in candidates]))
    measured = dict(zip(names, map(median, zip(*times, strict=True)), strict=True))
    key = _key(problem, machine, mode)
    _known[str(key)] = {**found, **measured}
    store.keep(_path(key), {"key": key, "date": store.today(), "times_us": _known[str(key)]})
    return measured


def remembered(problem: Problem, machine: str, mode: Mode) -> dict[str, float]:
    """Return the cached times of candidates for `problem`: {candidate: time in us}. Times count only if they were measured on
    this machine, with the installed versions of packages and driver.
    """
    if not _known and not store.any_of("autotune"):  # the common case is fast: without cached times, no key is computed
        return {}
    key = _key(problem, machine, mode)
    if str(key) not in _known:
        try:
            times = _read(_path(key), key)
        except UnreadableError as error:  # the next measurement replaces the file
            warn_once(f"cached times are ignored: {error}")
            times = {}
        if not times:
            return {}
        _known[str(key)] = times
    return _known[str(key)]


def _read(path: Path, key: dict[str, Any]) -> dict[str, float]:
    """Return the times that `autotune` cached in this file; {} if there is no file.

    Raise `UnreadableError` for a broken or edited file.

    key: the cache key that the file must contain.
    """
    content = store.read(path)
    if content is None:
        return {}
    times = content.get("times_us")
    if content.get("key") != key or not isinstance(times, dict):
        raise UnreadableError(f"{path} contains times whose key does not match the file name; {store.FIX}")
    for name, us in times.items():
        if not store.is_positive(us):
            raise UnreadableError(f"{path}: times_us.{name} is {us!r}: {store.TIMES}; {store.FIX}")
    return times


def known_times(problem: Problem, machine: str, mode: Mode) -> dict[str, float] | None:
    """Return the cached times of candidates that still exist, for `choose(..., measured=...)`; None if the serial
    schedule was not measured.

    If nothing was measured in mode "graph", return the times of mode "queued", which does the same work.
    """
    modes: tuple[Mode, ...] = ("graph", "queued") if mode == "graph" else (mode,)
    for one in modes:
        times = remembered(problem, machine, one)
        names = {candidate.name for candidate in candidates(problem)} if times else set()
        found = {name: us for name, us in times.items() if name in names}
        if "serial" in found:
            return found
    return None


def from_outside(problem: Problem, candidate: Candidate) -> bool:
    """True if the builder of `candidate` is a user's, not weft's."""
    return candidate.builder in outside_builders(type(problem))


def candidates_from_outside(problem: Problem) -> list[Candidate]:
    """Return the candidates of `problem` with users' builders."""
    builders = outside_builders(type(problem))
    return candidates(problem, builders) if builders else []


def _key(problem: Problem, machine: str, mode: Mode) -> dict[str, Any]:
    return {
        "problem": f"{problem.name} {asdict(problem)}",
        "mode": mode,
        "machine": machine,
        "versions": versions(),
        "from_outside": _made_outside(problem, builders_of(type(problem))),
    }


@lru_cache(maxsize=256)
def _made_outside(problem: Problem, builders: tuple[tuple[str, Callable[..., Schedule]], ...]) -> str:
    """Return a hash of the schedules that users' builders return for `problem`; "" if there are none."""
    made = []
    for candidate in candidates_from_outside(problem):
        with contextlib.suppress(NotApplicableError):
            made.append(candidate.name + to_json(candidate.build()))
    return _digest("".join(made)) if made else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _path(key: dict[str, Any]) -> Path:
    return store.path_of("autotune", _digest(str(key)))
