"""The forward and the backward of a gated MoE layer on GPUs as one autograd function.

It calls the same operators as `weft.nn.experts`. Kernels that read and write each row once (`weft.kernels.expert_rows`) replace
the functions between the operators, and their nodes in the autograd graph. In small layers, the CPU time of these functions
exceeds the time of the GPU's work.

If the first weights need a gradient, dispatch also returns the received tokens, so that backward does not send the tokens
again. The received tokens replace this rank's own rows in the memory that forward keeps. With `max_rows`, backward sends
the tokens again. The reason is that dispatch drops rows beyond `max_rows`, and the returned tokens may lack other rows than
the results. Either all ranks run this function, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from weft.nn.expert_rows import Routing
from weft.operator.calls import prepared_for
from weft.operator.compiled_operator import CompiledOperator
from weft.operator.derivatives import once, require_single
from weft.operator.flops import counted, flops_of
from weft.operator.layers import require_kept_by
from weft.operator.together import together
from weft.ops.all_to_all_matmul import OPERATOR as DISPATCH
from weft.ops.all_to_all_matmul_and_tokens import all_to_all_matmul_and_tokens
from weft.ops.matmul_all_to_all import OPERATOR as COMBINE
from weft.runtime.unfused.experts import begin_in_expert_order
from weft.runtime.unfused.permutation import in_expert_order
from weft.runtime.unfused.sizes import sizes_of
from weft.symm.groups import group_of

_LAYER = "ExpertParallelMLP"


class Layer(Protocol):
    """The parts of `weft.nn.ExpertParallelMLP` that the fused forward calls."""

    max_rows: int | None
    capacity: int | None
    schedules: tuple[str | None, str | None]

    @property
    def group_name(self) -> str: ...
    def _dispatched(self, rows: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]: ...
    def _combined(self, a: torch.Tensor, received: torch.Tensor, routing: Routing) -> torch.Tensor: ...
    def _summed(self, y: torch.Tensor, routing: Routing, top_k_weights: torch.Tensor) -> torch.Tensor: ...


def fused_experts(
    layer: Layer, tokens: torch.Tensor, weights: torch.Tensor, first: torch.Tensor, down: torch.Tensor, routing: Routing
) -> torch.Tensor:
    """Run the layer. Return the weighted sum of each token's rows.

    weights: [tokens, top_k]. first, down: the parameters gate_up_proj and down_proj. routing: its `kernels` must not be None.
    """
    given = tokens.contiguous(), weights.contiguous(), first, down
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return _Experts.apply(layer, routing, *given)  # type: ignore[no-any-return]
    return _run(layer, routing, *given[:2], first, False).result


class _Results(NamedTuple):
    """The results of all parts of forward. x: the received tokens, or None."""

    rows: torch.Tensor
    h: torch.Tensor
    received: torch.Tensor
    x: torch.Tensor | None
    a: torch.Tensor
    y: torch.Tensor
    result: torch.Tensor


def _run(
    layer: Layer, routing: Routing, tokens: torch.Tensor, weights: torch.Tensor, first: torch.Tensor, keeps: bool
) -> _Results:  # fmt: skip
    """Run forward. keeps: True to return the received tokens too."""
    kernels: Any = routing.kernels
    rows, x = kernels.gathered(tokens, routing.order, routing.copies), None
    if keeps:
        h, received, x = all_to_all_matmul_and_tokens(
            rows, first.mT, routing.splits, group=layer.group_name, capacity=layer.capacity, schedule=layer.schedules[0]
        )
    else:
        h, received = layer._dispatched(rows, routing)
    a = kernels.gate(h)
    y = layer._combined(a, received, routing)
    return _Results(rows, h, received, x, a, y, layer._summed(y, routing, weights))


def _keeps(layer: Layer, wants_first: bool) -> bool:
    """True if forward keeps the received tokens for backward. wants_first: True if the first weights need a gradient."""
    return wants_first and layer.max_rows is None


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, layer: Layer, routing: Routing, tokens: torch.Tensor, weights: torch.Tensor, first: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        require_kept_by(ctx, _LAYER, layer.group_name, tokens, weights, first, down)
        keeps = _keeps(layer, ctx.needs_input_grad[4])
        rows, h, received, x, a, y, result = _run(layer, routing, tokens, weights, first, keeps)
        group, splits, count = group_of(layer.group_name), routing.splits, len(rows)
        dispatch = DISPATCH.form(rows, first.mT, splits, layer.max_rows, layer.capacity, keeps)
        combine = COMBINE.form(a, down.mT, received, splits, count, layer.capacity, count)
        ctx.prepared = []
        for op, call, schedule in zip((DISPATCH, COMBINE), (dispatch, combine), layer.schedules, strict=True):
            prepared = prepared_for(op, call, group, schedule, None, None)  # type: ignore[arg-type]
            prepared.require_room(call, None)  # backward may run a schedule even if forward did not
            ctx.prepared.append(prepared)
        ctx.flops = 0
        if is_in_torch_dispatch_mode():
            ctx.flops = flops_of(DISPATCH, dispatch, [h]), flops_of(COMBINE, combine, [y])
        ctx.sizes = sizes_of(splits, received)
        ctx.sizes.fetch()
        ctx.routing, ctx.received, ctx.keeps = routing, received, keeps
        ctx.save_for_backward(weights, first, down, rows if x is None else x, h, a, y)
        return result

    @staticmethod
    @once(_LAYER, lambda ctx: ctx.prepared[0].group)
    def backward(ctx: Any, saved: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weights, first, down, tokens, h, a, y = saved  # tokens: as received, or as sent
        _, _, wants_tokens, _, wants_first, wants_down = ctx.needs_input_grad
        routing, sizes, received = ctx.routing, ctx.sizes, ctx.received
        kernels, splits = routing.kernels, routing.splits
        require_single(_LAYER, [grad])
        of_y, of_weights = kernels.summed_grads(grad.resolve_neg().contiguous(), y, routing.place, weights)
        wants_h = wants_tokens or wants_first
        if not (wants_h or wants_down):
            return None, None, None, of_weights, None, None
        arrived = sum(sizes.host.came)
        of_dispatch, of_combine = ctx.prepared
        kept, wanted = (a[:arrived], down.mT, received, splits), (wants_h, wants_down)
        by_expert: Callable[[], torch.Tensor] | None = None
        if ctx.keeps:
            by_expert = partial(in_expert_order, tokens[:arrived], sizes)

        def send_again() -> None:
            nonlocal by_expert
            if wants_first and by_expert is None:  # during the gradient of the gate
                turn = of_dispatch.turn(None)
                by_expert = begin_in_expert_order(tokens, sizes, of_dispatch.group, turn, "exchange tokens again")

        of_a, of_down = _gradients(ctx, of_combine, kept, of_y, wanted, send_again)[:2]
        of_tokens = of_first = None
        if wants_h:
            of_h = kernels.gate_grad(h[:arrived], of_a[: len(h)])
            kept, wanted = (by_expert or tokens, first.mT, splits, received), (wants_tokens, wants_first)
            of_rows, of_first = _gradients(ctx, of_dispatch, kept, of_h, wanted)[:2]
            if wants_tokens:
                of_tokens = kernels.summed(of_rows, routing.place, None, routing.copies)
        of_first, of_down = (None if of is None else of.mT for of in (of_first, of_down))
        return None, None, of_tokens, of_weights, of_first, of_down


def _gradients(
    ctx: Any, prepared: CompiledOperator, saved: tuple[Any, ...], grad: torch.Tensor, wanted: tuple[bool, bool],
    then: Callable[[], None] = lambda: None,
) -> list[Any]:  # fmt: skip
    """Run the backward of one operator (`Operator.gradients`), which peers may run as a node of their own autograd graph.

    saved: what `Operator.saved` returns. grad: the gradient of the operator's first result. then: called at the end.
    """
    op, group, device = prepared.op, prepared.group, prepared.device

    def made() -> list[Any]:
        with together(f"backward of {op.title}", group, lambda: device, None):
            prepared.begin_backward()
            found = op.gradients(prepared.p, group, saved, [grad], wanted, prepared.turn(None), ctx.sizes)
            then()
            return found

    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            return made()
    if ctx.flops and is_in_torch_dispatch_mode():
        return counted(ctx.flops[op is COMBINE], wanted, made)
    return made()
