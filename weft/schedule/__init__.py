"""Schedules as values, without torch: which rank computes, copies, signals and waits for what, on which lane.

A new operator needs one line here, the import of its problem. Files with builders in this folder are found by themselves.
"""

import importlib
import pkgutil

from weft.schedule.builders import NotApplicableError, builder, builders_of, candidates, named, unregister
from weft.schedule.candidate import Candidate
from weft.schedule.expr import RANK, Expr, Index, lookup, total, value
from weft.schedule.output_map import MatmulInto, OutputMap, schedule_of
from weft.schedule.problem import PROBLEMS, Problem, described
from weft.schedule.problems.all_gather_matmul import AllGatherMatmul as AllGatherMatmul
from weft.schedule.problems.all_gather_matmul import Scaled
from weft.schedule.problems.all_gather_matmul_gradients import AllGatherMatmulGradients as AllGatherMatmulGradients
from weft.schedule.problems.all_to_all_matmul import AllToAllMatmul as AllToAllMatmul
from weft.schedule.problems.embedding_all_to_all import EmbeddingAllToAll as EmbeddingAllToAll
from weft.schedule.problems.matmul_all_gather import MatmulAllGather as MatmulAllGather
from weft.schedule.problems.matmul_all_gather_gradients import MatmulAllGatherGradients as MatmulAllGatherGradients
from weft.schedule.problems.matmul_all_reduce import MatmulAllReduce as MatmulAllReduce
from weft.schedule.problems.matmul_all_to_all import MatmulAllToAll as MatmulAllToAll
from weft.schedule.problems.matmul_reduce_scatter import MatmulReduceScatter as MatmulReduceScatter
from weft.schedule.problems.scaled_matmul_reduce_scatter import ScaledMatmulReduceScatter as ScaledMatmulReduceScatter
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
    Set,
    Signals,
    Step,
    Tiles,
    Wait,
)

__all__ = [
    "ITEM_BYTES", "MATMULS", "OPS", "PLAIN_MATMULS", "RANK", "SCALED_MATMULS", "Agree", "Buffer", "Candidate", "Collective",
    "Compute", "Contents", "Copy", "Draft", "Expr", "For", "Index", "Lane", "MatmulInto", "Norm", "NotApplicableError",
    "OutputMap", "Problem", "Read", "Reduce", "Region", "Scaled", "Schedule", "Set", "Signals", "Step", "Tiles", "Wait",
    "builder", "builders_of", "candidates", "described", "lookup", "named", "schedule_of", "total", "unregister", "value",
]  # fmt: skip
__all__ += [problem.__name__ for problem in PROBLEMS.values()]

for _file in pkgutil.iter_modules(__path__):  # importing a file registers its builders
    importlib.import_module(f"{__name__}.{_file.name}")
