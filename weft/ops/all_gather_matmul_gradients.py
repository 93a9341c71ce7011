"""The backward pass of `weft.all_gather_matmul` if both x and the weights need gradients, as an operator with its own
schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from weft.builders import AllGatherMatmulGradients
from weft.operator.dtypes import name_of_dtype
from weft.operator.layout import contiguous, is_scattered, normal, strided
from weft.operator.registration import registered
from weft.operator.spec import Operator
from weft.runtime.collectives import all_gather_single, all_reduce_single
from weft.runtime.unfused.turn import Turn

AGAIN = "all_gather x_shard again"

_FORWARD = "all_gather_matmul"  # the operator that users call


class _Call(NamedTuple):
    """The arguments of a call.

    x: this rank's shard [m / W, k].
    grads: the gradients of the products, each [m, n_i].
    wts: the transposed weights, each [n_i, k].
    """

    x: torch.Tensor
    grads: list[torch.Tensor]
    wts: list[torch.Tensor]


class _AllGatherMatmulGradients(Operator[_Call]):
    """The operator that returns the gradient of x, and the transposed gradients of the weights."""

    name, form = "all_gather_matmul_gradients", _Call
    caller_names: ClassVar[Mapping[str, str]] = {"x": "A_shard"}
    arguments: ClassVar[Mapping[str, str]] = {"x_shard": "A_shard"}

    def problem(self, call: _Call, world: int, most: int) -> AllGatherMatmulGradients:
        x, grads, wts = call
        sizes = tuple(wt.shape[0] for wt in wts)
        m, k = x.shape[0] * world, x.shape[1]
        shapes = [tuple(t.shape) for t in (*grads, *wts)]
        if shapes != [*((m, n) for n in sizes), *((n, k) for n in sizes)]:
            raise ValueError(
                f"A_shard has shape {tuple(x.shape)}, which does not match the shapes {shapes} of gradients and weights: with "
                f"{world} ranks, gradients must have {m} rows, and transposed weights {k} columns"
            )
        return AllGatherMatmulGradients(world, m, sizes, k, name_of_dtype("A_shard", x))

    def inputs(self, p: AllGatherMatmulGradients, call: _Call) -> dict[str, Any]:
        tensors = {"x_shard": contiguous(call.x, "A_shard", _FORWARD)}
        for i, (grad, wt) in enumerate(zip(call.grads, call.wts, strict=True)):
            # No warning about the copy, because autograd made the tensor: the gradient of a sum is one expanded
            # element.
            grad = grad.contiguous() if is_scattered(grad) else grad
            tensors |= {f"g{i}": grad, f"gt{i}": grad.t(), f"wt{i}": strided(wt, f"Bs[{i}]", _FORWARD)}
        return tensors

    def outputs(self, call: _Call, world: int) -> dict[str, Any]:
        grads = {f"grad_wt{i}": wt.new_empty(wt.shape) for i, wt in enumerate(call.wts)}
        return {"grad_x": call.x.new_empty(call.x.shape)} | grads

    def gemms(self, call: _Call, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        return call.grads[0].shape[0], [*call.wts, *call.wts]

    def unfused(
        self, p: AllGatherMatmulGradients, call: _Call, group: dist.ProcessGroup, turn: Turn
    ) -> list[torch.Tensor] | None:
        """Compute the gradients with NCCL and cuBLAS. Each collective runs during GEMMs that do not depend on it."""
        x, grads, wts = call
        whole = x.new_empty(p.m, p.k)
        gathering = turn.begin(AGAIN, all_gather_single, whole, x.contiguous(), group=group)
        grad_x, scattering = reduce_scattered(partial_of(grads, wts), [p.rows] * p.world_size, group, turn)
        gathering.wait()
        grad_wts = [grad.t() @ whole for grad in grads]
        scattering.wait()
        turn.done("gradients", whole)
        return [grad_x, *grad_wts]

    def drawn(self, p: AllGatherMatmulGradients, rank: int, generator: torch.Generator) -> _Call:
        random = partial(normal, generator, p.dtype)
        return _Call(random(p.rows, p.k), [random(p.m, n) for n in p.n], [random(n, p.k) for n in p.n])

    def expected(self, p: AllGatherMatmulGradients, rank: int, calls: Sequence[_Call]) -> list[torch.Tensor]:
        whole, mine = torch.cat([call.x for call in calls]).double(), slice(rank * p.rows, (rank + 1) * p.rows)
        products = [
            grad[mine].double() @ wt.double() for call in calls for grad, wt in zip(call.grads, call.wts, strict=True)
        ]
        return [torch.stack(products).sum(0), *(grad.t().double() @ whole for grad in calls[rank].grads)]


def partial_of(
    grads: Sequence[torch.Tensor], wts: Sequence[torch.Tensor], gathered: torch.Tensor | None = None
) -> torch.Tensor:
    """Return sum_i grads[i] @ wts[i]. The gradient of x is the sum of this matrix over ranks.

    gathered: the gradient of the gathered x, if forward returned x. It is added to the result, and has its shape.
    """
    partial = grads[0] @ wts[0] if gathered is None else torch.addmm(gathered, grads[0], wts[0])
    for grad, wt in zip(grads[1:], wts[1:], strict=True):
        partial.addmm_(grad, wt)
    return partial


def reduce_scattered(
    partial: torch.Tensor, rows: Sequence[int], group: dist.ProcessGroup, turn: Turn
) -> tuple[torch.Tensor, Any]:
    """Start the reduce-scatter of `partial`. Return this rank's rows of the sum, and the handle to wait on before you
    read them.

    rows: the number of rows of each rank.
    """
    rank = group.rank()
    if len(set(rows)) == 1 and partial.device.type == "cuda":
        mine = partial.new_empty(rows[rank], partial.shape[1])
        return mine, dist.reduce_scatter_tensor(mine, partial, group=group, async_op=True)
    work = turn.begin("reduce-scatter of A_shard's gradient", all_reduce_single, partial, group=group)
    return partial.split(list(rows))[rank], work


OPERATOR = registered(_AllGatherMatmulGradients())
