"""Tables, their placement on ranks, and the sparse input that looks them up: descriptions and checks, no groups."""

from weft.sparse.hashing import hash_ids
from weft.sparse.jagged import JaggedInput, JaggedTensor, KeyedJaggedTensor, KeyedTensor, as_jagged
from weft.sparse.placement import place_tables
from weft.sparse.tables import EmbeddingBagConfig, EmbeddingSharding, Slot

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
