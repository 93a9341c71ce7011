"""Modules: what a model holds. The operators beneath them are in `weft.ops`."""

from weft.nn.embedding import ShardedEmbeddingBagCollection
from weft.nn.experts import ExpertParallelMLP

__all__ = ["ExpertParallelMLP", "ShardedEmbeddingBagCollection"]
