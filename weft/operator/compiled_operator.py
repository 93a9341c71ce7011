"""An operator compiled for one shape, made at the first call of the shape and cached (`weft.operator.cache`).

The first call chooses a schedule. An executor runs the schedule, or the call runs unfused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from weft import plan, symm
from weft.builders import NotApplicableError, named
from weft.errors import WeftError
from weft.operator import select
from weft.operator.across import AcrossRanks, passing_fingerprint
from weft.operator.agreement import agreement_on
from weft.operator.know_links import know_links
from weft.operator.spec import Operator
from weft.runtime.capture import is_captured
from weft.runtime.executor import Executor
from weft.runtime.meeting import Topic, refuse
from weft.runtime.opaque import opaque
from weft.runtime.rails import largest_collective_bytes
from weft.runtime.unfused.serial import Unfused
from weft.runtime.unfused.turn import STRAIGHT, Marks, Turn, Turns
from weft.schedule import Schedule
from weft.symm import Communicator
from weft.symm.calls import calls_of
from weft.symm.device import synchronize
from weft.timeline import Timeline
from weft.words import joined


@contextlib.contextmanager
def whole(comm: Communicator, what: str) -> Iterator[None]:
    """Make the group fail if the body of this context manager raises an error on this rank only.

    Use it around a set-up with several exchanges between ranks. Otherwise peers would wait for this rank in the next
    exchange until their deadline. what: the set-up, for error texts.
    """
    try:
        yield
    except (WeftError, NotApplicableError):  # every rank raises this error, or the group has already failed
        raise
    except BaseException as error:
        comm.poison(f"{what}: {error!r}")
        raise


class CompiledOperator:
    """An operator compiled for calls of one shape on one group."""

    def __init__(
        self,
        op: Operator[Any],
        p: Any,
        group: dist.ProcessGroup,
        device: torch.device,
        pinned: str | None,
        remembered: bool,
        said: str,
        shown: str,
        began_s: float,
        like: CompiledOperator | None = None,
    ) -> None:
        """Prepare calls of the problem `p`. The first call chooses a schedule.

        pinned: the name of the schedule that the user has chosen; None to let weft choose.
        remembered: True if any rank has cached times of schedules for exactly this problem.
        said: the full description of the call, which CPU ranks compare at every call.
        shown: a short description of the call, for error texts.
        began_s: the time when the compilation began (`time.monotonic`).
        like: the compiled operator of a problem that differs from `p` only in size. The serial schedule is then shared, which saves
            a part of the compilation.
        """
        self._began_s = began_s  # 0 once the compilation has ended
        self.op, self.p, self.device, self.pinned, self._remembered = op, p, device, pinned, remembered
        self._shown = shown
        self.agreed: set[tuple[str, tuple[bool, ...]]] = set()
        """The pairs (`Operator.given`, wanted gradients) that ranks have compared."""
        self._across: dict[str, AcrossRanks] = {}  # by the text of the call's options (`Operator.given`)
        self.comm = symm.communicator(group, device) if p.world_size > 1 or op.has_executors else None
        self._group = weakref.ref(group)  # weak, so that the cache does not keep a dropped group alive
        self.chosen: select.Chosen | None = None
        self._executors: list[Executor] = []  # the executors of `chosen`
        self._turns: Turns | None = None
        if self.comm is not None and agreement_on(device).meets:
            self._turns = Turns(f"{op.title}, {shown}", self.comm, said, op.arguments)
        # True if ranks begin unfused calls before they have synchronised.
        self._begins = self._turns is not None and type(op).begun is not Operator.begun
        if self._turns is not None:
            self._turns.reserve(largest_collective_bytes(self._serial))
        self.results: list[str] = like.results if like else [b.name for b in self._serial.buffers if b.role == "output"]
        # At most one, made on demand; shared by the copies of `for_one_call`, and by operators that differ only in size.
        self._steps: list[Unfused] = like._steps if like else []
        self._checked: bool = (
            like is not None and like._checked
        )  # True if the spec's inputs and outputs match the buffers
        self._ran: set[tuple[int, Hashable]] = set()  # pairs (id of executor, layout) that have run
        self._ready: set[tuple[int, Hashable]] = set()  # pairs (id of executor, layout) that can be captured
        self.key: Any = None  # the key in the table
        self.called_at = 0  # number of the last call that used this operator
        self.family: Hashable = None  # the problem family, if a new size may run unfused
        self.passes = False  # True if made for a single call
        self.came_back = False  # True if called more than once

    @functools.cached_property
    def _serial(self) -> Schedule:
        return named(self.p, "serial").build()

    @opaque
    def __call__(
        self, call: Any, deadline_s: float | None, timeline: Timeline | None, inputs: dict[str, Any] | None = None
    ) -> list[torch.Tensor]:
        """Run a call. Return its results in the order of the output buffers.

        Autocast is disabled during the call: it would affect only some schedules. inputs: the result of
        `Operator.inputs` for this call, or None to compute it here.
        """
        if torch.is_autocast_enabled(self.device.type):
            with torch.autocast(self.device.type, enabled=False):
                return self(call, deadline_s, timeline, inputs)
        op, capturing = self.op, is_captured(self.device)
        turn, begun, numbers = STRAIGHT, None, None
        if self._across:
            if self._begins and self.known_serial(capturing):
                turn = self.turn(deadline_s, timeline).met
                begun = op.begun(self.p, call, self.group, turn)
            numbers = self.across(call).begin(call, capturing, deadline_s, begun)
        if begun is not None:  # the choice is to run unfused
            assert numbers is not None
            made = begun.end(numbers)
            turn.end()
            op.finished(call, made, self.rank)
            return made
        inputs = op.inputs(self.p, call) if inputs is None else inputs
        if op.has_executors:
            executor = self.executor(call, inputs, capturing, deadline_s)
            assert executor is not None
            return list(executor.run(inputs, deadline_s=deadline_s, timeline=timeline).values())
        if not self._checked:
            self._check_buffers("inputs", "input", inputs)
            self._check_buffers("outputs", "output", op.outputs(call, self.p.world_size))
            self._checked = True
        results = (
            None if self.known_serial(capturing) else self._scheduled(call, inputs, capturing, deadline_s, timeline)
        )
        if results is None:
            results = self.in_turn(call, lambda: inputs, deadline_s, timeline, numbers is not None)
        if self.device.type == "cpu":
            op.finished(call, results, self.rank)
        elif not capturing:
            self._be_ready_for_capture(call, inputs)
        if self._began_s:
            calls_of(self.group).compilations.ended(self._began_s)
            self._began_s = 0.0
        return results

    def _check_buffers(self, of: str, role: str, tensors: dict[str, Any]) -> None:
        """Raise `TypeError` unless `tensors` have the names and shapes of the operator's input or output buffers. These are
        read from the serial schedule, because all schedules of an operator have the same inputs and outputs.

        of: the spec's method that returned `tensors`, for the error text. role: "input" or "output".
        """
        buffers = {b.name: b for b in self._serial.buffers_of_rank(self.rank) if b.role == role}
        if tensors.keys() != buffers.keys():
            raise TypeError(
                f"{of}() of the operator {self.op.name} returns {', '.join(tensors) or 'nothing'}, but the {role} buffers "
                f"of its schedules are {', '.join(buffers) or 'none'}: return one tensor for each buffer"
            )
        for name, tensor in tensors.items():
            rows, cols = int(buffers[name].rows), buffers[name].cols
            if isinstance(tensor, torch.Tensor) and not self._serial.contents and tensor.numel() != rows * cols:
                raise TypeError(
                    f"{of}() of {self.op.name} returns {name} of shape {list(tensor.shape)}: return [{rows}, {cols}], the shape of "
                    f"the buffer in {self.p}"
                )

    def in_turn(
        self, call: Any, inputs: Callable[[], dict[str, Any]], deadline_s: float | None, timeline: Timeline | None,
        met: bool = False,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Run the call unfused: torch's collectives and GEMMs, one after the other.

        inputs: a function that returns the tensors of the input buffers. It is called only if `Operator.unfused` returns
            None.
        met: True if CPU ranks have already synchronised in this call. Ranks on several hosts then do not synchronise
            again.
        """
        turn = STRAIGHT if self._turns is None and timeline is None else self.turn(deadline_s, timeline)
        if met and turn.comm_between_hosts is not None:
            turn = turn.met
        results = self.op.unfused(self.p, call, self.group, turn)
        if results is None:
            made = self.steps().run(inputs(), turn, self.group)
            results = [made[name] for name in self.results]
        turn.end()
        return results

    def _scheduled(
        self, call: Any, inputs: dict[str, Any], capturing: bool, deadline_s: float | None, timeline: Timeline | None
    ) -> list[torch.Tensor] | None:
        """Run the chosen schedule and return its results. Return None if the serial schedule is chosen, so that the call
        must run unfused.
        """
        self.require_room(call, deadline_s)
        outputs = self.op.outputs(call, self.p.world_size)
        tensors = {**inputs, **outputs}
        executor = self.executor(call, tensors, capturing, deadline_s)
        if executor is None:
            return None
        if self.device.type == "cpu":
            made = executor.run(tensors, deadline_s=deadline_s, timeline=timeline)
        else:
            # A GPU call may take only tens of microseconds. So tensors are validated once per layout: later calls with
            # the same layout differ only in addresses.
            layout = (id(executor), tuple([t.stride() for t in inputs.values()]))
            known = layout in self._ran
            made = executor.run(tensors, deadline_s=deadline_s, timeline=timeline, like_before=known)
            if not known:
                self._ran.add(layout)
        found = outputs | made
        results = [found[name] for name in self.results]
        if read := executor.read:
            self.op.note_read(call, results, read, self.rank)
        return results

    def _be_ready_for_capture(self, call: Any, inputs: dict[str, Any]) -> None:
        """Load the kernels of the schedule that is used under CUDA graph capture, once for each memory layout of the inputs.
        This schedule may differ from the schedule of other calls.
        """
        chosen = self.chosen
        if chosen is None or chosen.captured is None or chosen.captured is chosen.usual or chosen.captured.gone:
            return
        layout = (id(chosen.captured), tuple([t.stride() for t in inputs.values()]))
        if layout not in self._ready:
            chosen.captured.warm_up({**inputs, **self.op.outputs(call, self.p.world_size)})
            self._ready.add(layout)

    def require_room(self, call: Any, deadline_s: float | None) -> None:
        """Raise `RefusedError` if the call exceeds the sizes for which the operator was compiled. On GPUs the group
        fails, because ranks do not synchronise before calls.
        """
        if self.comm is not None and (trouble := self.op.does_not_fit(self.p, call)):
            refuse(self.comm, trouble, deadline_s=deadline_s)

    def agree(self, given: str, wanted: tuple[bool, ...], said: str, shown: str) -> None:
        """Record that ranks have compared a call with these options and these wanted gradients. Later calls with the
        same options and wanted gradients then count as calls of a known shape.

        given: the options as text (`Operator.given`).
        said: the full description of the call, which ranks compared.
        shown: a short description, for error texts.
        """
        self.agreed.add((given, wanted))
        if self.comm is not None and given not in self._across:
            self._across[given] = AcrossRanks(self.op, self.comm, f"{self.op.title}, {shown}", said)

    def begin_backward(self) -> None:
        # Backward does not know the options of its forward call, so every rank uses the fingerprint of the first
        # options.
        for across in itertools.islice(self._across.values(), 1):
            across.begin_backward()

    def for_one_call(self, p: Any, rows: int, call: Any, wanted: tuple[bool, ...]) -> CompiledOperator:
        """Return a copy of this operator for one unfused call. The size of the call differs from the size for which
        this operator was compiled. The copy is not cached.

        p: the problem of the call, from this operator's problem family.
        rows: the number of rows of the call's first tensor.
        wanted: for each differentiable field of the call, True if its gradient is wanted.
        """
        op, given = self.op, self.op.given(call)
        said, shown = self._described(p, call, given)
        made = copy.copy(self)
        made.p, made.passes, made.chosen, made._shown, made._began_s = p, True, select.Chosen(None, None), shown, 0.0
        made._executors, made._ran, made._ready, made._across, made.agreed = [], set(), set(), {}, set()
        made.agreed.add((given, wanted))
        if self.comm is not None:
            fingerprint = passing_fingerprint(op.name, self.family, rows)
            made._across[given] = AcrossRanks(op, self.comm, f"{op.title}, {shown}", said, fingerprint)
            if self._turns is not None:
                made._turns = self._turns_of(said, shown, wanted, fingerprint)
        return made

    def topic_on_cpu(self, number: int, call: Any, wanted: tuple[bool, ...], fingerprint: int) -> Topic:
        """Return the description that CPU ranks compare before a collective of an unfused call. The size of the call differs
        from the size for which this operator was compiled.

        number: the index of the collective among the collectives of the call.
        fingerprint: the 64-bit number that represents the call in the comparison (`passing_fingerprint`).
        """
        op = self.op
        p = op.problem(call, self.p.world_size, 0)
        turns = self._turns_of(*self._described(p, call, op.given(call)), wanted, fingerprint)
        return turns.topic(self.steps().collectives[number])

    def run_on_cpu(
        self, p: Any, call: Any, wanted: tuple[bool, ...], fingerprint: int, deadline_s: float | None
    ) -> list[torch.Tensor]:
        """Run one unfused call on CPU, and return its results. The size of the call differs from the size for which
        this operator was compiled. `for_one_call` serves the same purpose, but takes longer.

        p: the problem of the call, from this operator's problem family.
        wanted: for each differentiable field of the call, True if its gradient is wanted.
        fingerprint: the 64-bit number that represents the call when ranks compare calls (`passing_fingerprint`).
        """
        op = self.op
        turn = Turn(self._turns_of(*self._described(p, call, op.given(call)), wanted, fingerprint), deadline_s)
        made = self.steps().run(op.inputs(p, call), turn, self.group)
        return [made[name] for name in self.results]

    def _described(self, p: Any, call: Any, given: str) -> tuple[str, str]:
        """Return the full and the short description of a call. The size of the call differs from the size for which
        this operator was compiled.
        """
        op, full = self.op, str(p)
        said = full if type(op).said is Operator.said else op.said(call, p.world_size)
        return joined(said, given), joined(p.text if said == full else said, given)

    def _turns_of(self, said: str, shown: str, wanted: tuple[bool, ...], fingerprint: int) -> Turns:
        """Return the object that runs the rendezvous before each collective of a call on CPU. The size of the call
        differs from the size for which this operator was compiled. In the rendezvous, ranks compare `fingerprint`,
        which represents the call.
        """
        assert self.comm is not None
        op = self.op
        details = joined(said, op.described(wanted))
        return Turns(f"{op.title}, {shown}", self.comm, details, op.arguments, hint=op.hint, number=fingerprint)

    @property
    def turns(self) -> Turns:
        """The object that runs the rendezvous before each collective of an unfused call on CPU."""
        assert self._turns is not None
        return self._turns

    def across(self, call: Any) -> AcrossRanks:
        """Return the object that compares this call between ranks. `agree` must already have recorded a first call with
        the same options.
        """
        return next(iter(self._across.values())) if len(self._across) == 1 else self._across[self.op.given(call)]

    def has_run(self, executor: Executor, layout: tuple[tuple[int, ...], ...]) -> bool:
        """True if `executor` has run on a GPU with inputs of these strides, so that the next run may skip the checks of
        tensors.
        """
        return (id(executor), layout) in self._ran

    @property
    def in_steps(self) -> bool:
        """True if an unfused call has run the serial schedule step by step, because the operator does not override
        `Operator.unfused`.
        """
        return bool(self._steps)

    def steps(self) -> Unfused:
        """Return the object that runs the serial schedule as calls of torch. It is made once."""
        if not self._steps:
            self._steps.append(Unfused(self._serial, self.rank))
        return self._steps[0]

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise WeftError("the process group of this call has been destroyed: destroy it only after backward has run")
        return group

    @property
    def rank(self) -> int:
        return 0 if self.comm is None else self.comm.rank

    @property
    def stale(self) -> bool:
        return self.comm is not None and self.comm.closed

    def close(self) -> None:
        """Release the executors. The next call of this shape makes new executors."""
        chosen, self.chosen, self._executors = self.chosen, None, []
        self._ran.clear()
        self._ready.clear()
        if chosen is not None and not self.stale:
            synchronize(self.device)
            chosen.close()

    @property
    def taken(self) -> tuple[str, str]:
        """The names of the two chosen schedules: the one for usual calls, and the one for calls under CUDA graph capture."""
        return ("serial", "serial") if self.chosen is None else self.chosen.names

    @property
    def captured(self) -> bool:
        """True if a captured CUDA graph uses memory of this operator and may be replayed."""
        return self.chosen is not None and self.chosen.was_captured

    @property
    def light(self) -> bool:
        """True if closing this operator frees no memory, because the operator shares its memory or has no memory."""
        return self.chosen is None or all(one.shared for one in self.chosen.executors())

    @property
    def nbytes(self) -> int:
        """The size of the operator's symmetric GPU memory in bytes."""
        return 0 if self.chosen is None else self.chosen.nbytes

    def capturing(self) -> bool:
        return is_captured(self.device)

    @property
    def runs_unfused(self) -> bool:
        """True if a schedule has been chosen, the choice is to run all calls unfused, and calls of other sizes can run unfused as
        fast. On GPUs native code must repeat calls of any size, because otherwise only compiled sizes take the fast path.
        """
        if self.chosen is None or self.chosen.executors():
            return False
        return self.device.type == "cpu" or (self.in_steps and self.steps().plain is not None)

    def known_serial(self, capturing: bool) -> bool:
        """True if a schedule has been chosen, and the choice is to run this call unfused. Raise the group's error if the group
        has failed and the call would run unfused.
        """
        if self.comm is None:
            return True
        chosen = self.chosen
        settled = chosen is not None and (chosen.captured if capturing else chosen.usual) is None
        if settled:
            self.comm.check()
        return settled

    def turn(self, deadline_s: float | None, timeline: Timeline | None = None) -> Turn:
        """Return the object that runs the collectives of an unfused call or of a backward. It has the deadline, the timeline,
        and on CPU the rendezvous before each collective.
        """
        # If an operator has its own kernels, its backward also waits for peers, with the call's deadline.
        waits = self.op.has_executors and deadline_s is not None
        if self._turns is None and timeline is None and not waits:
            return STRAIGHT
        return Turn(self._turns, deadline_s, None if timeline is None else Marks(timeline, self.rank, self.device))

    def executor(
        self, call: Any, tensors: dict[str, Any], capturing: bool, deadline_s: float | None
    ) -> Executor | None:
        """Return the executor of this call; None if it runs unfused.

        The first call chooses a schedule, and may run candidates on its `tensors`. All ranks must make the first call
        together.
        """
        if True in [one.gone if capturing else one.stale for one in self._executors]:
            self.close()
            self._began_s = time.monotonic()
        if self.chosen is None:
            if capturing:
                raise ValueError(
                    f"the first call of {self.op.title} with these shapes sets up memory and kernels, which a CUDA graph cannot "
                    "capture: call it once with these shapes before capturing it"
                )
            comm, op, p = self.comm, self.op, self.p
            assert comm is not None
            typical = call
            if not plan.names_schedule(self.pinned):
                typical = op.to_choose_with(p, comm.rank, call)
            if typical is not call:
                tensors = {**op.inputs(p, typical), **op.outputs(typical, p.world_size)}
            # Ranks compile and measure here, which takes different times on different ranks.
            patience_s = comm.deadline_s if deadline_s is None else deadline_s
            with whole(comm, f"choosing a schedule of {op.title}"), symm.set_up_within(patience_s):
                if self.device.type == "cpu" and not plan.names_schedule(self.pinned):
                    know_links(comm, patience_s)
                if op.has_executors:
                    self.chosen = op.own_executors(p, call, comm, tensors, deadline_s)
                else:
                    self.chosen = select.choose(
                        p, comm, tensors, self.pinned, deadline_s=deadline_s, what=self._shown,
                        serial=lambda: self.in_turn(typical, lambda: tensors, deadline_s, None), remembered=self._remembered,
                    )  # fmt: skip
            self._executors = self.chosen.executors()
        return self.chosen.captured if capturing else self.chosen.usual
