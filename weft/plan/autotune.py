"""Autotuning: the few most promising candidates are run, and the slowest rank's times decide.

Candidates take turns, so that a GPU that warms up slows all of them; of each the median counts. Times are kept in memory
and on disk with the versions and the machine they hold for. What one rank finds there counts only if all ranks do: they must
run the same, or nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from weft.plan import store
from weft.plan.choose import Choice
from weft.plan.machine import versions
from weft.plan.predict import Mode
from weft.schedule import Candidate, Problem

_ALWAYS = ("serial", "gather")
"""Builders whose schedules are measured in any case: nothing overlaps in them, and they are what the others must beat."""

_known: dict[str, dict[str, float]] = {}


def promising(choice: Choice, count: int = 6) -> list[Candidate]:
    """The `count` candidates that `choice` predicts to be the fastest, and serial and gather."""
    timed = sorted(
        (row for row in choice.rows if row.predicted_us is not None), key=lambda row: row.predicted_us or 0.0
    )
    chosen = timed[:count] + [row for row in timed[count:] if row.candidate.builder in _ALWAYS]
    return [row.candidate for row in chosen]


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
    """Microseconds of each candidate by name, for `choose(..., measured=...)`. Collective, all ranks with the same arguments.

    run: runs a candidate and says how long it took on this rank; collective.
    agree: the largest of each number over all ranks; collective.
    machine: whose times these are, as `weft.plan.machine.machine_name()` or the device's name.
    """
    if rounds < 1 or not candidates:
        raise ValueError(f"rounds={rounds}, {len(candidates)} candidates: measure one candidate once at least")
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
    date = datetime.now(UTC).date().isoformat()
    store.keep(_path(key), {"key": key, "date": date, "times_us": _known[str(key)]})
    return measured


def remembered(problem: Problem, machine: str, mode: Mode) -> dict[str, float]:
    """Microseconds by candidate: all that was measured before with the versions installed here, by this process or another."""
    key = _key(problem, machine, mode)
    if str(key) not in _known:
        try:
            content = store.read(_path(key))
        except ValueError:  # a broken file: measured again, it is replaced
            content = None
        if content is None or content.get("key") != key:
            return {}
        _known[str(key)] = content["times_us"]
    return _known[str(key)]


def _key(problem: Problem, machine: str, mode: Mode) -> dict[str, Any]:
    return {"problem": f"{problem.name} {asdict(problem)}", "mode": mode, "machine": machine, "versions": versions()}


def _path(key: dict[str, Any]) -> Path:
    return store.path_of("autotune", hashlib.sha256(str(key).encode()).hexdigest()[:16])
