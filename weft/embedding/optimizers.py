"""Optimizers that update embedding tables inside of backward, as values: the rule's name, its numbers, its states.

A batch reads a small part of a table. So backward reduces the gradient of each row that the batch has read, and updates that
row at once: no gradient of the table is stored, and other rows cost nothing. With g the row's reduced gradient, w the row:

    all                     g = g + weight_decay * w                       (L2, as torch.optim; only rows that the batch reads)
    SGD                     w = w - lr * g
    RowwiseAdagrad          s = s + mean(g * g)                            one number a row
                            w = w - lr * g / (sqrt(s) + eps)
    Adagrad                 s = s + g * g
                            w = w - lr * g / (sqrt(s) + eps)
    Adam                    m = beta1 * m + (1 - beta1) * g
                            v = beta2 * v + (1 - beta2) * g * g
                            w = w - lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
    PartialRowwiseAdam      the same with v = beta2 * v + (1 - beta2) * mean(g * g), one number a row

t counts updates, not the reads of a row: rows that a batch does not read keep m and v, as in `torch.optim.SparseAdam`. States
are float32 for tables of any dtype, and updates are computed in float32. The rules are those of FBGEMM's exact optimizers, but
for weight decay of Adam, which FBGEMM applies beside the gradient. They stand in code once for each device:
`csrc/embedding_backward.cpp` and `weft/kernels/embedding_backward.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Literal, TypeAlias, get_args

StateShape: TypeAlias = Literal["row", "element"]


def state_shape(table: Sequence[int], shape: StateShape) -> tuple[int, ...]:
    """Return the shape of a state of a table of shape `table`: [rows, columns] or [rows]."""
    return tuple(table if shape == "element" else table[:1])


Nonfinite: TypeAlias = Literal["propagate", "skip", "raise"]


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptimizer:
    """The base class. Raises `ValueError` for a number out of its range.

    lr: the learning rate at first; `ebc.fused_optimizer` changes it.
    weight_decay: times the row, added to its gradient. Only rows that a batch reads decay.
    nonfinite: "propagate" updates a row although its gradient is infinite or NaN. "skip" leaves the row as it is. "raise" is a
        `RefusedError` on every rank that names the table, before anything is updated; for it ranks meet and wait for the device.
    """

    rule: ClassVar[int]
    states: ClassVar[dict[str, StateShape]] = {}
    """The states of a table, each with one number for a row or for an element; at most two. Names are TorchRec's."""

    lr: float
    weight_decay: float = 0.0
    nonfinite: Nonfinite = "propagate"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "nonfinite":
                if value not in get_args(Nonfinite):
                    raise ValueError(f"nonfinite={value!r} must be one of {', '.join(map(repr, get_args(Nonfinite)))}")
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{type(self).__name__}: {field.name}={value!r} must be a finite number")
            object.__setattr__(self, field.name, float(value))
            if field.name.startswith("beta"):
                if not 0 <= value < 1:
                    raise ValueError(f"{type(self).__name__}: {field.name}={value} must be at least 0 and below 1")
            elif value < 0:
                raise ValueError(f"{type(self).__name__}: {field.name}={value} must not be negative")

    @property
    def written(self) -> str:
        """The rule and its numbers without the learning rate as JSON: see `optimizer_of`."""
        numbers = asdict(self)
        del numbers["lr"]
        return json.dumps([type(self).__name__, numbers])

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the rule, except for the learning rate."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("lr", "nonfinite")}

    @property
    def counts(self) -> bool:
        """True if an update depends on the number of updates before it."""
        return False


@dataclass(frozen=True, kw_only=True)
class SGD(EmbeddingOptimizer):
    """Stochastic gradient descent without momentum. It keeps no state.

    lr: learning rate. weight_decay, nonfinite: as in `EmbeddingOptimizer`.
    """

    rule = 1


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(EmbeddingOptimizer):
    """Adagrad with one sum for each row: the mean of the squares of its gradient. State: 4 bytes a row.

    eps: added to the root. Default 1e-8, as in FBGEMM; torch.optim.Adagrad has 1e-10.
    """

    rule = 2
    states: ClassVar[dict[str, StateShape]] = {"momentum1": "row"}
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class Adagrad(EmbeddingOptimizer):
    """Adagrad. State: 4 bytes an element.

    eps: added to the root. Default 1e-8, as in FBGEMM; torch.optim.Adagrad has 1e-10.
    """

    rule = 3
    states: ClassVar[dict[str, StateShape]] = {"momentum1": "element"}
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class Adam(EmbeddingOptimizer):
    """Adam for the rows that a batch reads. State: 8 bytes an element.

    beta1, beta2: decay of the first and second moment. eps: added to the root; default 1e-8, as in FBGEMM and torch.
    """

    rule = 4
    states: ClassVar[dict[str, StateShape]] = {"momentum1": "element", "exp_avg_sq": "element"}
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def counts(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class PartialRowwiseAdam(EmbeddingOptimizer):
    """Adam with one second moment for each row. State: 4 bytes an element and 4 bytes a row.

    beta1, beta2: decay of the first and second moment. eps: added to the root; default 1e-8, as in FBGEMM.
    """

    rule = 5
    states: ClassVar[dict[str, StateShape]] = {"momentum1": "element", "exp_avg_sq": "row"}
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def counts(self) -> bool:
        return True


OPTIMIZERS: dict[str, type[EmbeddingOptimizer]] = {
    one.__name__: one for one in (SGD, RowwiseAdagrad, Adagrad, Adam, PartialRowwiseAdam)
}


def optimizer_of(written: str) -> EmbeddingOptimizer:
    """Return the optimizer that `EmbeddingOptimizer.written` describes, with learning rate 0."""
    name, numbers = json.loads(written)
    return OPTIMIZERS[name](lr=0.0, **numbers)
