"""The names of all operators, for the help of commands, and the lookup of their benchmarks.

An operator's module is imported on demand, so that `--help` does not import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any

from weft.bench.core.arguments import one_of
from weft.builders.problem import PROBLEMS, SCALED

LAYERS = ("expert_parallel", "tensor_parallel")
"""The benchmarks of layers that call several operators. `weft plan` does not plan layers: plan their operators instead.
"""
_STUDIES = {
    "inefficiency": "weft.studies.losses_bench:OPERATOR", "fused_embedding": "weft.studies.fused_embedding_measure:OPERATOR",
    "pgas": "weft.studies.pgas_measure:OPERATOR",
}  # fmt: skip
"""{study: "module:object" of its benchmark}, for studies that measure on GPUs but are no operators: the losses from
overlap, and two papers on embeddings.
"""
_TRAINING = "embedding_training"
"""An embedding training step: forward, backward and update. Benchmarks measure all of it; plans cover only the forward."""
_HOMES = {
    **_STUDIES,
    "scaled_matmul_reduce_scatter": "weft.bench.ops.matmul_reduce_scatter:SCALED",
    **{name: f"weft.bench.ops.{plain}:OPERATOR" for name, plain in SCALED.items()},
}  # fmt: skip
"""{benchmark: "module:object"} for benchmarks without a module of their own name in `weft.bench.ops`."""


def names() -> list[str]:
    """Return the names of all operators (including backward passes), and of the benchmarks of layers."""
    return sorted([*PROBLEMS, *SCALED, *LAYERS])


def measured() -> list[str]:
    """Return the names that `weft bench` accepts: `names()`, embedding_training, and studies that run on real machines."""
    return [*names(), _TRAINING, *_STUDIES]


def operator(name: str, *commands: str) -> Any:
    """Return the `OperatorBenchmark` of operator `name`. For an unknown name raise `ValueError`, which lists the known
    names and `commands`.

    An operator that a user has registered can be measured too, if its spec (`weft.operator.spec.Operator`) draws random
    inputs and computes the expected results.
    """
    home, _, what = _HOMES.get(name, f"weft.bench.ops.{name}:OPERATOR").partition(":")
    if name in measured() and importlib.util.find_spec(home) is not None:
        return getattr(importlib.import_module(home), what)
    if name.isidentifier():  # a record may contain any text, and dots in it would import packages
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"weft.ops.{name}")
    calls, any_operator = map(importlib.import_module, ("weft.operator.calls", "weft.bench.ops.any_operator"))
    if name not in calls.OPERATORS:
        raise one_of("operator", name, [*measured(), *commands])
    return any_operator.AnyOperator(calls.OPERATORS[name])
