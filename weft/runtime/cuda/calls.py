"""Compute and collective steps as calls of torch, cuBLAS and NCCL.

When a schedule is compiled, each such step becomes a function of a run's tensors. In a run, this function only makes views
and calls. Results are written into the step's destination, so torch allocates no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.errors import ScheduleError
from weft.runtime.collectives import all_gather_single, all_reduce_single, reduce_scatter_single, sendable
from weft.runtime.cuda.context import Context, Tensors
from weft.runtime.cuda.regions import Regions, RegionView
from weft.runtime.elementwise import ELEMENTWISE
from weft.runtime.scaled_matmul import scaled_matmul
from weft.schedule import SCALED_MATMULS, Collective, Compute, Schedule
from weft.schedule.steps import of_kind

ALIGNMENT = 256  # bytes; larger than any alignment on which cuBLAS bases its choice of kernels
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A call of `function`, given a run's tensors. Native code makes it too (`_core.KnownRun`).

    inputs: the positional arguments. constants: keyword arguments. out: the argument `out`, or None.
    """

    function: Callable[..., Any]
    inputs: Sequence[RegionView]
    out: RegionView | None
    constants: Mapping[str, Any]

    def __call__(self, tensors: Tensors) -> None:
        given = [view(tensors) for view in self.inputs]
        if self.out is None:
            self.function(*given, **self.constants)
        else:
            self.function(*given, **self.constants, out=self.out(tensors))


class Operation(NamedTuple):
    """A call of torch or NCCL that a run makes.

    call: a function that makes the call, given the run's tensors.
    what, views: the operation and its operands. Calls launch the same kernel if their operations, and the layouts of their
        operands, are equal. `StreamItems.warm_up` makes only one of these calls. If `what` is None, the warm-up always makes
        the call.
    aside: a function that the warm-up runs instead of `call`. It loads the same kernel, but writes no memory that peers
        read or add to.
    meets: True for a collective. The warm-up makes it only before the first run, which all ranks make together. A later
        warm-up, for tensors with other strides, may happen on some ranks only, and a collective would then hang.
    """

    call: Callable[[Tensors], None]
    what: tuple[str, bool] | None = None
    views: tuple[RegionView, ...] = ()
    aside: Callable[[Tensors], None] | None = None
    meets: bool = False


def compute_call(step: Compute, regions: Regions) -> Operation:
    """Return the torch call that runs the compute step `step`. Raise `ScheduleError` if no torch call can run it."""
    out, inputs = regions.view(step.out), [regions.view(region) for region in step.inputs]
    operation = _computing(step, out, inputs)
    if not regions.is_shared(step.out):
        return operation

    def aside(t: Tensors) -> None:
        _computing(step, RegionView("", fixed=_like(out(t))), inputs).call(t)

    return operation._replace(aside=aside)


def _like(x: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor like `x`, with the same shape, layout and alignment, so that cuBLAS chooses the same kernel for it. The
    warm-up writes to this tensor instead of `x`.
    """
    items, last = ALIGNMENT // x.itemsize, sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    flat = x.new_empty(items + last + 1)
    return flat.as_strided(x.shape, x.stride(), (x.data_ptr() - flat.data_ptr()) % ALIGNMENT // x.itemsize)


def _computing(step: Compute, out: RegionView, inputs: list[RegionView]) -> Operation:
    what, views = (step.op, step.accumulate), (out, *inputs)
    if step.op == "matmul":
        if step.accumulate:
            return Operation(TorchCall(torch.Tensor.addmm_, views, None, {}), what, views)
        return Operation(TorchCall(torch.mm, inputs, out, {}), what, views)
    if step.op == "addmm":  # torch copies the addend into the output, and adds to it
        a, b, c = inputs
        return Operation(TorchCall(torch.addmm, (c, a, b), out, {}), what, views)
    if step.op in SCALED_MATMULS and not step.accumulate:
        return Operation(TorchCall(scaled_matmul, inputs, out, {"fast": step.op == "scaled_matmul_fast"}))
    if step.op not in ELEMENTWISE or step.accumulate:
        raise ScheduleError(f"streams cannot run {step}: use matmul, addmm or {', '.join(ELEMENTWISE)}")
    return Operation(TorchCall(ELEMENTWISE[step.op].into, inputs, out, {}))


def collective_call(step: Collective, regions: Regions, context: Context) -> Operation:
    return Operation(_collective(step, regions, context), meets=True)


def _collective(step: Collective, regions: Regions, context: Context) -> Callable[[Tensors], None]:
    src, dst, group = regions.view(step.src), regions.view(step.dst), context.own_group or context.comm.group
    for region in (step.src, step.dst):
        regions.place(region)  # NCCL needs tensors without gaps
    nth = _collectives(context.schedule, context.rank).index(step)
    peers = [_collectives(context.schedule, r)[nth] for r in range(context.comm.world_size)]
    sizes = [int((s.src if step.op == "all_gather" else s.dst).rows) for s in peers]
    if step.op == "all_reduce":
        if step.src == step.dst:
            return lambda t: void(all_reduce_single(dst(t), group=group))
        return lambda t: void(all_reduce_single(dst(t).copy_(src(t)), group=group))
    if step.op == "reduce_scatter":
        if len(set(sizes)) > 1:
            raise ScheduleError(
                f"{step}: the parts of the ranks have {sizes} rows, but reduce_scatter needs equal parts: pad them"
            )
        return lambda t: void(reduce_scatter_single(dst(t), src(t), group=group))
    if len(set(sizes)) == 1:
        return lambda t: void(all_gather_single(sendable(dst(t)), sendable(src(t)), group=group))
    return lambda t: void(dist.all_gather(list(sendable(dst(t)).split(sizes)), sendable(src(t)), group=group))


def _collectives(schedule: Schedule, rank: int) -> list[Collective]:
    """Return the collective steps of a rank, lane by lane. The order is equal on all ranks, so the n-th steps of all ranks are
    one collective.
    """
    return [s for lane in schedule.of_rank(rank) for s in of_kind(lane.steps, Collective)]


def void(_: Any) -> None:
    """Discard the argument and return None. Write `void(f(x))` if the result of the call is not needed."""
