"""The list of operators that every command shows, and what a benchmark needs of each.

Names alone: an operator's file is imported when it is asked for, so that the command line shows its help without torch, and options
can be checked by the operator that they are for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any

from weft.bench.core.arguments import one_of
from weft.schedule.problem import PROBLEMS

SCALED = {"all_gather_scaled_matmul": "all_gather_matmul"}
"""Operators of fp8 operands that are planned and measured as another one with `--dtype fp8`."""
LAYERS = "tensor_parallel"
"""Layers that call several operators: measured as a whole, planned operator by operator."""
_STUDY = "inefficiency"
"""What overlap costs: measured, and no operator."""
_HOMES = {
    LAYERS: "weft.bench.ops.tensor_parallel:OPERATOR", _STUDY: "weft.studies.inefficiency:OPERATOR",
    "scaled_matmul_reduce_scatter": "weft.bench.ops.matmul_reduce_scatter:SCALED",
    **{name: f"weft.bench.ops.{plain}:OPERATOR" for name, plain in SCALED.items()},
}  # fmt: skip
"""Where those are that have no file of their name."""


def plain(name: str, dtype: str | None) -> tuple[str, str | None]:
    """Return the operator and dtype as which `name` is planned and measured. `ValueError` for a dtype other than fp8."""
    if name not in SCALED:
        return name, dtype
    if dtype not in (None, "fp8"):
        raise ValueError(f"--dtype {dtype}: {name} is for fp8; {SCALED[name]} takes {dtype}")
    return SCALED[name], "fp8"


def names() -> list[str]:
    """Return the names of all operators, gradients among them."""
    return sorted([*PROBLEMS, *SCALED, LAYERS])


def measured() -> list[str]:
    """Return what benchmarks take: all operators, and what else is measured."""
    return [*names(), _STUDY]


def operator(name: str) -> Any:
    """Return the `weft.bench.core.operator.Operator` of that name; `ValueError` lists the names if there is none.

    An operator whose spec says how its calls are drawn, and what must come out, needs no file in `weft.bench.ops`, whether it is
    weft's or registered by somebody (`weft.operator`).
    """
    home, _, what = _HOMES.get(name, f"weft.bench.ops.{name}:OPERATOR").partition(":")
    if name in measured() and importlib.util.find_spec(home) is not None:
        return getattr(importlib.import_module(home), what)
    if name.isidentifier():  # a name out of a record may be anything, and dots in it would import package after package
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"weft.ops.{name}")
    calls, any_operator = map(importlib.import_module, ("weft.operator.calls", "weft.bench.ops.any_operator"))
    if name not in calls.OPERATORS:
        raise one_of("operator", name, measured())
    return any_operator.AnyOperator(calls.OPERATORS[name])
