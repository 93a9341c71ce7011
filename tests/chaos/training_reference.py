"""Embedding tables and optimizer states in float64, with which training steps are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import weft

from .work import Given

RULES: dict[str, Callable[..., Any]] = {
    "SGD": weft.SGD, "RowwiseAdagrad": weft.RowwiseAdagrad, "Adagrad": weft.Adagrad, "Adam": weft.Adam,
    "PartialRowwiseAdam": weft.PartialRowwiseAdam,
}  # fmt: skip

LR, EPS = 0.25, 1e-3


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

    def updated(self, grads: list[torch.Tensor], rows: list[torch.Tensor], lr: float) -> Tables:
        """Return the tables and states after an update. grads, rows: the gradients of each table, and the rows that
        change.
        """
        new = copy.deepcopy(self)
        new.steps += 1
        if (most := self.options.get("clip_norm")) is not None:
            norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
            grads = [grad * min(1.0, most / (float(norm) + 1e-6)) for grad in grads]
        for i, (grad, of_rows) in enumerate(zip(grads, rows, strict=True)):
            grad = grad + self.options.get("weight_decay", 0.0) * self.weights[i]
            most = self.options.get("clip_value", float("inf"))
            new._update(i, grad.clamp(-most, most), of_rows, lr)
            if self.dtype is not None:
                new.weights[i] = new.weights[i].to(self.dtype).double()
        return new

    def _update(self, i: int, g: torch.Tensor, rows: torch.Tensor, lr: float) -> None:
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
