"""The base class of steps. A kind of step defines its properties once; checks, simulator, printing and storage use them.

A new kind is a frozen dataclass that derives from `Step`, in a file of its own. Its fields are the regions that it touches, and
numbers or expressions. To run it, add an entry to each executor (`weft.runtime.cpu.steps.bind`,
`weft.runtime.cuda.compile.emit`). A step of serial schedules also needs an entry in `weft.runtime.unfused.serial.bind`, which
calls NCCL and cuBLAS directly. An executor without an entry refuses the step by name. The simulator prices the memory that a step
moves; to change that, register a cost with `weft.sim.costs.price`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias

from weft.schedule.expr import Expr, Index, Total, Values
from weft.schedule.kernels import TileKernel
from weft.schedule.regions import Access, Declared, Norm, Region, is_empty

CounterId: TypeAlias = tuple[Index, str, Index]
"""(rank that owns the counter, signals' name, index), in numbers."""
Counters: TypeAlias = Counter[CounterId]
KINDS: dict[str, type[Step]] = {}
"""Kinds of steps by their name in files."""
_NOTHING_SET: Mapping[CounterId, int] = MappingProxyType({})
_PLAIN = (Region, Norm, TileKernel)  # values that consist of their fields only


@dataclass(frozen=True, slots=True)
class Awaited:
    """A wait for `count` sets of a counter of this rank; with `previous`, for sets of the previous run."""

    signal: str
    index: Index
    count: Index
    previous: bool


class Step:
    """A step with the defaults: work for the device that touches no memory, sets no signal and waits for none."""

    __slots__ = ()
    kind: ClassVar[str]
    is_signal: ClassVar[bool] = False
    """True if the step only sets a signal or waits for one."""

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    def accesses(self) -> tuple[Access, ...]:
        """Return the regions that the step reads, writes or updates, its operands in order."""
        return ()

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of the accesses, in order."""
        return tuple([access.region for access in self.accesses()])

    def sets(self) -> Mapping[CounterId, int]:
        """Return, for each counter, how often a step in numbers increments it."""
        return _NOTHING_SET

    def only_sets(self) -> Step | None:
        """Return the step reduced to its sets; None if it has no sets."""
        return self if self.sets() else None

    @property
    def awaits(self) -> Awaited | None:
        """The counter that the step waits for; None if it does not wait."""
        return None

    @property
    def meets(self) -> bool:
        """True if the step begins only when all ranks have reached it."""
        return False

    @property
    def occupies(self) -> bool:
        """True if the step keeps a queue or the host busy. The host then issues steps of other lanes before it
        continues with this lane."""
        return True

    @property
    def needs_unit(self) -> bool:
        """True if the step takes a compute unit."""
        return False

    @property
    def copies_by(self) -> str:
        """The engine of a copy: "dma" or "kernel"; empty for other steps."""
        return ""

    @property
    def multiplies(self) -> bool:
        """True if the step is a GEMM."""
        return False

    @property
    def tile_kernel(self) -> TileKernel | None:
        """The kernel that does all tiles of the step; None if the step has no tiles."""
        return None

    @property
    def in_place(self) -> bool:
        """True if the step may write exactly the region that it reads."""
        return False

    @property
    def decisive(self) -> tuple[int, ...]:
        """The numbers of the operands that decide if there is work: if one of them is empty, the step does nothing."""
        return tuple(number for number, access in enumerate(self.accesses()) if access.writes)

    @property
    def is_empty(self) -> bool:
        """True if a step in numbers has nothing to do."""
        accesses = self.accesses()
        return any(is_empty(accesses[number].region) for number in self.decisive)

    @property
    def sizes(self) -> tuple[Index, ...]:
        """The rows that go to each rank, if they differ from rank to rank."""
        return ()

    @property
    def inner(self) -> tuple[Step, ...]:
        """The repeated steps of a loop or a kernel."""
        return ()

    @property
    def own_variables(self) -> frozenset[str]:
        """The variables that have a value only in the step's body."""
        return frozenset()

    @property
    def settings(self) -> tuple[object, ...]:
        """The fields that are not places. Steps with equal settings and operands of equal sizes cost the same."""
        return tuple(one for one in self.values() if isinstance(one, str | bool | float | None))

    def values(self) -> tuple[Any, ...]:
        """Return the values of the fields, in order."""
        return values_of(self)

    def with_fields(self, change: Callable[[Any], Any]) -> Self:
        """Return a copy with `change` applied to each field."""
        return type(self)(*[change(getattr(self, name)) for name in _names_of(type(self))])

    def substitute(self, values: Values, partially_evaluated: bool) -> Step:
        """Substitute values for the step's variables; with `partially_evaluated`, leave variables without a value."""
        return _fields_substituted(self, values, partially_evaluated)

    def faults(self, where: Declared) -> Iterator[str]:
        """Yield the errors of a step in numbers whose regions are all inside their buffers."""
        yield from ()

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        """Return the name in a timeline, without rows and columns.

        at: returns "@2" for rank 2, "" for the step's own rank. number: returns an index's value."""
        return " ".join([self.kind, *(f"{a.region.buffer}{at(a.region.at)}" for a in self.accesses() if a.writes)])

    def __str__(self) -> str:
        parts = [str(access.region) for access in self.accesses()]
        return f"{self.kind:<7} {', '.join(parts)}"


def substitute(item: Any, values: Values, *, partially_evaluated: bool = False) -> Any:
    """Substitute values for the variables of a step, region, kernel or index. With `partially_evaluated`, leave variables without
    a value."""
    if type(item) in (int, str):  # most are
        return item
    if isinstance(item, Expr):
        return item.partially_evaluated(values) if partially_evaluated else item.evaluate(values)
    if isinstance(item, tuple):
        return tuple(substitute(part, values, partially_evaluated=partially_evaluated) for part in item)
    if isinstance(item, Step):
        return item.substitute(values, partially_evaluated)
    return _fields_substituted(item, values, partially_evaluated) if isinstance(item, _PLAIN) else item


def _fields_substituted(item: Any, values: Values, partially_evaluated: bool) -> Any:
    """Substitute values in the fields of `item`; return `item` itself if nothing changes."""
    kind = type(item)
    old = values_of(item)
    # This repeats `substitute` for the common types, since a large schedule has a million values.
    new = [
        one
        if (of := type(one)) is int or of is str or of is bool
        else one.evaluate(values)
        if of is Expr and not partially_evaluated
        else substitute(one, values, partially_evaluated=partially_evaluated)
        for one in old
    ]
    return item if all(map(operator.is_, old, new)) else kind(*new)


_NAMES: dict[type, tuple[str, ...]] = {}


def _names_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass."""
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in fields(kind))
    return _NAMES[kind]


_VALUES: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


def values_of(item: Any) -> tuple[Any, ...]:
    """Return the values of the fields of `item`, in order."""
    found = _VALUES.get(type(item))
    if found is None:
        found = _VALUES[type(item)] = getter(_names_of(type(item)))
    return found(item)


def getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that gets these attributes as a tuple. It is fast: a large schedule has a million of them."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda item: tuple([getattr(item, name) for name in names])


def variables_of(item: Any) -> Set[str]:
    """Return the variables in all expressions of a step, region or index, without the variables of its own loop."""
    found = set[str]()
    _add_variables(item, found)
    return found


def depends(item: Any, names: Collection[str]) -> bool:
    """True if an expression of a step, region or index has one of these variables. Faster than listing all variables."""
    kind = type(item)
    if kind is int or kind is str:
        return False
    if isinstance(item, Expr):
        return not item.variables().isdisjoint(names)
    if isinstance(item, tuple):
        return any(depends(part, names) for part in item)
    if isinstance(item, Step) and item.own_variables:
        return not variables_of(item).isdisjoint(names)
    if isinstance(item, (Step, *_PLAIN)):
        return any(depends(getattr(item, name), names) for name in _names_of(kind))
    return False


def _add_variables(item: Any, found: set[str]) -> None:
    kind = type(item)
    if kind is int or kind is str:  # most are
        return
    if isinstance(item, Expr):
        found |= item.variables()
    elif isinstance(item, tuple):
        for part in item:
            _add_variables(part, found)
    elif isinstance(item, Step) and item.own_variables:
        found |= variables_of(item.values()) - item.own_variables
    elif isinstance(item, (Step, *_PLAIN)):
        for name in _names_of(kind):
            _add_variables(getattr(item, name), found)


def totals_of(item: Any) -> list[Total]:
    """Return the sums over contents of buffers that a rank's step has."""
    if type(item) in (int, str):
        return []
    if isinstance(item, Expr):
        return list(item.totals()[1])
    if isinstance(item, tuple):
        return [total for part in item for total in totals_of(part)]
    if isinstance(item, (Step, *_PLAIN)):
        return [total for name in _names_of(type(item)) for total in totals_of(getattr(item, name))]
    return []


def differing(dtypes: Sequence[str]) -> Iterator[str]:
    if len(set(dtypes)) > 1:
        yield f"dtypes differ: {', '.join(dtypes)}"
