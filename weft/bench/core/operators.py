"""Which operators can be measured. Names alone: an operator's file is imported when it is asked for, so that the command line
shows its help without torch, and options can be checked by the operator that they are for."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any

from weft.schedule.problem import PROBLEMS

_OTHERS = {
    "tensor_parallel": "weft.bench.ops.tensor_parallel:OPERATOR", "inefficiency": "weft.studies.inefficiency:OPERATOR",
}  # fmt: skip
"""What is measured beside single operators, and where."""
_SHARING = {"scaled_matmul_reduce_scatter": "weft.bench.ops.matmul_reduce_scatter:SCALED"}
"""Operators in another one's file."""


def names() -> list[str]:
    """Operators that users call, and what else is measured."""
    return [*sorted(name for name, one in PROBLEMS.items() if one.title == name), *_OTHERS]


def operator(name: str) -> Any:
    """Its `weft.bench.core.operator.Operator`. Raises ValueError on a name that is no operator. One whose spec says how its calls
    are drawn, and what must come out, needs no file in `weft.bench.ops`, whether it is weft's or registered by somebody
    (`weft.operator`)."""
    home, _, what = (_OTHERS | _SHARING).get(name, f"weft.bench.ops.{name}:OPERATOR").partition(":")
    if name in names() and importlib.util.find_spec(home) is not None:
        return getattr(importlib.import_module(home), what)
    if name.isidentifier():  # a name out of a record may be anything, and dots in it would import package after package
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"weft.ops.{name}")
    calls, any_operator = map(importlib.import_module, ("weft.operator.calls", "weft.bench.ops.any_operator"))
    if name not in calls.OPERATORS:
        raise ValueError(f"no operator {name!r}: give one of {', '.join(names())}")
    return any_operator.AnyOperator(calls.OPERATORS[name])
