"""Which operators can be measured. Names alone: an operator's file is imported when it is asked for, so that the command line
shows its help without torch, and options can be checked by the operator that they are for."""

from __future__ import annotations

import importlib
from typing import Any

OPERATORS = {
    "embedding_all_to_all": "weft.bench.embedding_all_to_all",
    "all_gather_matmul": "weft.bench.all_gather_matmul",
    "all_to_all_matmul": "weft.bench.all_to_all_matmul",
    "inefficiency": "weft.bench.inefficiency",
}


def operator(name: str) -> Any:
    """Its `weft.bench.operator.Operator`. Raises ValueError on a name that is no operator."""
    if name not in OPERATORS:
        raise ValueError(f"no operator {name!r}: give one of {', '.join(OPERATORS)}")
    return importlib.import_module(OPERATORS[name]).OPERATOR
