"""What a step is called in a timeline, whichever executor wrote it: "copy x_shard -> box@1", "matmul y0", "wait arrived[0]".

Without its rows and columns, so that a lane's many chunks are of one name.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.schedule.expr import Index, value
from weft.schedule.steps import Step


def span_name(step: Step, rank: int, numbers: Mapping[str, int] | None = None) -> str:
    """Of a step of `rank`; what is that rank's own goes without its number. numbers: of its variables, if it has any left."""
    known = numbers or {}

    def at(where: Index) -> str:
        number = value(where, **known)
        return "" if number == rank else f"@{number}"

    return step.span(at, lambda index: value(index, **known))
