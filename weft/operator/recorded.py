"""Calls that are recorded for the fast path (`weft.operator.replay`), and calls that native code makes for any number of
rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _pg_map

from weft import _core
from weft.operator.across import number_of_family, of_size
from weft.operator.cache import Table
from weft.operator.compiled_operator import CompiledOperator
from weft.operator.recipes import Arguments, Given, Place, UnlikeError, with_division
from weft.operator.spec import Operator
from weft.operator.together import failed, together
from weft.runtime.collectives import COALESCING
from weft.runtime.meeting import HEADER, Topic, meeting_of, number_of_collective
from weft.runtime.opaque import looks_at_frames
from weft.runtime.unfused.serial import Unfused
from weft.symm.calls import calls_of
from weft.symm.communicator import LOOK_S

SURROUNDINGS = _core.Surroundings(
    groups=_pg_map,
    coalescing=COALESCING,
    is_any_autocast_enabled=torch._C._is_any_autocast_enabled,
    is_autocast_enabled=torch.is_autocast_enabled,
    is_capturing=torch._C._cuda_isCurrentStreamCapturing,
    looks_at_frames=looks_at_frames,
)


class Seen(NamedTuple):
    """A call that took the slow path, recorded for replay.

    call, checked: the argument of `Operator.checked`, and its result.
    results: the results in the order of the output buffers.
    inputs: the tensor of each input buffer; None if gradients are wanted.
    apply: if gradients are wanted, the method `apply` of the operator's `torch.autograd.Function`; otherwise None.
    """

    op: Operator[Any]
    table: Table
    prepared: CompiledOperator
    call: Any
    checked: Any
    inputs: dict[str, Any] | None
    deadline_s: float | None
    results: list[torch.Tensor]
    apply: Callable[..., tuple[torch.Tensor, ...]] | None = None

    @property
    def recorded(self) -> Any:
        """The call to repeat. Replays on CPU check every call, so they repeat the argument of `Operator.checked`."""
        return self.call if self.prepared.device.type == "cpu" else self.checked


class Recorded:
    """The base class of calls that are recorded for the fast path. Native code (`_core.KnownCall`) reads its attributes
    and calls its methods.
    """

    any_rows = passes = differentiated = notes = ignores_autocast = False
    fingerprint, what = 0, ""

    def __init__(self, seen: Seen) -> None:
        op, prepared = seen.op, seen.prepared
        self.op, self.prepared, self._deadline_s = op, prepared, seen.deadline_s
        if prepared.chosen is None or prepared.comm is None or prepared.comm.checks_calls:
            raise UnlikeError
        group = prepared.group
        self.group_ref, self.chosen, self._comm = weakref.ref(group), prepared.chosen, prepared.comm
        self.here, self.counts, self.health = seen.table.of_group(group), calls_of(group), prepared.comm.health
        self.kind, self.digest = prepared.device.type, self.counts.made

    def known(self, arguments: Arguments, seen: Seen, returned: Any) -> _core.KnownCall:
        """Return the call `seen` as an object that native code replays with new tensors. Raise `UnlikeError` if this is
        impossible.

        arguments, returned: the arguments of the public function, and the value that it returned.
        """
        raise NotImplementedError

    @classmethod
    def of(cls, seen: Seen, arguments: Arguments, returned: Any) -> _core.KnownCall | None:
        """Return the call `seen` as an object that native code replays (the result of `known`); None if the call cannot be
        replayed.
        """
        try:
            return cls(seen).known(arguments, seen, returned)
        except UnlikeError:
            return None

    def _averaged(self, returned: Place, call: Any) -> Place:
        """Return the recipe `returned`. If the public function averages (`Operator.averages`), the recipe then also
        divides the first result by the number of ranks.

        returned: a recipe (instructions for native code) that makes the return value of the public function.
        """
        if not self.op.averages(call):
            return returned
        divided, count = with_division(returned, self.prepared.p.world_size)
        if count != 1:
            raise UnlikeError
        return divided

    def failed(self, error: BaseException, group: dist.ProcessGroup, published: int | None) -> NoReturn:
        """Notify peers of `error`. Raise it, or the `RefusedError` that replaces it.

        published: on CPU, the number of calls that this rank had announced to its peers before this call (`Meeting.calls`);
            None on GPUs.
        """
        try:
            raise error
        except BaseException:
            failed(error, self.op.title, group, self.prepared.device, self._deadline_s, published)
            raise

    def check(self) -> None:
        """Raise the error of the group, if it has failed."""
        self._comm.check()

    def refused(self, text: str) -> None:
        """Make the group fail, because a peer has refused the call that this rank has just made. text: the peer's reason."""
        self._comm.poison(text)
        self._comm.check()


