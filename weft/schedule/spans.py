"""Names of steps in timelines, such as "copy x_shard -> box@1", "matmul y0" or "wait arrived[0]".

All executors use them. A name has no rows and columns, so that all chunks of an operation have the same name.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.schedule.expr import Index, value
from weft.schedule.steps import Step


def span_name(step: Step, rank: int, numbers: Mapping[str, int] | None = None) -> str:
    """Return the name of a step of `rank`, in which regions of `rank` get no "@rank".

    numbers: {name: value} of the step's variables, such as loop indices.
    """
    known = numbers or {}

    def at(where: Index) -> str:
        number = value(where, **known)
        return "" if number == rank else f"@{number}"

    return step.span(at, lambda index: value(index, **known))
