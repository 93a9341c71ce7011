"""The schedule language. A schedule lists what each rank computes, copies, signals and waits for.

The steps of a rank are in lanes: queues such as a CUDA stream, a copy engine or a CPU thread. This package does not
import torch. `weft.builders` defines the problems of the operators and builds their schedules.
"""

import sys
from typing import Any

from weft.schedule.expr import RANK, Expr, Index, lookup, total, value
from weft.schedule.schedule import Draft, Schedule
from weft.schedule.steps import (
    ITEM_BYTES,
    MATMULS,
    OPS,
    PLAIN_MATMULS,
    SCALED_MATMULS,
    Agree,
    Buffer,
    Collective,
    Compute,
    Contents,
    Copy,
    For,
    Lane,
    Norm,
    Read,
    Reduce,
    Region,
    Send,
    Set,
    Signals,
    Step,
    Tiles,
    Wait,
)

__all__ = [
    "ITEM_BYTES", "MATMULS", "OPS", "PLAIN_MATMULS", "RANK", "SCALED_MATMULS", "Agree", "Buffer", "Collective", "Compute",
    "Contents", "Copy", "Draft", "Expr", "For", "Index", "Lane", "Norm", "Read", "Reduce", "Region", "Schedule", "Send",
    "Set", "Signals", "Step", "Tiles", "Wait", "lookup", "total", "value",
]  # fmt: skip

_MOVED = {
    **dict.fromkeys((
        "AllGatherMatmul", "AllGatherMatmulGradients", "AllToAllMatmul", "Candidate", "EmbeddingAllToAll", "MatmulAllGather",
        "MatmulAllGatherGradients", "MatmulAllReduce", "MatmulAllToAll", "MatmulInto", "MatmulReduceScatter",
        "NotApplicableError", "OutputMap", "PROBLEMS", "Problem", "Scaled", "ScaledMatmulReduceScatter", "builder", "builders_of",
        "candidates", "described", "named", "schedule_of", "unregister",
    ), "weft.builders"),
    "builders": "weft.builders.registry",
    "candidate": "weft.builders.problem",
    "ficco": "weft.builders.ficco",
    "operands": "weft.builders.operands",
    "options": "weft.builders.options",
    "output_map": "weft.builders.output_map.map",
    "problem": "weft.builders.problem",
    "problems": "weft.builders.problems",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        text = f"weft.schedule.{name} moved: use {_MOVED[name]}"
        # `from weft.schedule import name` would replace an AttributeError by its own ImportError, without this text.
        if sys._getframe(1).f_code.co_name == "_handle_fromlist":
            raise ImportError(text, name=f"weft.schedule.{name}")
        raise AttributeError(text, name=name)
    raise AttributeError(f"module 'weft.schedule' has no attribute {name!r}; it has {', '.join(__all__)}")