class RecordedOnCpu(Recorded):
    """A recorded unfused call that native code makes on CPU too. Native code (`_core.CpuTurns`) reads its attributes. It calls
    the methods `meet`, `settle` and `go_on` if a rendezvous needs Python.
    """

    def can_be_native(self) -> bool:
        """True if native code can make this call on CPU. All ranks must be on one host, the call must have collectives, and
        native code must support all of its steps.
        """
        prepared, op = self.prepared, type(self.op)
        if not prepared.in_steps or prepared.comm is None or op.finished is not Operator.finished:
            return False
        steps = prepared.steps()
        return steps.plain is not None and bool(steps.collectives) and prepared.comm.all_mapped

    def set_up_turns(self, compared: list[bytes]) -> None:
        """Set the attributes that native code reads. compared: for each collective, the bytes that ranks compare."""
        self.published = [HEADER + one for one in compared]
        self.meeting = meeting_of(self._comm)
        assert self.meeting.exchange is not None
        native = self.meeting.exchange.native
        assert native is not None
        self.exchange, self.patience_s = native, min(LOOK_S, self._deadline_s or self._comm.deadline_s)

    def topic(self, number: int, fingerprint: int, arguments: Arguments) -> Topic:
        """Return the description that ranks compare before a collective.

        number: the index of the collective among the collectives of the call.
        fingerprint: the 64-bit number that represents the call in the comparison; 0 for a call of a known size.
        arguments: the arguments of the public function.
        """
        return self.prepared.turns.topic(self.prepared.steps().collectives[number])

    def meet(
        self, number: int, fingerprint: int, p: tuple[Any, ...], k: dict[str, Any], collective: _core.SharedCollective
    ) -> None:  # fmt: skip
        """Wait until all ranks have reached a collective, and run it. `number` and `fingerprint` are as for `topic`; p and k are
        the positional and the keyword arguments of the public function.
        """
        topic = self.topic(number, fingerprint, (p, k))
        self.meeting.meet(topic, deadline_s=self._deadline_s, collective=collective)

    def settle(
        self, number: int, fingerprint: int, p: tuple[Any, ...], k: dict[str, Any], payload: bytes, is_complete: bool
    ) -> None:
        """Complete a rendezvous that native code has begun. payload, is_complete: as for `Meeting.settle`. The other
        arguments are as for `meet`.
        """
        topic = self.topic(number, fingerprint, (p, k))
        self.meeting.settle(self.exchange, topic, payload, is_complete, self._deadline_s or self._comm.deadline_s)

    def go_on(self, number: int, is_complete: bool) -> None:
        """Complete a later round of a collective (`Meeting.go_on`). number: its index among the collectives of the call."""
        name = f"{self.prepared.steps().collectives[number]} of {self.op.title}"
        self.meeting.go_on(name, is_complete, self._deadline_s or self._comm.deadline_s)

    def known_on_cpu(self, given: Given, inputs: dict[str, Any], written: Place) -> _core.KnownCall:
        """Return the call as an object that native code replays.

        given, inputs, written: the arguments `given`, `inputs` and `returned` of `native_call`.
        """
        try:
            return native_call(self, self.prepared.steps(), given, inputs, written, [True, False])
        except UnlikeError:  # an input buffer is a copy of an argument
            return native_call(self, None, given, inputs, written, [False, False])


