"""What a step is called in a timeline, whichever executor wrote it: "copy x_shard -> box@1", "matmul y0", "wait arrived[0]".

Without its rows and columns, so that a lane's many chunks are of one name.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.schedule.expr import Index, value
from weft.schedule.steps import Collective, Compute, Copy, For, Read, Region, Set, Step, Tiles, Wait


def span_name(step: Step, rank: int, numbers: Mapping[str, int] | None = None) -> str:
    """Of a step of `rank`; what is that rank's own goes without its number. numbers: of its variables, if it has any left."""
    known = numbers or {}

    def at(where: Index) -> str:
        number = value(where, **known)
        return "" if number == rank else f"@{number}"

    def of(region: Region) -> str:
        return f"{region.buffer}{at(region.at)}"

    match step:
        case Copy():
            return f"copy {of(step.src)} -> {of(step.dst)}"
        case Compute():
            return f"{step.op} {of(step.out)}"
        case Collective():
            return f"{step.op} {of(step.src)} -> {of(step.dst)}"
        case Set():
            return f"set {step.signal}{at(step.at)}[{value(step.index, **known)}]"
        case Wait():
            return f"wait {step.signal}[{value(step.index, **known)}]{' of the previous run' * step.previous}"
        case Tiles():
            return step.kernel
        case Read():
            return f"read {step.region.buffer}"
        case For():
            raise ValueError(f"a loop has no name in a timeline, the steps in it do: {step}")
