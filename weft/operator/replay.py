"""The fast path for repeated calls, without checks, normalisation and lookups.

A call repeats an earlier call if all arguments except the contents and addresses of tensors are equal. Then the earlier
checks still hold, and the compiled operator, the buffers and the shapes of results are known. A replay only counts the
call, adds it to the hash of calls that ranks compare, allocates results and runs the schedule. It also reports errors
to peers (`weft.operator.together`).

One native call (`csrc/replay.cpp`) makes a replay. A *recipe* tells native code how to make a value, such as an
argument of torch's GEMM, from the arguments of the new call. Unfused calls run no Python function of weft: native code
calls torch through Python's C API. On CPU native code also runs the rendezvous before each collective (`RecordedOnCpu`). On
GPUs it also issues overlapped calls with fixed sizes (`_core.KnownRun`). For other overlapped calls, differentiated calls, and
after an error, native code calls the methods of `Replay`.

All other calls take the slow path (`weft.operator.calls.made`), which also records calls for replay. Some calls are
never replayed: calls that fill a timeline, copy an argument or a result, or run under a pinned schedule
(`weft.plan.use`), and compiled, traced or transformed calls.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from weft import _core, plan
from weft.operator.across import table_weights
from weft.operator.derivatives import require_kept
from weft.operator.recipes import Arguments, Given, Place, UnlikeError
from weft.operator.recorded import SURROUNDINGS, Passing, RecordedOnCpu, Seen, native_call
from weft.operator.spec import Operator
from weft.operator.together import interrupted, together
from weft.runtime.executor import Executor
from weft.runtime.layouts import READER
from weft.runtime.meeting import Topic
from weft.runtime.opaque import looks_at_frames
from weft.runtime.unfused import experts_on_one_host
from weft.runtime.unfused.serial import TORCH

P = ParamSpec("P")
R = TypeVar("R")
KEPT = 8192  # recorded calls per function; when reached, the older half is dropped
_FAMILIES = 256
_IDENTIFIED = (dist.ProcessGroup, torch.dtype)
_TRANSFORMED: tuple[Callable[[], object], ...] = (
    torch._C._len_torch_dispatch_stack,
    torch._C._are_functorch_transforms_active,
)
_UNUSUAL = (*_TRANSFORMED, plan.pinned_around)
"""Functions that return True if a call must take the slow path: inside a dispatch mode or a torch.func transform, or
under a pinned schedule. Calls that enter Python also take it if Dynamo would compile the functions that they enter.
"""


_watching: ContextVar[list[Seen] | None] = ContextVar("watching", default=None)


def seen(*what: Any) -> None:
    """Record a call for replay, if its public function is decorated with `replayed`. what: the fields of `Seen`."""
    if (watching := _watching.get()) is not None:
        watching.append(Seen(*what))


@contextlib.contextmanager
def watching(records: bool) -> Iterator[list[Seen]]:
    """Yield a list to which the operator calls in this context are appended, for a caller that replays them itself.

    records: False to append nothing.
    """
    watched: list[Seen] = []
    token = _watching.set(watched if records else None)
    try:
        yield watched
    finally:
        _watching.reset(token)


def is_unusual() -> bool:
    """True if a call must take the slow path: inside a dispatch mode or a transform of torch, or while Dynamo looks at frames."""
    has_modes, transforms = _TRANSFORMED
    return bool(forward_ad._current_level >= 0 or has_modes() or transforms() or looks_at_frames())


class _Known:
    """The recorded calls of a public function.

    calls: {signature: recorded call}; None in place of a call that must take the slow path.
    families: {signature without the number of rows: recorded unfused call}. Native code replays these calls for any
        number of rows.
    """

    def __init__(self) -> None:
        self.calls: dict[bytes, _core.KnownCall | None] = {}
        self.families: dict[bytes, _core.KnownCall] = {}
        self._of_groups: dict[int, set[bytes]] = {}  # signatures, by id of a live group

    def learn(self, signature: bytes, family: bytes | None, seen: Seen, arguments: Arguments, returned: Any) -> None:
        group = seen.prepared.group
        passes, known = seen.prepared.passes, None
        if family is not None and (passes or not seen.op.sizes_are_alike):
            known = (Passing if passes else AnyRows).of(seen, arguments, returned)
        if family is not None and known is not None:
            self._bound(self.families, _FAMILIES)
            self.families[family] = known
            self._remember(group, family)
        if not passes and (known is None or not (known.is_native or seen.prepared.device.type == "cpu")):
            self._bound(self.calls, KEPT)
            self.calls[signature] = Replay.of(seen, arguments, returned)
            self._remember(group, signature)

    def never(self, signature: bytes) -> None:
        """Record that all calls with this signature must take the slow path, which checks the arguments in Python."""
        self._bound(self.calls, KEPT)
        self.calls[signature] = None

    def _bound(self, known: dict[bytes, Any], most: int) -> None:
        """Drop the older half of `known`, a dict of recorded calls, if it has `most` entries."""
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
        """Remove the recorded calls of a deleted group. group: the id of the group object. Python may reuse the id for a new
        group, whose calls must not be taken for these calls.
        """
        for signature in self._of_groups.pop(group):
            self.calls.pop(signature, None)
            self.families.pop(signature, None)


def replayed(function: Callable[P, R], of_size: str | None = None) -> Callable[P, R]:
    """Decorate the public function of an operator, so that repeated calls take the fast path.

    of_size: the name of an argument whose value follows from the sizes of tensors. If calls with other numbers of rows
        are replayed too, the values of this argument are not compared. Callers must pass the argument by name.
    """
    if READER is None:
        return function
    known, signature = _Known(), inspect.signature(function)
    repeat = _core.KnownCalls(
        READER, known.calls, known.families, _IDENTIFIED, _UNUSUAL, torch.is_grad_enabled, vars(forward_ad), of_size
    )  # fmt: skip
    unknown = _core.UnknownCall

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        try:
            found = repeat(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C, perhaps before the call was counted
                interrupted(function.__name__, signature.bind_partial(*args, **kwargs).arguments.get("group"), error)
            raise
        if type(found) is not unknown:
            return found  # type: ignore[no-any-return]
        if found.key is None:
            return function(*args, **kwargs)
        watching: list[Seen] = []
        token = _watching.set(watching)
        try:
            returned = function(*args, **kwargs)
        finally:
            _watching.reset(token)
        if len(watching) == 1:
            known.learn(found.key, found.family, watching[0], (args, kwargs), returned)
        else:
            known.never(found.key)
        return returned

    return call


class Replay(RecordedOnCpu):
    """A recorded call with fixed shapes, which native code replays with new tensors."""

    def known(self, arguments: Arguments, seen: Seen, returned: Any) -> _core.KnownCall:
        op, prepared, chosen, inputs = seen.op, seen.prepared, self.chosen, seen.inputs or {}
        self._set_up(seen)
        given, results = Given(arguments, seen.apply is None), Given((tuple(seen.results), {}), seen.apply is None)
        self._call = _core.Recipe(("call", op.form, [given.written(field) for field in seen.recorded]))
        self._inputs: _core.Recipe | None = None
        buffers: dict[str, Place] = {}
        if self.kind != "cpu":
            buffers = {name: given.written(tensor) for name, tensor in inputs.items()}
            self._inputs = _core.Recipe(("dict", buffers))
        if not given.all_used:
            raise UnlikeError  # the call depends on a tensor's contents
        executors = (chosen.usual, chosen.captured)
        made = op.outputs(seen.recorded, prepared.p.world_size)
        self._shapes = None
        if all(isinstance(one, torch.Tensor) and one.is_contiguous() for one in made.values()):
            self._shapes = [(name, (tuple(one.shape), one.dtype)) for name, one in made.items()]
        written = self._averaged(results.returned(returned, views=self._shapes is not None), seen.recorded)
        self._returned = _core.Recipe(written)
        if self.kind != "cpu" and chosen.usual is not None and seen.apply is None and self._shapes is not None:
            run = chosen.usual.known_run(inputs, made, prepared.results, seen.deadline_s)
            if run is not None:
                recipe = "list", list(buffers.values())
                return _core.KnownCall(self, SURROUNDINGS, recipe, run, [], written, usual=True, captured=False)
        is_native = None in executors and seen.apply is None and prepared.in_steps
        steps = prepared.steps() if is_native else None
        is_serial = [one is None and steps is not None and steps.plain is not None for one in executors]
        if self.kind == "cpu":
            if not (is_serial[0] and self.can_be_native()):
                return native_call(self, None, given, inputs, written, [False, False])
            self.set_up_turns([prepared.turns.topic(name).compared for name in prepared.steps().collectives])
            return self.known_on_cpu(given, inputs, written)
        return native_call(self, steps if True in is_serial else None, given, inputs, written, is_serial)

    def _set_up(self, seen: Seen) -> None:
        """Set the attributes that do not depend on the number of rows."""
        op, prepared, chosen = seen.op, seen.prepared, self.chosen
        self._apply, self.differentiated = seen.apply, seen.apply is not None
        if self.kind != "cpu":
            across = prepared.across(seen.recorded)
            self.fingerprint, self.what = across.fingerprint, across.what
        self.notes = type(op).note is not Operator.note
        self._notes_read = type(op).note_read is not Operator.note_read
        layout = tuple([t.stride() for t in (seen.inputs or {}).values()])
        executors = (chosen.usual, chosen.captured)
        self._warm = {id(one) for one in executors if one is not None and prepared.has_run(one, layout)}

    def is_ready(self, capturing: bool) -> bool:
        """True if the executor has run with the strides of the recorded inputs, and its memory still exists. Otherwise the call
        takes the slow path, which checks the arguments.
        """
        executor = self.chosen.captured if capturing else self.chosen.usual
        if executor is None or self._apply is not None:
            return True
        return id(executor) in self._warm and not (executor.gone if capturing else executor.stale)

    def run(self, p: tuple[Any, ...], k: dict[str, Any], capturing: bool) -> list[torch.Tensor]:
        """Run an overlapped or differentiated call, and return its results.

        p, k: the call's positional arguments and keyword arguments.
        """
        if self._apply is not None:
            return self._differentiated(self._call(p, k))
        assert self._inputs is not None
        executor, make_inputs = self.chosen.captured if capturing else self.chosen.usual, self._inputs
        if executor is None:
            return self.prepared.in_turn(self._call(p, k), lambda: make_inputs(p, k), self._deadline_s, None)
        inputs = make_inputs(p, k)
        if self._shapes is None:
            outputs = self.op.outputs(self._call(p, k), self.prepared.p.world_size)
        else:
            device = self.prepared.device
            outputs = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in self._shapes}
        return self._executed(executor, inputs, outputs, lambda: self._call(p, k))

    def _executed(
        self, executor: Executor, inputs: dict[str, Any], outputs: dict[str, Any], call: Callable[[], Any]
    ) -> list[torch.Tensor]:
        """Run the schedule, and return the results. call: a function that returns the operator's call."""
        made = executor.run({**inputs, **outputs}, deadline_s=self._deadline_s, like_before=True)
        found = {**outputs, **made} if made else outputs
        results = [found[name] for name in self.prepared.results]
        if self._notes_read and (read := executor.read):
            self.op.note_read(call(), results, read, self.prepared.rank)
        return results

    def note(self, p: tuple[Any, ...], k: dict[str, Any]) -> None:
        self.op.note(self._call(p, k))

    def in_python(self, p: tuple[Any, ...], k: dict[str, Any], group: dist.ProcessGroup) -> Any:
        """Make a whole call that native code cannot make. Return the value that the public function returns, or NotImplemented
        if the call must take the slow path.
        """
        with together(self.op.title, group, lambda: self.prepared.device, self._deadline_s):
            self.here.called(self.prepared)
            call = self.op.checked(self._call(p, k), group)  # `checked` and `inputs` also check values
            results = self.prepared(call, self._deadline_s, None) if self._apply is None else self._differentiated(call)
            self.op.note(call)
            return self._returned(results, {})

    def _differentiated(self, call: Any) -> list[torch.Tensor]:
        assert self._apply is not None
        tensors = self.op.tensors(call)
        require_kept(self.op.name, tensors)
        return list(self._apply(self.prepared, call, self._deadline_s, None, *tensors))


