"""Registration of operators with torch.library, for torch.compile and dispatch modes: schemas, kernels, fake kernels
and gradients.

torch.compile does not trace into an operator. Eager calls bypass the dispatcher (`weft.operator.calls.made`), because
the dispatcher costs microseconds per tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.arguments import check_tensor
from weft.operator.cache import Table
from weft.operator.calls import (
    BACKWARDS,
    OPERATORS,
    TABLES,
    WANTED_OUTSIDE,
    backward_of_call,
    gradients_of_call,
    prepared_for,
    require_device,
)
from weft.operator.compiled_operator import CompiledOperator
from weft.operator.derivatives import once, refuse_transforms, refused, require_no_tangents, saved_of
from weft.operator.flops import register_formulas
from weft.operator.spec import Operator
from weft.operator.together import together
from weft.runtime.opaque import never_left_out, opaque
from weft.symm.groups import group_of

O = TypeVar("O", bound=Operator[Any])  # noqa: E741

_library = torch.library.Library("weft", "FRAGMENT")


def registered(op: O) -> O:
    """Register `op` for eager calls and with torch.library, and return it."""
    if type(op).gradients is not Operator.gradients and not op.gradients_of:
        raise TypeError(
            f"{op.name}: the spec implements gradients(), but gradients_of is empty: set gradients_of = "
            f"{{field: its argument name in the public function}}"
        )
    OPERATORS[op.name], TABLES[op.name] = op, Table()
    BACKWARDS[op.name] = once(op.name, lambda ctx: ctx.prepared.group)(backward_of_call)
    fields, options = op.fields, "str group, str schedule, float deadline_s"
    _library.define(f"{op.name}({fields}, {options}) -> Tensor[]", tags=op.tags)

    @opaque
    def run(*arguments: Any) -> list[torch.Tensor]:
        *given, name, schedule, deadline_s = arguments
        call, group = op.form(*given), group_of(name)
        with together(op.title, group, next(t for t in op.tensors(call) if t is not None), deadline_s or None):
            require_no_tangents(op.name)
            require_device(op, call)
            for name, tensor in op.named_tensors(call):  # the public function has checked only the traced tensors
                check_tensor(name, tensor)
            wanted = WANTED_OUTSIDE.get() or op.wanted(call)
            call = op.checked(call, group)
            prepared = prepared_for(op, call, group, schedule or None, deadline_s or None, wanted)
            return prepared(call, deadline_s or None, None)

    def fake(*arguments: Any) -> list[torch.Tensor]:
        *given, name, _, _ = arguments
        require_no_tangents(op.name)
        return op.fake(op.form(*given), group_of(name).size())

    implement(op.name, run, fake)
    if op.gradients_of:
        _define_backward(op, fields, options)
    op.compiled = getattr(torch.ops.weft, op.name)
    register_formulas(op)
    return op


def implement(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register the kernels of an operator of torch's dispatcher.

    run: a function that makes the call.
    fake: a function that returns results without values, for a traced call or a call with only meta tensors.
    """

    @functools.wraps(fake)
    def without_values(*arguments: Any) -> Any:
        # If only some tensors of a call are on meta, torch still calls the kernel for meta. Then `run` refuses the call
        # on all ranks.
        return run(*arguments) if any(map(_has_values, _tensors(arguments))) else fake(*arguments)

    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    _library.impl(name, functools.partial(refuse_transforms, name), "FuncTorchDynamicLayerFrontMode")
    torch.library.register_fake(f"weft::{name}", without_values, lib=_library)
    never_left_out(name)


def _tensors(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield all tensors in `arguments`, including tensors in lists."""
    for one in arguments:
        yield from (t for t in (one if isinstance(one, list | tuple) else (one,)) if isinstance(t, torch.Tensor))


def _has_values(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def _laid_out(grad: torch.Tensor, like: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `grad` with the strides that the operator's fake kernel returns for a gradient of `like`.

    Copy `grad` if the strides differ. Also copy it if it is one of the inputs (`given`), because torch's operators must
    not return an input.
    """
    if grad.stride() == torch.empty_like(like, device="meta").stride() and not any(grad is one for one in given):
        return grad
    return torch.empty_like(like).copy_(grad)


def _define_backward(op: Operator[Any], fields: str, options: str) -> None:
    name = f"{op.name}_backward"
    schema = f"{name}(Tensor?[] saved, Tensor[] grads, {fields}, {options}, bool[] wanted) -> Tensor[]"
    _library.define(schema, tags=op.backward_tags)

    @opaque
    def run(saved: list[torch.Tensor | None], grads: list[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
        """Run the backward of an operator as an operator of torch. Return the gradients that are wanted. The last argument is
        `wanted`: for each tensor, True if its gradient is wanted.
        """
        *given, group_name, schedule, deadline_s, wanted = arguments
        group = group_of(group_name)

        def found() -> tuple[CompiledOperator, Any]:
            call = op.checked(op.form(*given), group)
            prepared = prepared_for(op, call, group, schedule or None, deadline_s or None, None)
            return prepared, op.beside(call, group, saved, None)

        made = gradients_of_call(op, group, grads[0].device, found, saved, list(grads), wanted, deadline_s or None)
        tensors = op.tensors(op.form(*given))
        return [
            torch.zeros_like(t) if g is None else _laid_out(g, t, grads)
            for g, t, want in zip(made, tensors, wanted, strict=True)
            if want and t is not None
        ]

    def fake(saved: Any, grads: Any, *arguments: Any) -> list[torch.Tensor]:
        *given, _, _, _, wanted = arguments
        tensors = op.tensors(op.form(*given))
        return [torch.empty_like(t) for t, want in zip(tensors, wanted, strict=True) if want and t is not None]

    def set_up(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        *given, group, schedule, deadline_s = inputs
        call = op.form(*given)
        tensors = op.tensors(call)
        saved = op.saved(call, output, [t is not None and t.requires_grad for t in tensors])
        ctx.count, ctx.rest = len(saved), (group, schedule, deadline_s)
        ctx.plain = [None if kind.startswith("Tensor") else value for kind, value in zip(op.kinds, call, strict=True)]
        ctx.lengths = [len(value) if kind.endswith("[]") else 0 for kind, value in zip(op.kinds, call, strict=True)]
        ctx.save_for_backward(*saved, *tensors)

    def in_fields(ctx: Any, flat: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Return one value for each field of the call. The values of tensor fields come from `flat`, the others from `others`.

        flat: one value for each tensor of the call, such as its gradient. A field with a list of tensors gets a list of
            values.
        others: one value for each field of the call.
        """
        left = iter(flat)
        return [
            other
            if not kind.startswith("Tensor")
            else [next(left) for _ in range(n)]
            if kind.endswith("[]")
            else next(left)
            for kind, n, other in zip(op.kinds, ctx.lengths, others, strict=True)
        ]

    def backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
        both = saved_of(ctx, op.name, lambda ctx: group_of(ctx.rest[0]), grads)
        wanted = op.flat(ctx.needs_input_grad)
        saved, call = list(both[: ctx.count]), in_fields(ctx, both[ctx.count :], ctx.plain)
        made = iter(getattr(torch.ops.weft, name)(saved, list(grads), *call, *ctx.rest, wanted))
        flat = [next(made) if want else None for want in wanted]
        return (*in_fields(ctx, flat, [None] * len(op.kinds)), None, None, None)

    implement(name, run, fake)
    torch.library.register_autograd(f"weft::{op.name}", backward, setup_context=set_up, lib=_library)
    torch.library.register_autograd(f"weft::{name}", refused(op.name), lib=_library)
