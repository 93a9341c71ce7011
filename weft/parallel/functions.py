"""Autograd functions with the names and arguments of torchtitan's `dist_gemm` backend
(`torchtitan/distributed/linear.py`).

    y = AllGatherLinear.apply(x_shard, w, bias, group, group.group_name)          column-parallel: [M/W, K] -> [M, N/W]
    a, b = AllGatherLinearMulti.apply(x_shard, wa, wb, group, group.group_name)   two weights, one all-gather
    y = LinearReduceScatter.apply(x, w, bias, group, group.group_name)            row-parallel: [M, K/W] -> [M/W, N]

Weights are shards of `nn.Linear` weights. As in torchtitan, forward saves this rank's columns of the gathered x, for
the gradient of the weight. (`weft.all_gather_matmul` saves this rank's rows, which have the same size.) Both
collectives of backward are fused with GEMMs:

    grad x_shard = reduce-scatter(grad y @ w)      grad w^T = all-gather(x_columns^T) @ grad y
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.operator.derivatives import once
from weft.operator.layers import compare_options, given, require_kept_by
from weft.operator.together import tell, together
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.symm.groups import group_of, size_of
from weft.words import kind


def _gathered(
    ctx: Any, x_shard: torch.Tensor, ws: Sequence[torch.Tensor], group: dist.ProcessGroup, group_name: str
) -> list[torch.Tensor]:
    x, ys = all_gather_matmul(x_shard, [w.t() for w in ws], 0, group_name)
    assert x is not None
    parts = x.tensor_split(size_of(group_name), 1)
    ctx.group_name, ctx.columns = group_name, [part.shape[1] for part in parts]
    ctx.save_for_backward(parts[group.rank()].t().contiguous(), *ws)
    return ys


def _gradients(ctx: Any, saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of x_shard and of each weight; None in place of a gradient that is not needed."""
    columns, *ws = saved
    grad_x: torch.Tensor | None = None
    grad_ws: list[torch.Tensor | None] = [None] * len(ws)
    if ctx.needs_input_grad[0]:
        grad, w = (grads[0], ws[0]) if len(ws) == 1 else (torch.cat(list(grads), 1), torch.cat(ws))
        grad_x = matmul_reduce_scatter(grad, w, "sum", 0, ctx.group_name)
    if any(ctx.needs_input_grad[1 : 1 + len(ws)]):
        rows = None if len(set(ctx.columns)) == 1 else ctx.columns
        _, found = all_gather_matmul(
            columns, [grad.contiguous() for grad in grads], 0, ctx.group_name, return_A=False, rows=rows
        )
        grad_ws = [grad.t() for grad in found]
    return [grad_x, *grad_ws]


def _require_operands(
    of: str, group_name: str, x: torch.Tensor, ws: Sequence[torch.Tensor], bias: torch.Tensor | None = None
) -> None:
    """Raise `ValueError` for operands that are no matrices, and for a bias with a wrong shape or device, before the
    collective, and notify peers. Also record whether there is a bias: ranks compare this at the next collective.

    of: the name of the function, for error texts.
    """
    compare_options(of, group_name, x, bias=given(bias))
    if not torch.compiler.is_compiling() and (wrong := _wrong_operands(x, ws, bias)):
        with together(of, group_of(group_name), x, None):
            raise ValueError(f"{of}: {wrong}")


def _wrong_operands(x: Any, ws: Sequence[Any], bias: Any) -> str:
    """Return an error text with its fix; "" for valid operands."""
    for name, operand in (("x", x), *(("w", w) for w in ws)):
        if not isinstance(operand, torch.Tensor):
            return f"{name} is {kind(operand)}: pass a torch.Tensor"
        if operand.dim() != 2:
            return f"{name} has shape {tuple(operand.shape)}: pass a matrix"
    if bias is None or (isinstance(bias, torch.Tensor) and bias.shape == ws[0].shape[:1] and bias.device == x.device):
        return ""
    found = f"has shape {tuple(bias.shape)} on {bias.device}" if isinstance(bias, torch.Tensor) else f"is {kind(bias)}"
    return f"bias {found}: pass shape {tuple(ws[0].shape[:1])} on {x.device}, the device of x"


