"""The description of embedding operators: tables, their placement on ranks, sparse input, options, plans. No groups, no memory."""

from weft.embedding.hashing import hash_ids
from weft.embedding.jagged import JaggedInput, JaggedTensor, KeyedJaggedTensor, KeyedTensor, as_jagged
from weft.embedding.placement import place_tables
from weft.embedding.tables import EmbeddingBagConfig, EmbeddingSharding, Slot

__all__ = [
    "EmbeddingBagConfig",
    "EmbeddingSharding",
    "JaggedInput",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Slot",
    "as_jagged",
    "hash_ids",
    "place_tables",
]