class AnyRows(Replay):
    """A recorded call that can be replayed for any number of rows. Its operator leaves the number of rows out of
    `Operator.key`, so that one compiled operator serves all numbers.
    """

    any_rows = True

    def known(self, arguments: Arguments, seen: Seen, returned: Any) -> _core.KnownCall:
        if not arguments[0] or self.op.has_executors:
            raise UnlikeError
        first, call = arguments[0][0], seen.call
        tensors = [t for t in self.op.tensors(call) if t is not None]
        if tensors[0] is not first or any(t.dim() == 2 and t.shape[0] == first.shape[0] for t in tensors[1:]):
            raise UnlikeError  # the family would allow any number of rows of the other matrix too
        self._set_up(seen)
        given, results = Given(arguments, None, first.shape[0]), Given((tuple(seen.results), {}), None)
        self._key = self.op.key(call)
        fields = [
            ("named", name) if name == self.op.of_size and name in arguments[1] else given.written(field)
            for name, field in call._asdict().items()
        ]
        self._call = _core.Recipe(("call", self.op.form, fields))
        if not given.all_used:
            raise UnlikeError
        self._converts = any(one is not other for one, other in zip(call, seen.checked, strict=True))
        self._inputs: _core.Recipe | None = None
        if not self._converts:
            with contextlib.suppress(UnlikeError):  # an input buffer is a copy of an argument
                buffers = {name: given.written(tensor) for name, tensor in (seen.inputs or {}).items()}
                self._inputs = _core.Recipe(("dict", buffers))
        written = self._averaged(results.returned(returned, views=False), call)
        self._returned = _core.Recipe(written)
        steps, inputs = self._combine(seen, given) if self.kind == "cpu" else self._steps(seen, given, arguments)
        if steps is None:
            return native_call(self, None, given, {}, written, [False, False])
        return _core.KnownCall(
            self, SURROUNDINGS, ("list", inputs), steps, self.prepared.results, written, usual=True, captured=False
        )

    def _steps(
        self, seen: Seen, given: Given, arguments: Arguments
    ) -> tuple[_core.PlainSteps | None, list[Place]]:  # fmt: skip
        """Return the native steps of an unfused call on GPUs, and the recipes of their inputs. Return (None, []) if Python makes
        the call.
        """
        world, call = self.prepared.p.world_size, seen.call
        if world == 1 or self._converts or seen.apply is not None or self.chosen.usual is not None:
            return None, []
        native = self.op.steps_on_gpu(call, world)
        if native is None or not arguments[1].keys() >= set(native.named):
            return None, []
        inputs = [given.written(tensor) for tensor in native.tensors]
        return native.steps, inputs + [("named", name) for name in native.named]

    def _combine(self, seen: Seen, given: Given) -> tuple[_core.CombineSteps | None, list[Place]]:
        """Return the native form of an unfused combine of experts on CPU, and the recipes of its inputs. Return (None, []) for
        other calls.
        """
        prepared, call, comm = self.prepared, seen.call, self.prepared.comm
        if not (self.op.is_combine and seen.apply is None and self.chosen.usual is None):
            return None, []
        if TORCH is None or comm is None or not comm.all_mapped or comm.world_size == 1:
            return None, []
        _, w, received, splits, rows, *_ = call
        if received.dtype != torch.int64 or splits.dtype != torch.int64:
            return None, []
        if not experts_on_one_host.has_room(prepared.turn(None), splits):
            return None, []
        self._across = prepared.across(seen.recorded)
        self.set_up_turns([self._across.topic.compared])
        of_received, of_splits = table_weights(comm.world_size, w.shape[0], comm.rank)
        steps = _core.CombineSteps(
            torch=TORCH, rank=comm.rank, world=comm.world_size, rows=-1 if rows is None else rows,
            of_received=of_received, of_splits=of_splits,
        )  # fmt: skip
        return steps, [given.written(tensor) for tensor in call[:4]]

    def topic(self, number: int, fingerprint: int, arguments: Arguments) -> Topic:
        return self._across.topic

    def go_on(self, number: int, is_complete: bool) -> None:
        self.meeting.go_on(self.op.title, is_complete, self._deadline_s or self._comm.deadline_s)

    def refuse_tables(self, p: tuple[Any, ...], k: dict[str, Any]) -> NoReturn:
        """Raise `RefusedError` on every rank, because the tables of counts do not agree. p, k: the arguments of the call."""
        call, world = self._call(p, k), self.prepared.p.world_size
        self._across.refuse_tables(call.received, call.splits.view(world, -1))

    def run(self, p: tuple[Any, ...], k: dict[str, Any], capturing: bool) -> list[torch.Tensor]:
        call, prepared = self._call(p, k), self.prepared
        if self._converts:
            call = self.op.checked(call, prepared.group)
        if self._apply is not None:
            return self._differentiated(call)
        executor, recipe = self.chosen.usual, self._inputs

        def inputs() -> dict[str, Any]:
            return self.op.inputs(prepared.p, call) if recipe is None else recipe(p, k)  # type: ignore[no-any-return]

        if executor is None:
            return prepared.in_turn(call, inputs, self._deadline_s, None)
        prepared.require_room(call, self._deadline_s)
        return self._executed(executor, inputs(), self.op.outputs(call, prepared.p.world_size), lambda: call)

    def in_python(self, p: tuple[Any, ...], k: dict[str, Any], group: dist.ProcessGroup) -> Any:
        if self.prepared.chosen is not self.chosen or self.op.key(self._call(p, k)) != self._key:
            return NotImplemented
        return super().in_python(p, k, group)
