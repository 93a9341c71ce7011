"""`weft.matmul_all_gather`: a GEMM that sends finished rows to all ranks while it computes other rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from weft.arguments import check_tensor, checked_dimension
from weft.builders import MatmulAllGather
from weft.operator.calls import made, within
from weft.operator.dtypes import name_of_dtype
from weft.operator.flattened import (
    check_weights,
    flattened,
    grad_of_weight,
    outer_of,
    outer_text,
    restored,
)
from weft.operator.layout import contiguous, normal, strided
from weft.operator.registration import registered
from weft.operator.replay import replayed
from weft.operator.spec import Across, Operator
from weft.ops.matmul_all_gather_gradients import OPERATOR as GRADIENTS
from weft.ops.matmul_all_gather_gradients import part_of_sum
from weft.runtime.unfused.turn import Turn
from weft.timeline import Timeline


@replayed
def matmul_all_gather(
    x: torch.Tensor,
    w: torch.Tensor,
    gather_dim: int,
    group: dist.ProcessGroup | str,
    *,
    schedule: str | None = None,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> torch.Tensor:
    """Multiply `x` by `w`, and all-gather the products of all ranks of `group` along `gather_dim`.

    Equivalent to

        return all_gather(x @ w, gather_dim)

    but sends finished rows while it computes other rows. The planner chooses a schedule for the shape and the machine.
    If no overlapping schedule is faster, the GEMM runs first, and then the all-gather of NCCL (on CPU weft or gloo). All ranks
    of `group` must make the call. Autocast has no effect: inputs are multiplied in their own dtype.

    x: [..., K] in fp32, fp16 or bf16 (on CPU also fp64, for `gradcheck`), at least 2-D. The same shape on all ranks.
        Not a DTensor: pass its to_local(). Copied if `x.movedim(gather_dim, 0)` is not contiguous.
    w: [K, N] in the same dtype, row- or column-major (`linear.weight.t()` is not copied). Its values may differ between
        ranks.
    gather_dim: a dimension of the product [..., N]. -1 or the last dimension concatenates columns, as in a
        column-parallel layer that gathers its output: the columns of rank r begin at r * N. Any other dimension
        concatenates rows.
    group: a process group, or its name.
    schedule: the name of a schedule for forward, such as "serial" or "direct[chunks=2,by=dma]". `weft.plan.explain`
        lists the names. "autotune" times schedules at the first call of a shape, and caches the fastest
        (docs/planning.md).
    deadline_s: the longest wait for a peer, in seconds, at most 1e6 (default: WEFT_DEADLINE_S, 60). On CPU it applies
        in backward too. On GPUs the serial schedule and backward call NCCL, which uses the timeout of the process
        group.
    timeline: records the times of all steps, for profiling. On GPUs the call then synchronises with the device. Not
        supported under torch.compile.

    Returns the products of all ranks in x's dtype, in ordinary memory. On GPUs the result is valid in stream order. All
    ranks get the same bits, and equal calls give equal bits. Two schedules may round differently, because they may
    split the GEMM into parts of different sizes.

    The first call of a shape sets up memory and kernels on all ranks, which takes milliseconds to seconds. Make it
    before you capture a CUDA graph.

    Memory: the result, and symmetric memory of the size of x @ w, which weft keeps for later calls. All calls that
        differ only in rows share the memory of the largest x, as in `weft.all_gather_matmul`. During a call the serial
        schedule also needs x @ w and, to concatenate columns, memory of the size of the result. Overlapped backward
        keeps symmetric memory of the size of the peers' parts of the result, and ordinary memory of the size of this
        rank's part.

    Differentiable once in x and w. All ranks must enable gradients for the same inputs. Gradients are sums over ranks,
    as in the backward of an all-gather. If all ranks compute the same loss from y, as replicated layers do, divide the
    loss by the number of ranks. Backward is a reduce-scatter of the result's gradient and two GEMMs. If x and w both
    need gradients, the GEMMs may overlap with the reduce-scatter.

    Raises:

    - `RefusedError` (a `ValueError`) on every rank if any rank passes bad arguments. The group stays usable. On GPUs,
      bad arguments after the first call of a shape may make the group unusable.
    - `ValueError` on this rank only, for an invalid group.
    - `DisagreementError` if ranks make different calls. CPU ranks compare every call before it runs. GPU ranks compare
      only the first call of a shape before it runs. They compare later calls up to a second afterwards, and a
      difference then makes the group unusable.
    - `DeadlineError`, `PeerLostError` or `PoisonedGroupError` if a rank is late, is lost, or has failed.
    - `NotImplementedError` for second derivatives.

    Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 7.1.
    """

    def form(group: dist.ProcessGroup | str | None) -> _Call:
        check_tensor("x", x)
        check_tensor("w", w)
        dim = checked_dimension(x, gather_dim, names=("x", "gather_dim"), last=True)
        columns = dim == x.dim() - 1
        return _Call(x.flatten(0, -2) if columns else flattened(x, dim), w, columns, outer_of(x, 0 if columns else dim))

    (y,) = made(OPERATOR, group, x, form, schedule=schedule, deadline_s=deadline_s, timeline=timeline)
    if x.dim() == 2:
        return y
    if gather_dim % x.dim() == x.dim() - 1:
        return y.view(*x.shape[:-1], y.shape[1])
    (y,) = restored([y], x.shape, gather_dim, None, group)
    return y


class _Call(NamedTuple):
    """The arguments of a call, with tensors as matrices.

    columns: True to concatenate columns, False for rows.
    outer: the part of x's shape that is lost in the reshape to a matrix: gather_dim, and the sizes of all other
        dimensions except the last. Ranks compare `outer`. None if x is a matrix (`outer_of`).
    """

    x: torch.Tensor
    w: torch.Tensor
    columns: bool
    outer: list[int] | None = None


class _MatmulAllGather(Operator[_Call]):
    """The operator y = all_gather(x @ w). Its gradients are

        own = this rank's part of the sum of grad y over ranks
        grad x = own @ w^T      grad w = x^T @ own

    If both are needed, `weft.ops.matmul_all_gather_gradients` computes them. Otherwise backward is NCCL's
    reduce-scatter and one GEMM.
    """

    name, form = "matmul_all_gather", _Call
    compared = ("outer",)
    across_ranks: ClassVar[Mapping[str, Across]] = {
        "x": "layout", "w": "layout", "gather_dim": "alike", "group": "own", "schedule": "alike", "deadline_s": "own",
        "timeline": "own",
    }  # fmt: skip
    gradients_of: ClassVar[Mapping[str, str]] = {"x": "x", "w": "w"}

    def problem(self, call: _Call, world: int, most: int) -> MatmulAllGather:
        x, w, columns, _ = call
        dtype = name_of_dtype("x", x)
        check_weights(x, [w], what="x", each="w")
        return MatmulAllGather(world, x.shape[0], w.shape[1], x.shape[1], dtype, columns)

    def given(self, call: _Call) -> str:
        return outer_text("x", call.outer)

    def inputs(self, p: MatmulAllGather, call: _Call) -> dict[str, Any]:
        return {"x": contiguous(call.x, "x", self.name), "w": strided(call.w, "w", self.name)}

    def outputs(self, call: _Call, world: int) -> dict[str, Any]:
        m, n = call.x.shape[0], call.w.shape[1]
        return {"y": call.x.new_empty((m, world * n) if call.columns else (world * m, n))}

    def gemms(self, call: _Call, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        return call.x.shape[0], [call.w]

    def gradients(
        self, p: MatmulAllGather, group: dist.ProcessGroup, saved: Sequence[Any], grads: list[torch.Tensor],
        wanted: Sequence[bool], turn: Turn, beside: Any,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        (x, w), (g,) = saved, grads
        if p.world_size > 1 and all(wanted):
            call = GRADIENTS.form(x, g, w, p.columns)
            return [*within(GRADIENTS, call, group, turn)]
        own = part_of_sum(p, g, group, turn)
        return [own @ w.t() if wanted[0] else None, grad_of_weight(x, own, w) if wanted[1] else None]

    def drawn(self, p: MatmulAllGather, rank: int, generator: torch.Generator) -> _Call:
        random = partial(normal, generator, p.dtype)
        return _Call(random(p.m, p.k), random(p.n, p.k).t(), p.columns)

    def expected(self, p: MatmulAllGather, rank: int, calls: Sequence[_Call]) -> list[torch.Tensor]:
        return [torch.cat([x.double() @ w.double() for x, w, *_ in calls], dim=int(p.columns))]


OPERATOR = registered(_MatmulAllGather())
