"""The arguments of embedding_all_to_all that only backward uses."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from weft.embedding.optimizers import EmbeddingOptimizer
from weft.embedding.update import FusedUpdate
from weft.words import kind


class Training(NamedTuple):
    """The arguments of a call that only backward uses.

    states: the optimizer's states, as in `FusedUpdate.tensors`.
    learning_rate, step: tensors with the learning rate and the number of updates.
    factor, deterministic: as in `FusedUpdate`.
    anchor: an empty tensor that requires a gradient, so that autograd calls backward even if no table requires one.
    optimizer: the optimizer as JSON (`EmbeddingOptimizer.written`), or "".
    """

    states: list[torch.Tensor]
    learning_rate: torch.Tensor | None
    step: torch.Tensor | None
    anchor: torch.Tensor | None
    optimizer: str
    factor: float
    sparse: bool
    deterministic: bool = True


NOT_TRAINED = Training([], None, None, None, "", 1.0, False)


def training_of(
    update: FusedUpdate | None, sparse: bool, requires_grad: bool, device: torch.device, factor: float = 1.0
) -> Training:
    """Return the arguments of a call that only backward uses. Raise `ValueError` for options that contradict each
    other.

    factor: the number by which the sum of gradients is multiplied if `update` is None. Otherwise the factor of `update`
        counts.
    """
    if not isinstance(sparse, bool) or not isinstance(requires_grad, bool):
        raise ValueError(f"sparse={sparse!r}, requires_grad={requires_grad!r}: pass True or False")
    if sparse and torch.compiler.is_compiling():
        raise ValueError(
            "sparse=True inside a compiled program: torch.compile supports only dense gradients; pass sparse=False"
        )
    if update is None:
        anchor = _anchor(device) if requires_grad and torch.is_grad_enabled() else None
        return (
            Training([], None, None, anchor, "", factor, sparse)
            if sparse or factor != 1.0 or anchor is not None
            else NOT_TRAINED
        )
    if not isinstance(update, FusedUpdate):
        raise TypeError(f"update is {kind(update)}: pass weft.embedding.FusedUpdate(weft.SGD(lr=...), weights)")
    if sparse:
        raise ValueError(
            "sparse=True with an update: an optimizer in backward leaves no gradient, so pass "
            "sparse=False, or update=None"
        )
    if not torch.is_grad_enabled():
        return NOT_TRAINED
    if torch.compiler.is_compiling():
        raise ValueError(
            "embedding_all_to_all with update= inside a compiled program: torch.compile does not support "
            "backward that changes the tables. Call it in a function decorated with torch.compiler.disable"
        )
    written = update.optimizer.written
    anchor, rate = _anchor(device), update.learning_rate
    return Training(update.tensors, rate, update.step, anchor, written, update.factor, False, update.deterministic)


@functools.lru_cache(maxsize=64)
def _anchor(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, device=device, requires_grad=True)


def check_module_options(
    optimizer: Any, sparse: Any, gradients: Any, deterministic: Any = True, dedup: Any = False
) -> None:
    """Raise `ValueError` for invalid or contradictory options of a module."""
    if optimizer is not None and not isinstance(optimizer, EmbeddingOptimizer):
        raise ValueError(
            f"optimizer is {kind(optimizer)}: pass an optimizer of weft, such as weft.SGD(lr=...) or weft.RowwiseAdagrad(lr=...). "
            "To use an optimizer of torch, pass None, and give it the parameters"
        )
    for name, value in (("sparse", sparse), ("deterministic", deterministic), ("dedup", dedup)):
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False")
    if sparse and optimizer is not None:
        raise ValueError(
            "sparse=True with an optimizer: an optimizer in backward leaves no gradient, so pass "
            "sparse=False, or optimizer=None"
        )
    if not isinstance(gradients, str) or gradients not in ("mean", "sum"):
        raise ValueError(f"gradients={gradients!r} must be 'mean' or 'sum'")
