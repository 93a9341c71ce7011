"""Run the call of an operator, and its backward, in eager mode.

The public function (`weft.ops`) puts its arguments into a NamedTuple, the *form* of a call. `made` finds the compiled
operator for the shape (`weft.operator.cache`), or compiles one (`weft.operator.compiled_operator`). The compiled
operator runs the chosen schedule (`weft.operator.select`), or torch's collectives and GEMMs unfused
(`weft.runtime.unfused`). Under torch.compile, `weft.operator.registration` makes the same calls.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from weft import plan
from weft.arguments import check_memory, checked_deadline
from weft.builders import Problem
from weft.errors import BackwardError
from weft.operator import select
from weft.operator.agreement import agreement_on
from weft.operator.cache import Table
from weft.operator.compiled_operator import CompiledOperator
from weft.operator.derivatives import (
    require_kept,
    require_plain,
    require_single,
)
from weft.operator.flops import counted, flops_of, is_counter_there
from weft.operator.replay import seen
from weft.operator.spec import Operator
from weft.operator.together import agree, interrupted, tell, together
from weft.runtime.capture import is_captured
from weft.runtime.layouts import READER
from weft.runtime.meeting import UNKNOWN, in_backward, published_on
from weft.runtime.opaque import opaque
from weft.runtime.unfused.turn import Turn
from weft.symm.calls import calls_of
from weft.symm.groups import group_of
from weft.timeline import Timeline
from weft.words import joined, kind

OPERATORS: dict[str, Operator[Any]] = {}
"""All operators, by name."""
TABLES: dict[str, Table[CompiledOperator]] = {}
"""The cache of each operator."""
WANTED_OUTSIDE: ContextVar[tuple[bool, ...] | None] = ContextVar("wanted_outside", default=None)
"""Inside a dispatch mode: for each differentiable field of the current call, True if its gradient is wanted. Outside:
None.

The kernel of the dispatcher cannot see whether autograd is active, so `made` stores this before it calls the
dispatcher. Peers may run the same call without a mode, for example if only one rank counts FLOPs.
"""


def check_options(deadline_s: float | None, timeline: Timeline | None) -> float | None:
    """Return the deadline in seconds, or None for the default. Raise `ValueError` for an invalid deadline or timeline."""
    if timeline is not None and not isinstance(timeline, Timeline):
        raise ValueError(f"timeline={timeline!r} is not a Timeline: pass weft.Timeline(), or None")
    return checked_deadline(deadline_s)


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
    """Make a call in eager mode or under torch.compile. Return its results in the order of the output buffers.

    like: a tensor on the device of the call.
    form: a function that takes the group and returns the call's arguments as `op.form`, a NamedTuple. Peers are
        notified if the function raises.
    """
    if torch.compiler.is_compiling():
        return op.compiled(*_for_dispatcher(op, group, form, schedule, deadline_s, timeline))  # type: ignore[no-any-return]
    if is_in_torch_dispatch_mode():
        return _made_in_mode(op, group, like, form, schedule, deadline_s, timeline)
    try:
        return _made_now(op, group, like, form, schedule, deadline_s, timeline)
    except BaseException as error:
        interrupted(op.title, group, error)
        raise


def _for_dispatcher(
    op: Operator[Any], group: dist.ProcessGroup | str | None, form: Callable[[dist.ProcessGroup | str | None], Any],
    schedule: str | None, deadline_s: float | None, timeline: Timeline | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of `op.compiled` for a call."""
    call, deadline_s = form(group), check_options(deadline_s, timeline)
    if timeline is not None:
        raise ValueError(
            "timeline= is not supported in a compiled call, or inside a dispatch mode such as FlopCounterMode: do not pass it, "
            "or call in eager mode"
        )
    name = group if isinstance(group, str) else group_of(group).group_name
    return *call, name, schedule or "", deadline_s or 0.0


