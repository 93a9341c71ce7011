"""Optimizers that update embedding tables during backward: their formulas, hyperparameters and states.

A batch reads a small part of a table. So backward sums the gradient of each row that the batch has read, and updates
that row immediately. No gradient of the whole table is stored, and other rows cost nothing. w is a row, and g its
gradient, summed over the batch:

    all                     g = g + weight_decay * w                       (L2, as torch.optim; only rows that the batch reads)
    SGD                     w = w - lr * g
    RowwiseAdagrad          s = s + mean(g * g)                            one number per row
                            w = w - lr * g / (sqrt(s) + eps)
    Adagrad                 s = s + g * g
                            w = w - lr * g / (sqrt(s) + eps)
    Adam                    m = beta1 * m + (1 - beta1) * g
                            v = beta2 * v + (1 - beta2) * g * g
                            w = w - lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
    PartialRowwiseAdam      as Adam, with v = beta2 * v + (1 - beta2) * mean(g * g), one number per row

t is the number of updates by the optimizer, not of the row. Rows that a batch does not read keep m and v, as in
`torch.optim.SparseAdam`. States are float32 for tables of any dtype, and updates are computed in float32. The formulas
are the same as in FBGEMM's exact optimizers, except that FBGEMM applies Adam's weight decay separately from the
gradient.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Literal, TypeAlias, get_args

from weft.arguments import check_choice, checked_within
from weft.integers import is_real

StateShape: TypeAlias = Literal["row", "element"]


def state_shape(table: Sequence[int], shape: StateShape) -> tuple[int, ...]:
    """Return the shape of an optimizer state: [rows] if the state has one number per row, otherwise `table`, the shape
    [rows, columns] of its table.
    """
    return tuple(table if shape == "element" else table[:1])


Nonfinite: TypeAlias = Literal["propagate", "skip", "raise"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]
GradientDtype: TypeAlias = Literal["table", "fp16", "bf16"]
_CHOICES = {"nonfinite": Nonfinite, "rounding": Rounding, "gradient_dtype": GradientDtype}
_NOT_OF_THE_RULE = ("lr", "clip_value", "clip_norm", "seed", *_CHOICES)
LARGEST, SMALLEST = float.fromhex("0x1.fffffep127"), 2.0**-149
"""The largest and the smallest positive number of float32, in which updates are computed."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptimizer:
    """The base class of optimizers that backward runs.

    Raises `ValueError` for an invalid argument. A number that float32 would round to 0 or to infinity is invalid.

    lr: the initial learning rate. Change it with `fused_optimizer.param_groups[0]["lr"]` of the module.
    weight_decay: backward adds `weight_decay` times the row to the row's gradient. Only rows that a batch reads decay.
    nonfinite: what happens to a row with an infinite or NaN gradient. "propagate" updates it. "skip" leaves it
        unchanged. "raise" raises `RefusedError` on every rank, with the table's name, before anything is updated; for
        this check ranks synchronise and wait for the device. The check includes gradients of empty bags.
    clip_value: the limit on the absolute value of each element of a row's gradient, as in
        `torch.nn.utils.clip_grad_value_`. It cannot be combined with `clip_norm`.
    clip_norm: the limit on the norm of all gradients of an update, over all tables and ranks, as in `clip_grad_norm_`.
        If the norm is larger, all gradients are scaled down. Ranks all-reduce the norm before each update. Rows that
        "skip" leaves unchanged do not count.
    rounding: "stochastic" rounds rows of fp16 and bf16 tables up or down at random, so that small updates are not lost.
        The expected value is exact. The random bits depend only on `seed`, the number of the update, table, row and
        column.
    gradient_dtype: "fp16" or "bf16" rounds the gradients of pooled vectors to that dtype before they are sent to the
        owners of tables. For float32 gradients, this halves the bytes that are sent. Sums stay in float32. "table": no
        rounding. Data-parallel tables and rows without pooling ignore it.
    """

    rule: ClassVar[int]
    states: ClassVar[dict[str, StateShape]] = {}
    """The states of a table, at most two, each with one number per row or per element. They have TorchRec's names."""

    lr: float
    weight_decay: float = 0.0
    nonfinite: Nonfinite = "propagate"
    clip_value: float | None = None
    clip_norm: float | None = None
    rounding: Rounding = "nearest"
    seed: int = 0
    gradient_dtype: GradientDtype = "table"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), get_args(choices))
        object.__setattr__(self, "seed", checked_within("seed", self.seed, 0, 2**63 - 1, "from 0 to 2**63 - 1"))
        if self.clip_value is not None and self.clip_norm is not None:
            raise ValueError(f"clip_value={self.clip_value} and clip_norm={self.clip_norm}: pass only one of them")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("seed", *_CHOICES) or (field.name.startswith("clip") and value is None):
                continue
            if not is_real(value) or not abs(value) < math.inf:
                raise ValueError(f"{type(self).__name__}: {field.name}={value!r} must be a finite number")
            if value > LARGEST or 0 < value < SMALLEST:
                raise ValueError(
                    f"{type(self).__name__}: {field.name}={value!r} must be between {SMALLEST:.2g} and {LARGEST:.2g}, or 0, "
                    "because updates are computed in float32"
                )
            object.__setattr__(self, field.name, float(value))
            if field.name.startswith("beta"):
                if not 0 <= value < 1:
                    raise ValueError(f"{type(self).__name__}: {field.name}={value} must be at least 0 and below 1")
            elif field.name.startswith("clip") and value == 0:
                raise ValueError(
                    f"{type(self).__name__}: {field.name}=0 would set every gradient to 0: pass None to disable "
                    "clipping"
                )
            elif value < 0:
                raise ValueError(f"{type(self).__name__}: {field.name}={value} must not be negative")

    @functools.cached_property
    def written(self) -> str:
        """The class and all arguments except the learning rate, as JSON for `optimizer_of`."""
        numbers = asdict(self)
        del numbers["lr"]
        return json.dumps([type(self).__name__, numbers])

    @functools.cached_property
    def numbers(self) -> dict[str, float]:
        """The hyperparameters in the optimizer's formula, without the learning rate."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_OF_THE_RULE}

    @property
    def described(self) -> str:
        """The class and `numbers` as a text, such as "SGD(weight_decay=0.0)"."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.numbers.items())})"

    @property
    def counts(self) -> bool:
        """True if the optimizer's formula uses the number of updates so far, for bias corrections."""
        return False


