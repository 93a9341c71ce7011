"""Modules with parameters, built on the operators in `weft.ops`."""

from weft.nn.embedding import ShardedEmbeddingBagCollection
from weft.nn.embedding_collection import ShardedEmbeddingCollection
from weft.nn.experts import ExpertParallelMLP
from weft.nn.fused_optimizer import FusedOptimizer, ignore_tables
from weft.nn.norm import RMSNorm
from weft.nn.partitioned_embedding import PartitionedEmbeddingBagCollection as _  # noqa: F401  # which placements choose
from weft.nn.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    distributed_state_dict,
    local_state_dict,
    rotary_embedding,
)
from weft.operator.layers import replicated

__all__ = [
    "ColumnParallelLinear",
    "ExpertParallelMLP",
    "FusedOptimizer",
    "ParallelAttention",
    "ParallelMLP",
    "RMSNorm",
    "RowParallelLinear",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "distributed_state_dict",
    "ignore_tables",
    "local_state_dict",
    "replicated",
    "rotary_embedding",
]
