"""The cache of compiled operators, with lookup by group and shape or by a call's signature. It drops the least recently called
operators.

First calls are collective: ranks compare their calls before any rank computes or allocates (`weft.operator.together`). Later
calls of a known shape find their compiled operator by a key.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

KEPT = 64  # shapes per operator and group with memory of their own, except shapes that graphs have captured
KEPT_LIGHT = (
    2048  # shapes per operator and group, except captured shapes; most share memory with larger shapes, or hold none
)
_AT_ONCE = 128  # shapes to drop at KEPT_LIGHT: finding them takes milliseconds
KEPT_BYTES = 4 << 30  # symmetric memory on a GPU, of shapes that were not called for WHILE
_SIGNATURES = 8192  # of an operator's calls on a group
PASSING = (
    16  # see `_OfGroup`: after so many new sizes of a family in a row without a repeated size, new sizes run unfused
)
PASSING_ON = ["cuda"]  # device types; on CPU ranks meet before every call, and compiling costs less than that
_SERVED = 1 << 16  # sizes to remember that ran unfused once
WHILE = 1000  # calls of the operator: a training step repeats all its shapes in fewer


class Entry(Protocol):
    """The interface of a compiled operator that the cache uses."""

    family: Hashable  # of sizes that may pass
    came_back: bool  # True if called more than once
    called_at: int  # the number of the call that used it last
    key: Any  # in the table

    @property
    def stale(self) -> bool:
        """True if its communicator is closed."""

    @property
    def captured(self) -> bool:
        """True if a CUDA graph that uses its memory may be replayed."""

    @property
    def light(self) -> bool:
        """True if it holds no memory of its own."""

    @property
    def nbytes(self) -> int:
        """The bytes of symmetric memory on a GPU."""

    def capturing(self) -> bool:
        """True during the capture of a CUDA graph."""

    def close(self) -> None:
        """Release its memory."""


E = TypeVar("E", bound=Entry)


class Known(NamedTuple, Generic[E]):
    """Calls that differ from an earlier one only in the addresses of their tensors.

    places: (buffer, its field in a call, its index if the field is a list) for each input buffer. None if a buffer is not itself a
    tensor of the call. differentiated: True if gradients are wanted.
    """

    prepared: E
    places: list[tuple[str, int, int | None]] | None
    differentiated: bool

    def inputs(self, call: Any) -> dict[str, Any] | None:
        if self.places is None:
            return None
        return {name: call[field] if nth is None else call[field][nth] for name, field, nth in self.places}


def _place(call: Any, tensor: Any) -> tuple[int, int | None] | None:
    """Return the place of this tensor object in a call. Return None if it occurs twice, because the next call may pass two
    different tensors."""
    places: list[tuple[int, int | None]] = []
    for field, value in enumerate(call):
        places += [(field, None)] if value is tensor else []
        places += [(field, nth) for nth, one in enumerate(value if isinstance(value, list) else ()) if one is tensor]
    return places[0] if len(places) == 1 else None


class _OfGroup(Generic[E]):
    """The record of an operator's calls on one group.

    Calls are counted per group: ranks that share a group may also call on other groups, and must drop the same compiled
    operators of the shared group.

    Compiling for a size takes as long as several calls. That is wasted on sizes that never recur, such as sequences without
    padding. So on GPUs, once `PASSING` new sizes of a family in a row have not recurred, a new size runs unfused. Then
    hosts do not synchronise, and only NCCL and cuBLAS load kernels or wait. A size is compiled when it recurs. As soon as any size
    recurs, all new sizes are compiled again. Ranks make the same calls, so their counts are equal.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, E] = {}
        self.by_signature: dict[Hashable, Known[E]] = {}
        self.calls = 0
        self._new: dict[Hashable, int] = {}  # by family, the number of new sizes in a row that have not recurred
        self._served: dict[tuple[Hashable, int], None] = {}  # sizes that ran unfused, once
        self._typical: dict[Hashable, E] = {}  # by family
        self._room = 0  # number of further shapes that cannot reach a limit
        self._nbytes = 0  # symmetric memory of shapes whose first call is done

    def passes(self, family: Hashable, rows: int, capturing: bool = False) -> E | None:
        """Return the compiled operator of a typical size if a call of a new size runs unfused. Return None if the size must
        be compiled.

        A size is its family and the rows of its first tensor, without the layout: layouts may differ between ranks, and all
        ranks must compile the same sizes. capturing: a size that has run unfused is captured unfused.
        """
        size = family, rows
        if size in self._served:
            if capturing:
                return self._typical[family]
            del self._served[size]  # it has recurred
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

    def called(self, prepared: E) -> E:
        """Note a call of a known size."""
        self.calls = prepared.called_at = self.calls + 1
        if not prepared.came_back:
            prepared.came_back = True
            self._new.pop(prepared.family, None)
        return prepared

    def prepared(self, family: Hashable, prepared: E) -> None:
        """Note the compiled operator of a new size."""
        prepared.family = family
        self._new[family] = self._new.get(family, 0) + 1
        self._typical[family] = prepared

    def make_room(self, capturing: bool) -> None:
        """Drop the least recently called sizes if another size would exceed a limit.

        All ranks make the same calls, so all drop the same sizes. capturing: drop nothing, since releasing memory would break the
        capture.
        """
        last = next(reversed(self.known.values()), None)
        self._nbytes += 0 if last is None else last.nbytes
        self._room -= 1
        if not capturing and (self._room < 0 or self._nbytes > KEPT_BYTES):
            self._drop()

    def _drop(self) -> None:
        known = self.known
        # Captured shapes do not count: many of them would leave no space for others.
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


class Table(Generic[E]):
    """The cache of an operator, by group and by key."""

    def __init__(self) -> None:
        # By id while the group lives: every call looks here, and a weak dictionary takes microseconds.
        self._of_group: dict[int, _OfGroup[E]] = {}

    def find(self, group: dist.ProcessGroup, key: Hashable) -> E | None:
        here = self._of_group.get(id(group))
        prepared = None if here is None else here.known.get(key)
        if here is None or prepared is None or prepared.stale:
            return None
        return here.called(prepared)

    def again(self, group: dist.ProcessGroup, signature: Hashable) -> Known[E] | None:
        """Return the `Known` of calls with this signature (`weft.runtime.layouts`), and count the call. Return None without
        an entry."""
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

    def of_group(self, group: dist.ProcessGroup) -> _OfGroup[E]:
        here = self._of_group.get(id(group))
        if here is None:
            here = self._of_group[id(group)] = _OfGroup()
            weakref.finalize(group, self._of_group.pop, id(group), None).atexit = False
        return here

    def known(self, group: dist.ProcessGroup) -> list[E]:
        """Return the compiled operators on `group`, the oldest first."""
        here = self._of_group.get(id(group))
        return [] if here is None else list(here.known.values())

    def drop(self, group: dist.ProcessGroup, dropped: list[E]) -> None:
        """Close compiled operators and forget them. The next calls of their shapes are first calls."""
        here = self.of_group(group)
        for signature in [one for one, known in here.by_signature.items() if known.prepared in dropped]:
            del here.by_signature[signature]
        for prepared in dropped:
            here.known.pop(prepared.key).close()

    def keep(self, group: dist.ProcessGroup, key: Hashable, prepared: E) -> E:
        here = self.of_group(group)
        here.make_room(prepared.capturing())
        prepared.called_at, prepared.key = here.calls, key
        here.known[key] = prepared
        return prepared
