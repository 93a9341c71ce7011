"""`weft.matmul_reduce_scatter`: a GEMM that sends finished rows to their owners for reduction while it computes other
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from weft.arguments import check_reduction, check_tensor, checked_dimension
from weft.builders import MatmulReduceScatter
from weft.operator.calls import made, within
from weft.operator.dtypes import name_of_dtype
from weft.operator.flattened import (
    check_even,
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
from weft.ops.all_gather_matmul import OPERATOR as GATHER
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.runtime.unfused.collectives import all_gather
from weft.runtime.unfused.turn import Turn
from weft.symm.groups import size_of
from weft.timeline import Timeline
from weft.words import joined


@replayed
def matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    reduce_op: str,
    scatter_dim: int,
    group: dist.ProcessGroup | str,
    *,
    schedule: str | None = None,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> torch.Tensor:
    """Multiply `A` by `B`, reduce the products of all ranks of `group`, and return this rank's part along
    `scatter_dim`.

    Same signature and result as `torch.ops.symm_mem.fused_matmul_reduce_scatter`. Equivalent to

        return reduce_scatter(A @ B, reduce_op, scatter_dim)

    but sends finished rows while it computes other rows. The planner chooses a schedule for the shape and the machine.
    If no overlapping schedule is faster, the GEMM runs first, and then the reduce-scatter of NCCL (on CPU weft or gloo). All
    ranks of `group` must make the call. Autocast has no effect: inputs are multiplied in their own dtype.

    A: [..., K] in fp32, fp16 or bf16 (on CPU also fp64, for `gradcheck`), at least 2-D. Not a DTensor: pass its
        to_local(). Integers and fp8 are refused, because products are rounded to A's dtype before they are reduced (for
        fp8 use `scaled_matmul_reduce_scatter`). Copied if `A.movedim(scatter_dim, 0)` is not contiguous.
    B: [K, N] in the same dtype, row- or column-major (`linear.weight.t()` is not copied). Its values may differ between
        ranks.
    reduce_op: "sum", or "avg" (the sum divided by the number of ranks).
    scatter_dim: a dimension of the product [..., N], whose size is divisible by the number of ranks. -1 or the last
        dimension scatters columns: weft then computes B^T @ A^T and scatters its rows. This copies the result, and also
        B if B is row-major.
    group: a process group, or its name.
    schedule: the name of a schedule for forward, such as "serial" or "direct[chunks=2,by=dma,add=gemm]".
        `weft.plan.explain` lists the names, except "pulled[chunks=2,by=gemm]" and "pulled[chunks=2,by=tracked]", which
        have not been timed on GPUs. "autotune" times schedules at the first call of a shape, and caches the fastest
        (docs/planning.md).
    deadline_s: the longest wait for a peer, in seconds, at most 1e6 (default: WEFT_DEADLINE_S, 60). On CPU it applies
        in backward too. On GPUs the serial schedule calls NCCL, which uses the timeout of the process group.
    timeline: records the times of all steps, for profiling. On GPUs the call then synchronises with the device. Not
        supported under torch.compile.

    Returns this rank's part of the sum in A's dtype, in ordinary memory. On GPUs the result is valid in stream order.
    It has the product's shape, with the size of scatter_dim divided by the number of ranks. Overlapped schedules reduce
    in fp32, in an order that depends only on the schedule and the number of ranks, so equal calls give equal bits. The
    schedule "ring" rounds its sums at each rank, as NCCL does. Two schedules may differ by rounding. "avg" divides the
    rounded sum, so in fp16 a product or sum above 65504 overflows before the division.

    The first call of a shape, and its first backward, set up memory and kernels on all ranks, which takes milliseconds
    to seconds. Make the call and its backward before you capture a CUDA graph.

    Memory: the result, and memory that weft keeps for later calls, up to twice the size of A @ B, partly symmetric. All
        calls that differ only in rows share the memory of the largest A, as in `weft.all_gather_matmul`. During a call
        the serial schedule also needs A @ B.

    Differentiable once in A and B. All ranks must enable gradients for the same inputs. Gradients are sums over ranks.
    Backward is `all_gather_matmul` of the result's gradient.

    Raises:

    - `RefusedError` (a `ValueError`) on every rank if any rank passes bad arguments. The group stays usable. On GPUs,
      bad arguments after the first call of a shape may make the group unusable.
    - `ValueError` on this rank only, for an invalid group.
    - `DisagreementError` if ranks make different calls. CPU ranks compare every call before it runs. GPU ranks compare
      only the first call of a shape before it runs. They compare later calls up to a second afterwards, and a
      difference then makes the group unusable.
    - `DeadlineError`, `PeerLostError` or `PoisonedGroupError` if a rank is late, is lost, or has failed.
    - `NotImplementedError` for second derivatives.

    Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives".
    """

    def form(group: dist.ProcessGroup | str | None) -> _Call:
        check_tensor("A", A)
        check_tensor("B", B)
        check_reduction("reduce_op", reduce_op)
        dim = checked_dimension(A, scatter_dim, names=("A", "scatter_dim"), last=True)
        if dim == A.dim() - 1:  # columns of A @ B are rows of B^T @ A^T
            check_weights(A, [B], what="A", each="B")
            check_even((*A.shape[:-1], B.shape[1]), dim, size_of(group), what="A @ B")
            average, outer = reduce_op == "avg", [-1, *A.shape[:-1]]
            return _Call(B.t().contiguous(), A.flatten(0, -2).t(), average, outer)
        check_even(A.shape, dim, size_of(group))
        return _Call(flattened(A, dim), B, reduce_op == "avg", outer_of(A, dim))

    (y,) = made(OPERATOR, group, A, form, schedule=schedule, deadline_s=deadline_s, timeline=timeline)
    world = size_of(group)
    if reduce_op == "avg":
        y = y.div_(world)
    if scatter_dim % A.dim() == A.dim() - 1:
        return y.t().reshape(*A.shape[:-1], y.shape[0]).contiguous()
    (y,) = restored([y], A.shape, scatter_dim, [A.shape[scatter_dim] // world], group)
    return y


class _Call(NamedTuple):
    """The arguments of a call, with tensors as matrices: the call computes x @ B.

    average: True if the public function divides the sum by the number of ranks.
    outer: the part of A's shape that is lost in the reshape to a matrix: scatter_dim, and the sizes of all other
        dimensions except the last. Ranks compare `outer`. None if A is a matrix (`outer_of`).

    To scatter columns, the call computes B^T @ A^T instead: the field x is the argument B transposed, and the field B is the
    argument A transposed. Then outer is [-1, the sizes of all dimensions of A except the last].
    """

    x: torch.Tensor
    B: torch.Tensor
    average: bool = False
    outer: list[int] | None = None


class _MatmulReduceScatter(Operator[_Call]):
    """The operator y = reduce_scatter(x @ B). Its gradients are

        grad x = whole @ B^T      grad B = x^T @ whole

    where whole = all-gather(grad y).
    """

    name, form = "matmul_reduce_scatter", _Call
    compared = ("average", "outer")
    across_ranks: ClassVar[Mapping[str, Across]] = {
        "A": "layout", "B": "layout", "reduce_op": "alike", "scatter_dim": "alike", "group": "own", "schedule": "alike",
        "deadline_s": "own", "timeline": "own",
    }  # fmt: skip
    caller_names: ClassVar[Mapping[str, str]] = {"x": "A"}
    gradients_of: ClassVar[Mapping[str, str]] = {"x": "A", "B": "B"}

    def problem(self, call: _Call, world: int, most: int) -> MatmulReduceScatter:
        x, B, _, _ = call
        fp8 = "; for fp8 use weft.scaled_matmul_reduce_scatter" if x.dtype == TORCH_DTYPE["fp8"] else ""
        dtype = name_of_dtype("A", x, f", because the ranks' products must be reduced in it{fp8}")
        check_weights(x, [B], what="A", each="B")
        check_even(x.shape, 0, world)
        return MatmulReduceScatter(world, x.shape[0], B.shape[1], x.shape[1], dtype)

    def multiple_of_rows(self, world: int) -> int:
        return world

    def given(self, call: _Call) -> str:
        outer = outer_text("A", call.outer)
        if call.outer is not None and call.outer[0] == -1:
            outer = f"scatter_dim=-1 of [{', '.join(map(str, call.outer[1:]))}, N]"
        return joined('reduce_op="avg"' * call.average, outer)

    def inputs(self, p: MatmulReduceScatter, call: _Call) -> dict[str, Any]:
        return {"x": contiguous(call.x, "A", self.name), "w": strided(call.B, "B", self.name)}

    def outputs(self, call: _Call, world: int) -> dict[str, Any]:
        return {"y": call.x.new_empty(call.x.shape[0] // world, call.B.shape[1])}

    def gemms(self, call: _Call, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        return call.x.shape[0], [call.B]

    def gradients(
        self, p: MatmulReduceScatter, group: dist.ProcessGroup, saved: Sequence[Any], grads: list[torch.Tensor],
        wanted: Sequence[bool], turn: Turn, beside: Any,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        (x, B), (grad,) = saved, grads
        grad_x: torch.Tensor | None = None
        whole = grad.contiguous()
        if p.world_size == 1:
            grad_x = grad @ B.t() if wanted[0] else None
        elif wanted[0]:
            grad_x, *gathered = within(GATHER, GATHER.form(whole, [B.t()], wanted[1], None), group, turn)
            whole = gathered[0] if gathered else whole
        else:
            rows = [p.rows] * p.world_size
            whole = all_gather(whole, rows, group.rank(), group, turn, "all_gather of the result's gradient")
        return [grad_x, grad_of_weight(x, whole, B) if wanted[1] else None]

    def drawn(self, p: MatmulReduceScatter, rank: int, generator: torch.Generator) -> _Call:
        random = partial(normal, generator, p.dtype)
        return _Call(random(p.m, p.k), random(p.n, p.k).t())

    def expected(self, p: MatmulReduceScatter, rank: int, calls: Sequence[_Call]) -> list[torch.Tensor]:
        mine = slice(rank * p.rows, (rank + 1) * p.rows)
        return [torch.stack([x[mine].double() @ B.double() for x, B, *_ in calls]).sum(0)]


OPERATOR = registered(_MatmulReduceScatter())
