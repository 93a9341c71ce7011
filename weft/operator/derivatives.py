"""Checks that allow only first-order, reverse-mode gradients. Second derivatives, forward-mode derivatives and vmap
raise.

Autograd cannot differentiate a backward that calls collectives. `torch.autograd.function.once_differentiable` raises
only for derivatives with respect to incoming gradients, not with respect to saved inputs. So this module adds an
autograd node that connects the results of backward to the incoming gradients and to the saved inputs. The node's own
backward raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from weft.operator.together import tell


def once(
    operator: str, group: Callable[[Any], dist.ProcessGroup]
) -> Callable[[Callable[..., tuple[Any, ...]]], Callable[..., tuple[Any, ...]]]:
    """Return a decorator for the function `backward(ctx, saved, *grads)` of a `torch.autograd.Function`. Peers are
    notified of errors in it. Differentiating the decorated function's result raises `NotImplementedError`.

    group: a function that returns the group of a call from its `ctx`.
    saved: the saved tensors of `ctx`.
    """

    def decorated(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        @functools.wraps(backward)
        def call(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            saved = saved_of(ctx, operator, group, grads)
            try:
                with torch.no_grad():
                    found = backward(ctx, saved, *grads)
            except BaseException as error:  # between calls of operators, which notify peers of their own errors
                tell(error, f"backward of {operator}", group(ctx), _first_of(grads))
                raise
            if not torch.is_grad_enabled():  # without create_graph=True there is no second backward
                return found
            return _Refusing.apply(operator, len(found), *found, *grads, *saved)

        return call

    return decorated


def saved_of(
    ctx: Any, operator: str, group: Callable[[Any], dist.ProcessGroup], grads: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Return the saved tensors of `ctx`. Notify peers if torch raises an error instead, because they run backward too.

    torch raises an error if a tensor was changed in place after forward, or if an earlier backward has freed the graph.
    """
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except BaseException as error:
        # Read outside `together`: hooks for saved tensors may call operators, such as those of activation checkpointing.
        is_misuse = type(error) is RuntimeError  # no subclass, such as an error of weft or of the device
        told = ValueError(str(error)) if is_misuse else error
        tell(told, f"backward of {operator}", group(ctx), _first_of(grads))
        raise


def _first_of(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    return next((grad for grad in grads if grad is not None), None)


def refused(operator: str) -> Callable[..., NoReturn]:
    """Return a function that raises `NotImplementedError`, to register as the backward of an operator's backward
    (`torch.library.register_autograd`).
    """

    def refuse(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(
            f"{operator} does not support second derivatives: compute gradients without create_graph=True, or use "
            "torch.matmul and torch.distributed.nn.functional"
        )

    return refuse


def is_transformed() -> bool:
    """True inside a torch.func transform or a forward-mode derivative."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def require_plain(operator: str, tensors: Callable[[], Iterable[torch.Tensor | None]]) -> None:
    """Raise `ValueError` inside a torch.func transform, such as vmap, or if a tensor has a forward-mode tangent.

    A transform cannot apply to a call that involves all ranks. A tangent would be lost silently.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        refuse_transforms(operator)
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors()
    ):
        _refuse_tangents(operator)


def require_no_tangents(operator: str) -> None:
    """Raise `ValueError` inside a forward-mode derivative, even if no tensor has a tangent.

    Kernels that weft registers with torch's dispatcher call this function, because they cannot see tangents.
    """
    if forward_ad._current_level >= 0:
        _refuse_tangents(operator)


def _refuse_tangents(operator: str) -> NoReturn:
    raise ValueError(
        f"{operator} does not support forward-mode derivatives, and would drop the tangents: use backward()"
    )


def refuse_transforms(operator: str, *_: Any) -> NoReturn:
    """Raise `ValueError`, because the call is inside a torch.func transform. torch's dispatcher calls this function
    there.
    """
    raise ValueError(
        f"{operator} was called inside a torch.func transform (vmap, grad, jvp, ...), which cannot change a call "
        "that involves all ranks: call it outside, on the whole batch, and differentiate by backward()"
    )


def require_single(operator: str, grads: Iterable[torch.Tensor]) -> None:
    """Raise `ValueError` if torch runs backward under vmap, to compute several gradients at the same time
    (`is_grads_batched=True`).
    """
    if any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
        raise ValueError(
            f"backward of {operator} was called for several gradients at the same time (is_grads_batched=True, or "
            "vectorize=True), but vmap cannot run a backward that involves all ranks: compute one gradient "
            "after the other"
        )


def require_kept(operator: str, tensors: Iterable[torch.Tensor | None]) -> None:
    """Raise `ValueError` for tensors of `torch.inference_mode()`, which autograd cannot save for backward. Autograd
    itself would raise only after the call.
    """
    if any(isinstance(t, torch.Tensor) and t.is_inference() for t in tensors):
        raise ValueError(
            f"{operator} needs gradients, but an input was created in torch.inference_mode(), so autograd cannot "
            "save it for backward: create it in torch.no_grad(), or pass its clone()"
        )


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: str, count: int, *tensors: Any) -> tuple[Any, ...]:
        """Return the first `count` of `tensors`. In the autograd graph, the results depend on all of `tensors`."""
        ctx.operator = operator
        return tuple(None if tensor is None else tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        refused(ctx.operator)(ctx, *grads)
