"""The name of a step in a timeline, the same for all executors: "copy x_shard -> box@1", "matmul y0", "wait arrived[0]".

It has no rows and columns, so that a lane's many chunks share one name.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.schedule.expr import Index, value
from weft.schedule.steps import Step


def span_name(step: Step, rank: int, numbers: Mapping[str, int] | None = None) -> str:
    """Return the name of a step of `rank`, without that rank's own number. numbers: values of its variables, if any are left."""
    known = numbers or {}

    def at(where: Index) -> str:
        number = value(where, **known)
        return "" if number == rank else f"@{number}"

    return step.span(at, lambda index: value(index, **known))
