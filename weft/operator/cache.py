"""The cache of compiled operators (`weft.operator.compiled_operator`).

At the first call of a shape, ranks compare their calls before any rank computes or allocates
(`weft.operator.together`). Later calls find the compiled operator in one of two ways:

- By signature: the call's arguments, with the layouts of tensors in place of their contents and addresses. Native code
  reads a signature in a microsecond (`weft.runtime.layouts`), so this lookup comes first.
- By key: shapes, dtypes and options, after all checks of the arguments.

A full cache drops the least recently used operators.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from weft import _core
from weft.symm.calls import GroupCalls, calls_of

KEPT = 64  # shapes per operator and group that have memory of their own; captured shapes do not count
KEPT_LIGHT = 2048  # shapes per operator and group; captured shapes do not count. Most share memory, or hold none
_AT_ONCE = 128  # shapes to drop together at KEPT_LIGHT, because finding them takes milliseconds
KEPT_BYTES = 4 << 30  # symmetric GPU memory kept for shapes that were not called in the last WHILE calls
_SIGNATURES = 8192  # signatures kept per operator and group
PASSING = 16  # if this many compiled sizes of a family have not recurred, new sizes run unfused (see `_OfGroup`)
_SERVED = 1 << 16  # sizes of a family to remember that ran unfused once
WHILE = 1000  # calls of the operator. A training step makes fewer calls, and then repeats its shapes


class Entry(Protocol):
    """The interface of cached objects: compiled operators, and the executors of `weft.run_schedule`."""

    family: Hashable  # the problem family if new sizes of it may run unfused; otherwise None
    came_back: bool  # True if called more than once
    called_at: int  # the number of the last call that used it
    key: Any  # its key in the table

    @property
    def stale(self) -> bool:
        """True if the communicator is closed, so that this entry cannot be used."""

    @property
    def runs_unfused(self) -> bool:
        """True if a schedule has been chosen, the choice is to run all calls unfused, and calls of other sizes can run unfused as
        fast.
        """

    @property
    def captured(self) -> bool:
        """True if a CUDA graph that may be replayed uses the memory of this entry."""

    @property
    def light(self) -> bool:
        """True if dropping the entry frees no memory, because the entry shares its memory or has no memory."""

    @property
    def nbytes(self) -> int:
        """The size of the entry's symmetric GPU memory in bytes."""

    def capturing(self) -> bool:
        """True while a CUDA graph is being captured."""

    def close(self) -> None:
        """Release the memory of this entry."""


E = TypeVar("E", bound=Entry)


class Known(NamedTuple, Generic[E]):
    """The compiled operator for calls with one signature: they differ only in the contents and addresses of their
    tensors.

    places: for each input buffer, its place among the tensors of the call: (buffer name, index of the field, index in the
        field's list). The last is None if the field is a single tensor. `places` is None if an input buffer is not a
        tensor of the call, so that `Operator.inputs` must make the buffers.
    differentiated: True if gradients are wanted.
    """

    prepared: E
    places: list[tuple[str, int, int | None]] | None
    differentiated: bool

    def inputs(self, call: Any) -> dict[str, Any] | None:
        if self.places is None:
            return None
        return {name: call[field] if nth is None else call[field][nth] for name, field, nth in self.places}


def _place(call: Any, tensor: Any) -> tuple[int, int | None] | None:
    """Return the place of this tensor object in `call`: (index of the field, index in the field's list or None).

    Return None if the call does not contain the tensor. Also return None if it contains the tensor twice, because the
    next call may pass two different tensors.
    """
    places: list[tuple[int, int | None]] = []
    for field, value in enumerate(call):
        places += [(field, None)] if value is tensor else []
        places += [(field, nth) for nth, one in enumerate(value if isinstance(value, list) else ()) if one is tensor]
    return places[0] if len(places) == 1 else None


