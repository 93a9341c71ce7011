"""`weft.matmul_all_reduce`: a GEMM whose finished rows are reduced while it computes other rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, overload

import torch
import torch.distributed as dist

from weft.arguments import check_reduction, check_tensor, checked_dimension
from weft.builders import MatmulAllReduce
from weft.operator.calls import made, within
from weft.operator.dtypes import name_of_dtype
from weft.operator.flattened import check_weights, grad_of_weight, outer_of, outer_text
from weft.operator.layout import contiguous, normal, strided
from weft.operator.registration import registered
from weft.operator.replay import replayed
from weft.operator.spec import Across, Operator
from weft.ops.all_gather_matmul import OPERATOR as GATHER
from weft.runtime.unfused.collectives import all_reduce, all_reduce_, reduce_scatter
from weft.runtime.unfused.turn import Turn
from weft.schedule.regions import checked_eps
from weft.symm.groups import size_of
from weft.timeline import Timeline
from weft.words import joined

EPS = 1e-6


@overload
def matmul_all_reduce(
    x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup | str, *, reduce_op: str = "sum", bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, norm: None = None, eps: float = EPS, schedule: str | None = None,
    deadline_s: float | None = None, timeline: Timeline | None = None,
) -> torch.Tensor: ...  # fmt: skip


@overload
def matmul_all_reduce(
    x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup | str, *, reduce_op: str = "sum", bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, norm: torch.Tensor, eps: float = EPS, schedule: str | None = None,
    deadline_s: float | None = None, timeline: Timeline | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@replayed
def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    group: dist.ProcessGroup | str,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = EPS,
    schedule: str | None = None,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multiply `x` by `w`, and all-reduce the products of all ranks of `group`.

    Equivalent to

        y = x @ w; all_reduce(y, reduce_op); y = y + bias + residual; return y

    With `norm`, return `(rms_norm(y, [N], norm, eps), y)`: the input and the residual of a transformer's next layer.

    Each rank sends finished rows to the ranks that reduce them, while it computes other rows. These ranks send sums to
    all ranks while they reduce other rows. With few rows, as in decoding, every rank reduces all rows. The planner
    chooses a schedule for the shape and the machine. If no overlapping schedule is faster, the GEMM runs first, and
    then the all-reduce of NCCL (on CPU weft or gloo). All ranks of `group` must make the call. Autocast has no effect: GEMM and
    norm use the dtype of the inputs.

    x: [..., K] in fp32, fp16 or bf16 (on CPU also fp64, for `gradcheck`), at least 2-D, with any number of rows. The
        same shape on all ranks. Not a DTensor: pass its to_local(). Integers and fp8 are refused, because products are
        rounded to x's dtype before they are reduced. Copied if it is not contiguous.
    w: [K, N] in the same dtype, row- or column-major (`linear.weight.t()` is not copied). Its values may differ between
        ranks.
    group: a process group, or its name.
    reduce_op: "sum", or "avg" (the sum divided by the number of ranks).
    bias, residual: [N] and [..., N] in x's dtype, added to the sum. Each must be equal on all ranks. If the values
        differ, ranks raise an error only with WEFT_CHECK_CALLS=1. Otherwise results may differ between ranks: depending
        on the schedule, each rank adds its own values, or one rank adds its values for all ranks. Not supported with
        "avg".
    norm: [N] in x's dtype, the weight of an RMSNorm of the sum. Not supported with "avg".
    eps: the norm's epsilon, at least 0, which is added to the mean square of a row.
    schedule: the name of a schedule for forward, such as "serial" or "two_shot[chunks=2,by=dma,add=gemm]".
        `weft.plan.explain` lists the names. "autotune" times schedules at the first call of a shape, and caches the
        fastest (docs/planning.md).
    deadline_s: the longest wait for a peer, in seconds, at most 1e6 (default: WEFT_DEADLINE_S, 60). On CPU it applies
        in backward too. On GPUs the serial schedule calls NCCL, which uses the timeout of the process group.
    timeline: records the times of all steps, for profiling. On GPUs the call then synchronises with the device. Not
        supported under torch.compile.

    Returns the sum [..., N] in x's dtype, in ordinary memory. On GPUs the result is valid in stream order. With `norm`,
    returns (the normalised sum, the sum). The norm is computed in fp32 (fp64 for fp64 inputs) from the sum in x's
    dtype, with this rank's weight, and rounded once.

    Overlapped schedules reduce in fp32, in an order that depends only on the schedule and the number of ranks. So equal
    calls give equal bits, and all ranks get the same bits. In most schedules one rank reduces a row, and its peers copy
    the result. In "one_shot" each rank reduces all rows itself, in the order of ranks. The rows to reduce are divided
    equally among the ranks, but the last ranks may get fewer rows, or none. Two schedules may differ by rounding. "avg"
    divides the rounded sum, so in fp16 a product or sum above 65504 overflows before the division.

    The first call of a shape, and its first backward, set up memory and kernels on all ranks, which takes milliseconds
    to seconds. Make the call and its backward before you capture a CUDA graph.

    Memory: the results, and memory that weft keeps for later calls, up to two and a half times the size of the sum,
        partly symmetric. With few rows, the kept memory is W times the size of the sum on W ranks, at most 256 MiB.
        Autograd also saves x, w and, with `norm`, the sum. Do not change these tensors in place: write `sum = sum +
        ...`, not `sum += ...`. Backward raises an error if they were changed.

    Differentiable once in x, w, bias, residual and norm. All ranks must enable gradients for the same inputs. Gradients
    of x and w are gradients of the sum of the ranks' losses, as in `torch.distributed.nn.functional.all_reduce`. If all
    ranks compute the same loss from y, as replicated layers do, divide the loss by the number of ranks. Gradients of
    bias, residual and norm are gradients of this rank's own loss, as if the rank had added and normalised after the
    all-reduce.

    Backward first computes the gradient of the norm. Then it reduce-scatters the sum's gradient, and runs
    `all_gather_matmul`. If x needs no gradient, or if the rows are not divisible by the number of ranks, backward
    instead runs one all-reduce, and then one GEMM for each gradient.

    Raises:

    - `RefusedError` (a `ValueError`) on every rank if any rank passes bad arguments. The group stays usable. On GPUs,
      bad arguments after the first call of a shape may make the group unusable.
    - `ValueError` on this rank only, for an invalid group.
    - `DisagreementError` if ranks make different calls. CPU ranks compare every call before it runs. GPU ranks compare
      only the first call of a shape before it runs. They compare later calls up to a second afterwards, and a
      difference then makes the group unusable.
    - `DeadlineError`, `PeerLostError` or `PoisonedGroupError` if a rank is late, is lost, or has failed.
    - `NotImplementedError` for second derivatives.

    Source: "T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute & Collectives", 2.3, 7.3 and 7.6.
    """

    def form(group: dist.ProcessGroup | str | None) -> _Call:
        check_tensor("x", x)
        check_tensor("w", w)
        check_reduction("reduce_op", reduce_op)
        if reduce_op == "avg" and not (bias is None and residual is None and norm is None):
            raise ValueError('reduce_op="avg" does not support bias, residual and norm: apply them to the result')
        checked_dimension(x, 0, names=("x", "dimension"))
        rows = None
        if residual is not None:
            check_tensor("residual", residual)
            if residual.shape[:-1] != x.shape[:-1]:
                raise ValueError(
                    f"residual has shape {tuple(residual.shape)}, but x has {tuple(x.shape)}: pass a residual of shape "
                    f"{(*x.shape[:-1], *w.shape[-1:])}, like the result"
                )
            rows = residual.flatten(0, -2)
        added = checked_eps(eps)
        if norm is None and added != EPS:
            raise ValueError(f"eps={eps} without norm: pass norm (the weight of the RMSNorm), or omit eps")
        row, weight = _row("bias", bias), _row("norm", norm)
        matrices = x.flatten(0, -2), w, row, rows, weight
        return _Call(*matrices, None if norm is None else added, reduce_op == "avg", outer_of(x, 0))

    results = made(OPERATOR, group, x, form, schedule=schedule, deadline_s=deadline_s, timeline=timeline)
    if reduce_op == "avg":
        results[0].div_(size_of(group))
    if x.dim() != 2:
        results = [one.view(*x.shape[:-1], one.shape[1]) for one in results]
    return results[0] if norm is None else (results[0], results[1])


