"""Descriptions of embedding operators: tables, their placement on ranks, sparse input, options, plans, optimizers.

This package uses no process groups, and allocates no memory except for optimizer states.
"""

from weft.embedding.hashing import hash_ids
from weft.embedding.jagged import JaggedInput, JaggedTensor, KeyedJaggedTensor, KeyedTensor, as_jagged
from weft.embedding.optimizers import SGD, Adagrad, Adam, EmbeddingOptimizer, PartialRowwiseAdam, RowwiseAdagrad
from weft.embedding.partition import ColumnWise, DataParallel, RowWise, TableSharding, TableWise
from weft.embedding.placement import place_tables
from weft.embedding.planner import TablePlan, plan_tables
from weft.embedding.tables import EmbeddingBagConfig, EmbeddingSharding, Slot
from weft.embedding.update import FusedUpdate

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "ColumnWise",
    "DataParallel",
    "EmbeddingBagConfig",
    "EmbeddingOptimizer",
    "EmbeddingSharding",
    "FusedUpdate",
    "JaggedInput",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PartialRowwiseAdam",
    "RowWise",
    "RowwiseAdagrad",
    "Slot",
    "TablePlan",
    "TableSharding",
    "TableWise",
    "as_jagged",
    "hash_ids",
    "place_tables",
    "plan_tables",
]
