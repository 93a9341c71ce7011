"""The backward pass of `weft.matmul_all_gather` if both x and w need gradients, as an operator with its own schedules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.builders import MatmulAllGather, MatmulAllGatherGradients
from weft.operator.dtypes import name_of_dtype
from weft.operator.flattened import check_weights, grad_of_weight, room_for_grad_of_weight
from weft.operator.layout import normal, strided
from weft.operator.registration import registered
from weft.operator.spec import Operator
from weft.runtime.unfused.collectives import reduce_scatter
from weft.runtime.unfused.turn import Turn
from weft.runtime.unfused.unpack import below_each_other

_FORWARD = "matmul_all_gather"  # the operator that users call


class _Call(NamedTuple):
    """The arguments of a call. g: the gradient of the gathered products. columns: True if the products are concatenated
    along columns.
    """

    x: torch.Tensor
    g: torch.Tensor
    w: torch.Tensor
    columns: bool


class _MatmulAllGatherGradients(Operator[_Call]):
    """The operator that returns the gradients of x and w. The gradient of w has the memory layout of w."""

    name, form = "matmul_all_gather_gradients", _Call

    def problem(self, call: _Call, world: int, most: int) -> MatmulAllGatherGradients:
        x, g, w, columns = call
        check_weights(x, [w], what="x", each="w")
        p = MatmulAllGatherGradients(world, x.shape[0], w.shape[1], x.shape[1], name_of_dtype("x", x), columns)
        if (g.shape, g.dtype) != (p.shape, x.dtype):
            raise ValueError(
                f"the gradient has shape {tuple(g.shape)} and dtype {g.dtype}, but the gathered products have shape "
                f"{p.shape} and dtype {x.dtype}: pass a gradient with this shape and dtype"
            )
        return p

    def inputs(self, p: MatmulAllGatherGradients, call: _Call) -> dict[str, Any]:
        # g may be copied. No warning: autograd made it, not the caller.
        return {
            "g": call.g.contiguous(),
            "xt": strided(call.x, "x", _FORWARD).t(),
            "wt": strided(call.w, "w", _FORWARD).t(),
        }

    def outputs(self, call: _Call, world: int) -> dict[str, Any]:
        return {"grad_x": call.x.new_empty(call.x.shape), "grad_w": room_for_grad_of_weight(call.w)}

    def gemms(self, call: _Call, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        return call.x.shape[0], [call.w, call.w]

    def unfused(
        self, p: MatmulAllGatherGradients, call: _Call, group: dist.ProcessGroup, turn: Turn
    ) -> list[torch.Tensor] | None:
        """Compute the gradients with NCCL and cuBLAS."""
        own = part_of_sum(p, call.g, group, turn)
        grad_x, grad_w = own @ call.w.t(), grad_of_weight(call.x, own, call.w)
        turn.done("gradients", own)
        return [grad_x, grad_w]

    def drawn(self, p: MatmulAllGatherGradients, rank: int, generator: torch.Generator) -> _Call:
        random = partial(normal, generator, p.dtype)
        return _Call(random(p.m, p.k), random(*p.shape), random(p.n, p.k).t(), p.columns)

    def expected(self, p: MatmulAllGatherGradients, rank: int, calls: Sequence[_Call]) -> list[torch.Tensor]:
        total, (x, _, w, _) = torch.stack([call.g.double() for call in calls]).sum(0), calls[rank]
        own = total.tensor_split(p.world_size, dim=int(p.columns))[rank]
        return [own @ w.double().t(), x.double().t() @ own]


def part_of_sum(p: MatmulAllGather, g: torch.Tensor, group: dist.ProcessGroup, turn: Turn) -> torch.Tensor:
    """Sum g, the gradient of the gathered products, over ranks. Return this rank's part of the sum, which is the gradient of
    this rank's product.
    """
    if p.world_size == 1:
        return g
    if p.columns:
        g = below_each_other(g, p.world_size)
    what = "reduce-scatter of the result's gradient"
    return reduce_scatter(g.contiguous(), [p.m] * p.world_size, group.rank(), group, turn, what)


OPERATOR = registered(_MatmulAllGatherGradients())
