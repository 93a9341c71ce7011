"""`weft.all_gather_matmul`: GEMMs that start before all of their input has arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from weft.arguments import check_flag, check_tensor, check_tensors, checked_dimension, checked_rows, listed
from weft.builders import AllGatherMatmul
from weft.operator.calls import made, operator_named, overlaps, within
from weft.operator.dtypes import name_of_dtype
from weft.operator.flattened import (
    UNEVEN,
    check_weights,
    flattened,
    grad_of_weight,
    outer_of,
    outer_text,
    restored,
    rows_of_ranks,
)
from weft.operator.layout import contiguous, strided
from weft.operator.registration import registered
from weft.operator.replay import replayed
from weft.operator.spec import Across, Operator
from weft.ops.all_gather_matmul_gradients import AGAIN, partial_of, reduce_scattered
from weft.ops.all_gather_matmul_gradients import OPERATOR as ALL_GRADIENTS
from weft.runtime.collectives import all_gather_single
from weft.runtime.schedule_memory import TORCH_DTYPE
from weft.runtime.unfused.collectives import all_gather
from weft.runtime.unfused.turn import Turn
from weft.timeline import Timeline
from weft.words import joined


@replayed
def all_gather_matmul(
    A_shard: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group: dist.ProcessGroup | str,
    *,
    return_A: bool = True,
    schedule: str | None = None,
    rows: Sequence[int] | None = None,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """All-gather `A_shard` along `gather_dim` over `group`, and multiply the result by each of `Bs`.

    Same signature and results as `torch.ops.symm_mem.fused_all_gather_matmul`. Equivalent to

        A = all_gather(A_shard, gather_dim); return A, [A @ B for B in Bs]

    but multiplies rows that have arrived while it transfers other rows. The planner chooses a schedule for the shape
    and the machine. If no overlapping schedule is faster, the all-gather of NCCL (on CPU weft or gloo) runs first, and then the
    GEMMs. All ranks of `group` must make the call. Autocast has no effect: inputs are multiplied in their own dtype.

    A_shard: [..., K] in fp32, fp16 or bf16 (on CPU also fp64, for `gradcheck`), at least 2-D. Not a DTensor: pass its
        to_local(). Copied if `A_shard.movedim(gather_dim, 0)` is not contiguous.
    Bs: [K, N_i] in the same dtype, row- or column-major (`linear.weight.t()` is not copied). Unlike in torch's op,
        shapes must be equal on all ranks: pad a vocabulary that is not divisible by the number of ranks. If shapes
        differ, the call raises `DisagreementError` before it sends anything.
    gather_dim: any dimension except the last.
    group: a process group, or its name.
    return_A: True to return the gathered A too. This needs memory for A, and copies the rows that arrive into it.
    schedule: the name of a schedule, such as "serial" or "shard[chunks=1,send=in_turn,by=dma]". `weft.plan.explain`
        lists the names. "autotune" times schedules at the first call of a shape, and caches the fastest
        (docs/planning.md). "heuristic" uses the schedule that FiCCO's static heuristic picks (the paper in "Source").
        If this schedule cannot run, weft warns with the reason and uses its default choice.
    rows: a list with the size of `gather_dim` on each rank, if the sizes differ. Pass the same list on every rank.
    deadline_s: the longest wait for a peer, in seconds, at most 1e6 (default: WEFT_DEADLINE_S, 60). On CPU it applies
        in backward too; on GPUs backward uses the default. On GPUs the serial schedule and parts of backward call NCCL,
        which uses the timeout of the process group.
    timeline: records the times of all steps, for profiling. On GPUs the call then synchronises with the device. Not
        supported under torch.compile.

    Returns (A or None, [A @ B for B in Bs]) in A_shard's dtype, in ordinary memory. On GPUs the results are valid in
    stream order. A has A_shard's shape, except that `gather_dim` has the rows of all ranks. A product has N_i in place
    of K.

    The first call of a shape, and its first backward, set up memory and kernels on all ranks, which takes milliseconds
    to seconds. Make the call and its backward before you capture a CUDA graph.

    Memory: the results, and symmetric memory of the size of A. On CPU all calls of a group share this memory until the
        group is destroyed. On GPUs all calls that differ only in their number of rows share memory, which grows to the
        largest A. Smaller buffers above 64 MiB are then freed, except buffers that a CUDA graph has captured. After the
        memory has grown, make one more call before you capture. With uneven `rows`, each of the last 64 shapes has its
        own memory. Backward needs up to three times the size of A, and on GPUs does not share the memory of forward.

    Differentiable once in A_shard and Bs. All ranks must enable gradients for the same inputs. Gradients are sums over
    ranks, not means.

    Raises:

    - `RefusedError` (a `ValueError`) on every rank if any rank passes bad arguments. The group stays usable. On GPUs,
      bad arguments after the first call of a shape may make the group unusable.
    - `ValueError` on this rank only, for an invalid group.
    - `DisagreementError` if ranks make different calls. CPU ranks compare every call before it runs. GPU ranks compare
      only the first call of a shape before it runs. They compare later calls up to a second afterwards, and a
      difference then makes the group unusable.
    - `DeadlineError`, `PeerLostError` or `PoisonedGroupError` if a rank is late, is lost, or has failed.
    - `NotImplementedError` for second derivatives.

    Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap" (FiCCO).
    """

    def form(group: dist.ProcessGroup | str | None) -> _Call:
        check_tensor("A_shard", A_shard)
        weights = Bs if type(Bs) is list else list(listed("Bs", Bs))
        check_tensors("Bs", weights)
        check_flag("return_A", return_A)
        dim = checked_dimension(A_shard, gather_dim)
        sizes = rows_of_ranks(rows, A_shard, dim, group)
        return _Call(flattened(A_shard, dim), weights, return_A, sizes, outer_of(A_shard, dim))

    results = made(OPERATOR, group, A_shard, form, schedule=schedule, deadline_s=deadline_s, timeline=timeline)
    results = restored(results, A_shard.shape, gather_dim, rows, group)
    return (results[-1], results[:-1]) if return_A else (None, results)


class _Call(NamedTuple):
    """The arguments of a call, with tensors as matrices.

    rows: the number of rows of each rank's shard, if the numbers differ.
    outer: the part of A_shard's shape that is lost in the reshape to a matrix: gather_dim, and the sizes of all other
        dimensions except the last. Ranks compare `outer`. None if A_shard is a matrix (`outer_of`).
    """

    x: torch.Tensor
    Bs: list[torch.Tensor]
    return_x: bool
    rows: Sequence[int] | None
    outer: list[int] | None = None


class _AllGatherMatmul(Operator[_Call]):
    """The operator y_i = x @ w_i, where x is gathered from the ranks' shards. Its gradients are

        grad x_shard = reduce-scatter of sum_i grad y_i @ w_i^T      grad w_i = x^T @ grad y_i

    If both are needed, `weft.ops.all_gather_matmul_gradients` computes them. For uneven rows, or after a forward that
    returned x, torch and NCCL compute them. NCCL gathers x during the GEMMs of grad x, and reduces grad x during the
    GEMMs of grad w. If only grad x is needed, `matmul_reduce_scatter` fuses the reduce-scatter with the GEMMs.
    """

    name, form, hint = "all_gather_matmul", _Call, UNEVEN
    compared = ("outer",)
    across_ranks: ClassVar[Mapping[str, Across]] = {
        "A_shard": "layout", "Bs": "layout", "gather_dim": "alike", "group": "own", "return_A": "alike", "schedule": "alike",
        "rows": "alike", "deadline_s": "own", "timeline": "own",
    }  # fmt: skip
    caller_names: ClassVar[Mapping[str, str]] = {"x": "A_shard"}
    gradients_of: ClassVar[Mapping[str, str]] = {"x": "A_shard", "Bs": "any of Bs"}
    arguments: ClassVar[Mapping[str, str]] = {"x_shard": "A_shard", "x": "A"}

    def checked(self, call: _Call, group: dist.ProcessGroup) -> _Call:
        return call if call.rows is None else call._replace(rows=checked_rows(call.rows, call.x, 0, group))

    def problem(self, call: _Call, world: int, most: int) -> AllGatherMatmul:
        x, Bs = call.x, call.Bs
        fp8 = "; for fp8 use weft.all_gather_scaled_matmul" if x.dtype == TORCH_DTYPE["fp8"] else ""
        dtype = name_of_dtype("A_shard", x, fp8)
        check_weights(x, Bs)
        rows = tuple(call.rows or (x.shape[0],) * world)
        return AllGatherMatmul(world, rows, tuple(B.shape[1] for B in Bs), x.shape[1], dtype, call.return_x)

    def given(self, call: _Call) -> str:
        return joined("return_A=False" * (call.return_x is False), outer_text("A_shard", call.outer))

    def inputs(self, p: AllGatherMatmul, call: _Call) -> dict[str, Any]:
        tensors = {"x_shard": contiguous(call.x, "A_shard", self.name)}
        for i, B in enumerate(call.Bs):
            tensors[f"w{i}"] = strided(B, f"Bs[{i}]", self.name)
        return tensors

    def outputs(self, call: _Call, world: int) -> dict[str, Any]:
        x, m = call.x, sum(call.rows) if call.rows else call.x.shape[0] * world
        tensors = {f"y{i}": x.new_empty(m, B.shape[1]) for i, B in enumerate(call.Bs)}
        if call.return_x:
            tensors["x"] = x.new_empty(m, x.shape[1])
        return tensors

    def gemms(self, call: _Call, results: Sequence[torch.Tensor]) -> tuple[int, Sequence[torch.Tensor]]:
        return results[0].shape[0], call.Bs

    def saved(self, call: _Call, results: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Save the gathered x if the call returns it. Otherwise save the shard, which backward gathers again."""
        return [results[-1] if call.return_x else call.x, *call.Bs]

    def gradients(
        self, p: AllGatherMatmul, group: dist.ProcessGroup, saved: Sequence[Any], grads: list[torch.Tensor],
        wanted: Sequence[bool], turn: Turn, beside: Any,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        (x, *Bs), even = saved, p.world_size > 1 and len(set(p.rows)) == 1
        grad_gathered = grads.pop() if p.return_gathered else None
        # Ranks agree on whether any weight needs a gradient, but may freeze different weights, and change this between
        # calls. So compute gradients of frozen weights too: otherwise ranks would run different schedules.
        if even and wanted[0] and any(wanted[1:]) and not p.return_gathered:
            made = _all_at_once(x, Bs, grads, group, turn)
            return [grad if want else None for grad, want in zip(made, wanted, strict=True)]
        whole, gathering = x, None
        if any(wanted[1:]) and not p.return_gathered and p.world_size > 1:
            if even:
                whole = x.new_empty(p.m, p.k)
                gathering = turn.begin(AGAIN, all_gather_single, whole, x.contiguous(), group=group)
            else:
                whole = all_gather(x.contiguous(), list(p.rows), group.rank(), group, turn, AGAIN)
        grad_x = scattering = None
        if wanted[0]:
            if even and not p.return_gathered:
                grad_x = _scattered_by_dual(grads, Bs, group, turn)
            if grad_x is None:
                grad_x = partial_of(grads, [B.t() for B in Bs], grad_gathered)
                if p.world_size > 1:
                    grad_x, scattering = reduce_scattered(grad_x, p.rows, group, turn)
        if gathering is not None:
            gathering.wait()
        grad_Bs = [
            grad_of_weight(whole, grad, B) if want else None
            for grad, B, want in zip(grads, Bs, wanted[1:], strict=True)
        ]
        if scattering is not None:
            scattering.wait()
        return [grad_x, *grad_Bs]


def _all_at_once(
    x: torch.Tensor, Bs: Sequence[torch.Tensor], grads: list[torch.Tensor], group: dist.ProcessGroup, turn: Turn
) -> list[torch.Tensor]:
    call = ALL_GRADIENTS.form(x, grads, [B.t() for B in Bs])
    grad_x, *grad_wts = within(ALL_GRADIENTS, call, group, turn)
    as_weights = [wt.t() if B.stride(0) == 1 else wt.t().contiguous() for wt, B in zip(grad_wts, Bs, strict=True)]
    return [grad_x, *as_weights]


def _scattered_by_dual(
    grads: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor], group: dist.ProcessGroup, turn: Turn
) -> torch.Tensor | None:
    """Return the gradient of x, computed by `matmul_reduce_scatter`. Return None if `matmul_reduce_scatter` would not overlap
    for this shape: then backward calls NCCL itself.
    """
    dual: Any = operator_named("matmul_reduce_scatter")
    m, k, n = grads[0].shape[0], Bs[0].shape[0], sum(B.shape[1] for B in Bs)
    nothing = grads[0].new_empty(())
    like = dual.form(nothing.expand(m, n), nothing.expand(n, k))
    if not overlaps(dual, like, group, turn):
        return None
    # Linear layers have column-major Bs, so this concatenates contiguous rows.
    grad, B = (grads[0], Bs[0].t()) if len(Bs) == 1 else (torch.cat(list(grads), 1), torch.cat([B.t() for B in Bs]))
    (found,) = within(dual, dual.form(grad.contiguous(), B), group, turn)
    # The first call may have chosen serial. Then later calls return None here, and so must this call: equal calls give
    # equal bits.
    return found if overlaps(dual, like, group, turn) else None


OPERATOR = registered(_AllGatherMatmul())
