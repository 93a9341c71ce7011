"""List every operator under test, by the name used in draws. A new operator needs a class and an entry here."""

from __future__ import annotations

from .checkpoints import Checkpoints
from .combine import MatmulAllToAll
from .pipeline import Pipeline
from .pooled import Embedding, GlobalBatch, LocalBatch
from .products import MatmulAllGather, MatmulAllReduce, MatmulReduceScatter, ScaledMatmulReduceScatter
from .sharder import Sharder
from .training import Training
from .training_tables import CutTables, DistinctRows, Rows, WholeTables
from .work import AllGatherMatmul, AllGatherScaledMatmul, AllToAllMatmul, Work

OPERATORS: dict[str, type[Work]] = {
    "all_gather_matmul": AllGatherMatmul,
    "all_gather_scaled_matmul": AllGatherScaledMatmul,
    "all_to_all_matmul": AllToAllMatmul,
    "matmul_reduce_scatter": MatmulReduceScatter,
    "scaled_matmul_reduce_scatter": ScaledMatmulReduceScatter,
    "matmul_all_reduce": MatmulAllReduce,
    "matmul_all_gather": MatmulAllGather,
    "matmul_all_to_all": MatmulAllToAll,
    "embedding_all_to_all": Embedding,
    "module, local batch": LocalBatch,
    "module, global batch": GlobalBatch,
    "training, whole tables": WholeTables,
    "training, cut tables": CutTables,
    "training, rows": Rows,
    "training, distinct rows": DistinctRows,
    "training, checkpoints": Checkpoints,
    "training, torchrec": Sharder,
    "training, pipeline": Pipeline,
}
CHECKPOINTS = ("training, checkpoints",)
ON_DEMAND = ("training, torchrec", "training, pipeline")
"""Operators that are drawn only if they are named, because they need packages that weft does not depend on."""
TRAINING = tuple(name for name, work in OPERATORS.items() if issubclass(work, Training))
