"""weft.matmul_all_gather: a GEMM whose finished rows travel to all ranks while it computes others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from weft.operator.layout import contiguous, strided
from weft.operator.registration import registered
from weft.operator.replay import replayed
from weft.operator.spec import Across, Operator
from weft.ops.matmul_all_gather_gradients import OPERATOR as GRADIENTS
from weft.ops.matmul_all_gather_gradients import part_of_sum
from weft.runtime.schedule_memory import TORCH_DTYPE
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
    """Multiply `x` with `w`, and join the products of all ranks of `group` along `gather_dim`, on every rank.

    Equals

        return all_gather(x @ w, gather_dim)

    but finished rows travel while others are computed. The schedule depends on shape and machine. If none is faster than GEMM and
    then collective, that sequence runs. Collective over `group`. Autocast does not apply: inputs are multiplied in their own
    dtype.

    x: [..., K] in fp32, fp16 or bf16, on CPU also fp64 (for `gradcheck`), at least 2-D, an ordinary tensor (for a DTensor pass
        its to_local()); of one shape on all ranks. Copied if `x.movedim(gather_dim, 0)` is not contiguous.
    w: [K, N], same dtype, row- or column-major (`linear.weight.t()` is not copied). Usually different on each rank.
    gather_dim: of the product, [..., N]. -1 or its last dimension joins columns, as behind a column-parallel layer that gathers
        its output: rank r's columns begin at r * N. Any other dimension joins rows, as x has them.
    group: a process group, or its name.
    schedule: pin one by name, as `weft.plan.explain` lists them ("serial", "direct[chunks=2,by=dma]", ...), forward only;
        "autotune": select the fastest by measurement at the first call of a shape, and remember it (docs/planning.md).
    deadline_s: seconds, up to 1e6, that a wait for a peer may take (default: WEFT_DEADLINE_S, 60); on CPU also in backward. On
        GPUs the serial schedule and backward call NCCL, whose waits use the process group's timeout.
    timeline: filled with the times of all steps (profiling: on GPUs it waits for the device; not under torch.compile).

    Returns all products, in x's dtype and in ordinary memory; on GPUs valid in stream order. All ranks have the same bits, and
    equal calls give equal bits; two schedules may multiply in parts of different sizes, which round differently. The first call
    of a shape is collective set-up of milliseconds to seconds: make it before capturing a CUDA graph.

    Memory: the result; symmetric memory of the size of x @ w, which is kept. All calls that differ only in rows share the
        memory of the largest x, as for `weft.all_gather_matmul`. The serial schedule takes x @ w during the call, and to
        join columns as much memory as the result again. Backward, if it overlaps, keeps symmetric memory of the size of the
        others' parts of the result, and memory of the size of this rank's part.

    Differentiable in x and w, once; all ranks must request the same gradients. They are sums over ranks: a rank's gradient of y
    goes to the x and w of the ranks that made its parts, as in all-gather's own backward. If all ranks compute the same loss from
    y, as replicated layers do, it counts once for each rank: divide it by the number of ranks. Backward is a reduce-scatter of
    the result's gradient and two GEMMs. If both gradients are requested, rows that have arrived from all ranks are
    multiplied while others travel, if that is faster.

    Raises `ValueError` for bad arguments. It is a `RefusedError` on every rank, and the group stays usable; on GPUs this holds
    for the first call of a shape, and a later error ends the group. An invalid group is a `ValueError` on its rank alone.
    `DisagreementError` if ranks describe different calls: on CPU at every call, on GPUs at the first call of a shape; later calls
    are compared within a second, and a difference ends the group. `DeadlineError`, `PeerLostError`, `PoisonedGroupError`.
    `NotImplementedError` for a second derivative.

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
    """The call as matrices. columns: True to join columns, False to join rows. outer: x's dimensions (`outer_of`)."""

    x: torch.Tensor
    w: torch.Tensor
    columns: bool
    outer: list[int] | None = None


class _MatmulAllGather(Operator[_Call]):
    """The operator. With y the products of all ranks, and `own` the part of the sum over ranks of grad y where this rank's
    product lies:

        grad x = own @ w^T      grad w = x^T @ own

    If both are requested, they are an operator of their own (`weft.ops.matmul_all_gather_gradients`). Otherwise backward is
    NCCL's reduce-scatter and one GEMM.
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
        return {"x": contiguous(call.x, "x"), "w": strided(call.w, "w")}

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
        def random(*shape: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, device=generator.device)
            return drawn.to(TORCH_DTYPE[p.dtype])

        return _Call(random(p.m, p.k), random(p.n, p.k).t(), p.columns)

    def expected(self, p: MatmulAllGather, rank: int, calls: Sequence[_Call]) -> list[torch.Tensor]:
        return [torch.cat([x.double() @ w.double() for x, w, *_ in calls], dim=int(p.columns))]


OPERATOR = registered(_MatmulAllGather())
