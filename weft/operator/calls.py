"""Calls of operators, made from their specs: in eager mode and under torch.compile, and their gradients in both.

From one call down: the public function (`weft.ops`) normalises its arguments. `made` finds, or makes, what is prepared for calls
of that shape (`weft.operator.prepared`). That runs the chosen schedule (`weft.operator.choosing`), or torch's collectives and
GEMMs unfused (`weft.runtime.unfused`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from weft import plan
from weft.operator import choosing
from weft.operator.derivatives import (
    once,
    refuse_transforms,
    refused,
    require_kept,
    require_no_tangents,
    require_plain,
    require_single,
)
from weft.operator.flops import counted, flops_of, is_counter_there, register_formulas
from weft.operator.prepared import PASSING_ON, Prepared, Table, check_options, group_of
from weft.operator.replay import seen
from weft.operator.spec import Operator
from weft.operator.together import agree, together
from weft.runtime.in_turn import Turn
from weft.runtime.layouts import READER
from weft.runtime.opaque import never_left_out, opaque
from weft.schedule import Problem
from weft.timeline import Timeline
from weft.words import joined, kind

O = TypeVar("O", bound=Operator[Any])  # noqa: E741

_library = torch.library.Library("weft", "FRAGMENT")
OPERATORS: dict[str, Operator[Any]] = {}
"""All operators that can be called, by name."""
_tables: dict[str, Table] = {}
_wanted_outside: ContextVar[tuple[bool, ...] | None] = ContextVar("wanted_outside", default=None)
"""The gradients that a call below a dispatch mode wants, where autograd has already been passed.

Peers may have no such mode, for example if one rank counts its FLOPs.
"""


def made(
    op: Operator[Any],
    group: dist.ProcessGroup | str | None,
    like: Any,
    form: Callable[[dist.ProcessGroup | str | None], Any],
    *,
    schedule: str | None = None,
    deadline_s: float | None = None,
    timeline: Timeline | None = None,
) -> list[torch.Tensor]:
    """Make a call. Return its results in the order of the output buffers.

    like: a tensor on the device of the call. form: normalises the arguments; peers are notified of its errors.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        call, deadline_s = form(group), check_options(deadline_s, timeline)
        if timeline is not None:
            raise ValueError("timeline is for calls one by one: a compiled call cannot fill it")
        name = group if isinstance(group, str) else group_of(group).group_name
        options = name, schedule or "", deadline_s or 0.0
        if torch.compiler.is_compiling():
            return op.compiled(*call, *options)  # type: ignore[no-any-return]
        before = _wanted_outside.set(op.wanted(call))
        try:
            return op.compiled(*call, *options)  # type: ignore[no-any-return]
        finally:
            _wanted_outside.reset(before)
    group = group_of(group)
    with together(op.title, group, like, deadline_s):
        call = form(group)
        require_plain(op.name, lambda: op.tensors(call))
        results = _called(op, call, group, schedule, check_options(deadline_s, timeline), timeline)
        op.note(call)
        return results


def within(op: Operator[Any], call: Any, group: dist.ProcessGroup, turn: Turn | None) -> list[torch.Tensor]:
    """Make a call as a part of another call, which has been counted and reports errors. A pinned schedule is for that
    other call."""
    deadline_s = None if turn is None else turn.deadline_s
    if plan.pinned() is None:
        return _called(op, call, group, None, deadline_s, None)
    with plan.use(None):
        return _called(op, call, group, None, deadline_s, None)


def operator_named(name: str) -> Operator[Any]:
    """Return weft's operator of that name. Its file is imported on demand: duals are each other's gradients, and imports have no
    cycles."""
    if name not in OPERATORS:
        importlib.import_module(f"weft.ops.{name}")
    return OPERATORS[name]


def overlaps(op: Operator[Any], call: Any, group: dist.ProcessGroup, turn: Turn | None) -> bool:
    """True if calls like this one, `within` another, run overlapped. Also True until one has been made."""
    with plan.use(None):
        prepared = _prepared_for(op, call, group, None, None if turn is None else turn.deadline_s, op.wanted(call))
    return not prepared.known_serial(prepared.capturing())


def prepared_calls(op: Operator[Any], group: dist.ProcessGroup) -> list[Prepared]:
    """Return what is prepared for each shape that was called on `group`, the oldest first."""
    return _tables[op.name].known(group)


