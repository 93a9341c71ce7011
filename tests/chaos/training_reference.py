"""Embedding tables and optimizer states in float64, with which training steps are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import weft

from .work import Given

LR, EPS = 0.25, 1e-3
RULES: dict[str, Callable[..., Any]] = {
    "SGD": weft.SGD, "RowwiseAdagrad": weft.RowwiseAdagrad, "Adagrad": weft.Adagrad, "Adam": weft.Adam,
    "PartialRowwiseAdam": weft.PartialRowwiseAdam,
}  # fmt: skip
DENSE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD, "Adagrad": partial(torch.optim.Adagrad, eps=EPS), "Adam": partial(torch.optim.Adam, eps=EPS),
    "AdamW": partial(torch.optim.AdamW, eps=EPS),
}  # fmt: skip
SPARSE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD, "Adagrad": partial(torch.optim.Adagrad, eps=EPS),
    "SparseAdam": partial(torch.optim.SparseAdam, eps=EPS),
}  # fmt: skip
"""Optimizers of torch for dense and for sparse gradients. A large eps, because the gradients of a row may cancel."""
TOLERANCES = {torch.float16: ((0.01, 0.25), (0.03, 0.5)), torch.bfloat16: ((0.05, 2.0), (0.1, 4.0))}
"""The tolerances of 16-bit tables, whose updates round to the nearest number, or up or down at random."""


class Tables:
    """All tables and optimizer states, in float64.

    blocks: for each table, the ranges of columns that have rowwise states of their own. dtype: the dtype to which updates round
    tables; None if they round at random or are as good as exact.
    """

    def __init__(
        self,
        weights: list[torch.Tensor],
        blocks: list[list[tuple[int, int]]],
        options: Given,
        dtype: torch.dtype | None,
    ) -> None:
        self.weights = [weight.double() for weight in weights]
        self.first, self.second = ([torch.zeros_like(weight) for weight in self.weights] for _ in range(2))
        self.blocks, self.options, self.dtype, self.steps = blocks, options, dtype, 0
        self.torchs: torch.optim.Optimizer | None = None
        if options["optimizer"] is None and (name := options.get("torchs")):
            self.torchs = (SPARSE if options["sparse"] else DENSE)[name](self.weights, lr=LR)

    def updated(self, grads: list[torch.Tensor], rows: list[torch.Tensor], lr: float) -> Tables:
        """Return the tables and states after an update. grads, rows: the gradients of each table, and the rows that
        change.
        """
        new = copy.deepcopy(self)
        if new.torchs is not None:
            new._step(grads, rows, lr)
            return new
        new.steps += 1
        left = [self._skipping(i, grad, of_rows) for i, (grad, of_rows) in enumerate(zip(grads, rows, strict=True))]
        grads = [torch.where(of_rows, grad, 0.0) for grad, of_rows in zip(grads, left, strict=True)]
        if (most := self.options.get("clip_norm")) is not None:
            norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
            grads = [grad * min(1.0, most / (float(norm) + 1e-6)) for grad in grads]
        for i, (grad, of_rows) in enumerate(zip(grads, left, strict=True)):
            grad = grad + self.options.get("weight_decay", 0.0) * self.weights[i]
            most = self.options.get("clip_value", float("inf"))
            new._update(i, grad.clamp(-most, most), of_rows, lr)
            if self.dtype is not None:
                new.weights[i] = new.weights[i].to(self.dtype).double()
        return new

    def _skipping(self, i: int, grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return, for each element of table i, True if it changes. With nonfinite="skip", rows of a part with an infinite
        or NaN gradient do not change.
        """
        changes = rows[:, None].expand_as(grad).clone()
        if self.options.get("nonfinite") == "skip":
            for begin, end in self.blocks[i]:
                changes[:, begin:end] &= grad[:, begin:end].isfinite().all(1, keepdim=True)
        return changes

    def _step(self, grads: list[torch.Tensor], rows: list[torch.Tensor], lr: float) -> None:
        """Update the tables by the optimizer of torch. Sparse gradients have all rows that the batch has read."""
        assert self.torchs is not None
        self.torchs.param_groups[0]["lr"] = lr
        for weight, grad, of_rows in zip(self.weights, grads, rows, strict=True):
            at = of_rows.nonzero().T
            is_sparse = self.options["sparse"]
            weight.grad = torch.sparse_coo_tensor(at, grad[at[0]], grad.shape).coalesce() if is_sparse else grad
        self.torchs.step()
        self.torchs.zero_grad()

    def _update(self, i: int, g: torch.Tensor, rows: torch.Tensor, lr: float) -> None:
        """Update the elements `rows` of table i with the gradient g."""
        rule, square = self.options["optimizer"] or "SGD", g * g
        if "owwise" in rule:
            for begin, end in self.blocks[i]:
                square[:, begin:end] = square[:, begin:end].mean(1, keepdim=True)
        if rule == "SGD":
            change = g
        elif rule in ("RowwiseAdagrad", "Adagrad"):
            self.first[i][rows] += square[rows]
            change = g / (self.first[i].sqrt() + EPS)
        else:
            self.first[i][rows] = (0.9 * self.first[i] + 0.1 * g)[rows]
            self.second[i][rows] = (0.999 * self.second[i] + 0.001 * square)[rows]
            unbiased = self.second[i] / (1 - 0.999**self.steps)
            change = self.first[i] / (1 - 0.9**self.steps) / (unbiased.sqrt() + EPS)
        self.weights[i][rows] -= lr * change[rows]
