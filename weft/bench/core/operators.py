"""Which operators can be measured. Names alone: an operator's file is imported when it is asked for, so that the command line
shows its help without torch, and options can be checked by the operator that they are for."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

OPERATORS = {
    "embedding_all_to_all": "weft.bench.ops.embedding_all_to_all",
    "all_gather_matmul": "weft.bench.ops.all_gather_matmul",
    "matmul_all_gather": "weft.ops.matmul_all_gather",
    "matmul_all_reduce": "weft.ops.matmul_all_reduce",
    "matmul_reduce_scatter": "weft.bench.ops.matmul_reduce_scatter",
    "scaled_matmul_reduce_scatter": "weft.bench.ops.scaled_matmul_reduce_scatter",
    "matmul_all_to_all": "weft.bench.ops.matmul_all_to_all",
    "all_to_all_matmul": "weft.bench.ops.all_to_all_matmul",
    "tensor_parallel": "weft.bench.ops.tensor_parallel",
    "inefficiency": "weft.studies.inefficiency",
}


def operator(name: str) -> Any:
    """Its `weft.bench.core.operator.Operator`. Raises ValueError on a name that is no operator. One whose spec says how its calls
    are drawn, and what must come out, needs no file here, whether it is weft's or registered by somebody (`weft.operator`)."""
    home = OPERATORS.get(name, f"weft.ops.{name}")
    if not home.startswith("weft.ops."):
        return importlib.import_module(home).OPERATOR
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(home)
    calls, any_operator = map(importlib.import_module, ("weft.operator.calls", "weft.bench.ops.any_operator"))
    if name not in calls.OPERATORS:
        raise ValueError(f"no operator {name!r}: give one of {', '.join(OPERATORS)}")
    return any_operator.AnyOperator(calls.OPERATORS[name])
