"""The rows of an MoE layer: each token is copied for each of its experts, and the copies are sorted by expert.

On GPUs, kernels copy, sort and add up rows (`weft.nn.fused_experts`). Otherwise torch's functions do: on CPU, under torch.compile,
and without Triton.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch

from weft.runtime.launchers import launchers

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST_COPIES = 32  # a kernel unrolls the loop over a token's rows


class Routing(NamedTuple):
    """The rows that this rank's tokens become: each token is copied for each of its experts.

    order: for each row, the index of the copy: token * top_k + number of the choice. Rows are sorted by expert.
    place: for each copy, the index of its row: the inverse of `order`.
    splits: the number of rows of each expert of all ranks.
    copies: top_k.
    kernels: the launchers of the kernels, `weft.runtime.cuda.expert_rows`; None if torch's functions run instead.
    """

    order: torch.Tensor
    place: torch.Tensor
    splits: torch.Tensor
    copies: int
    kernels: ModuleType | None

    @classmethod
    def of(cls, top_k_index: torch.Tensor, experts: int, fuses: bool) -> Routing:
        """Return the routing of tokens.

        top_k_index: each token's experts, of which there are `experts` in all. fuses: True to use kernels.
        """
        copies, chosen = top_k_index.shape[1], top_k_index.flatten()
        if fuses and (sorting := launchers("expert_order")) is not None:
            order, place, splits = sorting.chosen_order(chosen, experts)
            return cls(order, place, splits, copies, launchers("expert_rows"))
        expert, order = chosen.to(torch.int64).sort(stable=True)
        splits = torch.zeros(experts, dtype=torch.int64, device=expert.device)
        splits = splits.scatter_add(0, expert, torch.ones_like(expert))  # torch.bincount would wait for the device
        return cls(order, inverse(order), splits, copies, None)

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of `tokens`, sorted by expert."""
        return GatherRows.apply(tokens, self.order // self.copies, self.place, self.copies)  # type: ignore[no-any-return]

    def summed(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's rows. Products are in y's dtype.

        y: a row for each copy, [rows, columns], sorted by expert. weights: [tokens, top_k].
        """
        if self.kernels is not None:
            return self.kernels.summed(y, self.place, weights, self.copies)  # type: ignore[no-any-return]
        rows = GatherRows.apply(y, self.place, self.order, 1).view(*weights.shape, y.shape[1])
        return (rows * weights.to(y.dtype).unsqueeze(2)).sum(1)  # type: ignore[no-any-return]


def can_fuse(tokens: torch.Tensor, weights: torch.Tensor) -> bool:
    """True if kernels can run a layer with these tokens and weights: [tokens, top_k]."""
    return (
        not torch.compiler.is_compiling()
        and tokens.is_cuda
        and type(tokens) is torch.Tensor
        and tokens.dtype in _DTYPES
        and weights.dtype in _DTYPES
        and weights.shape[1] <= _MOST_COPIES
        and tokens.device.index == torch.cuda.current_device()
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
    )


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class GatherRows(torch.autograd.Function):
    """Return rows `there` of x. Backward gathers too, while torch's indexing would sort `there` and add up rows one by one.

    there: for each row of the result, its row of x. Each row of x occurs `copies` times.
    back: the rows of the result that are copies of row 0 of x, then of row 1, and so on.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: torch.Tensor, back: torch.Tensor, copies: int) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        rows = grad.index_select(0, back)
        if ctx.copies > 1:
            rows = rows.view(len(rows) // ctx.copies, ctx.copies, grad.shape[1]).sum(1)
        return rows, None, None, None