def _biased(of: str, group_name: str, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return y + bias, after the last collective of the function `of`. An error makes the group fail, because no later
    collective could notify peers of it.
    """
    if bias is None or torch.compiler.is_compiling():
        return y if bias is None else y + bias
    try:
        return y + bias
    except BaseException as error:
        tell(error, of, group_of(group_name), y, last=True)
        raise


class AllGatherLinear(torch.autograd.Function):
    """Return all_gather(x_shard) @ w.T + bias, [M, N/W], on W ranks.

    x_shard: this rank's rows of the input, [M/W, K], in fp32, fp16 or bf16.
    w: this rank's rows of an `nn.Linear`'s weight, [N/W, K], in the same dtype.
    bias: the same part of the layer's bias, [N/W]; None for no bias.

    Memory: as for `weft.all_gather_matmul` with return_A=True. Autograd saves [M, K/W]: this rank's columns of the
    gathered x. Raises the errors of `weft.all_gather_matmul`.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_shard: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, group_name: str
    ) -> torch.Tensor:  # fmt: skip
        _require_operands("AllGatherLinear", group_name, x_shard, [w], bias)
        require_kept_by(ctx, "AllGatherLinear", group_name, x_shard, w, bias)
        (y,) = _gathered(ctx, x_shard, [w], group, group_name)
        return _biased("AllGatherLinear", group_name, y, bias)

    @staticmethod
    @once("AllGatherLinear", lambda ctx: group_of(ctx.group_name))
    def backward(ctx: Any, saved: Sequence[torch.Tensor], grad: torch.Tensor) -> tuple[Any, ...]:
        return (*_gradients(ctx, saved, [grad]), grad.sum(0) if ctx.needs_input_grad[2] else None, None, None)


class AllGatherLinearMulti(torch.autograd.Function):
    """Return all_gather(x_shard) @ wa.T and all_gather(x_shard) @ wb.T, without biases, as in SwiGLU.

    x_shard [M/W, K], wa [Na/W, K], wb [Nb/W, K]; the results are [M, Na/W] and [M, Nb/W]. Dtypes, memory and errors: as
    for `AllGatherLinear`.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_shard: torch.Tensor, wa: torch.Tensor, wb: torch.Tensor, group: dist.ProcessGroup, group_name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        _require_operands("AllGatherLinearMulti", group_name, x_shard, [wa, wb])
        require_kept_by(ctx, "AllGatherLinearMulti", group_name, x_shard, wa, wb)
        a, b = _gathered(ctx, x_shard, [wa, wb], group, group_name)
        return a, b

    @staticmethod
    @once("AllGatherLinearMulti", lambda ctx: group_of(ctx.group_name))
    def backward(ctx: Any, saved: Sequence[torch.Tensor], *grads: torch.Tensor) -> tuple[Any, ...]:
        return (*_gradients(ctx, saved, grads), None, None)


class LinearReduceScatter(torch.autograd.Function):
    """Return reduce_scatter(x @ w.T) + bias, [M/W, N], on W ranks.

    x: this rank's columns of the input, [M, K/W], in fp32, fp16 or bf16.
    w: the same columns of an `nn.Linear`'s weight, [N, K/W], in the same dtype.
    bias: the layer's whole bias, [N], equal on all ranks; None for no bias. The gradient of the bias is the sum over ranks.

    Memory and errors: as for `weft.matmul_reduce_scatter`.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, group_name: str
    ) -> torch.Tensor:  # fmt: skip
        _require_operands("LinearReduceScatter", group_name, x, [w], bias)
        require_kept_by(ctx, "LinearReduceScatter", group_name, x, w, bias)
        ctx.group_name = group_name
        ctx.save_for_backward(x, w)
        y = matmul_reduce_scatter(x, w.t(), "sum", 0, group_name)
        return _biased("LinearReduceScatter", group_name, y, bias)

    @staticmethod
    @once("LinearReduceScatter", lambda ctx: group_of(ctx.group_name))
    def backward(ctx: Any, saved: Sequence[torch.Tensor], grad: torch.Tensor) -> tuple[Any, ...]:
        x, w = saved
        _, w_wanted, bias_wanted, *_ = ctx.needs_input_grad
        whole, (grad_x,) = all_gather_matmul(
            grad.contiguous(), [w], 0, ctx.group_name, return_A=w_wanted or bias_wanted
        )
        grad_w = whole.t() @ x if w_wanted and whole is not None else None
        return grad_x, grad_w, whole.sum(0) if bias_wanted and whole is not None else None, None, None
