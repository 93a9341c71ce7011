"""The kinds of steps, and lanes of steps. `weft.schedule.steps.base` describes how to add a kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from weft.schedule.regions import ITEM_BYTES, Buffer, Contents, Norm, Region, Role, Signals, at_text
from weft.schedule.steps.agreeing import Agree
from weft.schedule.steps.base import (
    KINDS,
    Awaited,
    CounterId,
    Counters,
    Step,
    depends,
    substitute,
    totals_of,
    variables_of,
)
from weft.schedule.steps.collectives import Collective, CollectiveOp
from weft.schedule.steps.computing import MATMULS, OPS, PLAIN_MATMULS, SCALED_MATMULS, Compute, Op, Reduce
from weft.schedule.steps.copies import COPY_UNITS, DYNAMIC_COPY_UNITS, SPARED_UNITS, Copy, CopyBy
from weft.schedule.steps.loops import For, Tiles, flattened, iterations, map_steps, of_kind, unrolled, walk
from weft.schedule.steps.reads import Read, ReadBy
from weft.schedule.steps.sends import Send
from weft.schedule.steps.signals import Set, Wait

Resource: TypeAlias = Literal["compute", "copy"]


@dataclass(frozen=True, slots=True)
class Lane:
    """Steps in order on one resource: "compute" (a stream for kernels) or "copy" (a stream for copy engines)."""

    name: str
    resource: Resource
    steps: tuple[Step, ...] = field(default=())


__all__ = [
    "COPY_UNITS",
    "DYNAMIC_COPY_UNITS",
    "ITEM_BYTES",
    "KINDS",
    "MATMULS",
    "OPS",
    "PLAIN_MATMULS",
    "SCALED_MATMULS",
    "SPARED_UNITS",
    "Agree",
    "Awaited",
    "Buffer",
    "Collective",
    "CollectiveOp",
    "Compute",
    "Contents",
    "Copy",
    "CopyBy",
    "CounterId",
    "Counters",
    "For",
    "Lane",
    "Norm",
    "Op",
    "Read",
    "ReadBy",
    "Reduce",
    "Region",
    "Resource",
    "Role",
    "Send",
    "Set",
    "Signals",
    "Step",
    "Tiles",
    "Wait",
    "at_text",
    "depends",
    "flattened",
    "iterations",
    "map_steps",
    "of_kind",
    "substitute",
    "totals_of",
    "unrolled",
    "variables_of",
    "walk",
]  # fmt: skip
