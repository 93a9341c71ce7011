"""Replay of earlier calls: the fast path, which checks, normalises and looks up nothing again.

A call repeats an earlier one if all its arguments are equal except for the addresses of tensors. One native call decides that
(`weft.runtime.layouts`). Then the checks of the first call hold. Its preparations are known, as are the argument of each buffer
and the result that the function returns. The rest is done in every call. The call is counted and added to the digest that ranks
compare, errors are reported (`weft.operator.together`), results get new memory, and the schedule runs.

All other calls take the slow path (`weft.operator.calls.made`), which also records calls for replay. Never replayed are calls that
fill a timeline, calls with a schedule pinned around them, compiled, traced or transformed calls, and calls whose tensors are copied
on the way in or out.
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
from weft.operator.across import passing_fingerprint
from weft.operator.cache import PASSING_ON, Table
from weft.operator.compiled_operator import CompiledOperator
from weft.operator.derivatives import require_kept
from weft.operator.spec import Operator
from weft.operator.together import failed, together
from weft.runtime.layouts import READER
from weft.runtime.opaque import looks_at_frames
from weft.runtime.unfused.serial import Unfused
from weft.runtime.unfused.turn import STRAIGHT
from weft.symm.calls import calls_of

P = ParamSpec("P")
R = TypeVar("R")
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of the public function, by position and by name."""
View: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

KEPT = 8192  # known calls of a function; when full, the older half is dropped
_FAMILIES = 256
_MISS = object()
_IDENTIFIED = (dist.ProcessGroup, torch.dtype)
_UNUSUAL: tuple[Callable[[], object], ...] = (
    torch._C._len_torch_dispatch_stack,
    torch._C._functorch.peek_interpreter_stack,
    looks_at_frames,
    plan.pinned_around,
)
"""Functions with a true result if a call may mean something else here, or if Dynamo would compile the functions that it calls."""


class Seen(NamedTuple):
    """A call that took the slow path.

    results: in the order of the output buffers. apply: the autograd Function's `apply`, if gradients are wanted; `inputs` is then
    None.
    """

    op: Operator[Any]
    table: Table
    prepared: CompiledOperator
    call: Any
    inputs: dict[str, Any] | None
    deadline_s: float | None
    results: list[torch.Tensor]
    apply: Callable[..., tuple[torch.Tensor, ...]] | None = None


_watching: ContextVar[list[Seen] | None] = ContextVar("watching", default=None)


def seen(*what: Any) -> None:
    """Note a call that a later one may repeat, if a wrapper is watching."""
    if (watching := _watching.get()) is not None:
        watching.append(Seen(*what))