def _made_in_mode(
    op: Operator[Any], group: dist.ProcessGroup | str | None, like: Any,
    form: Callable[[dist.ProcessGroup | str | None], Any], schedule: str | None, deadline_s: float | None,
    timeline: Timeline | None,
) -> list[torch.Tensor]:  # fmt: skip
    """Make a call inside a dispatch mode, such as FlopCounterMode, which must see the call as one operator of torch."""
    try:
        plan.pinned(schedule)  # refuses a schedule that is not a string
        arguments = _for_dispatcher(op, group, form, schedule, deadline_s, timeline)
        wanted = op.wanted(op.form(*arguments[:-3]))
    except Exception as error:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:  # a call that peers make too
            tell(error, op.title, group_of(group), like)
        raise
    before = WANTED_OUTSIDE.set(wanted)
    try:
        return op.compiled(*arguments)  # type: ignore[no-any-return]
    finally:
        WANTED_OUTSIDE.reset(before)


@opaque  # if tracing a caller has failed, Dynamo would trace this function frame by frame
def _made_now(
    op: Operator[Any], group: dist.ProcessGroup | str | None, like: Any,
    form: Callable[[dist.ProcessGroup | str | None], Any], schedule: str | None, deadline_s: float | None,
    timeline: Timeline | None,
) -> list[torch.Tensor]:  # fmt: skip
    group = group_of(group)
    with together(op.title, group, like, deadline_s):
        call = form(group)
        require_plain(op.name, lambda: op.tensors(call))
        call = call if op.has_executors else _without_negated_views(op, call)
        results = _called(op, call, group, schedule, check_options(deadline_s, timeline), timeline)
        op.note(call)
        return results


def _without_negated_views(op: Operator[Any], call: Any) -> Any:
    """Return the call with a copy in place of each negated view, such as the imaginary part of a conjugate.

    The memory of such a view holds its values with the opposite sign. Copies between ranks, kernels and the cache of
    calls (`weft.runtime.layouts`) see only the memory.
    """
    if not any(isinstance(t, torch.Tensor) and t.is_neg() for t in op.tensors(call)):
        return call

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(one) for one in value]
        return value.resolve_neg() if isinstance(value, torch.Tensor) else value

    return call._make(map(resolved, call))


def within(op: Operator[Any], call: Any, group: dist.ProcessGroup, turn: Turn) -> list[torch.Tensor]:
    """Make a call inside another call of weft, such as the backward of another operator.

    Ranks count the two calls as one, and the outer call notifies peers of errors. The inner call ignores pinned
    schedules.

    turn: the outer call's `Turn`, which gives the deadline.
    """
    if plan.pinned() is None:
        return _called(op, call, group, None, turn.deadline_s, None)
    with plan.use(None):
        return _called(op, call, group, None, turn.deadline_s, None)


def operator_named(name: str) -> Operator[Any]:
    """Return weft's operator called `name`. Its file is imported here at the first use, because an import at the top of
    this file would form a cycle.
    """
    if name not in OPERATORS:
        importlib.import_module(f"weft.ops.{name}")
    return OPERATORS[name]


def overlapped(
    op: Operator[Any], call: Any, group: dist.ProcessGroup, turn: Turn
) -> Callable[[], list[torch.Tensor]] | None:
    """Return a function that makes `call` inside another call of weft, as `within` does. Return None if the call would run
    unfused.
    """
    prepared = _prepared_within(op, call, group, turn)
    if prepared.known_serial(prepared.capturing()):
        return None
    return partial(prepared, call, turn.deadline_s, None)


def overlaps(op: Operator[Any], call: Any, group: dist.ProcessGroup, turn: Turn) -> bool:
    """True if `call`, made inside another call of weft, would run a schedule with overlap. Also True if no schedule has been
    chosen for it yet. False if it would run unfused.
    """
    prepared = _prepared_within(op, call, group, turn)
    return not prepared.known_serial(prepared.capturing())


def _prepared_within(op: Operator[Any], call: Any, group: dist.ProcessGroup, turn: Turn) -> CompiledOperator:
    with plan.use(None):
        return prepared_for(op, call, group, None, turn.deadline_s, op.wanted(call))


