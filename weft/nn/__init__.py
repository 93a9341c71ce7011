"""Modules: what a model holds. The operators beneath them are in `weft.ops`."""

from weft.nn.embedding import ShardedEmbeddingBagCollection

__all__ = ["ShardedEmbeddingBagCollection"]
