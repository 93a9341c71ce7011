"""Calls that were made before, made again: nothing of them is checked, brought into one form or looked up anew.

A call repeats an earlier one if all of its arguments do, but for where tensors lie: one native call reads that
(`weft.runtime.layouts`). Then the checks of the first one hold, what was prepared for it is known, and so is which argument is
which buffer, and which result is what the function returns. What is left is what every call has: it is counted and added to the
digest that ranks compare, errors are told (`weft.operator.together`), results get new memory, and the schedule runs.

Everything else goes the long way (`weft.operator.calls.made`), which is also how a call is learnt: calls in which a timeline is
filled, a schedule is pinned around the call, or that are compiled, traced or transformed; and calls whose tensors are copied on the
way in or out.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import _pg_map

from weft import env, plan
from weft.operator.derivatives import require_kept
from weft.operator.prepared import Prepared, Table
from weft.operator.spec import Operator
from weft.operator.together import failed, together
from weft.runtime.layouts import READER
from weft.runtime.opaque import frames_are_looked_at
from weft.symm.calls import calls_of

P = ParamSpec("P")
R = TypeVar("R")
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Of the public function, by position and by name."""
Get: TypeAlias = Callable[[Arguments], Any]
View: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

KEPT = 8192  # calls of a function that are known; the half that was met first goes when there are more
_MISS = object()
_IDENTIFIED = (dist.ProcessGroup, torch.dtype)
_UNUSUAL: tuple[Callable[[], object], ...] = (
    torch._C._len_torch_dispatch_stack,
    torch._C._functorch.peek_interpreter_stack,
    plan.pinned_around,
)


class Seen(NamedTuple):
    """A call on its long way. results: in the order of the output buffers. apply: of the autograd Function, where gradients are
    wanted; inputs are None then."""

    op: Operator[Any]
    table: Table
    prepared: Prepared
    call: Any
    inputs: dict[str, Any] | None
    deadline_s: float | None
    results: list[torch.Tensor]
    apply: Callable[..., tuple[torch.Tensor, ...]] | None = None


_watching: ContextVar[list[Seen] | None] = ContextVar("watching", default=None)


def seen(*what: Any) -> None:
    """Note a call that a later one may repeat, if somebody watches."""
    if (watching := _watching.get()) is not None:
        watching.append(Seen(*what))


