"""Pinning: which schedule to take, said by the user.

    with weft.plan.use("shard[chunks=2,send=in_turn,by=dma]"):
        _, (y,) = weft.all_gather_matmul(x_shard, [w], 0, group)

Holds in this thread (or task) until the block ends; autograd's backward runs in threads of its own. All ranks must pin the
same. Names are those that `weft.plan.explain` lists, or "autotune": none is pinned, and what is promising is measured.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from weft.schedule import Candidate, Problem, candidates

AUTOTUNE = "autotune"
"""In place of a schedule's name: measure at the first call of a shape (`weft.ops.choosing`), and remember."""

_pinned: ContextVar[str | None] = ContextVar("weft.plan.pinned", default=None)


@contextmanager
def use(schedule: str) -> Iterator[None]:
    """Take `schedule` wherever a schedule is chosen, or with "autotune" the one that is measured to be the fastest.
    `ValueError` at the operator, if it has none of that name."""
    token = _pinned.set(schedule)
    try:
        yield
    finally:
        _pinned.reset(token)


def pinned() -> str | None:
    """The name given to the innermost `use` around the caller."""
    return _pinned.get()


def named(problem: Problem, name: str) -> Candidate:
    """The candidate of that name. `ValueError` with the nearest names if there is none."""
    known = {candidate.name: candidate for candidate in candidates(problem)}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
        raise ValueError(f"no schedule {name!r} for {problem.name}; the nearest are {', '.join(near)}")
    return known[name]
