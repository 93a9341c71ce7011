"""The backward pass of `weft.all_to_all_matmul`: the exchanges of tokens and gradients, and the GEMMs of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.builders import AllToAllMatmul
from weft.operator.calls import operator_named
from weft.operator.spec import Operator
from weft.runtime.unfused import experts
from weft.runtime.unfused.grouped_matmul import grad_of_weights, grouped_matmul
from weft.runtime.unfused.permutation import in_order_of_arrival
from weft.runtime.unfused.sizes import Sizes
from weft.runtime.unfused.turn import STRAIGHT, Turn


def dual_of(
    p: AllToAllMatmul, grad: torch.Tensor, w: torch.Tensor, sizes: Sizes
) -> tuple[Operator[Any], Any]:  # fmt: skip
    """Return the operator and the call that compute the gradient of tokens: `matmul_all_to_all`."""
    dual, transposed = operator_named("matmul_all_to_all"), w.transpose(1, 2)
    tables, tokens = (sizes.received, sizes.splits), sum(sizes.host.sent)
    if not w.is_cuda:  # the tables of forward, because the caller may have overwritten its tensors
        tables = torch.from_numpy(sizes.tables[1]), torch.from_numpy(sizes.tables[0]).flatten()
    form: Any = dual.form
    return dual, form(grad, transposed if w.is_cuda else transposed.contiguous(), *tables, tokens, p.most, tokens)


def all_rows(grad_y: torch.Tensor, came: int) -> torch.Tensor:
    """Return `grad_y` with exactly `came` rows. The gradients of rows that max_rows has left out are 0."""
    missing = came - grad_y.shape[0]
    if missing <= 0:
        return grad_y[:came].contiguous()
    return torch.cat((grad_y, grad_y.new_zeros(missing, grad_y.shape[1])))


def send_again(
    tokens: torch.Tensor | Callable[[], torch.Tensor], sizes: Sizes, group: dist.ProcessGroup, turn: Turn
) -> Callable[[], torch.Tensor]:
    """Send tokens again. Return a function that returns the received tokens, sorted by expert. tokens: as for
    `gradients_of_experts`.
    """
    if not isinstance(tokens, torch.Tensor):
        return tokens
    return experts.begin_in_expert_order(tokens.contiguous(), sizes, group, turn, "exchange tokens again")


def gradients_of_experts(
    tokens: torch.Tensor | Callable[[], torch.Tensor],
    w: torch.Tensor,
    sizes: Sizes,
    group: dist.ProcessGroup,
    grad_y: torch.Tensor,
    wanted: Sequence[bool],
    turn: Turn = STRAIGHT,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of tokens and of w; None for a gradient that is not wanted. All ranks must want the same
    gradients.

    tokens: this rank's tokens, or an exchange of them that has begun (`experts.begin_in_expert_order`).

        grad w_e = x_e^T @ grad y_e            grad x_e = grad y_e @ w_e^T

    x_e are the tokens that arrived on this rank for expert e. Tokens are sent again during the GEMM of grad x. grad x is then
    sorted into the order of arrival, and sent back during the GEMM of grad w. The gradient of a weight is the sum, not the
    mean, over the rows of all ranks, on the rank that has the weight.

    sizes: the numbers of rows that this rank sends and receives. grad_y: a row for each received row.
    """
    world = group.size()
    grad_tokens: torch.Tensor | None = None
    returning: Any = None
    arriving = send_again(tokens, sizes, group, turn) if wanted[1] else None
    if wanted[0]:
        grad_x = grouped_matmul(grad_y, w.transpose(1, 2), sizes)
        if world > 1 and w.shape[0] > 1:
            grad_x = in_order_of_arrival(grad_x, sizes)
        grad_tokens = grad_x
        if world > 1:
            grad_tokens = grad_x.new_empty(sum(sizes.host.sent), grad_x.shape[1])
            returning = experts.send(
                grad_x, grad_tokens, sizes.host.came, sizes.host.sent, group, turn, "exchange gradients of tokens"
            )
    grad_w = None
    if arriving is not None:
        grad_w = grad_of_weights(arriving(), grad_y, w, sizes)
    if returning is not None:
        returning.wait()
    return grad_tokens, grad_w
