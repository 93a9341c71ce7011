"""weft: collectives that overlap with the computation before or after them.

    pooled = weft.embedding_all_to_all(weights, features, sharding, group=group)

Names are loaded when they are first used. So `import weft` is fast, and works without Triton, CUDA or a compiler.
"""

from __future__ import annotations

import importlib
from typing import Any

import weft.forks  # noqa: F401 - from here on a forked child knows that it is one

__version__ = "0.1.0"

_HOME = {
    "Adagrad": "weft.embedding",
    "Adam": "weft.embedding",
    "EmbeddingBagConfig": "weft.embedding",
    "EmbeddingSharding": "weft.embedding",
    "KeyedJaggedTensor": "weft.embedding",
    "KeyedTensor": "weft.embedding",
    "OutputMap": "weft.builders",
    "PartialRowwiseAdam": "weft.embedding",
    "RowwiseAdagrad": "weft.embedding",
    "SGD": "weft.embedding",
    "Timeline": "weft.timeline",
    "all_gather_matmul": "weft.ops.all_gather_matmul",
    "all_gather_scaled_matmul": "weft.ops.all_gather_scaled_matmul",
    "all_to_all_matmul": "weft.ops.all_to_all_matmul",
    "embedding_all_to_all": "weft.ops.embedding_all_to_all",
    "embedding_pool": "weft.ops.embedding_pool",
    "matmul_all_gather": "weft.ops.matmul_all_gather",
    "matmul_all_reduce": "weft.ops.matmul_all_reduce",
    "matmul_all_to_all": "weft.ops.matmul_all_to_all",
    "matmul_reduce_scatter": "weft.ops.matmul_reduce_scatter",
    "on_failure": "weft.symm",
    "place_tables": "weft.embedding",
    "run_schedule": "weft.operator.run_schedule",
    "scaled_matmul_reduce_scatter": "weft.ops.scaled_matmul_reduce_scatter",
}
_MODULES = (
    "builders",
    "embedding",
    "errors",
    "hw",
    "nn",
    "parallel",
    "plan",
    "schedule",
    "sim",
    "symm",
    "timeline",
    "trace",
)

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"weft.{name}")
    raise AttributeError(f"module 'weft' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
