"""Modules with parameters, such as sharded embedding tables, expert layers and tensor-parallel layers."""

from typing import TYPE_CHECKING, Any

from weft.nn.checkpoint import FusedOptimizers
from weft.nn.deduplicated_embedding import DeduplicatedEmbeddingBagCollection as __  # noqa: F401  # which dedup=True chooses
from weft.nn.embedding import ShardedEmbeddingBagCollection
from weft.nn.embedding_collection import ShardedEmbeddingCollection
from weft.nn.embedding_memory import EmbeddingMemory
from weft.nn.experts import ExpertParallelMLP
from weft.nn.fused_optimizer import FusedOptimizer
from weft.nn.norm import RMSNorm
from weft.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear
from weft.nn.partitioned_embedding import PartitionedEmbeddingBagCollection as _  # noqa: F401  # which placements choose
from weft.nn.prefetching import prefetched
from weft.nn.table_marks import ignore_tables
from weft.nn.tensor_parallel import ParallelAttention, ParallelMLP, rotary_embedding
from weft.nn.tensor_parallel_state import distributed_state_dict, local_state_dict
from weft.operator.layers import replicated

if TYPE_CHECKING:
    from weft.nn.load_planner import LoadPlanner
    from weft.nn.parts_state import ModelState

__all__ = [
    "ColumnParallelLinear",
    "EmbeddingMemory",
    "ExpertParallelMLP",
    "FusedOptimizer",
    "FusedOptimizers",
    "LoadPlanner",
    "ModelState",
    "ParallelAttention",
    "ParallelMLP",
    "RMSNorm",
    "RowParallelLinear",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "distributed_state_dict",
    "ignore_tables",
    "local_state_dict",
    "prefetched",
    "replicated",
    "rotary_embedding",
]


def __getattr__(name: str) -> Any:
    """Import `ModelState` and `LoadPlanner` when they are first used, because importing torch.distributed.checkpoint
    takes most of a second.
    """
    if name == "ModelState":
        from weft.nn.parts_state import ModelState

        return ModelState
    if name == "LoadPlanner":
        from weft.nn.load_planner import LoadPlanner

        return LoadPlanner
    raise AttributeError(f"module 'weft.nn' has no attribute {name!r}; it has {', '.join(__all__)}")