class Passing(RecordedOnCpu):
    """A recorded unfused call that native code replays for any number of rows. It serves sizes that do not recur
    (`weft.operator.cache`).

    Native code begins such a call: it reads and updates `sizes`, the record of the family's sizes. number: the contribution of
    the problem family to the hash of calls that ranks compare (`of_size` adds the size). multiple: calls must have a multiple of
    this number of rows.
    """

    any_rows = passes = True

    def known(self, arguments: Arguments, seen: Seen, returned: Any) -> _core.KnownCall:
        prepared, inputs, first = seen.prepared, seen.inputs or {}, arguments[0][0]
        if seen.apply is not None or not prepared.in_steps:
            raise UnlikeError
        given, results = Given(arguments, None, first.shape[0]), Given((tuple(seen.results), {}), None)
        call = "call", self.op.form, [given.written(field) for field in seen.recorded]
        steps, self.what = prepared.steps(), f"{self.op.title} of any size"
        written = self._averaged(results.returned(returned, views=False), seen.recorded)
        self._world, self._wanted = prepared.p.world_size, self.op.wanted(seen.recorded)
        self.number = number_of_family(self.op.name, prepared.family)
        self.sizes = self.here.family(prepared.family)
        self.multiple = self.op.multiple_of_rows(self._world)
        if self.kind == "cpu":
            self._call, self._returned = _core.Recipe(call), _core.Recipe(written)
            if self.can_be_native():
                self.set_up_turns([number_of_collective(name) for name in steps.collectives])
                known = self.known_on_cpu(given, inputs, written)
            else:
                known = native_call(self, None, given, inputs, written, [False, False])
        else:
            if steps.plain is None:
                raise UnlikeError
            known = native_call(self, steps, given, inputs, written, [True, False])
        if not given.all_used or self.op.tensors(seen.call)[0] is not first:
            raise UnlikeError
        return known

    def topic(self, number: int, fingerprint: int, arguments: Arguments) -> Topic:
        call = self._call(*arguments)
        return self.sizes.typical.topic_on_cpu(number, call, self._wanted, fingerprint)

    def in_python(self, p: tuple[Any, ...], k: dict[str, Any], group: dist.ProcessGroup) -> Any:
        """Make a whole call that native code cannot make, on CPU. Return the value that the public function returns, or
        NotImplemented if the call must take the slow path.
        """
        rows = p[0].shape[0]
        if rows % self.multiple or self._comm.closed or not self.sizes.takes(rows):
            return NotImplemented
        with together(self.op.title, group, lambda: self.prepared.device, self._deadline_s):
            call = self.op.checked(self._call(p, k), group)
            self.sizes.serve(rows)
            problem, fingerprint = self.op.problem(call, self._world, 0), of_size(self.number, rows)
            typical = self.sizes.typical
            results = typical.run_on_cpu(problem, call, self._wanted, fingerprint, self._deadline_s)
            self.op.note(call)
            return self._returned(results, {})


def native_call(
    of: Recorded, steps: Unfused | None, given: Given, inputs: dict[str, Any], returned: Place, is_serial: list[bool]
) -> _core.KnownCall:  # fmt: skip
    """Return the native object that replays a call.

    of: the recorded call. Native code calls its methods for work that remains in Python.
    steps: the unfused call as a list of torch calls, which native code runs; None if Python runs the call.
    given: the tensor arguments of the recorded call.
    inputs: the tensor of each input buffer in the recorded call.
    returned: the recipe that makes the return value of the public function.
    is_serial: True if native code runs `steps`: one entry for usual calls, one for calls under CUDA graph capture.
    """
    plain, recipe = None, None
    if steps is not None:
        plain, as_scale = steps.plain, steps.only_scales
        names = [name for name in steps.order if steps.buffers[name].role == "input"]
        recipe = ("list", [given.written(inputs[name], is_scale=name in as_scale) for name in names])
    return _core.KnownCall(
        of, SURROUNDINGS, recipe, plain, of.prepared.results, returned, usual=is_serial[0], captured=is_serial[1]
    )  # fmt: skip
