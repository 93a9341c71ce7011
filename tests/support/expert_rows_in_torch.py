"""The launchers of the kernels of an MoE layer, `weft.runtime.cuda.expert_rows` and `expert_order`, written with torch's functions.
CPU processes run the fused layer with them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F


def chosen_order(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order = chosen.sort(stable=True).indices
    return order, order.argsort(), torch.bincount(chosen, minlength=experts)


def gathered(tokens: torch.Tensor, order: torch.Tensor, copies: int) -> torch.Tensor:
    return tokens[order // copies]


def gate(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, dim=1)
    return F.silu(gate) * up


def gate_grad(h: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.vjp(gate, h, grad)[1]


def summed(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None, copies: int) -> torch.Tensor:
    of_tokens = rows[place].view(len(place) // copies, copies, rows.shape[1])
    return (of_tokens if weights is None else of_tokens * weights.unsqueeze(2)).sum(1)


def summed_grads(
    grad: torch.Tensor, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def run(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return summed(rows, place, weights, weights.shape[1])

    return torch.autograd.functional.vjp(run, (rows, weights), grad)[1]


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """Run the fused layer on CPU in this context."""
    here = sys.modules[__name__]
    with (
        mock.patch("weft.nn.experts.can_fuse", return_value=True),
        mock.patch("weft.nn.expert_rows.launchers", return_value=here),
    ):
        yield
