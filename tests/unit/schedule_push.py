"""The schedule `push`, into which the tests of `verify` plant faults."""

from __future__ import annotations

from dataclasses import replace

from weft.schedule import (
    RANK,
    Draft,
    Lane,
    Region,
    Schedule,
    Step,
)


def push() -> Schedule:
    """Return a schedule in which each of two ranks puts x into the other's box, and signals when it has computed on its
    own box.
    """
    d = Draft("push", 2)
    x, y = d.buffer("x", 4, 8, "fp32", "input"), d.buffer("y", 4, 8, "fp32", "output")
    box = d.buffer("box", 4, 8, "fp32", "symmetric")
    arrived, credit = d.signals("arrived", 1), d.signals("credit", 1)
    peer = 1 - RANK
    d.lane("out", "copy").wait(credit, previous=True).copy(x.part(), box.part(at=peer)).set(arrived, at=peer)
    d.lane("compute").wait(arrived).compute("silu", y.part(), box.part()).set(credit, at=peer)
    return d.schedule()


def with_steps(*steps: Step) -> Schedule:
    """Return `push` with an additional lane of these steps."""
    schedule = push()
    return replace(schedule, lanes=(*schedule.lanes, Lane("more", "compute", steps)))


X, Y, BOX = (Region(name, 0, 4, 0, 8) for name in ("x", "y", "box"))
