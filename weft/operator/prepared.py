"""The preparations of an operator for a shape: made at the first call, and cached.

First calls are collective: ranks compare their calls before any rank computes or allocates (`weft.operator.together`). Later
calls of a known shape find the preparations by a key.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_group_size_by_name, _resolve_process_group

from weft import env, plan, symm
from weft.arguments import checked_deadline
from weft.caller import warn
from weft.errors import WeftError
from weft.operator import choosing
from weft.operator.across import AcrossRanks, passing_fingerprint
from weft.operator.spec import Operator
from weft.runtime.executor import Executor
from weft.runtime.in_turn import Marks, Turn, Turns
from weft.runtime.meeting import refuse
from weft.runtime.opaque import opaque
from weft.runtime.unfused import Unfused
from weft.schedule import NotApplicableError, named
from weft.symm import Domain
from weft.symm.groups import NO_GROUP
from weft.timeline import Timeline

KEPT = 64  # shapes per operator and group with memory of their own, not counting shapes that graphs have captured
KEPT_LIGHT = (
    2048  # shapes per operator and group, without captured ones; most share memory with larger ones, or hold none
)
_AT_ONCE = 128  # shapes to drop at KEPT_LIGHT: finding them takes milliseconds
KEPT_BYTES = 4 << 30  # symmetric memory on a GPU, of shapes that were not called for WHILE
_SIGNATURES = 8192  # of an operator's calls on a group
PASSING = 16  # new sizes of a family in a row without a repeated one, after which new sizes run unfused: see `_OfGroup`
PASSING_ON = ["cuda"]  # device types; on CPU ranks meet before every call, and preparing costs less than that
_SERVED = 1 << 16  # sizes to remember that ran unfused once
WHILE = 1000  # calls of the operator: a training step repeats all its shapes in fewer


def group_of(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup:
    """Return the process group that a caller passes, or names. Refuse None: the ranks of a default group would wait."""
    if isinstance(group, str):
        if torch.compiler.is_dynamo_compiling():
            raise ValueError(
                f"torch.compile finds no group by its name, {group!r}: ask size_of(group) and rank_of(group)"
            )
        try:
            return _resolve_process_group(group)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise ValueError(
                f"group={group!r} names no process group of this rank, or a destroyed one: pass the group, or its group_name"
            ) from error
    if group is None:
        raise ValueError(NO_GROUP)
    if not isinstance(group, dist.ProcessGroup):
        if hasattr(group, "get_group"):
            raise ValueError(
                f"group={group!r} is a {type(group).__name__}: pass its get_group(), of one of its dimensions"
            )
        raise ValueError(
            f"group={group!r} is no process group that this rank belongs to: only its members make this call"
        )
    return group


def rank_of(group: dist.ProcessGroup | str | None) -> int:
    """Return this rank's number in the group, also during tracing."""
    if isinstance(group, str) and torch.compiler.is_compiling():
        return _rank_by_name(group)
    return group_of(group).rank()


def _rank_by_name(group: str) -> int:
    return group_of(group).rank()


_rank_by_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # `assume_constant_result`, which would load Dynamo


def size_of(group: dist.ProcessGroup | str | None) -> int:
    """Return the group's world size, also during tracing, when torch finds no group by its name."""
    if isinstance(group, str) and torch.compiler.is_compiling():
        return int(_get_group_size_by_name(group))  # type: ignore[arg-type]
    return group_of(group).size()


def check_options(deadline_s: float | None, timeline: Timeline | None) -> float | None:
    """Return the deadline. Raise `ValueError` for invalid options, before peers are notified of the call."""
    if timeline is not None and not isinstance(timeline, Timeline):
        raise ValueError(f"timeline={timeline!r} is no timeline: pass weft.Timeline(), or None")
    return checked_deadline(deadline_s)


@contextlib.contextmanager
def _whole(domain: Domain, what: str) -> Iterator[None]:
    """Guard set-up with several exchanges between ranks: an error on this rank alone (a broken file, no memory, Ctrl-C) ends the
    group. Otherwise peers would wait for its part in the next exchange until their deadline."""
    try:
        yield
    except (WeftError, NotApplicableError):  # all ranks raise it, or it has ended the group
        raise
    except BaseException as error:
        domain.poison(f"{what}: {error!r}")
        raise