class Family(_core.FamilySizes, Generic[E]):
    """The sizes of one problem family that a group has called. (Problems of a family differ only in size.)

    typical: the operator that was compiled last, for any of these sizes.
    counts: the record of the group's calls. If ranks refuse a call, it undoes the changes that the call has made here.

    The native base class has these attributes, which native code updates when a call is replayed (`csrc/replay.cpp`):

    - once: the number of sizes that have been compiled, but called only once.
    - served: the sizes that have been called, but not compiled: their calls ran unfused. A dict without values, whose keys have
      the order of the first calls.
    - unfused_from, unfused_to: sizes from the first to the second run unfused without compilation. 1 and 0 if there are none.
    """

    def __init__(self, typical: E, counts: GroupCalls) -> None:
        super().__init__(PASSING, _SERVED)
        self.typical, self._counts = typical, counts
        self._count = 0  # compiled sizes
        self._compiled: dict[int, E] = {}  # sizes whose choice has not been read
        self.is_uniform = True  # see `_OfGroup.prepared`
        self._unfused: list[int] = []  # the smallest and the largest size for which serial was chosen
        self._overlapped: set[int] = set()  # sizes for which another schedule was chosen
        self._is_mixed = False  # True if some of them are between the sizes of `_unfused`

    def takes(self, rows: int) -> bool:
        """True if a call of this size is to run unfused, without compilation."""
        if self.typical.stale:
            return False
        return self.waits(rows, self._counts) or (self._count >= PASSING and self._stays_unfused(rows))

    def compiled(self, rows: int, prepared: E, uniform: bool) -> None:
        """Record that a size has been compiled. uniform: as for `_OfGroup.prepared`."""
        self.typical = prepared
        self.is_uniform &= uniform
        self.unfused_from, self.unfused_to = 1, 0  # until `_stays_unfused` has read this size's choice
        self._count += 1
        if self.is_uniform:
            self._compiled[rows] = prepared  # its first call chooses, so the choice is read later

    def _stays_unfused(self, rows: int) -> bool:
        """True if the choice for this size is also to run unfused, so that compilation would change nothing. This is so if
        serial was chosen for a smaller and for a larger size, and no other schedule in between (`weft.plan.nearby.between`).
        """
        if not self.is_uniform:
            return False
        if self._compiled:
            for size, prepared in self._compiled.items():
                if prepared.runs_unfused:
                    self._unfused = (
                        [min(size, *self._unfused), max(size, *self._unfused)] if self._unfused else [size] * 2
                    )
                else:
                    self._overlapped.add(size)
            self._compiled.clear()
            self._is_mixed = any(
                self._unfused[0] <= size <= self._unfused[1] for size in self._overlapped if self._unfused
            )
        if self._is_mixed or not self._unfused:
            return False
        self.unfused_from, self.unfused_to = self._unfused
        return self._unfused[0] <= rows <= self._unfused[1]

    def serve(self, rows: int) -> None:
        """Record that the current call, of this size, runs unfused."""
        if self.add(rows):
            self._counts.undo_if_refused(lambda: self.served.pop(rows, None))


class _OfGroup(Generic[E]):
    """The cache of one operator, such as `all_gather_matmul`, on one process group: its compiled operators by shape.

    All ranks of a group make the same calls, so they drop the same compiled operators.

    Compiling for a size takes as long as several calls. This time is wasted on a size that never recurs, such as a
    sequence length without padding. So this class counts, for each problem family, the compiled sizes that have been
    called only once. (The problems of a family differ only in size: `weft.builders.Problem.family`.) If the count has
    reached `PASSING` (16), a new size first runs unfused, without compilation and without the agreement of a first
    call. A later call compiles it if compilations take a small share of the time (`weft.symm.compilations`). CPU ranks
    still compare the call in the rendezvous of its collective. No call compiles a size if it would run unfused anyway
    (`Family.takes`).

    All ranks must count alike. But if a call is refused, some ranks have counted it and others have not. So with each
    count, this class gives `counts` a function that undoes the count. The function runs if ranks refuse the call.

    counts: the record of the group's calls.
    """

    def __init__(self, counts: GroupCalls) -> None:
        self._counts = counts
        self.known: dict[Hashable, E] = {}
        self.by_signature: dict[Hashable, Known[E]] = {}
        self.calls = 0
        self._families: dict[Hashable, Family[E]] = {}
        self._is_tuned = False
        self._room = 0  # shapes that can be added before a limit has to be checked
        self._nbytes = 0  # symmetric memory of all shapes except the newest

    def passes(self, family: Hashable, rows: int, capturing: bool = False) -> E | None:
        """Decide if a call of a new size runs unfused, without compilation. If so, return the latest compiled operator of the
        same problem family; otherwise None.

        The returned operator was compiled for another size, so the caller copies it, and sets the call's size in the
        copy.

        rows: the number of rows of the call's first tensor.
        capturing: True while a graph is captured. A size that has run unfused before is then captured unfused.
        """
        known = self._families.get(family)
        if known is None:
            return None
        if capturing:
            return known.typical if rows in known.served else None
        if not known.takes(rows):
            return None
        known.serve(rows)
        return known.typical

    def latest(self, family: Hashable) -> E | None:
        """Return the latest compiled operator of a problem family; None if there is none that can be used."""
        known = self._families.get(family)
        return None if known is None or known.typical.stale else known.typical

    def recurs(self, family: Hashable, rows: int) -> bool:
        """True if this size of a problem family is not compiled, and has run unfused before."""
        return family in self._families and rows in self._families[family].served

    def family(self, family: Hashable) -> Family[E]:
        """Return the record of the sizes of a problem family. At least one of these sizes must have been compiled."""
        return self._families[family]

    def called(self, prepared: E) -> E:
        """Record a call that has found the compiled operator `prepared` in the cache, so that it counts as recently used.
        Return `prepared`.
        """
        self.calls = prepared.called_at = self.calls + 1
        if not prepared.came_back:
            self._came_back(prepared, True)
            self._counts.undo_if_refused(lambda: self._came_back(prepared, False))
        return prepared

    def _came_back(self, prepared: E, came_back: bool) -> None:
        prepared.came_back = came_back
        if prepared.family is not None:
            self._families[prepared.family].once += -1 if came_back else 1

    def prepared(self, family: Hashable, rows: int, prepared: E, uniform: bool = False) -> None:
        """Record that an operator has been compiled for a new size of a problem family.

        prepared: the compiled operator.
        uniform: True if a size between two sizes with the serial schedule need not be compiled. False if gradients are wanted,
            because native code repeats such calls only of compiled sizes.
        """
        known = self._families.setdefault(family, Family(prepared, self._counts))
        prepared.family, prepared.came_back = family, rows in known.served
        known.served.pop(rows, None)
        known.once += not prepared.came_back
        known.compiled(rows, prepared, uniform and not self._is_tuned)

    def tuned(self) -> None:
        """Record that schedules have been measured because a call asked for it ("autotune"). From then on, each size that
        recurs is compiled, to use its measured times.
        """
        self._is_tuned = True
        for family in self._families.values():
            family.is_uniform = False
            family.unfused_from, family.unfused_to = 1, 0

    def make_room(self, capturing: bool) -> None:
        """Drop the least recently called shapes if one more shape would exceed a limit.

        While a graph is captured nothing is dropped: releasing memory would break the capture.
        """
        last = next(reversed(self.known.values()), None)
        self._nbytes += 0 if last is None else last.nbytes
        self._room -= 1
        if not capturing and (self._room < 0 or self._nbytes > KEPT_BYTES):
            self._drop()

    def _drop(self) -> None:
        known = self.known
        # Captured shapes are never dropped, so they do not count: many of them would leave no space for others.
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
        self._room = min(KEPT - n_own, KEPT_LIGHT - n_free) - 1  # minus the shape that is being added
        self._nbytes = sum(one.nbytes for one in known.values())