def prepared_calls(op: Operator[Any], group: dist.ProcessGroup) -> list[CompiledOperator]:
    """Return the compiled operators of all shapes that were called on `group`, in the order of their first calls."""
    return TABLES[op.name].known(group)


def drop_calls(op: Operator[Any], group: dist.ProcessGroup, dropped: list[CompiledOperator]) -> None:
    """Drop the compiled operators `dropped` of `group`. All ranks must drop the same shapes, and not during a call."""
    TABLES[op.name].drop(group, dropped)


def _called(
    op: Operator[Any], call: Any, group: dist.ProcessGroup, schedule: str | None, deadline_s: float | None,
    timeline: Timeline | None,
) -> list[torch.Tensor]:  # fmt: skip
    table, signature = TABLES[op.name], _signature(op, call, schedule)
    if signature is not None and (known := table.again(group, signature)) is not None:
        if known.differentiated:
            require_kept(op.name, op.tracked(call))
            return _differentiated(op, table, known.prepared, call, deadline_s, timeline, call)
        inputs = known.inputs(call)
        inputs = op.inputs(known.prepared.p, call) if inputs is None else inputs
        results = known.prepared(call, deadline_s, timeline, inputs)
        if timeline is None:
            seen(op, table, known.prepared, call, call, inputs, deadline_s, results)
        return results
    require_device(op, call)
    checked, wanted = op.checked(call, group), op.wanted(call)
    differentiated = True in wanted
    if differentiated:
        require_kept(op.name, op.tracked(checked))
    prepared = prepared_for(op, checked, group, schedule, deadline_s, wanted)
    inputs = None if differentiated else op.inputs(prepared.p, checked)
    if signature is not None and (checked is call or op.has_executors) and not prepared.passes:
        table.remember(group, signature, prepared, call, inputs)
    if differentiated:
        return _differentiated(op, table, prepared, checked, deadline_s, timeline, call)
    results = prepared(checked, deadline_s, timeline, inputs)
    if timeline is None:
        seen(op, table, prepared, call, checked, inputs, deadline_s, results)
    return results


def _signature(op: Operator[Any], call: Any, schedule: str | None) -> Hashable:
    """Return a key by which the cache finds the compiled operator of a repeated call. Calls that differ only in the contents
    and addresses of their tensors have equal keys. Return None if every call must be checked: with a pinned schedule, or
    if weft's native reader of calls does not support this version of torch.
    """
    if op.has_executors:
        return op.key(call), op.given(call), op.wanted(call)
    if READER is None or plan.pinned(schedule) is not None:
        return None
    return READER.signature(call, torch.is_grad_enabled())


def _differentiated(
    op: Operator[Any], table: Table[CompiledOperator], prepared: CompiledOperator, call: Any, deadline_s: float | None,
    timeline: Timeline | None, given: Any,
) -> list[torch.Tensor]:  # fmt: skip
    results = list(_Function.apply(prepared, call, deadline_s, timeline, *op.tracked(call)))
    if timeline is None:
        seen(op, table, prepared, given, call, None, deadline_s, results, _Function.apply)
    return results