class _Known:
    """The known calls of a function.

    calls: by signature; None for calls that take the slow path. families: calls of passing sizes, with any number of rows.
    """

    def __init__(self) -> None:
        self.calls: dict[bytes, Replay | None] = {}
        self.families: dict[bytes, Passing] = {}
        self._of_groups: dict[int, set[bytes]] = {}  # signatures, by id of a live group

    def learn(self, signature: bytes, family: bytes | None, seen: Seen, arguments: Arguments, returned: Any) -> None:
        group = seen.prepared.group
        if not seen.prepared.passes:
            self._bound(self.calls, KEPT)
            self.calls[signature] = Replay.of(seen, arguments, returned)
            self._remember(group, signature)
        elif family is not None and (passing := Passing.of(seen, arguments, returned)) is not None:
            self._bound(self.families, _FAMILIES)
            self.families[family] = passing
            self._remember(group, family)

    def never(self, signature: bytes) -> None:
        """Note calls that cannot be repeated."""
        self._bound(self.calls, KEPT)
        self.calls[signature] = None

    def _bound(self, known: dict[bytes, Any], most: int) -> None:
        """Forget the first half of what is known if it reaches a limit."""
        if len(known) >= most:
            for old in list(itertools.islice(known, most // 2)):
                del known[old]
                for signatures in self._of_groups.values():
                    signatures.discard(old)

    def _remember(self, group: dist.ProcessGroup, signature: bytes) -> None:
        if id(group) not in self._of_groups:
            self._of_groups[id(group)] = set()
            weakref.finalize(group, self._forget, id(group)).atexit = False
        self._of_groups[id(group)].add(signature)

    def _forget(self, group: int) -> None:
        """Forget a group that is gone: another group may get its id."""
        for signature in self._of_groups.pop(group):
            self.calls.pop(signature, None)
            self.families.pop(signature, None)


def replayed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate the public function of an operator, so that a call that repeats an earlier one takes the fast path."""
    if READER is None:
        return function
    known, read_call, read_family = _Known(), READER.call, READER.family
    known_calls = known.calls

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling() or forward_ad._current_level >= 0:
            return function(*args, **kwargs)
        gradients = torch.is_grad_enabled()
        signature = read_call(args, kwargs, gradients, _IDENTIFIED, _UNUSUAL)
        if signature is None:
            return function(*args, **kwargs)
        replay = known_calls.get(signature, _MISS)
        if replay is None:
            return function(*args, **kwargs)
        of_family = None
        if replay is not _MISS:
            found = replay(args, kwargs)  # type: ignore[operator]
            if found is not _MISS:
                return found  # type: ignore[no-any-return]
        elif (of_family := read_family(args, kwargs, gradients, _IDENTIFIED, _UNUSUAL)) is not None:
            passing = known.families.get(of_family[0])
            if passing is not None:
                found = passing(args, kwargs, of_family[1])
                if found is not _MISS:
                    return found  # type: ignore[no-any-return]
        watching: list[Seen] = []
        token = _watching.set(watching)
        try:
            returned = function(*args, **kwargs)
        finally:
            _watching.reset(token)
        if len(watching) == 1:
            known.learn(signature, None if of_family is None else of_family[0], watching[0], (args, kwargs), returned)
        else:
            known.never(signature)
        return returned

    return call


class _UnlikeError(Exception):
    """A call cannot be replayed: it uses or returns more than views of its arguments or results."""


class _Short:
    """The common part of the fast paths."""

    def __init__(self, seen: Seen) -> None:
        op, prepared = seen.op, seen.prepared
        self.op, self.prepared, self._deadline_s = op, prepared, seen.deadline_s
        if prepared.chosen is None or prepared.domain is None or not op.repeats(seen.call) or env.check_calls():
            raise _UnlikeError
        group = prepared.group
        self._group, self._chosen, self._domain = weakref.ref(group), prepared.chosen, prepared.domain
        self._here, self._calls = seen.table.of_group(group), calls_of(group)
        self._device, self._kind, self._made = prepared.device, prepared.device.type, calls_of(group).made
        self._names = prepared.results

    def _failed(self, error: BaseException, group: dist.ProcessGroup) -> None:
        failed(error, self.op.title, group, self._device, self._deadline_s)

    def _end(self) -> None:
        if refused := self._calls.end():
            self._domain.poison(refused)
            self._domain.check()


class Replay(_Short):
    """A recorded call, to be replayed with new arguments."""

    def __init__(self, seen: Seen, arguments: Arguments, returned: Any) -> None:
        """Raise `_UnlikeError` if the call cannot be replayed."""
        super().__init__(seen)
        op, prepared, chosen, inputs = seen.op, seen.prepared, self._chosen, seen.inputs or {}
        self._apply, self._across = seen.apply, prepared.across(seen.call)
        given, results = _Given(arguments, seen.apply is None), _Given((tuple(seen.results), {}), seen.apply is None)
        self._call = given.maker("{}(" + ", ".join([given.written(field) for field in seen.call]) + ")", op.form)
        self._inputs = given.maker("{{" + ", ".join([f"{n!r}: {given.written(t)}" for n, t in inputs.items()]) + "}}")
        if not given.all_used:
            raise _UnlikeError  # the call depends on the contents of a tensor
        layout = tuple([t.stride() for t in inputs.values()])
        executors = (chosen.usual, chosen.captured)
        self._warm = {id(one) for one in executors if one is not None and prepared.has_run(one, layout)}
        is_serial = None in executors and seen.apply is None
        self._steps = prepared.steps() if is_serial and prepared.in_steps else None
        made = op.outputs(seen.call, prepared.p.world_size)
        self._shapes = None
        if all(isinstance(one, torch.Tensor) and one.is_contiguous() for one in made.values()):
            self._shapes = [(name, (tuple(one.shape), one.dtype)) for name, one in made.items()]
        self._notes = type(op).note is not Operator.note
        self._returned = results.maker(results.returned(returned, views=self._shapes is not None))

    @classmethod
    def of(cls, seen: Seen, arguments: Arguments, returned: Any) -> Replay | None:
        try:
            return cls(seen, arguments, returned)
        except _UnlikeError:
            return None

    def __call__(self, p: tuple[Any, ...], k: dict[str, Any]) -> Any:
        """Return the function's result; `_MISS` if the call must take the slow path."""
        prepared, here, domain, chosen = self.prepared, self._here, self._domain, self._chosen
        group = self._group()
        if (
            group is None or group not in _pg_map or prepared.chosen is not chosen or not domain.is_well()
            or torch.is_autocast_enabled(self._kind)
        ):  # fmt: skip
            return _MISS
        if self._kind != "cuda":
            return self._on_cpu(p, k, group)
        capturing = torch._C._cuda_isCurrentStreamCapturing()
        executor = chosen.captured if capturing else chosen.usual
        if executor is not None and self._apply is None and (
            id(executor) not in self._warm or (executor.gone if capturing else executor.stale)
        ):  # fmt: skip
            return _MISS
        calls = self._calls
        if calls.unanswered or calls.is_refused or not calls.running.acquire(blocking=False):
            return _MISS
        try:
            here.called(prepared)
            calls.begun += 1
            if self._apply is not None:
                results = self._differentiated(self._call(p, k))
            else:
                self._made.note(self._across.fingerprint, self._across.what)
                inputs = self._inputs(p, k)
                if executor is not None:
                    results = self._run(executor, p, k, inputs)
                elif self._steps is not None:
                    made = self._steps.run(inputs, STRAIGHT, group)
                    results = [made[name] for name in self._names]
                else:
                    results = prepared.in_turn(self._call(p, k), inputs, self._deadline_s, None)
            if self._notes:
                self.op.note(self._call(p, k))
            self._end()
        except BaseException as error:
            self._failed(error, group)
            raise
        finally:
            calls.running.release()
        return self._returned(results, {})

    def _on_cpu(self, p: tuple[Any, ...], k: dict[str, Any], group: dist.ProcessGroup) -> Any:
        self._here.called(self.prepared)
        with together(self.op.title, group, lambda: self._device, self._deadline_s):
            call = self.op.checked(self._call(p, k), group)  # on CPU, this and `inputs` check values too
            results = self.prepared(call, self._deadline_s, None) if self._apply is None else self._differentiated(call)
            self.op.note(call)
            return self._returned(results, {})

    def _differentiated(self, call: Any) -> list[torch.Tensor]:
        assert self._apply is not None
        tensors = self.op.tensors(call)
        require_kept(self.op.name, tensors)
        return list(self._apply(self.prepared, call, self._deadline_s, None, *tensors))

    def _run(self, executor: Any, p: tuple[Any, ...], k: dict[str, Any], inputs: dict[str, Any]) -> list[torch.Tensor]:
        if self._shapes is None:
            outputs = self.op.outputs(self._call(p, k), self.prepared.p.world_size)
        else:
            device = self._device
            outputs = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in self._shapes}
        tensors = {**inputs, **outputs}
        made = executor.run(tensors, deadline_s=self._deadline_s, like_before=True)
        found = {**outputs, **made} if made else outputs
        return [found[name] for name in self._names]


class Passing(_Short):
    """An unfused call with any number of rows, in a family whose sizes do not come back (`weft.operator.cache`)."""

    def __init__(self, seen: Seen, arguments: Arguments, returned: Any) -> None:
        super().__init__(seen)
        prepared, inputs, (first, *_) = seen.prepared, seen.inputs or {}, arguments[0]
        if seen.apply is not None or prepared.device.type not in PASSING_ON or not prepared.in_steps:
            raise _UnlikeError
        given, results = _Given(arguments, None, first.shape[0]), _Given((tuple(seen.results), {}), None)
        for field in seen.call:
            given.written(field)
        self._inputs = given.maker("{{" + ", ".join([f"{n!r}: {given.written(t)}" for n, t in inputs.items()]) + "}}")
        if not given.all_used:
            raise _UnlikeError
        self._steps: Unfused = prepared.steps()
        self._returned = results.maker(results.returned(returned, views=False))
        self._world, self._family = prepared.p.world_size, prepared.family
        if self.op.tensors(seen.call)[0] is not first or not self._steps.is_plain:
            raise _UnlikeError
        self._what = f"{self.op.title} of any size"

    @classmethod
    def of(cls, seen: Seen, arguments: Arguments, returned: Any) -> Passing | None:
        try:
            return cls(seen, arguments, returned)
        except _UnlikeError:
            return None

    def __call__(self, p: tuple[Any, ...], k: dict[str, Any], rows: int) -> Any:
        here, calls, group, domain = self._here, self._calls, self._group(), self._domain
        if (
            group is None or group not in _pg_map or not domain.is_well() or torch.is_autocast_enabled(self._kind)
            or (self._kind == "cuda" and torch._C._cuda_isCurrentStreamCapturing()) or not self.op.takes_rows(rows, self._world)
            or calls.unanswered or calls.is_refused or not calls.running.acquire(blocking=False)
        ):  # fmt: skip
            return _MISS
        try:
            if here.passes(self._family, rows) is None:
                return _MISS
            calls.begun += 1
            self._made.note(passing_fingerprint(self.op.name, self._family, rows), self._what)
            made = self._steps.run(self._inputs(p, k), STRAIGHT, group)
            self._end()
        except BaseException as error:
            self._failed(error, group)
            raise
        finally:
            calls.running.release()
        return self._returned([made[name] for name in self._names], {})


# --- sources of a call's tensors and other values ---


class _Given:
    """All tensors of a call with their places, as Python source: "p[0]", "p[1][0]" or "k['x']".

    strided: True if views may have any strides, which would make autograd slow. None if there may be no views, except of tensors
    without a dimension of `rows`.
    """

    def __init__(self, arguments: Arguments, strided: bool | None, rows: int = 0) -> None:
        self._rows = rows
        self._strided, self._tensors, self._names = strided, dict[str, torch.Tensor](), dict[str, Any]()
        by_name = {f"k[{name!r}]": value for name, value in arguments[1].items()}
        for place, value in ({f"p[{i}]": value for i, value in enumerate(arguments[0])} | by_name).items():
            if isinstance(value, torch.Tensor):
                self._tensors[place] = value
            elif isinstance(value, list | tuple):
                self._tensors |= {f"{place}[{i}]": t for i, t in enumerate(value) if isinstance(t, torch.Tensor)}
        self._unused = set(self._tensors)

    @property
    def all_used(self) -> bool:
        return not self._unused

    def written(self, value: Any) -> str:
        """Return Python source that makes `value` from these tensors. A value without tensors is the same in every call."""
        if isinstance(value, torch.Tensor):
            return self._source(value)
        if isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value):
            return f"[{', '.join(map(self.written, value))}]"
        return self._named(value)

    def returned(self, value: Any, *, views: bool) -> str:
        """Return Python source for a function's results. views: True if results may be views, whose sizes are fixed."""
        if isinstance(value, torch.Tensor):
            source = self._source(value)
            if not views and "(" in source:
                raise _UnlikeError
            return source
        if value is None:
            return "None"
        if type(value) not in (list, tuple):
            raise _UnlikeError
        parts = "".join(f"{self.returned(one, views=views)}, " for one in value)
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"

    def maker(self, expression: str, *named: Any) -> Callable[[Any, Any], Any]:
        """Return a function of arguments by position and by name that runs this source.

        It is a single function for any expression: a Python call costs the host more than its work.
        """
        text = expression.format(*map(self._named, named))
        return eval(f"lambda p, k: {text}", dict(self._names))  # type: ignore[no-any-return]

    def _source(self, tensor: torch.Tensor) -> str:
        same = [place for place, one in self._tensors.items() if one is tensor]
        fixed = self._rows > 1 and self._rows not in tensor.shape
        is_view = not same and tensor.numel() > 0 and (self._strided is not None or fixed)
        if is_view:
            at = tensor.data_ptr(), tensor.dtype, tensor.numel()
            same = [p for p, one in self._tensors.items() if (one.data_ptr(), one.dtype, one.numel()) == at]
        if len(same) != 1:
            raise _UnlikeError
        place = same[0]
        self._unused.discard(place)
        if not is_view:
            return place
        if tensor.is_contiguous() and self._tensors[place].is_contiguous():
            return f"{place}.view({self._named(tuple(tensor.shape))})"
        if not self._strided:
            raise _UnlikeError
        return f"{place}.as_strided({self._named(tuple(tensor.shape))}, {self._named(tensor.stride())})"

    def _named(self, value: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name