def drop_calls(op: Operator[Any], group: dist.ProcessGroup, dropped: list[Prepared]) -> None:
    """Give back what is prepared for some shapes. All ranks drop the same, and nothing may be running."""
    _tables[op.name].drop(group, dropped)


def _called(
    op: Operator[Any], call: Any, group: dist.ProcessGroup, schedule: str | None, deadline_s: float | None,
    timeline: Timeline | None,
) -> list[torch.Tensor]:  # fmt: skip
    table, signature = _tables[op.name], _signature(op, call, schedule)
    if signature is not None and (known := table.again(group, signature)) is not None:
        if known.differentiated:
            require_kept(op.name, op.tensors(call))
            return _differentiated(op, table, known.prepared, call, deadline_s, timeline)
        inputs = known.inputs(call)
        inputs = op.inputs(known.prepared.p, call) if inputs is None else inputs
        results = known.prepared(call, deadline_s, timeline, inputs)
        if timeline is None:
            seen(op, table, known.prepared, call, inputs, deadline_s, results)
        return results
    _require_device(op, _device_of(op, call))
    checked, wanted = op.checked(call, group), op.wanted(call)
    differentiated = True in wanted
    if differentiated:
        require_kept(op.name, op.tensors(checked))
    prepared = _prepared_for(op, checked, group, schedule, deadline_s, wanted)
    inputs = None if differentiated else op.inputs(prepared.p, checked)
    if signature is not None and (checked is call or op.has_executors) and not prepared.passes:
        table.remember(group, signature, prepared, call, inputs)
    if differentiated:
        return _differentiated(op, table, prepared, checked, deadline_s, timeline)
    results = prepared(checked, deadline_s, timeline, inputs)
    if timeline is None:
        seen(op, table, prepared, checked, inputs, deadline_s, results)
    return results


def _signature(op: Operator[Any], call: Any, schedule: str | None) -> Hashable:
    """Return a key of calls that differ only in what is read in each; None if each call must be looked at."""
    if op.has_executors:
        return op.key(call)
    if READER is None or plan.pinned(schedule) is not None:
        return None
    return READER.signature(call, torch.is_grad_enabled())


def _differentiated(
    op: Operator[Any], table: Table, prepared: Prepared, call: Any, deadline_s: float | None, timeline: Timeline | None
) -> list[torch.Tensor]:  # fmt: skip
    results = list(_Function.apply(prepared, call, deadline_s, timeline, *op.tensors(call)))
    if timeline is None:
        seen(op, table, prepared, call, None, deadline_s, results, _Function.apply)
    return results