def prepared_for(
    op: Operator[Any], call: Any, group: dist.ProcessGroup, schedule: str | None, deadline_s: float | None,
    wanted: tuple[bool, ...] | None,
) -> CompiledOperator:  # fmt: skip
    """Return the compiled operator of a call; compile it if needed.

    wanted: for each differentiable field of the call, True if its gradient is wanted. This value must be
        equal on all ranks, which compare it in forward. None in backward, where it is not compared again.
    """
    pinned = None if op.has_executors else plan.pinned(schedule)
    table, device, given, began_s = TABLES[op.name], _device_of(op, call), op.given(call), time.monotonic()
    # Ranks that synchronise before every call agree per key, so the key includes everything that they compare.
    key = (op.key(call), pinned, given if agreement_on(device).meets else "")
    prepared = table.find(group, key)
    if prepared is not None and (wanted is None or (given, wanted) in prepared.agreed):
        return prepared
    world, wanted = group.size(), op.wanted(call) if wanted is None else wanted
    family: Hashable = None
    rows = 0
    if prepared is None and pinned is None and world > 1 and op.sizes_are_alike:
        p = _described(op, call, world)
        if p is not None and p.family[0] is not p and p.has_work:
            family, rows = (p.family[0], given, wanted), _rows_of(op, call)
            capturing = is_captured(device)
            typical = table.of_group(group).passes(family, rows, capturing)
            if typical is not None:
                return typical.for_one_call(p, rows, call, wanted)

    def check() -> tuple[str, str, tuple[int, int]]:
        """Return (short description, full description, numbers), as `weft.operator.agreement.Check`.

        The numbers may differ between ranks. The first is twice the size of the call (`Operator.size`), plus 1 if this rank has
        cached times for the problem. The second is the number of calls that must come before the next compilation.
        """
        size, said = op.size(call), op.said(call, world)
        p = op.problem(call, world, size)
        _require_problem(op, p)
        if pinned is not None:
            select.check_name(pinned, p)
        texts[:] = p.text if said == str(p) else said.partition("\n")[0], select.wanted_schedule(pinned, p)
        remembered = pinned is None and world > 1 and select.remembers(p, device)
        return (
            joined(texts[0], given, texts[1], op.described(wanted)),
            said,
            (2 * size + remembered, compilations.calls_to_wait()),
        )

    texts: list[str] = []
    compilations = calls_of(group).compilations
    numbers = agree(op.title, group, device, check, deadline_s, op.hint)
    said, (shown, wanted_schedule) = op.said(call, world), texts
    if prepared is None:
        like = table.of_group(group).latest(family)
        if like and table.of_group(group).recurs(family, rows) and (calls := max(wait for _, wait in numbers)):
            compilations.wait(calls)
            return like.for_one_call(op.problem(call, world, 0), rows, call, wanted)
        sizes = [number for number, _ in numbers]
        p, remembered = op.problem(call, world, max(sizes) // 2), any(number % 2 for number in sizes)
        compared = joined(said, given, wanted_schedule)
        made = CompiledOperator(op, p, group, device, pinned, remembered, compared, joined(shown, given), began_s, like)
        prepared = table.keep(group, key, made)
        if not (op.sizes_are_alike or op.has_executors):  # the sizes of a refused call must not limit later calls
            calls_of(group).undo_if_refused(table.forget, group, prepared)
        if family is not None:
            table.of_group(group).prepared(family, rows, prepared, uniform=True not in wanted)
        elif pinned == plan.AUTOTUNE:
            table.of_group(group).tuned()
    prepared.agree(given, wanted, joined(said, given, wanted_schedule), joined(shown, given))
    return prepared


def _described(op: Operator[Any], call: Any, world: int) -> Any:
    """Return the problem of a call (its sizes, dtypes and options); None if the call is invalid. All ranks later refuse an
    invalid call together.
    """
    try:
        return op.problem(call, world, 0)
    except Exception:
        return None


def _rows_of(op: Operator[Any], call: Any) -> int:
    return next(t.shape[0] for t in op.tensors(call) if t is not None)


def _device_of(op: Operator[Any], call: Any) -> torch.device:
    return next(t.device for t in op.tensors(call) if isinstance(t, torch.Tensor))


def require_device(op: Operator[Any], call: Any) -> None:
    """Raise `ValueError` unless the call's tensors are on a CPU or GPU. Ranks cannot synchronise on other devices."""
    device = _device_of(op, call)
    if device.type not in ("cpu", "cuda"):
        made = ". If a module is on meta, call to_empty(device=...) and load its values" * (device.type == "meta")
        raise ValueError(f"{op.name} does not run on {device}: pass tensors on a GPU or on the CPU{made}")


def _require_problem(op: Operator[Any], p: Any) -> None:
    if not isinstance(p, Problem):
        raise TypeError(f"problem() of {op.name} returns {kind(p)}: return a Problem")
    of_another = p.name in OPERATORS or type(p).__module__.startswith(
        "weft."
    )  # two operators may share a problem class
    if p.name != op.name and not of_another:
        raise TypeError(
            f"{op.name}.problem() returns a Problem with the name {p.name!r}: give {type(p).__name__} the operator's "
            "name, which plans and messages use"
        )


# --- gradients in eager mode ---


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, prepared: CompiledOperator, call: Any, deadline_s: float | None, timeline: Timeline | None,
        *_: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        op = prepared.op
        prepared.require_room(call, deadline_s)  # check unfused calls too, because their backward may run a schedule
        inputs = op.inputs(prepared.p, call)
        results = prepared(call, deadline_s, timeline, inputs)
        ctx.prepared, ctx.deadline_s = prepared, deadline_s
        ctx.number = published_on(prepared.group) if prepared.device.type == "cpu" else UNKNOWN
        ctx.flops = flops_of(op, call, results) if is_counter_there() else None
        saved = op.saved(call, results, ctx.needs_input_grad[4:])
        ctx.beside = op.beside(call, prepared.group, saved, inputs)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        require_backward(ctx)
        return BACKWARDS[ctx.prepared.op.name](ctx, *grads)


def require_backward(ctx: Any) -> None:
    """Raise `BackwardError` if backward of the call cannot run. Notify peers, because they run backward too."""
    prepared = ctx.prepared
    try:
        prepared.op.require_backward(ctx.beside)
    except BackwardError as error:
        tell(error, f"backward of {prepared.op.title}", prepared.group, lambda: prepared.device)
        raise


BACKWARDS: dict[str, Callable[..., tuple[Any, ...]]] = {}
"""The backward function of each operator: `backward_of_call`, decorated so that its errors name the operator."""


def backward_of_call(ctx: Any, saved: Sequence[torch.Tensor], *grads: torch.Tensor) -> tuple[Any, ...]:
    prepared, wanted = ctx.prepared, ctx.needs_input_grad[4:]
    of_call = prepared.op, prepared.group, prepared.device, lambda: (prepared, ctx.beside)

    def made() -> list[torch.Tensor | None]:
        return gradients_of_call(*of_call, saved, list(grads), wanted, ctx.deadline_s, ctx.number)

    counts = ctx.flops is not None and is_in_torch_dispatch_mode()
    return (None, None, None, None, *(counted(ctx.flops, wanted, made) if counts else made()))


def gradients_of_call(
    op: Operator[Any], group: dist.ProcessGroup, device: torch.device, found: Callable[[], tuple[CompiledOperator, Any]],
    saved: Sequence[torch.Tensor | None], grads: list[torch.Tensor], wanted: Sequence[bool], deadline_s: float | None,
    number: int = UNKNOWN,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Return a gradient, or None, for each entry of `wanted`. Autocast is disabled: it would affect only some of the
    torch calls.

    found: a function that returns the compiled operator, and the object that forward kept for backward
        (`Operator.beside`). Peers are notified if the function raises.
    saved: the tensors that `Operator.saved` returned in forward.
    grads: the gradients of the results.
    number: the number of the forward call (`weft.runtime.meeting.Meeting.forward`). CPU ranks compare it, to check that
        all run the backward of the same call.
    """
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            return gradients_of_call(op, group, device, found, saved, grads, wanted, deadline_s, number)
    with together(f"backward of {op.title}", group, lambda: device, deadline_s):
        require_single(op.title, grads)
        grads = [grad.resolve_neg() for grad in grads]
        saved = [t if t is None else t.resolve_neg() for t in saved]  # torch's dispatcher leaves such views in `saved`
        for tensor in saved:
            if tensor is not None:
                check_memory(f"a tensor of shape {tuple(tensor.shape)} that {op.title} saved for backward", tensor)
        prepared, beside = found()
        prepared.begin_backward()
        with in_backward(prepared.comm if device.type == "cpu" else None, number):  # GPU ranks do not synchronise
            made = op.gradients(prepared.p, group, saved, grads, wanted, prepared.turn(deadline_s), beside)
        if len(made) != len(wanted):
            raise TypeError(
                f"{op.name}.gradients returns {len(made)} gradients, but a call has {len(wanted)} tensors: return "
                "a gradient for each tensor, or None if it needs none"
            )
        return made
