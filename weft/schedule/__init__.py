"""Schedules: who computes, copies, signals and waits for what, on which lane of which rank. Values, without torch."""

from weft.schedule import ficco, gather, serial, shard, slices  # noqa: F401  (registers their builders)
from weft.schedule.expr import RANK, Expr, Index, lookup, value
from weft.schedule.problem import (
    AllGatherMatmul,
    Candidate,
    EmbeddingAllToAll,
    NotApplicableError,
    Problem,
    builder,
    builders_of,
    candidates,
    unregister,
)
from weft.schedule.schedule import Draft, Schedule
from weft.schedule.steps import (
    ITEM_BYTES,
    OPS,
    Buffer,
    Collective,
    Compute,
    Copy,
    For,
    Lane,
    Region,
    Set,
    Signals,
    Step,
    Tiles,
    Wait,
)

__all__ = [
    "ITEM_BYTES", "OPS", "RANK", "AllGatherMatmul", "Buffer", "Candidate", "Collective", "Compute", "Copy", "Draft",
    "EmbeddingAllToAll", "Expr", "For", "Index", "Lane", "NotApplicableError", "Problem", "Region", "Schedule", "Set",
    "Signals", "Step", "Tiles", "Wait", "builder", "builders_of", "candidates", "lookup", "unregister", "value",
]  # fmt: skip
