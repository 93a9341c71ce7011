"""Linear layers for tensor parallelism without sequence parallelism: activations between layers are replicated.

A block needs one all-reduce in forward and one in backward. Each is fused with a GEMM (`weft.matmul_all_reduce`):

    column-parallel    forward     y_i = x @ w_i^T + b_i, this rank's output features
                       backward    grad x = all-reduce(grad y @ w)
    row-parallel       forward     y = all-reduce(x @ w^T) + b + residual, from this rank's input features;
                                   optionally also RMSNorm(y)
                       backward    no collective

All ranks continue with the same y. So in backward, the incoming gradient of y is complete and equal on every rank, as
for DTensor's replicated tensors. (In weft's operators, a rank's gradient covers only its own loss, and backward sums
over the ranks.)

Source: "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", section 3, functions f
    and g.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from weft.operator.derivatives import once
from weft.operator.flattened import grad_of_weight
from weft.operator.layers import require_kept_by, require_plain_by
from weft.ops.matmul_all_gather import matmul_all_gather
from weft.ops.matmul_all_reduce import EPS, matmul_all_reduce, through_norm
from weft.symm.groups import group_of

_COLUMNS, _ROW = "a column-parallel layer", "a row-parallel layer"


def columns(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], group: str
) -> list[torch.Tensor]:
    """Return y_i [..., N_i / W] of column-parallel layers with the same input x. W is the number of ranks.

    x: [..., K], equal on all ranks.
    weights: each [N_i / W, K].
    biases: each [N_i / W], or None.
    """
    require_plain_by(_COLUMNS, group, x, *weights, *biases)
    return list(_Columns.apply(x, group, len(weights), *weights, *biases))


def row(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: str, residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None, eps: float = EPS,
) -> Any:  # fmt: skip
    """Return y [..., N] of a row-parallel layer, equal on all ranks. With norm, return (rms_norm(y), y).

    x: [..., K / W].
    weight: [N, K / W]. bias [N], residual [..., N] and norm [N], the weight of an RMSNorm, must be equal on all ranks.
    """
    require_plain_by(_ROW, group, x, weight, bias, residual, norm)
    return _Row.apply(x, weight, bias, residual, norm, eps, group)


def gathered_columns(x: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    """Return the gathered output y [..., N] of a column-parallel layer with one weight and no bias. All ranks get the
    same y.
    """
    require_plain_by(_COLUMNS, group, x, weight)
    return _GatheredColumns.apply(x, weight, group)


def _of_parameters(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, w_wanted: bool, b_wanted: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    rows = grad.flatten(0, -2)
    of_weight = grad_of_weight(x.flatten(0, -2), rows, weight.t()).t() if w_wanted else None
    return of_weight, rows.sum(0) if b_wanted else None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, count: int, *parameters: Any) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        require_kept_by(ctx, _COLUMNS, group, x, *parameters)
        weights, biases = parameters[:count], parameters[count:]
        ctx.group, ctx.count = group, count
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @once(_COLUMNS, lambda ctx: group_of(ctx.group))
    def backward(ctx: Any, saved: Sequence[torch.Tensor], *grads: torch.Tensor) -> tuple[Any, ...]:
        (x, *weights), count = saved, ctx.count
        x_wanted, _, _, *wanted = ctx.needs_input_grad
        grad_x = None
        if x_wanted:
            grad, weight = (
                (grads[0].contiguous(), weights[0]) if count == 1 else (torch.cat(grads, -1), torch.cat(weights))
            )
            grad_x = matmul_all_reduce(grad, weight, ctx.group)
        each = zip(grads, weights, wanted[:count], wanted[count:], strict=True)
        of_weights, of_biases = zip(*(_of_parameters(x, *one) for one in each), strict=True)
        return (grad_x, None, None, *of_weights, *of_biases)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *following: Any) -> Any:  # type: ignore[override]
        bias, residual, norm, ctx.eps, group = following
        ctx.group = group
        require_kept_by(ctx, _ROW, group, x, weight, bias, residual, norm)
        if norm is None:
            ctx.save_for_backward(x, weight)
            return matmul_all_reduce(x, weight.t(), group, bias=bias, residual=residual)
        normed, y = matmul_all_reduce(x, weight.t(), group, bias=bias, residual=residual, norm=norm, eps=ctx.eps)
        ctx.save_for_backward(x, weight, norm, y)
        return normed, y

    @staticmethod
    @once(_ROW, lambda ctx: group_of(ctx.group))
    def backward(ctx: Any, saved: Sequence[torch.Tensor], *grads: torch.Tensor) -> tuple[Any, ...]:
        (x, weight, *normed), grad, of_norm = saved, grads[-1], None
        x_wanted, w_wanted, b_wanted, residual_wanted, norm_wanted, _, _ = ctx.needs_input_grad
        if normed:
            of_normed, of_sum, y = (one.flatten(0, -2) for one in (*grads, normed[1]))
            grad, of_norm = through_norm([of_normed, of_sum], [normed[0].unsqueeze(0), y], ctx.eps)
            grad, of_norm = grad.view(grads[-1].shape), of_norm.squeeze(0)
        of_parameters = _of_parameters(x, grad, weight, w_wanted, b_wanted)
        of_x, of_residual = grad @ weight if x_wanted else None, grad if residual_wanted else None
        return of_x, *of_parameters, of_residual, of_norm if norm_wanted else None, None, None


class _GatheredColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:  # type: ignore[override]
        require_kept_by(ctx, _COLUMNS, group, x, weight)
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return matmul_all_gather(x, weight.t(), -1, group)

    @staticmethod
    @once(_COLUMNS, lambda ctx: group_of(ctx.group))
    def backward(ctx: Any, saved: Sequence[torch.Tensor], grad: torch.Tensor) -> tuple[Any, ...]:
        (x, weight), (x_wanted, w_wanted, _) = saved, ctx.needs_input_grad
        rank, own = group_of(ctx.group).rank(), weight.shape[0]
        mine = grad.narrow(-1, rank * own, own).contiguous()
        grad_x = matmul_all_reduce(mine, weight, ctx.group) if x_wanted else None
        return grad_x, _of_parameters(x, mine, weight, w_wanted, False)[0], None
