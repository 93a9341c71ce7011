"""The list of operators that every command shows, and the lookup of their benchmarks.

It has names only: an operator's file is imported on demand. So the command line shows its help without torch, and operators check
their own options.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any

from weft.bench.core.arguments import one_of
from weft.builders.problem import PROBLEMS

SCALED = {"all_gather_scaled_matmul": "all_gather_matmul"}
"""fp8 operators that are planned and measured as another operator with `--dtype fp8`."""
LAYERS = "tensor_parallel"
"""Layers that call several operators: measured as a whole, planned operator by operator."""
_STUDY = "inefficiency"
"""The study of the cost of overlap: it is measured, but is no operator."""
_HOMES = {
    LAYERS: "weft.bench.ops.tensor_parallel:OPERATOR", _STUDY: "weft.studies.inefficiency:OPERATOR",
    "scaled_matmul_reduce_scatter": "weft.bench.ops.matmul_reduce_scatter:SCALED",
    **{name: f"weft.bench.ops.{plain}:OPERATOR" for name, plain in SCALED.items()},
}  # fmt: skip
"""The places of benchmarks without a file of their name."""


def plain(name: str, dtype: str | None) -> tuple[str, str | None]:
    """Return the operator and dtype as which `name` is planned and measured; raise `ValueError` for a dtype other than fp8."""
    if name not in SCALED:
        return name, dtype
    if dtype not in (None, "fp8"):
        raise ValueError(f"--dtype {dtype}: {name} is for fp8; {SCALED[name]} takes {dtype}")
    return SCALED[name], "fp8"


def names() -> list[str]:
    """Return the names of all operators, including gradients."""
    return sorted([*PROBLEMS, *SCALED, LAYERS])


def measured() -> list[str]:
    """Return the names that benchmarks accept: all operators, and the study."""
    return [*names(), _STUDY]


def operator(name: str) -> Any:
    """Return the `OperatorBenchmark` of that name; raise `ValueError` with the known names if there is none.

    An operator whose spec draws its calls and computes the expected results needs no file in `weft.bench.ops`, whether it is
    weft's or registered by a user (`weft.operator`).
    """
    home, _, what = _HOMES.get(name, f"weft.bench.ops.{name}:OPERATOR").partition(":")
    if name in measured() and importlib.util.find_spec(home) is not None:
        return getattr(importlib.import_module(home), what)
    if name.isidentifier():  # a name from a record may be anything, and dots in it would import packages
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"weft.ops.{name}")
    calls, any_operator = map(importlib.import_module, ("weft.operator.calls", "weft.bench.ops.any_operator"))
    if name not in calls.OPERATORS:
        raise one_of("operator", name, measured())
    return any_operator.AnyOperator(calls.OPERATORS[name])
