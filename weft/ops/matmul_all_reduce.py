"""weft.matmul_all_reduce: a GEMM whose rows leave for the ranks that add them up, and come back as sums, while it goes on with
others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from weft.arguments import check_tensor, checked_dimension
from weft.operator.calls import made, registered, within
from weft.operator.dtypes import name_of_dtype
from weft.operator.flattened import check_weights, grad_of_weight
from weft.operator.prepared import contiguous, size_of, strided
from weft.operator.spec import Operator
from weft.ops.all_gather_matmul import OPERATOR as GATHER
from weft.runtime.in_turn import Turn
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.runtime.unfused import all_reduce, all_reduce_, reduce_scatter
from weft.schedule import MatmulAllReduce
from weft.timeline import Timeline


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup | str,
    *,
    op: str = "sum",
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    schedule: str | None = None,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> torch.Tensor:
    """Multiply `x` with `w`, and add up the products of all ranks of `group`, on every rank.

    Equals

        y = x @ w; all_reduce(y, op); return y + bias + residual

    but rows that are computed travel while others are, and sums go back while others are added up; few rows, as when a language
    model generates, are added up by every rank. Shape and machine decide how. Where nothing beats the plain sequence of GEMM and
    collective, that is what runs. Collective over `group`. Autocast does not apply: inputs are multiplied in the dtype that they
    have.

    x: [..., K] in fp32, fp16 or bf16, on CPU also fp64 (for `gradcheck`), at least 2-D, an ordinary tensor (of a DTensor pass its
        to_local()); of one shape on all ranks, with any number of rows. Integers and fp8 are refused: products are rounded to x's
        dtype before they are added up, and these cannot hold sums. Copied if it is not contiguous.
    w: [K, N], same dtype, row- or column-major (`linear.weight.t()` is not copied). Another one on each rank, as a rule.
    group: a process group, or its name.
    op: "sum", or "avg": the sum, divided by the number of ranks.
    bias, residual: [N], and [..., N] as the result, in x's dtype: added to the sum, to each row by who adds it up, before it is
        rounded and goes to the others. So they must be equal on all ranks, which nothing checks. Not with "avg".
    schedule: pin one by name, as `weft.plan.explain` lists them ("serial", "two_shot[chunks=2,by=dma,add=gemm]", ...), forward
        only; "autotune": the fastest by measurement, made at the first call of a shape and remembered (docs/planning.md).
    deadline_s: seconds, up to 1e6, that a wait for a peer may take (default: WEFT_DEADLINE_S, 60); on CPU also in backward. On GPUs
        the serial schedule calls NCCL, whose waits go by the process group's timeout. Nothing checks there that ranks call the
        same, once a shape is known.
    timeline: filled with what ran when (profiling: on GPUs it waits for the device; not under torch.compile).

    Returns the sum, [..., N], in x's dtype and in ordinary memory; on GPUs valid in stream order. Overlapped schedules add up in
    fp32, in an order that the schedule and the number of ranks fix, so that equal calls give equal bits; and all ranks get the same
    bits. A row is added up by one rank, the others copy it; or by each in the order of ranks. Who adds up which rows is the
    schedule's business: parts of equal size, of which the last ranks' have fewer rows, or none. Results of two schedules differ by
    what they round. "avg" divides what has been rounded, once: in fp16, products and sums above 65504 are infinite before that. The
    first call of a shape, and its backward, are collective set-up of milliseconds to seconds: before capturing a CUDA graph.
    Memory: the result; symmetric and other memory that is kept, up to two and a half times the size of the result, or with
        few rows as many times as there are ranks and at most 256 MiB.

    Differentiable in x, w, bias and residual, once; all ranks must want the same gradients. Those of x and w are sums over ranks:
    what a rank's gradient of y is, all ranks' x and w get, as from `torch.distributed.nn.functional.all_reduce`. So each rank may
    have a loss of its own, and their sum is what is differentiated. If all ranks compute one and the same loss from y, as
    replicated layers do, it counts once for each: divide it by the number of ranks. Those of bias and residual are of this rank's
    own y, as if it had added them behind the all-reduce. Backward is a reduce-scatter of the result's gradient, and
    `all_gather_matmul` of that, which overlaps; or one all-reduce where ranks do not have equally many rows.

    Raises `ValueError` for bad arguments. It is a `RefusedError` on every rank, and the group lives on; on GPUs this holds for the
    first call of a shape, and a later one ends the group. A `group` that is none is a `ValueError` on its rank alone.
    `DisagreementError` when ranks describe different calls: on CPU at every call, on GPUs at the first of a shape.
    `DeadlineError`, `PeerLostError`, `PoisonedGroupError`. `NotImplementedError` for a second derivative.

    Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 2.3, 7.3 and 7.6.
    """

    def form(group: dist.ProcessGroup | str | None) -> _Call:
        check_tensor("x", x)
        check_tensor("w", w)
        if not isinstance(op, str) or op not in ("sum", "avg"):
            raise ValueError(f'op={op!r}: use "sum" or "avg"')
        if op == "avg" and (bias is not None or residual is not None):
            raise ValueError('op="avg" is of sums alone: add bias and residual to the result yourself')
        checked_dimension(x, 0, names=("x", "dimension"))
        row = rows = None
        if bias is not None:
            check_tensor("bias", bias)
            if bias.dim() != 1:
                raise ValueError(f"bias has shape {tuple(bias.shape)}: it must be [N]")
            row = bias.unsqueeze(0)
        if residual is not None:
            check_tensor("residual", residual)
            if residual.shape[:-1] != x.shape[:-1]:
                raise ValueError(
                    f"residual has shape {tuple(residual.shape)} and x {tuple(x.shape)}: all but the last dimension must be alike"
                )
            rows = residual.flatten(0, -2)
        return _Call(x.flatten(0, -2), w, row, rows)

    (y,) = made(OPERATOR, group, x, form, schedule=schedule, deadline_s=deadline_s, timeline=timeline)
    if op == "avg":
        y = y.div_(size_of(group))
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


class _Call(NamedTuple):
    """Of matrices."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None


