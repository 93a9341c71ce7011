"""FLOP formulas of operators for `torch.utils.flop_counter`, with which FlopCounterMode computes FLOPs and MFU.

An operator counts 2MNK for each GEMM of this rank, in forward and in backward. Embeddings count 0, like torch's
embeddings. weft registers the formulas when torch's counter is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weft.operator.spec import Operator

T = TypeVar("T")

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[Any, Any] = {}
"""The formulas, by operator in torch's dispatcher."""


def register_formulas(op: Operator[Any]) -> None:
    """Register the FLOP formula of `op`. If the backward of `op` is also an operator of torch's dispatcher, register
    its formula too.
    """
    count = len(op.kinds)

    def forward(*arguments: Any, out_val: Any = None, **_: Any) -> int:
        return sum(flops_of(op, op.form(*arguments[:count]), out_val))

    def backward(saved: Any, grads: Any, *arguments: Any, **_: Any) -> int:
        return _of_backward(flops_of(op, op.form(*arguments[:count]), grads), arguments[-1])

    for name, formula in ((op.name, forward), (f"{op.name}_backward", backward)):
        if hasattr(torch.ops.weft, name):
            _add(name, formula)


def counted(forward: Sequence[int], wanted: Sequence[bool], backward: Callable[[], T]) -> T:
    """Run the function `backward` of an eager call, return its result, and report its FLOPs to dispatch modes such as
    FlopCounterMode.

    Modes do not see eager calls of weft, which bypass torch's dispatcher.

    forward: the result of `flops_of` for the forward call.
    wanted: for the first tensor and then for each weight, True if its gradient is needed.
    """
    with _disable_current_modes():
        made = backward()
    torch.ops.weft.multiplied(_of_backward(forward, wanted))
    return made


def is_counter_there() -> bool:
    """True if torch's FLOP counter has been imported, so that it may be active."""
    return _COUNTER in sys.modules


def flops_of(op: Operator[Any], call: Any, results: Sequence[torch.Tensor]) -> list[int]:
    """Return, for each weight, the FLOPs of the GEMM with this weight in forward. results: the results of the call, or their
    gradients.
    """
    rows, weights = op.gemms(call, results)
    return [2 * rows * weight.shape[-2] * weight.shape[-1] for weight in weights]


def _of_backward(forward: Sequence[int], wanted: Sequence[bool]) -> int:
    """Return the FLOPs of backward: one GEMM for the gradient of each weight, and one GEMM per weight for the gradient
    of the first tensor.

    forward: the FLOPs of the forward GEMM with each weight.
    wanted: for the first tensor and then for each weight, True if its gradient is needed.
    """
    return sum(forward) * wanted[0] + sum(one * want for one, want in zip(forward, wanted[1:], strict=False))


def _register(counter: ModuleType) -> None:
    for target, formula in _formulas.items():
        if target not in counter.flop_registry:
            counter.register_flop_formula(target, get_raw=True)(formula)


def _add(name: str, formula: Any) -> None:
    _formulas[getattr(torch.ops.weft, name)] = formula
    if is_counter_there():
        _register(sys.modules[_COUNTER])


class _OnImport:
    """An import hook. When torch's FLOP counter is imported, the hook registers the FLOP formulas of weft's operators."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                _register(module)

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


if not is_counter_there():
    sys.meta_path.insert(0, _OnImport())

_library = torch.library.Library("weft", "FRAGMENT")
_library.define("multiplied(SymInt count) -> ()")
_library.impl("multiplied", lambda count: None, "CompositeExplicitAutograd")
_add("multiplied", lambda count, **_: count)