@dataclass(frozen=True, kw_only=True)
class SGD(EmbeddingOptimizer):
    """Stochastic gradient descent without momentum. It has no states.

    lr: the learning rate. `EmbeddingOptimizer` documents the other options.
    """

    rule = 1


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(EmbeddingOptimizer):
    """Adagrad with one state per row: the sum over updates of the mean squared gradient of the row. States: 4 bytes per
    row.

    eps: added to the square root (default: 1e-8, as in FBGEMM; torch.optim.Adagrad has 1e-10). With eps=0, a row whose
        gradients were all 0 becomes NaN.
    """

    rule = 2
    states: ClassVar[dict[str, StateShape]] = {"momentum1": "row"}
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class Adagrad(EmbeddingOptimizer):
    """Adagrad that updates only the rows that a batch reads. States: 4 bytes per element.

    eps: added to the square root (default: 1e-8, as in FBGEMM; torch.optim.Adagrad has 1e-10). With eps=0, an element
        whose gradients were all 0 becomes NaN, as in torch.optim.Adagrad.
    """

    rule = 3
    states: ClassVar[dict[str, StateShape]] = {"momentum1": "element"}
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class _Adam(EmbeddingOptimizer):
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def counts(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Adam(_Adam):
    """Adam that updates only the rows that a batch reads. States: 8 bytes per element.

    beta1, beta2: the decay rates of the first and second moment.
    eps: added to the square root (default: 1e-8, as in FBGEMM and torch). With eps=0, an element whose gradients were
        all 0 becomes NaN, as in torch.
    """

    rule = 4
    states: ClassVar[dict[str, StateShape]] = {"momentum1": "element", "exp_avg_sq": "element"}


@dataclass(frozen=True, kw_only=True)
class PartialRowwiseAdam(_Adam):
    """Adam with one second moment per row. States: 4 bytes per element and 4 bytes per row.

    beta1, beta2: the decay rates of the first and second moment.
    eps: added to the square root (default: 1e-8, as in FBGEMM). With eps=0, a row whose gradients were all 0 becomes
        NaN.
    """

    rule = 5
    states: ClassVar[dict[str, StateShape]] = {"momentum1": "element", "exp_avg_sq": "row"}


OPTIMIZERS: dict[str, type[EmbeddingOptimizer]] = {
    one.__name__: one for one in (SGD, RowwiseAdagrad, Adagrad, Adam, PartialRowwiseAdam)
}


@functools.lru_cache(maxsize=256)
def optimizer_of(written: str) -> EmbeddingOptimizer:
    """Return the optimizer that `EmbeddingOptimizer.written` describes, with learning rate 0."""
    name, numbers = json.loads(written)
    return OPTIMIZERS[name](lr=0.0, **numbers)


def seed_of_update(seed: int, step: int) -> int:
    """Return the seed for the random bits of update number `step`, as a signed 64-bit integer."""
    word = (seed + step * 0x9E3779B97F4A7C15) % 2**64
    return word - 2**64 if word >= 2**63 else word