def replayed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate the public function of an operator: a call that repeats an earlier one takes the short way."""
    if READER is None:
        return function
    known: dict[bytes, Replay | None] = {}  # None: such calls go the long way
    of_groups: dict[int, set[bytes]] = {}  # signatures, by identity of the group while it lives
    read_call = READER.call

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
            return function(*args, **kwargs)
        signature = read_call(args, kwargs, torch.is_grad_enabled(), _IDENTIFIED, _UNUSUAL)
        if signature is None:
            return function(*args, **kwargs)
        replay = known.get(signature, _MISS)
        if replay is None:
            return function(*args, **kwargs)
        if isinstance(replay, Replay):
            found = replay(args, kwargs)
            if found is not _MISS:
                return found  # type: ignore[no-any-return]
        watching: list[Seen] = []
        token = _watching.set(watching)
        try:
            returned = function(*args, **kwargs)
        finally:
            _watching.reset(token)
        if len(known) >= KEPT:
            for old in list(itertools.islice(known, KEPT // 2)):
                del known[old]
        if len(watching) == 1 and watching[0].prepared.passes:
            return returned
        known[signature] = Replay.of(watching[0], (args, kwargs), returned) if len(watching) == 1 else None
        if len(watching) == 1:
            group = watching[0].prepared.group
            if id(group) not in of_groups:
                of_groups[id(group)] = set()
                weakref.finalize(group, _forget, known, of_groups, id(group)).atexit = False
            of_groups[id(group)].add(signature)
        return returned

    return call


def _forget(known: dict[bytes, Replay | None], of_groups: dict[int, set[bytes]], group: int) -> None:
    """A group is gone: another one may come to lie at its address."""
    for signature in of_groups.pop(group):
        known.pop(signature, None)


class _UnlikeError(Exception):
    """A call cannot be repeated: what it hands on, or returns, is made of its arguments or results by more than a view."""


class Replay:
    """A call, with new arguments."""

    def __init__(self, seen: Seen, arguments: Arguments, returned: Any) -> None:
        """Raise `_UnlikeError` for a call that is no plain one."""
        op, prepared = seen.op, seen.prepared
        self.op, self.prepared, self._deadline_s = op, prepared, seen.deadline_s
        self._here = seen.table.of_group(prepared.group)
        chosen, domain, group = prepared.chosen, prepared.domain, prepared.group
        if chosen is None or domain is None or not op.repeats(seen.call) or env.check_calls():
            raise _UnlikeError
        self._chosen, self._domain, self._device = chosen, domain, prepared.device
        self._calls, self._across = calls_of(group), prepared.across(seen.call)
        self._is_cuda, self._apply = prepared.device.type == "cuda", seen.apply
        given, results = _Given(arguments, seen.apply is None), _Given((tuple(seen.results), {}), seen.apply is None)
        self._fields = [_getter(field, given) for field in seen.call]
        self._inputs = [(name, _getter(tensor, given)) for name, tensor in (seen.inputs or {}).items()]
        if not given.all_used:
            raise _UnlikeError  # numbers were read from a tensor
        layout = tuple([t.stride() for t in (seen.inputs or {}).values()])
        executors = (chosen.usual, chosen.captured)
        self._warm = {id(one) for one in executors if one is not None and prepared.has_run(one, layout)}
        is_serial = None in executors and type(op).unfused is Operator.unfused and seen.apply is None
        self._steps = prepared.steps() if is_serial else None
        made = op.outputs(seen.call, prepared.p.world_size)
        self._shapes = None
        if all(isinstance(one, torch.Tensor) and one.is_contiguous() for one in made.values()):
            self._shapes = [(name, (tuple(one.shape), one.dtype)) for name, one in made.items()]
        self._names, self._notes = prepared.results, type(op).note is not Operator.note
        views = self._shapes is not None
        self._returned = _finisher(returned, results, views)

    @classmethod
    def of(cls, seen: Seen, arguments: Arguments, returned: Any) -> Replay | None:
        try:
            return cls(seen, arguments, returned)
        except _UnlikeError:
            return None

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns; `_MISS` where the call has to go the long way."""
        prepared, device, domain = self.prepared, self._device, self._domain
        group = prepared.group_or_none
        if (
            group is None or group not in _pg_map or prepared.chosen is not self._chosen or domain.closed
            or torch.is_autocast_enabled(device.type) or frames_are_looked_at()
        ):  # fmt: skip
            return _MISS
        if not self._is_cuda:
            self._here.called(prepared)
            with together(self.op.title, group, lambda: device, self._deadline_s):
                call = self.op.checked(self._call(arguments), group)  # which looks at values here, and so does `inputs`
                results = prepared(call, self._deadline_s, None) if self._apply is None else self._differentiated(call)
                self.op.note(call)
                return self._returned(results)
        capturing = torch._C._cuda_isCurrentStreamCapturing()
        executor = self._chosen.captured if capturing else self._chosen.usual
        if (
            executor is not None
            and self._apply is None
            and (id(executor) not in self._warm or (executor.gone if capturing else executor.stale))
        ):
            return _MISS
        calls = self._calls
        if calls.unanswered or calls.is_refused or not calls.running.acquire(blocking=False):
            return _MISS
        try:
            self._here.called(prepared)
            calls.begun += 1
            if self._apply is not None:
                results = self._differentiated(self._call(arguments))
            else:
                self._across.note()
                inputs = {name: get(arguments) for name, get in self._inputs}
                results = (
                    self._in_turn(arguments, inputs, group)
                    if executor is None
                    else self._run(executor, arguments, inputs)
                )
            if self._notes:
                self.op.note(self._call(arguments))
            if refused := calls.end():
                domain.poison(refused)
                domain.check()
        except BaseException as error:
            failed(error, self.op.title, group, device, self._deadline_s)
            raise
        finally:
            calls.running.release()
        return self._returned(results)

    def _call(self, arguments: Arguments) -> Any:
        return self.op.form(*[get(arguments) for get in self._fields])

    def _differentiated(self, call: Any) -> list[torch.Tensor]:
        assert self._apply is not None
        tensors = self.op.tensors(call)
        require_kept(self.op.name, tensors)
        return list(self._apply(self.prepared, call, self._deadline_s, None, *tensors))

    def _in_turn(self, arguments: Arguments, inputs: dict[str, Any], group: dist.ProcessGroup) -> list[torch.Tensor]:
        self._domain.check()
        if self._steps is not None:
            made = self._steps.run(inputs, None, group)
            return [made[name] for name in self._names]
        return self.prepared.in_turn(self._call(arguments), inputs, self._deadline_s, None)

    def _run(self, executor: Any, arguments: Arguments, inputs: dict[str, Any]) -> list[torch.Tensor]:
        if self._shapes is None:
            outputs = self.op.outputs(self._call(arguments), self.prepared.p.world_size)
        else:
            device = self._device
            outputs = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in self._shapes}
        tensors = {**inputs, **outputs}
        made = executor.run(tensors, deadline_s=self._deadline_s, like_before=True)
        found = {**outputs, **made} if made else outputs
        return [found[name] for name in self._names]


