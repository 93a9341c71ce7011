"""Pinning: calls use the schedule that the user names.

    with weft.plan.use("shard[chunks=2,send=in_turn,by=dma]"):
        _, (y,) = weft.all_gather_matmul(x_shard, [w], 0, group)

A pin applies to this thread (or asyncio task) until the block ends. It does not apply to autograd's backward, which
runs in other threads. All ranks must pin the same schedule. `weft.plan.explain` lists the names. You may change the
numbers in a name (`weft.builders.named`).

Two words stand for rules instead of a name: "autotune" uses the schedule that is measured to be the fastest, and
"heuristic" the schedule of FiCCO's static heuristic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from weft.words import kind

AUTOTUNE = "autotune"
"""A rule instead of a schedule's name: measure at the first call of a shape (`weft.operator.select`), and cache the
times.
"""

HEURISTIC = "heuristic"
"""A rule instead of a schedule's name: use the schedule of FiCCO's static heuristic for the shape
(`weft.plan.heuristic`).
"""

_pinned: ContextVar[str | None] = ContextVar("weft.plan.pinned", default=None)


@contextmanager
def use(schedule: str | None) -> Iterator[None]:
    """Pin `schedule` for all operators called in the block. None pins nothing.

    "autotune" uses the schedule that is measured to be the fastest. "heuristic" uses the schedule of FiCCO's heuristic;
    if that schedule cannot run, a warning gives the reason, and the planner chooses. Operators raise `ValueError` if
    they have no schedule of this name. Embeddings support only "autotune"; pin their transport with `transport=`.
    """
    if schedule is not None and not schedule:  # the fast path of repeated calls would take it for None
        raise ValueError(f"schedule={schedule!r}: pass the name of a schedule, a string such as 'serial', or None")
    token = _pinned.set(schedule)
    try:
        yield
    finally:
        _pinned.reset(token)


pinned_around: Callable[[], str | None] = _pinned.get
"""A function that returns the schedule of the innermost enclosing `use`; None if there is none."""


def pinned(given: object = None) -> str | None:
    """Return the name of the pinned schedule: `given`, or if None, the name in the innermost enclosing `use`.

    given: an operator's `schedule` argument. Raise `ValueError` if it is neither a string nor None.
    """
    name = _pinned.get() if given is None else given
    if name is None or isinstance(name, str):
        return name
    raise ValueError(
        f"schedule={name!r} is {kind(name)}: pass the name of a schedule, a string such as 'serial', or None"
    )


def names_schedule(pinned: str | None) -> bool:
    """True if `pinned` is the name of a schedule, not None, "autotune" or "heuristic"."""
    return pinned not in (None, AUTOTUNE, HEURISTIC)