def _row(name: str, given: torch.Tensor | None) -> torch.Tensor | None:
    if given is None:
        return None
    check_tensor(name, given)
    if given.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(given.shape)}: pass a one-dimensional tensor, [N]")
    return given.unsqueeze(0)


class _Call(NamedTuple):
    """The arguments of a call, with tensors as matrices.

    norm, eps: the weight and the epsilon of the norm; None without a norm.
    average: True if the public function divides the sum by the number of ranks.
    outer: the part of x's shape that is lost in the reshape to a matrix: [0, the sizes of all dimensions of x except
        the first and the last]. Ranks compare `outer`. None if x is a matrix (`outer_of`).
    """

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    norm: torch.Tensor | None
    eps: float | None
    average: bool = False
    outer: list[int] | None = None


class _MatmulAllReduce(Operator[_Call]):
    """The operator y = all_reduce(x @ w) + bias + residual. Its gradients are

        whole = the sum of grad y over ranks
        grad x = whole @ w^T      grad w = x^T @ whole      grad bias = sum of the rows of grad y      grad residual = grad y

    grad y includes the gradient through the norm (`through_norm`).
    """

    name, form = "matmul_all_reduce", _Call
    compared = ("average", "outer")
    across_ranks: ClassVar[Mapping[str, Across]] = {
        "x": "layout", "w": "layout", "group": "own", "reduce_op": "alike", "bias": "equal", "residual": "equal", "norm": "layout",
        "eps": "alike", "schedule": "alike", "deadline_s": "own", "timeline": "own",
    }  # fmt: skip
    gradients_of: ClassVar[Mapping[str, str]] = {name: name for name in _Call._fields[:5]}

    def problem(self, call: _Call, world: int, most: int) -> MatmulAllReduce:
        x, w, bias, residual, norm, eps, _, _ = call
        dtype = name_of_dtype("x", x, ", because the ranks' products must be reduced in it")
        check_weights(x, [w], what="x", each="w")
        m, n = x.shape[0], w.shape[1]
        if (norm is None) != (eps is None):
            raise ValueError(f"eps={eps} with norm {'not ' * (norm is None)}given: pass both or neither")
        for name, given, rows in (("bias", bias, 1), ("residual", residual, m), ("norm", norm, 1)):
            if given is None:
                continue
            if given.shape != (rows, n):
                raise ValueError(f"{name} has {given.shape[-1]} columns: pass {n}, as many as w has")
            if given.dtype != x.dtype or given.device != x.device:
                raise ValueError(
                    f"{name} is {given.dtype} on {given.device} and x is {x.dtype} on {x.device}: use one dtype and device"
                )
        return MatmulAllReduce(world, m, n, x.shape[1], dtype, bias is not None, residual is not None, eps)

    def given(self, call: _Call) -> str:
        return joined('reduce_op="avg"' * call.average, outer_text("x", call.outer))

    def equal(self, call: _Call) -> dict[str, torch.Tensor]:
        following = ("bias", call.bias), ("residual", call.residual)
        return {name: tensor for name, tensor in following if tensor is not None}

    def inputs(self, p: MatmulAllReduce, call: _Call) -> dict[str, Any]:
        tensors = {"x": contiguous(call.x, "x", self.name), "w": strided(call.w, "w", self.name)}
        following = ("bias", call.bias), ("residual", call.residual), ("norm", call.norm)
        return tensors | {name: contiguous(given, name, self.name) for name, given in following if given is not None}

    def outputs(self, call: _Call, world: int) -> dict[str, Any]:
        names = ("y",) if call.norm is None else ("normed", "y")
        return {name: call.x.new_empty(call.x.shape[0], call.w.shape[1]) for name in names}

    def gemms(self, call: _Call, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        return call.x.shape[0], [call.w]

    def unfused(
        self, p: MatmulAllReduce, call: _Call, group: dist.ProcessGroup, turn: Turn
    ) -> list[torch.Tensor] | None:
        """Run the call without overlap, if it has a bias, a residual or a norm: torch adds each, rounds after each addition,
        and applies the norm. Return None for other calls, which run the steps of the serial schedule.
        """
        following = [one for one in (call.bias, call.residual) if one is not None]
        if (not following and call.norm is None) or not p.m * p.n:
            return None
        y = turn.done("matmul y", torch.mm(call.x, call.w))
        if p.world_size > 1:
            y = all_reduce_(y, [p.m] * p.world_size, group.rank(), group, turn, "all_reduce y -> y")
        for one in following:
            y.add_(one)
        if following:
            turn.done("add y", y)
        if call.norm is None:
            return [y]
        normed = torch.nn.functional.rms_norm(y, (p.n,), call.norm[0], p.eps)
        return [turn.done("norm y -> normed", normed), y]

    def saved(self, call: _Call, results: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        return [call.x, call.w, *([] if call.norm is None else [call.norm, results[1]])]

    def gradients(
        self, p: MatmulAllReduce, group: dist.ProcessGroup, saved: Sequence[Any], grads: list[torch.Tensor],
        wanted: Sequence[bool], turn: Turn, beside: Any,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        x, w, *normed = saved
        whole, of_norm = grads[-1], None
        if p.eps is not None:
            whole, of_norm = through_norm(grads, normed, p.eps)
        local = [whole.sum(0, keepdim=True) if wanted[2] else None, whole if wanted[3] else None]
        local.append(of_norm if wanted[4] else None)
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
        random = partial(normal, generator, p.dtype)
        x, w = random(p.m, p.k), random(p.n, p.k).t()
        # Bias, residual and norm are the same on all ranks.
        random = partial(normal, torch.Generator(generator.device).manual_seed(0), p.dtype)
        bias, residual = random(1, p.n) if p.bias else None, random(p.m, p.n) if p.residual else None
        return _Call(x, w, bias, residual, None if p.eps is None else random(1, p.n), p.eps)

    def expected(self, p: MatmulAllReduce, rank: int, calls: Sequence[_Call]) -> list[torch.Tensor]:
        total = torch.stack([call.x.double() @ call.w.double() for call in calls]).sum(0)
        for one in (calls[rank].bias, calls[rank].residual):
            total = total if one is None else total + one.double()
        if (norm := calls[rank].norm) is None:
            return [total]
        return [torch.nn.functional.rms_norm(total, (p.n,), norm[0].double(), p.eps), total]


def through_norm(
    grads: Sequence[torch.Tensor], saved: Sequence[torch.Tensor], eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the gradient of the sum y, the gradient of the norm's weight).

    grads: the gradients of the normalised sum and of y.
    saved: the norm's weight and y.

    Let scale = 1 / sqrt(mean(y^2) + eps), unit = y * scale and g = grads[0] * weight, with means over a row. The
    gradient of y, in fp32 (fp64 for fp64 inputs), is

        grads[1] + scale * (g - unit * mean(g * unit))

    On GPUs torch's RMSNorm kernel computes this gradient. torch has no such kernel for CPU.
    """
    (of_normed, of_sum), (weight, y), dtype = grads, saved, saved[0].dtype
    fused, columns = getattr(torch.ops.aten, "_fused_rms_norm_backward", None), [y.shape[1]]
    if y.is_cuda and fused is not None and y.numel():
        _, scale = torch.ops.aten._fused_rms_norm(y, columns, weight[0], eps)
        of_y, of_weight = fused(of_normed.contiguous(), y, columns, scale, weight[0], [True, True])
        return of_sum + of_y, of_weight.unsqueeze(0)
    of_normed, of_sum, weight, y = (one.to(torch.promote_types(dtype, torch.float32)) for one in (*grads, *saved))
    scale = torch.rsqrt(y.square().mean(1, keepdim=True) + eps)
    unit, g = y * scale, of_normed * weight
    of_sum = of_sum + scale * (g - unit * (g * unit).mean(1, keepdim=True))
    return of_sum.to(dtype), (of_normed * unit).sum(0, keepdim=True).to(dtype)


OPERATOR = registered(_MatmulAllReduce())