class _MatmulAllReduce(Operator[_Call]):
    """With y the sum over ranks of x @ w, and `whole` the sum over ranks of grad y:

    grad x = whole @ w^T      grad w = x^T @ whole      grad bias = the sum of grad y's rows      grad residual = grad y
    """

    name, form = "matmul_all_reduce", _Call
    gradients_of: ClassVar[Mapping[str, str]] = {"x": "x", "w": "w", "bias": "bias", "residual": "residual"}

    def problem(self, call: _Call, world: int, most: int) -> MatmulAllReduce:
        x, w, bias, residual = call
        dtype = name_of_dtype("x", x, ", in which the ranks' products can be added up")
        check_weights(x, [w], what="x", each="w")
        m, n = x.shape[0], w.shape[1]
        for name, given, rows in (("bias", bias, 1), ("residual", residual, m)):
            if given is None:
                continue
            if given.shape != (rows, n):
                raise ValueError(f"{name} has {given.shape[-1]} columns: it must have the N={n} of w")
            if given.dtype != x.dtype or given.device != x.device:
                raise ValueError(
                    f"{name} is {given.dtype} on {given.device} and x is {x.dtype} on {x.device}: use one dtype and device"
                )
        return MatmulAllReduce(world, m, n, x.shape[1], dtype, bias is not None, residual is not None)

    def inputs(self, p: MatmulAllReduce, call: _Call) -> dict[str, Any]:
        tensors = {"x": contiguous(call.x, "x"), "w": strided(call.w, "w")}
        following = ("bias", call.bias), ("residual", call.residual)
        return tensors | {name: contiguous(given, name) for name, given in following if given is not None}

    def outputs(self, call: _Call, world: int) -> dict[str, Any]:
        return {"y": call.x.new_empty(call.x.shape[0], call.w.shape[1])}

    def unfused(
        self, p: MatmulAllReduce, call: _Call, group: dist.ProcessGroup, turn: Turn | None
    ) -> list[torch.Tensor] | None:
        """The serial schedule, but that the library adds what follows, and rounds each time."""
        following = [one for one in (call.bias, call.residual) if one is not None]
        if not following or not p.m * p.n:
            return None
        y = torch.mm(call.x, call.w)
        if turn is not None:
            turn.done("matmul y", y)
        if p.world_size > 1:
            y = all_reduce_(y, [p.m] * p.world_size, group.rank(), group, turn, "all_reduce y -> y")
        for one in following:
            y.add_(one)
        return [y if turn is None else turn.done("add y", y)]

    def saved(self, call: _Call, results: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        return [call.x, call.w]

    def gradients(
        self, p: MatmulAllReduce, group: dist.ProcessGroup, saved: Sequence[Any], grads: list[torch.Tensor],
        wanted: Sequence[bool], turn: Turn | None, beside: Any,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        (x, w), (whole,) = saved, grads
        local = [whole.sum(0, keepdim=True) if wanted[2] else None, whole if wanted[3] else None]
        if not (wanted[0] or wanted[1]):
            return [None, None, *local]
        world, what = p.world_size, "of the result's gradient"
        if world > 1 and wanted[0] and p.has_work and p.m % world == 0:
            rows = [p.m // world] * world
            mine = reduce_scatter(whole.contiguous(), rows, group.rank(), group, turn, f"reduce-scatter {what}")
            grad_x, *gathered = within(GATHER, GATHER.form(mine, [w.t()], wanted[1], None), group, turn)
            return [grad_x, grad_of_weight(x, gathered[0], w) if gathered else None, *local]
        if world > 1:
            whole = all_reduce(whole, [p.m] * world, group.rank(), group, turn, f"all-reduce {what}")
        return [whole @ w.t() if wanted[0] else None, grad_of_weight(x, whole, w) if wanted[1] else None, *local]

    def drawn(self, p: MatmulAllReduce, rank: int, generator: torch.Generator) -> _Call:
        def random(*shape: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, device=generator.device)
            return drawn.to(TORCH_DTYPE[p.dtype])

        x, w = random(p.m, p.k), random(p.n, p.k).t()
        generator = torch.Generator(generator.device).manual_seed(0)  # what follows is the same on all ranks
        return _Call(x, w, random(1, p.n) if p.bias else None, random(p.m, p.n) if p.residual else None)

    def expected(self, p: MatmulAllReduce, rank: int, calls: Sequence[_Call]) -> list[torch.Tensor]:
        total = torch.stack([call.x.double() @ call.w.double() for call in calls]).sum(0)
        for one in (calls[rank].bias, calls[rank].residual):
            total = total if one is None else total + one.double()
        return [total]


OPERATOR = registered(_MatmulAllReduce())
