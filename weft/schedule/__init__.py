"""Schedules: who computes, copies, signals and waits for what, on which lane of which rank. Values, without torch."""

from weft.schedule import (  # noqa: F401  (registers their builders)
    all_reduce,
    combine,
    dispatch,
    ficco,
    ficco_dispatch,
    gather,
    gathered_gradients,
    gathered_product,
    gathered_product_gradients,
    scatter,
    serial,
    shard,
    slices,
)
from weft.schedule.builders import NotApplicableError, builder, builders_of, candidates, named, unregister
from weft.schedule.candidate import Candidate
from weft.schedule.expr import RANK, Expr, Index, lookup, total, value
from weft.schedule.output_map import MatmulInto, OutputMap, schedule_of
from weft.schedule.problem import Problem, described
from weft.schedule.problems.all_gather_matmul import AllGatherMatmul, Scaled
from weft.schedule.problems.all_gather_matmul_gradients import AllGatherMatmulGradients
from weft.schedule.problems.all_to_all_matmul import AllToAllMatmul
from weft.schedule.problems.embedding_all_to_all import EmbeddingAllToAll
from weft.schedule.problems.matmul_all_gather import MatmulAllGather
from weft.schedule.problems.matmul_all_gather_gradients import MatmulAllGatherGradients
from weft.schedule.problems.matmul_all_reduce import MatmulAllReduce
from weft.schedule.problems.matmul_all_to_all import MatmulAllToAll
from weft.schedule.problems.matmul_reduce_scatter import MatmulReduceScatter
from weft.schedule.problems.scaled_matmul_reduce_scatter import ScaledMatmulReduceScatter
from weft.schedule.schedule import Draft, Schedule
from weft.schedule.steps import (
    ITEM_BYTES,
    MATMULS,
    OPS,
    SCALED_MATMULS,
    Buffer,
    Collective,
    Compute,
    Contents,
    Copy,
    For,
    Lane,
    Read,
    Reduce,
    Region,
    Set,
    Signals,
    Step,
    Tiles,
    Wait,
)

__all__ = [
    "ITEM_BYTES", "MATMULS", "OPS", "RANK", "SCALED_MATMULS", "AllGatherMatmul", "AllGatherMatmulGradients",
    "AllToAllMatmul", "Buffer", "Candidate", "Collective", "Compute", "Contents", "Copy", "Draft", "EmbeddingAllToAll",
    "Expr", "For", "Index", "Lane", "MatmulAllGather", "MatmulAllGatherGradients", "MatmulAllReduce", "MatmulAllToAll",
    "MatmulInto", "MatmulReduceScatter", "NotApplicableError", "OutputMap", "Problem", "Read", "Reduce", "Region", "Scaled",
    "ScaledMatmulReduceScatter", "Schedule", "Set", "Signals", "Step", "Tiles", "Wait", "builder", "builders_of",
    "candidates", "described", "lookup", "named", "schedule_of", "total", "unregister", "value",
]  # fmt: skip
