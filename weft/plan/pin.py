"""Pinning: which schedule to take, said by the user.

    with weft.plan.use("shard[chunks=2,send=in_turn,by=dma]"):
        _, (y,) = weft.all_gather_matmul(x_shard, [w], 0, group)

Holds in this thread (or task) until the block ends; autograd's backward runs in threads of its own. All ranks must pin the
same. Names are those that `weft.plan.explain` lists, and those with other numbers (`weft.schedule.named`); or a rule that names
one: "autotune", what is measured to be the fastest, or "heuristic", what FiCCO's static heuristic picks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from weft.words import kind

AUTOTUNE = "autotune"
"""In place of a schedule's name: measure at the first call of a shape (`weft.operator.choosing`), and remember."""

HEURISTIC = "heuristic"
"""In place of a schedule's name: the one that FiCCO's static heuristic picks from the shape (`weft.plan.heuristic`)."""

_pinned: ContextVar[str | None] = ContextVar("weft.plan.pinned", default=None)


@contextmanager
def use(schedule: str | None) -> Iterator[None]:
    """Take `schedule` wherever a schedule is chosen, with "autotune" the one that is measured to be the fastest, with "heuristic"
    the one that FiCCO's heuristic picks; None: none is pinned. `ValueError` at the operator, if it has none of that name. Where
    the heuristic picks nothing that can run, a warning says why, and the choice is the usual one. Embeddings hear of "autotune"
    alone: their way is pinned by `transport=`."""
    token = _pinned.set(schedule)
    try:
        yield
    finally:
        _pinned.reset(token)


pinned_around: Callable[[], str | None] = _pinned.get
"""Returns what the innermost `use` around the caller says; None without one."""


def pinned(given: object = None) -> str | None:
    """What an operator was given as `schedule`; if that is None, the innermost `use` around the caller. `ValueError` for what is no
    text."""
    name = _pinned.get() if given is None else given
    if name is None or isinstance(name, str):
        return name
    raise ValueError(
        f"schedule={name!r} is {kind(name)}: pass the name of a schedule, a text such as 'serial', or None"
    )


def names_schedule(pinned: str | None) -> bool:
    """Whether this is a schedule's name, and neither None nor a rule that finds one."""
    return pinned not in (None, AUTOTUNE, HEURISTIC)