class Table(Generic[E]):
    """The cache of compiled operators of one operator, such as `all_gather_matmul`, for all process groups."""

    def __init__(self) -> None:
        # Keyed by id while the group exists: every call looks here, and a lookup in a WeakKeyDictionary takes
        # microseconds.
        self._of_group: dict[int, _OfGroup[E]] = {}

    def find(self, group: dist.ProcessGroup, key: Hashable) -> E | None:
        here = self._of_group.get(id(group))
        prepared = None if here is None else here.known.get(key)
        if here is None or prepared is None or prepared.stale:
            return None
        return here.called(prepared)

    def again(self, group: dist.ProcessGroup, signature: Hashable) -> Known[E] | None:
        """Return the compiled operator for calls with this signature (`weft.runtime.layouts`), and record the call. Return None
        if there is no such operator, or if its communicator is closed.
        """
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
        prepared: E,
        call: Any,
        inputs: dict[str, Any] | None,
    ) -> None:
        """Store `prepared`, a compiled operator, for calls with this signature.

        inputs: {buffer name: tensor} of the call's input buffers; None if gradients are wanted. The cache stores where
            each buffer is among the call's tensors (`Known.places`), so that later calls find their own buffers.
        """
        found = [
            (name, place) for name, tensor in (inputs or {}).items() if (place := _place(call, tensor)) is not None
        ]
        places = [(name, *place) for name, place in found] if inputs and len(found) == len(inputs) else None
        here = self._of_group[id(group)]
        if len(here.by_signature) >= _SIGNATURES:  # drop the older half
            for old in list(itertools.islice(here.by_signature, _SIGNATURES // 2)):
                del here.by_signature[old]
        here.by_signature[signature] = Known(prepared, places, inputs is None)

    def of_group(self, group: dist.ProcessGroup) -> _OfGroup[E]:
        here = self._of_group.get(id(group))
        if here is None:
            here = self._of_group[id(group)] = _OfGroup(calls_of(group))
            weakref.finalize(group, self._of_group.pop, id(group), None).atexit = False
        return here

    def known(self, group: dist.ProcessGroup) -> list[E]:
        """Return the compiled operators on `group`, in the order in which they were made."""
        here = self._of_group.get(id(group))
        return [] if here is None else list(here.known.values())

    def drop(self, group: dist.ProcessGroup, dropped: list[E]) -> None:
        """Close the compiled operators `dropped`, and remove them. The next call of each shape compiles it again."""
        here = self.of_group(group)
        for signature in [one for one, known in here.by_signature.items() if known.prepared in dropped]:
            del here.by_signature[signature]
        for prepared in dropped:
            here.known.pop(prepared.key).close()

    def forget(self, group: dist.ProcessGroup, prepared: E) -> None:
        """Drop `prepared` if it is still stored. All ranks must make this call."""
        if not prepared.stale and self.of_group(group).known.get(prepared.key) is prepared:
            self.drop(group, [prepared])

    def keep(self, group: dist.ProcessGroup, key: Hashable, prepared: E) -> E:
        here = self.of_group(group)
        here.make_room(prepared.capturing())
        prepared.called_at, prepared.key = here.calls, key
        here.known[key] = prepared
        return prepared