class Prepared:
    """The preparations for calls of one shape on one group: made at the first call, and found by later calls."""

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
    ) -> None:
        """Prepare calls of `p`, without a schedule yet.

        remembered: True if a rank has cached times of schedules for exactly this problem.
        said, shown: the text that CPU ranks compare at every call, in full and for errors.
        """
        self.op, self.p, self.device, self.pinned, self._remembered = op, p, device, pinned, remembered
        self._shown = shown
        self.agreed: set[tuple[str, tuple[bool, ...]]] = (
            set()
        )  # (given options, wanted gradients) that ranks have compared
        self._across: dict[str, AcrossRanks] = {}  # by given options
        self.domain = symm.domain(group, device) if p.world_size > 1 or op.has_executors else None
        self._group = weakref.ref(group)  # preparations must not keep a group alive that the caller has dropped
        self.chosen: choosing.Chosen | None = None
        self._executors: list[Executor] = []  # of `chosen`
        self._turns: Turns | None = None
        if self.domain is not None and device.type == "cpu":
            self._turns = Turns(f"{op.title}, {shown}", self.domain, said, op.arguments)
        self._serial = named(p, "serial").build()
        self.results = [b.name for b in self._serial.buffers if b.role == "output"]
        self._steps: list[Unfused] = []  # at most one, made on demand; shared with passing sizes
        self._checked = False  # True if the spec's inputs and outputs match the buffers
        self._ran: set[tuple[int, Hashable]] = set()  # (id of executor, layout) pairs that have run
        self._ready: set[tuple[int, Hashable]] = set()  # (id of executor, layout) pairs that are ready for captures
        self.key: Any = None  # in the table
        self.called_at = 0  # number of the operator's call that used this last
        self.family: Hashable = None  # of sizes that may pass
        self.passes = False  # True if made for a single call
        self.came_back = False  # True if called more than once

    @opaque
    def __call__(
        self, call: Any, deadline_s: float | None, timeline: Timeline | None, inputs: dict[str, Any] | None = None
    ) -> list[torch.Tensor]:
        """Run a call. Return its results in the order of the output buffers.

        Autocast is off inside, since it would affect only some schedules. inputs: the spec's input buffers, if they are known.
        """
        if torch.is_autocast_enabled(self.device.type):
            with torch.autocast(self.device.type, enabled=False):
                return self(call, deadline_s, timeline, inputs)
        op, capturing = self.op, self.capturing()
        if self._across:
            self.across(call).begin(call, capturing, deadline_s)
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
            results = self.in_turn(call, inputs, deadline_s, timeline)
        if self.device.type == "cpu":
            op.finished(call, results, self.rank)
        elif not capturing:
            self._be_ready_for_capture(call, inputs)
        return results

    def _check_buffers(self, of: str, role: str, tensors: dict[str, Any]) -> None:
        """Raise `TypeError` if the spec's tensors differ from the buffers of the serial schedule, which all schedules share."""
        buffers = {b.name: b for b in self._serial.buffers_of_rank(self.rank) if b.role == role}
        if tensors.keys() != buffers.keys():
            raise TypeError(
                f"{of} of {self.op.name} has {', '.join(tensors) or 'nothing'}, and the {role} buffers of its schedules are "
                f"{', '.join(buffers) or 'none'}: give one tensor for each"
            )
        for name, tensor in tensors.items():
            rows, cols = int(buffers[name].rows), buffers[name].cols
            if isinstance(tensor, torch.Tensor) and not self._serial.contents and tensor.numel() != rows * cols:
                raise TypeError(
                    f"{of} of {self.op.name} has {name} of shape {list(tensor.shape)}, and that buffer of {self.p} "
                    f"is [{rows}, {cols}]"
                )

    def in_turn(
        self, call: Any, inputs: dict[str, Any], deadline_s: float | None, timeline: Timeline | None
    ) -> list[torch.Tensor]:
        """Run the call unfused: torch's collectives and GEMMs, one after the other."""
        turn = None if self._turns is None and timeline is None else self.turn(deadline_s, timeline)
        results = self.op.unfused(self.p, call, self.group, turn)
        if results is None:
            made = self.steps().run(inputs, turn, self.group)
            results = [made[name] for name in self.results]
        if turn is not None:
            turn.end()
        return results

    def _scheduled(
        self, call: Any, inputs: dict[str, Any], capturing: bool, deadline_s: float | None, timeline: Timeline | None
    ) -> list[torch.Tensor] | None:
        """Run the chosen schedule; None if the unfused calls are at least as fast."""
        self.require_room(call, deadline_s)
        outputs = self.op.outputs(call, self.p.world_size)
        tensors = {**inputs, **outputs}
        executor = self.executor(call, tensors, capturing, deadline_s)
        if executor is None:
            return None
        if self.device.type == "cpu":
            made = executor.run(tensors, deadline_s=deadline_s, timeline=timeline)
        else:
            # A call on GPUs may take only tens of microseconds. So tensors are validated once per layout: later calls of the
            # layout differ only in addresses.
            layout = (id(executor), tuple([t.stride() for t in inputs.values()]))
            known = layout in self._ran
            made = executor.run(tensors, deadline_s=deadline_s, timeline=timeline, like_before=known)
            if not known:
                self._ran.add(layout)
        found = outputs | made
        return [found[name] for name in self.results]

    def _be_ready_for_capture(self, call: Any, inputs: dict[str, Any]) -> None:
        """Warm up the schedule for captures with this layout. It may differ from the schedule that has just run."""
        chosen = self.chosen
        if chosen is None or chosen.captured is None or chosen.captured is chosen.usual or chosen.captured.gone:
            return
        layout = (id(chosen.captured), tuple([t.stride() for t in inputs.values()]))
        if layout not in self._ready:
            chosen.captured.warm_up({**inputs, **self.op.outputs(call, self.p.world_size)})
            self._ready.add(layout)

    def require_room(self, call: Any, deadline_s: float | None) -> None:
        """Refuse a call that does not fit the preparations. On GPUs hosts do not meet: without a refusal, peers would wait for this
        rank until their deadline."""
        if self.domain is not None and (trouble := self.op.does_not_fit(self.p, call)):
            refuse(self.domain, trouble, deadline_s=deadline_s)

    def agree(self, given: str, wanted: tuple[bool, ...], said: str, shown: str) -> None:
        """Note that ranks have agreed on calls with these options and gradients.

        said, shown: the text that was compared, in full and for errors.
        """
        self.agreed.add((given, wanted))
        if self.domain is not None and given not in self._across:
            self._across[given] = AcrossRanks(self.op, self.domain, f"{self.op.title}, {shown}", said)

    def begin_backward(self) -> None:
        for across in itertools.islice(
            self._across.values(), 1
        ):  # the first that ranks have agreed on, for any given options
            across.begin_backward()

    def for_one_call(self, p: Any, rows: int, given: str, wanted: tuple[bool, ...], said: str, shown: str) -> Prepared:
        """Return preparations for one unfused call of another size, `p`. They are not kept. rows: of the first tensor."""
        made = copy.copy(self)
        made.p, made.passes, made.chosen, made._shown = p, True, choosing.Chosen(None, None), shown
        made._executors, made._ran, made._ready, made._across, made.agreed = [], set(), set(), {}, set()
        made.agreed.add((given, wanted))
        if self.domain is not None:
            fingerprint = passing_fingerprint(self.op.name, self.family, rows)
            made._across[given] = AcrossRanks(self.op, self.domain, f"{self.op.title}, {shown}", said, fingerprint)
        return made

    def across(self, call: Any) -> AcrossRanks:
        """Return the `AcrossRanks` of a call on which ranks have agreed."""
        return next(iter(self._across.values())) if len(self._across) == 1 else self._across[self.op.given(call)]

    def has_run(self, executor: Executor, layout: tuple[tuple[int, ...], ...]) -> bool:
        """True if `executor` has run with inputs of these strides on a GPU. The next such run does not check them again."""
        return (id(executor), layout) in self._ran

    @property
    def in_steps(self) -> bool:
        """True if the serial schedule has run step by step, and not by the spec's `unfused`."""
        return bool(self._steps)

    def steps(self) -> Unfused:
        """Return the serial schedule as torch calls."""
        if not self._steps:
            self._steps.append(Unfused(self._serial, self.rank))
        return self._steps[0]

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise WeftError("the process group of this call is gone: backward needs it as forward did")
        return group

    @property
    def group_or_none(self) -> dist.ProcessGroup | None:
        """The group; None if its last reference is gone."""
        return self._group()

    @property
    def rank(self) -> int:
        return 0 if self.domain is None else self.domain.rank

    @property
    def stale(self) -> bool:
        return self.domain is not None and self.domain.closed

    def close(self) -> None:
        """Release the executors. The next call of this shape makes new ones."""
        chosen, self.chosen, self._executors = self.chosen, None, []
        self._ran.clear()
        self._ready.clear()
        if chosen is not None and not self.stale:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            chosen.close()

    @property
    def taken(self) -> tuple[str, str]:
        """The names of the schedules for calls and for captured calls."""
        return ("serial", "serial") if self.chosen is None else self.chosen.names

    @property
    def captured(self) -> bool:
        """True if a CUDA graph that uses memory kept here may be replayed."""
        return self.chosen is not None and self.chosen.was_captured

    @property
    def light(self) -> bool:
        """True if it holds no memory of its own."""
        return self.chosen is None or all(one.shared for one in self.chosen.executors())

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory on a GPU."""
        return 0 if self.chosen is None else self.chosen.nbytes

    def capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def known_serial(self, capturing: bool) -> bool:
        """True if calls are known to run unfused. Raise the group's error, if it has one.

        Executors check the group themselves. Without the check here, an unfused call after a failed one would pair with a
        different call of the peers.
        """
        if self.domain is None:
            return True
        chosen = self.chosen
        settled = chosen is not None and (chosen.captured if capturing else chosen.usual) is None
        if settled:
            self.domain.check()
        return settled

    def turn(self, deadline_s: float | None, timeline: Timeline | None = None) -> Turn | None:
        """Return the `Turn` that runs the collectives of an unfused call; None if they run as they are."""
        if self._turns is None and timeline is None:
            return None
        return Turn(self._turns, deadline_s, None if timeline is None else Marks(timeline, self.rank, self.device))

    def executor(
        self, call: Any, tensors: dict[str, Any], capturing: bool, deadline_s: float | None
    ) -> Executor | None:
        """Return the executor of this call; None if it runs unfused.

        Collective at the first call, which chooses a schedule and may run candidates on the call's `tensors`.
        """
        if True in [one.gone if capturing else one.stale for one in self._executors]:
            self.close()
        if self.chosen is None:
            if capturing:
                raise ValueError(f"call {self.op.title} once with these shapes before capturing it in a CUDA graph")
            domain, op, p = self.domain, self.op, self.p
            assert domain is not None
            typical = call
            if not plan.names_schedule(self.pinned):
                typical = op.to_choose_with(p, domain.rank, call)
            if typical is not call:
                tensors = {**op.inputs(p, typical), **op.outputs(typical, p.world_size)}
            # Ranks compile and measure here, for different times.
            patience_s = env.deadline_s() if deadline_s is None else deadline_s
            with _whole(domain, f"choosing a schedule of {op.title}"), symm.set_up_within(patience_s):
                if op.has_executors:
                    self.chosen = op.own_executors(p, call, domain, tensors, deadline_s)
                else:
                    self.chosen = choosing.choose(
                        p, domain, tensors, self.pinned, deadline_s=deadline_s, what=self._shown,
                        serial=lambda: self.in_turn(typical, tensors, deadline_s, None), remembered=self._remembered,
                    )  # fmt: skip
            self._executors = self.chosen.executors()
        return self.chosen.captured if capturing else self.chosen.usual


class Known(NamedTuple):
    """Calls that differ from an earlier one only in the addresses of their tensors.

    places: (buffer, its field in a call, its index if the field is a list) for each input buffer. None if a buffer is not itself a
    tensor of the call. differentiated: True if gradients are wanted.
    """

    prepared: Prepared
    places: list[tuple[str, int, int | None]] | None
    differentiated: bool

    def inputs(self, call: Any) -> dict[str, Any] | None:
        if self.places is None:
            return None
        return {name: call[field] if nth is None else call[field][nth] for name, field, nth in self.places}


def _place(call: Any, tensor: Any) -> tuple[int, int | None] | None:
    """Return the place of this tensor object in a call. None also if it occurs twice: the next call may have two tensors there."""
    places: list[tuple[int, int | None]] = []
    for field, value in enumerate(call):
        places += [(field, None)] if value is tensor else []
        places += [(field, nth) for nth, one in enumerate(value if isinstance(value, list) else ()) if one is tensor]
    return places[0] if len(places) == 1 else None


class _OfGroup:
    """The record of an operator's calls on one group.

    Calls are counted per group: ranks that share a group may also call on other groups, and must drop the same preparations of the
    shared one.

    Preparing a size takes as long as several calls, which is wasted on sizes that never come back, such as sequences without
    padding. So on GPUs, once `PASSING` new sizes of a family in a row have not come back, a new size runs unfused: hosts do not
    meet, and nothing is made, loaded or awaited except by NCCL and cuBLAS. The size is prepared when it comes back. As soon as any
    size comes back, all new sizes are prepared again. Ranks see the same calls, and so have equal counts.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, Prepared] = {}
        self.by_signature: dict[Hashable, Known] = {}
        self.calls = 0
        self._new: dict[Hashable, int] = {}  # by family, the number of new sizes in a row that have not come back
        self._served: dict[tuple[Hashable, int], None] = {}  # sizes that ran unfused, once
        self._typical: dict[Hashable, Prepared] = {}  # by family
        self._room = 0  # number of further shapes that cannot reach a limit
        self._nbytes = 0  # symmetric memory of shapes whose first call is done

    def passes(self, family: Hashable, rows: int, capturing: bool = False) -> Prepared | None:
        """Return the preparations of a typical size if a call of a new size runs unfused, else None: the size is to be prepared.

        A size is its family and the rows of its first tensor, never a layout: each rank may have another one, and all ranks must
        prepare the same calls. capturing: a size that has run unfused is captured so.
        """
        size = family, rows
        if size in self._served:
            if capturing:
                return self._typical[family]
            del self._served[size]  # it comes back
            self._new.pop(family, None)
            return None
        typical = self._typical.get(family)
        if capturing or typical is None or typical.stale or self._new.get(family, 0) < PASSING:
            return None
        if len(self._served) >= _SERVED:
            for old in list(itertools.islice(self._served, _SERVED // 2)):
                del self._served[old]
        self._served[size] = None
        return typical

    def called(self, prepared: Prepared) -> Prepared:
        """Note a call of a known size."""
        self.calls = prepared.called_at = self.calls + 1
        if not prepared.came_back:
            prepared.came_back = True
            self._new.pop(prepared.family, None)
        return prepared

    def prepared(self, family: Hashable, prepared: Prepared) -> None:
        """Note the preparations for a new size."""
        prepared.family = family
        self._new[family] = self._new.get(family, 0) + 1
        self._typical[family] = prepared

    def make_room(self, capturing: bool) -> None:
        """Drop the least recently called sizes if another size would exceed a limit.

        All ranks make the same calls, so all drop the same sizes. capturing: drop nothing, since releasing memory would end the
        capture.
        """
        last = next(reversed(self.known.values()), None)
        self._nbytes += 0 if last is None else last.nbytes
        self._room -= 1
        if not capturing and (self._room < 0 or self._nbytes > KEPT_BYTES):
            self._drop()

    def _drop(self) -> None:
        known = self.known
        # Captured shapes do not count: many of them would leave no room for others.
        free = sorted((key for key, one in known.items() if not one.captured), key=lambda key: known[key].called_at)
        own = [key for key in free if not known[key].light]
        dropped = dict.fromkeys(own[: max(0, len(own) + 1 - KEPT)])
        if len(free) >= KEPT_LIGHT:
            dropped |= dict.fromkeys(free[:_AT_ONCE])
        idle = [
            (key, known[key].nbytes) for key in free if known[key].called_at < self.calls - WHILE and key not in dropped
        ]
        excess = sum(nbytes for _, nbytes in idle) - KEPT_BYTES
        for key, nbytes in idle:
            if excess <= 0:
                break
            dropped[key], excess = None, excess - nbytes
        for key in dropped:
            known.pop(key).close()
        if dropped:
            self.by_signature.clear()
        n_own = sum(key in known for key in own)
        n_free = sum(key in known for key in free)
        self._room = min(KEPT - n_own, KEPT_LIGHT - n_free) - 1  # without the shape that is being added
        self._nbytes = sum(one.nbytes for one in known.values())


class Table:
    """All preparations of an operator, by group and by key."""

    def __init__(self) -> None:
        # By id while the group lives: every call looks here, and a weak dictionary takes microseconds.
        self._of_group: dict[int, _OfGroup] = {}

    def find(self, group: dist.ProcessGroup, key: Hashable) -> Prepared | None:
        here = self._of_group.get(id(group))
        prepared = None if here is None else here.known.get(key)
        if here is None or prepared is None or prepared.stale:
            return None
        return here.called(prepared)

    def again(self, group: dist.ProcessGroup, signature: Hashable) -> Known | None:
        """Return the `Known` of calls with this signature (`weft.runtime.layouts`), and count the call; None if there is none."""
        here = self._of_group.get(id(group))
        known = None if here is None else here.by_signature.get(signature)
        if here is None or known is None:
            return None
        if known.prepared.stale:
            here.by_signature.clear()
            return None
        here.called(known.prepared)
        return known

    def remember(
        self,
        group: dist.ProcessGroup,
        signature: Hashable,
        prepared: Prepared,
        call: Any,
        inputs: dict[str, Any] | None,
    ) -> None:
        """Remember `prepared` for calls with this signature. inputs: the call's input buffers; None if gradients are wanted."""
        found = [
            (name, place) for name, tensor in (inputs or {}).items() if (place := _place(call, tensor)) is not None
        ]
        places = [(name, *place) for name, place in found] if inputs and len(found) == len(inputs) else None
        here = self._of_group[id(group)]
        if len(here.by_signature) >= _SIGNATURES:  # drop the older half
            for old in list(itertools.islice(here.by_signature, _SIGNATURES // 2)):
                del here.by_signature[old]
        here.by_signature[signature] = Known(prepared, places, inputs is None)

    def of_group(self, group: dist.ProcessGroup) -> _OfGroup:
        here = self._of_group.get(id(group))
        if here is None:
            here = self._of_group[id(group)] = _OfGroup()
            weakref.finalize(group, self._of_group.pop, id(group), None).atexit = False
        return here

    def known(self, group: dist.ProcessGroup) -> list[Prepared]:
        """Return the preparations on `group`, the oldest first."""
        here = self._of_group.get(id(group))
        return [] if here is None else list(here.known.values())

    def drop(self, group: dist.ProcessGroup, dropped: list[Prepared]) -> None:
        """Close preparations and forget them. The next calls of their shapes are first calls."""
        here = self.of_group(group)
        for signature in [one for one, known in here.by_signature.items() if known.prepared in dropped]:
            del here.by_signature[signature]
        for prepared in dropped:
            here.known.pop(prepared.key).close()

    def keep(self, group: dist.ProcessGroup, key: Hashable, prepared: Prepared) -> Prepared:
        here = self.of_group(group)
        here.make_room(prepared.capturing())
        prepared.called_at, prepared.key = here.calls, key
        here.known[key] = prepared
        return prepared


SCATTERED = "neither its rows nor its columns are in one piece each; pass a contiguous one"
_warned: set[tuple[str, tuple[int, ...]]] = set()


def warn_of_copy(name: str, x: torch.Tensor, reason: str) -> None:
    """Warn of a copy, once per layout."""
    if (name, x.stride()) not in _warned:
        _warned.add((name, x.stride()))
        warn(f"{name} is copied at every call: it has strides {x.stride()}, {reason}")


def contiguous(x: torch.Tensor, name: str) -> torch.Tensor:
    if not x.numel():  # to torch, an empty tensor with any strides is contiguous
        return x.new_empty(x.shape)
    x = x.resolve_neg()  # a view of an imaginary part may have its negative in memory
    if x.is_contiguous():
        return x
    warn_of_copy(name, x, "pass one with contiguous rows")
    return x.contiguous()


def strided(w: torch.Tensor, name: str) -> torch.Tensor:
    """Return `w` in a layout that GEMMs take; copy it if its layout is scattered."""
    w = w.resolve_neg()
    if w.is_contiguous():
        return w
    (rows, cols), (row, col) = w.shape[-2:], w.stride()[-2:]
    if (col == 1 and row >= cols) or (row == 1 and col >= rows) or not is_scattered(w):
        return w
    warn_of_copy(name, w, SCATTERED)
    return w.contiguous()


def is_scattered(matrix: torch.Tensor) -> bool:
    """True if cuBLAS would have to copy the tensor (or tensors): neither rows nor columns are contiguous."""
    (k, n), (row, col) = matrix.shape[-2:], matrix.stride()[-2:]
    by_rows = (col == 1 or n <= 1) and (row >= n or k <= 1)
    by_columns = (row == 1 or k <= 1) and (col >= k or n <= 1)
    return matrix.numel() > 0 and not (by_rows or by_columns)