def _prepared_for(
    op: Operator[Any], call: Any, group: dist.ProcessGroup, schedule: str | None, deadline_s: float | None,
    wanted: tuple[bool, ...] | None,
) -> Prepared:  # fmt: skip
    """Find or make what is prepared for a call.

    It does not depend on the wanted gradients, but all ranks must want the same. wanted=None: they have agreed on that in
    forward.
    """
    pinned = None if op.has_executors else plan.pinned(schedule)
    table, device, given = _tables[op.name], _device_of(op, call), op.given(call)
    # On CPU ranks meet as those who make calls of one shape, which says all that they compare.
    key = (op.key(call), pinned, given if device.type == "cpu" else "")
    prepared = table.find(group, key)
    if prepared is not None and (wanted is None or (given, wanted) in prepared.agreed):
        return prepared
    world, wanted = group.size(), op.wanted(call) if wanted is None else wanted
    family: Hashable = None
    if prepared is None and device.type in PASSING_ON and pinned is None and world > 1 and op.sizes_are_alike:
        p = _described(op, call, world)
        if p is not None and p.family[0] is not p and p.has_work:
            family, rows = (p.family[0], given, wanted), _rows_of(op, call)
            capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            typical = table.of_group(group).passes(family, rows, capturing)
            if typical is not None:
                said = op.said(call, world)
                shown = joined(p.text if said == str(p) else said, given)
                return typical.for_one_call(p, rows, given, wanted, joined(said, given), shown)

    def check() -> tuple[str, str, int]:
        """Return what ranks compare, in the words of other messages, and the rank's number.

        The number is twice the size, plus one if times of the problem are remembered.
        """
        size, said = op.size(call), op.said(call, world)
        p = op.problem(call, world, size)
        _require_problem(op, p)
        if pinned is not None:
            choosing.check_name(pinned, p)
        texts[:] = p.text if said == str(p) else said.partition("\n")[0], choosing.wanted_schedule(pinned, p)
        remembered = pinned is None and world > 1 and choosing.remembers(p, device)
        return joined(texts[0], given, texts[1], op.described(wanted)), said, 2 * size + remembered

    texts: list[str] = []
    numbers = agree(op.title, group, device, check, deadline_s, op.hint)
    said, (shown, wanted_schedule) = op.said(call, world), texts
    if prepared is None:
        p, remembered = op.problem(call, world, max(numbers) // 2), any(number % 2 for number in numbers)
        made = Prepared(op, p, group, device, pinned, remembered, joined(said, given), joined(shown, given))
        prepared = table.keep(group, key, made)
        if family is not None:
            table.of_group(group).prepared(family, prepared)
    prepared.agree(given, wanted, joined(said, given, wanted_schedule), joined(shown, given))
    return prepared


def _described(op: Operator[Any], call: Any, world: int) -> Any:
    """Return the problem of a call; None for bad input, which is refused where ranks agree on the call, for all of them to hear."""
    try:
        return op.problem(call, world, 0)
    except Exception:
        return None


def _rows_of(op: Operator[Any], call: Any) -> int:
    return next(t.shape[0] for t in op.tensors(call) if t is not None)


def _device_of(op: Operator[Any], call: Any) -> torch.device:
    return next(t.device for t in op.tensors(call) if isinstance(t, torch.Tensor))


def _require_device(op: Operator[Any], device: torch.device) -> None:
    """Raise `ValueError` for another device than CPU or GPU. It is raised here, where peers are notified: on other devices ranks
    do not meet."""
    if device.type not in ("cpu", "cuda"):
        made = "; of a module that was made on meta, to_empty(device=...) and then values" * (device.type == "meta")
        raise ValueError(f"{op.name} on {device}: pass tensors on a GPU, or on the CPU{made}")


def _require_problem(op: Operator[Any], p: Any) -> None:
    if not isinstance(p, Problem):
        raise TypeError(f"problem of {op.name} returns {kind(p)}: return a Problem, which describes the call")
    of_another = p.name in OPERATORS or type(p).__module__.startswith("weft.")  # two operators may share a problem
    if p.name != op.name and not of_another:
        raise TypeError(
            f"problem of {op.name} returns one named {p.name!r}: give {type(p).__name__} and the operator one name, by which plans "
            f"and messages know both"
        )


# --- gradients in eager mode ---


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, prepared: Prepared, call: Any, deadline_s: float | None, timeline: Timeline | None, *_: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        op = prepared.op
        prepared.require_room(call, deadline_s)  # the library's calls need none, but backward may go another way
        results = prepared(call, deadline_s, timeline)
        ctx.prepared, ctx.deadline_s = prepared, deadline_s
        ctx.flops = flops_of(op, call, results) if is_counter_there() else None
        saved = op.saved(call, results, ctx.needs_input_grad[4:])
        ctx.beside = op.beside(saved)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _backward_of[ctx.prepared.op.name](ctx, *grads)


_backward_of: dict[str, Callable[..., tuple[Any, ...]]] = {}


def _backward(ctx: Any, saved: Sequence[torch.Tensor], *grads: torch.Tensor) -> tuple[Any, ...]:
    prepared, wanted = ctx.prepared, ctx.needs_input_grad[4:]
    of_call = prepared.op, prepared.group, prepared.device, lambda: (prepared, ctx.beside)

    def made() -> list[torch.Tensor | None]:
        return _gradients(*of_call, saved, list(grads), wanted, ctx.deadline_s)

    counts = ctx.flops is not None and is_in_torch_dispatch_mode()
    return (None, None, None, None, *(counted(ctx.flops, wanted, made) if counts else made()))


def _gradients(
    op: Operator[Any], group: dist.ProcessGroup, device: torch.device, found: Callable[[], tuple[Prepared, Any]],
    saved: Sequence[torch.Tensor | None], grads: list[torch.Tensor], wanted: Sequence[bool], deadline_s: float | None,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Compute the gradients of a call, with autocast off, which would reach only some of the torch calls.

    found: returns what was prepared for the call, and the work begun after it; peers are notified of its errors too.
    """
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            return _gradients(op, group, device, found, saved, grads, wanted, deadline_s)
    with together(f"backward of {op.title}", group, lambda: device, deadline_s):
        require_single(op.title, grads)
        prepared, beside = found()
        prepared.begin_backward()
        made = op.gradients(prepared.p, group, saved, grads, wanted, prepared.turn(deadline_s), beside)
        if len(made) != len(wanted):
            raise TypeError(
                f"gradients of {op.name} returns {len(made)}, and a call has {len(wanted)} tensors: return one for each, None for "
                f"those that are not wanted"
            )
        return made


# --- for torch.compile: operators that it does not look into ---


def registered(op: O) -> O:
    """Register `op`, which can then be called, and return it."""
    if type(op).gradients is not Operator.gradients and not op.gradients_of:
        raise TypeError(
            f"{op.name}: its spec has gradients and does not say of what: set gradients_of = {{field: its name}}"
        )
    OPERATORS[op.name], _tables[op.name] = op, Table()
    _backward_of[op.name] = once(op.name)(_backward)
    fields, options = op.fields, "str group, str schedule, float deadline_s"
    _library.define(f"{op.name}({fields}, {options}) -> Tensor[]", tags=op.tags)

    @opaque
    def run(*arguments: Any) -> list[torch.Tensor]:
        *given, name, schedule, deadline_s = arguments
        call, group = op.form(*given), group_of(name)
        with together(op.title, group, next(t for t in op.tensors(call) if t is not None), deadline_s or None):
            require_no_tangents(op.name)
            wanted = _wanted_outside.get() or op.wanted(call)
            call = op.checked(call, group)
            prepared = _prepared_for(op, call, group, schedule or None, deadline_s or None, wanted)
            return prepared(call, deadline_s or None, None)

    def fake(*arguments: Any) -> list[torch.Tensor]:
        *given, name, _, _ = arguments
        require_no_tangents(op.name)
        return op.fake(op.form(*given), group_of(name).size())

    _implement(op.name, run, fake)
    if op.gradients_of:
        _define_backward(op, fields, options)
    op.compiled = getattr(torch.ops.weft, op.name)
    register_formulas(op)
    return op


def _implement(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    _library.impl(name, functools.partial(refuse_transforms, name), "FuncTorchDynamicLayerFrontMode")
    torch.library.register_fake(f"weft::{name}", fake, lib=_library)
    never_left_out(name)


def _laid_out(grad: torch.Tensor, like: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `grad` with the strides that the operator's fake says. Copy it if needed: torch's operators may not return their
    inputs."""
    if grad.stride() == torch.empty_like(like, device="meta").stride() and not any(grad is one for one in given):
        return grad
    return torch.empty_like(like).copy_(grad)


def _define_backward(op: Operator[Any], fields: str, options: str) -> None:
    name = f"{op.name}_backward"
    schema = f"{name}(Tensor?[] saved, Tensor[] grads, {fields}, {options}, bool[] wanted) -> Tensor[]"
    _library.define(schema, tags=op.backward_tags)

    @opaque
    def run(saved: list[torch.Tensor | None], grads: list[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
        """Return the gradients that are wanted."""
        *given, group_name, schedule, deadline_s, wanted = arguments
        group = group_of(group_name)

        def found() -> tuple[Prepared, Any]:
            call = op.checked(op.form(*given), group)
            prepared = _prepared_for(op, call, group, schedule or None, deadline_s or None, None)
            return prepared, op.beside(saved)

        made = _gradients(op, group, grads[0].device, found, saved, list(grads), wanted, deadline_s or None)
        tensors = op.tensors(op.form(*given))
        return [_laid_out(g, t, grads) for g, t in zip(made, tensors, strict=True) if g is not None and t is not None]

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
        """Return one value per tensor, as the call's fields. others: the values of fields that are no tensors."""
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
        both, wanted = ctx.saved_tensors, op.flat(ctx.needs_input_grad)
        saved, call = list(both[: ctx.count]), in_fields(ctx, both[ctx.count :], ctx.plain)
        made = iter(getattr(torch.ops.weft, name)(saved, list(grads), *call, *ctx.rest, wanted))
        flat = [next(made) if want else None for want in wanted]
        return (*in_fields(ctx, flat, [None] * len(op.kinds)), None, None, None)

    _implement(name, run, fake)
    torch.library.register_autograd(f"weft::{op.name}", backward, setup_context=set_up, lib=_library)
    torch.library.register_autograd(f"weft::{name}", refused(op.name), lib=_library)
