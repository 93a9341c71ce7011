"""What a kind of step says of itself, once: whoever checks, orders, prices, prints or stores steps goes by that.

A new kind is a frozen dataclass that derives from `Step`, in a file of its own. It has the regions it touches, and numbers or
expressions, as fields. What runs it is an entry in each executor (`weft.runtime.cpu.steps.bind`,
`weft.runtime.cuda.compile.emit`), and, if it is a step of serial schedules, in `weft.runtime.unfused.bind`, which calls the library
instead of an executor; one that has none refuses it by name. The simulator prices it by the memory that it moves, unless it has an
entry in `weft.sim.costs`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
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
"""By the name that files call it by."""
_NOTHING_SET: Mapping[CounterId, int] = MappingProxyType({})
_PLAIN = (Region, Norm, TileKernel)  # values of which nothing matters but their fields


@dataclass(frozen=True, slots=True)
class Awaited:
    """`count` sets of a counter of the own rank; with `previous`, those of the run before."""

    signal: str
    index: Index
    count: Index
    previous: bool


class Step:
    """What holds unless a kind says otherwise: work for the device that touches no memory, sets nothing and waits for nothing."""

    __slots__ = ()
    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    def accesses(self) -> tuple[Access, ...]:
        """The regions that it reads, writes or updates, its operands in order."""
        return ()

    def sets(self) -> Mapping[CounterId, int]:
        """Of a step in numbers: how often it adds one to which counters."""
        return _NOTHING_SET

    @property
    def awaits(self) -> Awaited | None:
        """What it stands still for."""
        return None

    @property
    def meets(self) -> bool:
        """Whether it begins when all ranks have come to it."""
        return False

    @property
    def occupies(self) -> bool:
        """Whether it keeps a queue busy, or the host: other lanes are given theirs before this one gets more."""
        return True

    @property
    def needs_unit(self) -> bool:
        """Whether it takes a compute unit."""
        return False

    @property
    def in_place(self) -> bool:
        """Whether it may write exactly what it reads."""
        return False

    @property
    def decisive(self) -> tuple[int, ...]:
        """The numbers of those operands without whose elements there is nothing to do."""
        return tuple(number for number, access in enumerate(self.accesses()) if access.writes)

    @property
    def is_empty(self) -> bool:
        """Of a step in numbers: whether there is nothing to do."""
        accesses = self.accesses()
        return any(is_empty(accesses[number].region) for number in self.decisive)

    @property
    def inner(self) -> tuple[Step, ...]:
        """Of a loop or a kernel: what it does again and again."""
        return ()

    @property
    def own_variables(self) -> frozenset[str]:
        """Those that have a value only in its body."""
        return frozenset()

    @property
    def settings(self) -> tuple[object, ...]:
        """What it says beside where: steps with the same ones, on operands of the same sizes, cost the same."""
        return tuple(one for one in self.values() if isinstance(one, str | bool | float | None))

    def values(self) -> tuple[Any, ...]:
        """Of its fields, in order."""
        return values_of(self)

    def with_fields(self, change: Callable[[Any], Any]) -> Self:
        """With each field as `change` makes it."""
        return type(self)(*[change(getattr(self, name)) for name in _names_of(type(self))])

    def put_in(self, values: Values, partly: bool) -> Step:
        """With numbers for its variables; with `partly`, others are left."""
        return _fields_put_in(self, values, partly)

    def faults(self, where: Declared) -> Iterator[str]:
        """What is wrong with a step in numbers whose regions are all inside their buffers."""
        yield from ()

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        """Its name in a timeline, without rows and columns. at: "@2" for another rank than its own. number: an index's value."""
        return " ".join([self.kind, *(f"{a.region.buffer}{at(a.region.at)}" for a in self.accesses() if a.writes)])

    def __str__(self) -> str:
        parts = [str(access.region) for access in self.accesses()]
        return f"{self.kind:<7} {', '.join(parts)}"


def put_in(item: Any, values: Values, *, partly: bool = False) -> Any:
    """A step, region, kernel or index in numbers: its variables have these values. With `partly`, others are left."""
    if type(item) in (int, str):  # most are
        return item
    if isinstance(item, Expr):
        return item.partly(values) if partly else item.evaluate(values)
    if isinstance(item, tuple):
        return tuple(put_in(part, values, partly=partly) for part in item)
    if isinstance(item, Step):
        return item.put_in(values, partly)
    return _fields_put_in(item, values, partly) if isinstance(item, _PLAIN) else item


def _fields_put_in(item: Any, values: Values, partly: bool) -> Any:
    """Itself, if that changes nothing."""
    kind = type(item)
    old = values_of(item)
    # As `put_in`, which is called for the others only: a large schedule has a million values.
    new = [
        one
        if (of := type(one)) is int or of is str or of is bool
        else one.evaluate(values)
        if of is Expr and not partly
        else put_in(one, values, partly=partly)
        for one in old
    ]
    return item if all(map(operator.is_, old, new)) else kind(*new)


_NAMES: dict[type, tuple[str, ...]] = {}


def _names_of(kind: Any) -> tuple[str, ...]:
    """Of its fields."""
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in fields(kind))
    return _NAMES[kind]


_VALUES: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


def values_of(item: Any) -> tuple[Any, ...]:
    """Of its fields, in order."""
    found = _VALUES.get(type(item))
    if found is None:
        found = _VALUES[type(item)] = getter(_names_of(type(item)))
    return found(item)


def getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Of these attributes: a large schedule has a million."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda item: tuple([getattr(item, name) for name in names])


def variables_of(item: Any) -> Set[str]:
    """The names in all expressions of a step, region or index but its own loop's."""
    found = set[str]()
    _add_variables(item, found)
    return found


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
    """The sums over what buffers hold in a step of a rank."""
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
