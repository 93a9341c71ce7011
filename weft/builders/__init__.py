"""Problems (the sizes and options of an operator's call) and builders (functions that return schedules for a problem).

This package does not import torch. To add an operator, import its problem here. Builder files in this folder are
imported automatically.
"""

import importlib
import pkgutil

from weft.builders.output_map.map import MatmulInto, OutputMap, schedule_of
from weft.builders.problem import PROBLEMS, Candidate, Problem, described
from weft.builders.problems.all_gather_matmul import AllGatherMatmul as AllGatherMatmul
from weft.builders.problems.all_gather_matmul import Scaled
from weft.builders.problems.all_gather_matmul_gradients import AllGatherMatmulGradients as AllGatherMatmulGradients
from weft.builders.problems.all_to_all_matmul import AllToAllMatmul as AllToAllMatmul
from weft.builders.problems.embedding_all_to_all import EmbeddingAllToAll as EmbeddingAllToAll
from weft.builders.problems.matmul_all_gather import MatmulAllGather as MatmulAllGather
from weft.builders.problems.matmul_all_gather_gradients import MatmulAllGatherGradients as MatmulAllGatherGradients
from weft.builders.problems.matmul_all_reduce import MatmulAllReduce as MatmulAllReduce
from weft.builders.problems.matmul_all_to_all import MatmulAllToAll as MatmulAllToAll
from weft.builders.problems.matmul_reduce_scatter import MatmulReduceScatter as MatmulReduceScatter
from weft.builders.problems.scaled_matmul_reduce_scatter import ScaledMatmulReduceScatter as ScaledMatmulReduceScatter
from weft.builders.registry import NotApplicableError, builder, builders_of, candidates, named, unregister

__all__ = [
    "Candidate", "MatmulInto", "NotApplicableError", "OutputMap", "Problem", "Scaled", "builder", "builders_of", "candidates",
    "described", "named", "schedule_of", "unregister",
]  # fmt: skip
__all__ += [problem.__name__ for problem in PROBLEMS.values()]

# Importing a file registers its builders. `ficco` is imported first, because the planner prefers the first of several
# candidates with equal times.
for _file in sorted(pkgutil.iter_modules(__path__), key=lambda file: file.name != "ficco"):
    importlib.import_module(f"{__name__}.{_file.name}")