# --- of what tensors and other values of a call are made ---


class _Given:
    """All tensors of a call with their places: (position or name), or (position or name, number in a list).

    strided: whether a view may be one with any strides: autograd would be slow with these.
    """

    def __init__(self, arguments: Arguments, strided: bool) -> None:
        self._strided = strided
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        for name, value in (*enumerate(arguments[0]), *arguments[1].items()):
            if isinstance(value, torch.Tensor):
                self._tensors[name,] = value
            elif isinstance(value, list | tuple):
                self._tensors |= {(name, i): one for i, one in enumerate(value) if isinstance(one, torch.Tensor)}
        self._unused = set(self._tensors)

    def source(self, tensor: torch.Tensor) -> tuple[tuple[Any, ...], View | None]:
        """The place of the tensor, or of the one that it is a view of, with what makes the view."""
        same = [place for place, one in self._tensors.items() if one is tensor]
        is_view = not same and tensor.numel() > 0
        if is_view:
            at = tensor.data_ptr(), tensor.dtype, tensor.numel()
            same = [p for p, one in self._tensors.items() if (one.data_ptr(), one.dtype, one.numel()) == at]
        if len(same) != 1:
            raise _UnlikeError
        self._unused.discard(same[0])
        if not is_view:
            return same[0], None
        shape, strides = tuple(tensor.shape), tensor.stride()
        if tensor.is_contiguous() and self._tensors[same[0]].is_contiguous():
            return same[0], lambda x: x.view(shape)
        if not self._strided:
            raise _UnlikeError
        return same[0], lambda x: x.as_strided(shape, strides)

    @property
    def all_used(self) -> bool:
        return not self._unused


def _getter(value: Any, given: _Given) -> Get:
    """A function from arguments to what `value` is in a call with these."""
    if isinstance(value, torch.Tensor):
        place, view = given.source(value)
        take = _taker(place)
        return take if view is None else lambda arguments: view(take(arguments))
    if isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value):
        parts = [_getter(one, given) for one in value]
        return lambda arguments: [part(arguments) for part in parts]
    return lambda arguments: value


def _taker(place: tuple[Any, ...]) -> Get:
    of, (name, *nth) = int(isinstance(place[0], str)), place
    if nth:
        (number,) = nth
        return lambda arguments: arguments[of][name][number]
    return lambda arguments: arguments[of][name]


def _finisher(returned: Any, results: _Given, views: bool) -> Callable[[list[Any]], Any]:
    """A function from results to what `returned` is of them. views: whether results have the same sizes in every call."""
    if returned is None:
        return lambda results: None
    if isinstance(returned, torch.Tensor):
        (number,), view = results.source(returned)
        if view is None:
            return lambda results: results[number]
        if not views:
            raise _UnlikeError
        return lambda results: view(results[number])
    if type(returned) not in (list, tuple):
        raise _UnlikeError
    kind, parts = type(returned), [_finisher(one, results, views) for one in returned]
    return lambda results: kind([part(results) for part in parts])
