"""The base class of steps. Checks, the simulator and printing read the properties of a step. Each kind of step
overrides them.

To add a kind, derive a frozen dataclass from `Step`, in a new file. Its fields are the regions that it accesses,
numbers, and expressions. To run the new kind, add an entry to each executor: `weft.runtime.cpu.steps.bind` and
`weft.runtime.cuda.compile.emit`. For use in serial schedules, also add an entry to `weft.runtime.unfused.serial.bind`,
which calls NCCL and cuBLAS. An executor without an entry refuses the step. The simulator derives a step's time from the
bytes that it reads and writes, unless a cost is registered with `weft.sim.costs.price`.

In an "evaluated" step, the expressions have been replaced by their values for one rank.
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
"""(rank that owns the counter, name of its signals, index), as numbers."""
Counters: TypeAlias = Counter[CounterId]
KINDS: dict[str, type[Step]] = {}
"""The step classes, by the name that JSON files use for them."""
_NOTHING_SET: Mapping[CounterId, int] = MappingProxyType({})
_PLAIN = (Region, Norm, TileKernel)  # classes whose values are defined by their fields


@dataclass(frozen=True, slots=True)
class Awaited:
    """The condition for which a step waits: a counter, and how often this counter must have been set. previous: True to
    count the sets of the previous run, False to count the sets of this run.
    """

    signal: str
    index: Index
    count: Index
    previous: bool


class Step:
    """The base class of steps. By default a step occupies its lane, and has neither memory accesses nor signals."""

    __slots__ = ()
    kind: ClassVar[str]
    is_signal: ClassVar[bool] = False
    """True if the step only sets a signal or waits for one."""

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    def accesses(self) -> tuple[Access, ...]:
        """Return the accesses of the step: one for each region that it reads, writes or updates, in the order of its
        operands.
        """
        return ()

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of `accesses()`, in order."""
        return tuple([access.region for access in self.accesses()])

    def sets(self) -> Mapping[CounterId, int]:
        """Return {counter: how often the step increments the counter}. The step must be evaluated: it has no
        expressions left.
        """
        return _NOTHING_SET

    def only_sets(self) -> Step | None:
        """Return a step that increments the same counters as this step, and does no other work; None if this step
        increments none. A CPU rank needs to know only these steps of its peers.
        """
        return self if self.sets() else None

    @property
    def awaits(self) -> Awaited | None:
        """The counter that the step waits for; None if it does not wait."""
        return None

    @property
    def meets(self) -> bool:
        """True if the step begins only when all ranks have reached it, like a collective."""
        return False

    @property
    def occupies(self) -> bool:
        """True if the step keeps a queue or the CPU busy, unlike a signal.

        After such a step the CPU issues steps of other lanes before it continues with this lane.
        """
        return True

    @property
    def needs_unit(self) -> bool:
        """True if the step runs on compute units."""
        return False

    @property
    def copies_by(self) -> str:
        """The engine of a copy: "dma" or "kernel"; "" if the step is not a copy."""
        return ""

    @property
    def multiplies(self) -> bool:
        """True if the step is a GEMM."""
        return False

    @property
    def tile_kernel(self) -> TileKernel | None:
        """The kernel that computes all tiles of the step; None if the step has no tiles."""
        return None

    @property
    def in_place(self) -> bool:
        """True if the step may write to the same region that it reads. Partial overlaps are never allowed."""
        return False

    @property
    def decisive(self) -> tuple[int, ...]:
        """The indices, in `accesses()`, of the regions that decide if the step has work to do. If one of these regions has no
        elements, the step does nothing (`is_empty`). By default, they are the regions that the step writes.
        """
        return tuple(number for number, access in enumerate(self.accesses()) if access.writes)

    @property
    def is_empty(self) -> bool:
        """True if the step has nothing to do. The step must be evaluated: it has no expressions left."""
        accesses = self.accesses()
        return any(is_empty(accesses[number].region) for number in self.decisive)

    @property
    def sizes(self) -> tuple[Index, ...]:
        """The number of rows that the step sends to each rank; () if all ranks get the same number of rows."""
        return ()

    @property
    def inner(self) -> tuple[Step, ...]:
        """The steps in the body of a loop or a tile kernel; () for other steps."""
        return ()

    @property
    def own_variables(self) -> frozenset[str]:
        """The variables that only the step's body may use: the index of a loop or of tiles."""
        return frozenset()

    @property
    def settings(self) -> tuple[object, ...]:
        """The values of the fields that are strings, bools, floats or None. Steps of one kind with equal settings and
        equal operand sizes take equal time.
        """
        return tuple(one for one in self.values() if isinstance(one, str | bool | float | None))

    def values(self) -> tuple[Any, ...]:
        """Return the values of the fields, in order."""
        return values_of(self)

    def with_fields(self, change: Callable[[Any], Any]) -> Self:
        """Return a copy with `change` applied to each field."""
        return type(self)(*[change(getattr(self, name)) for name in _names_of(type(self))])

    def substitute(self, values: Values, partially_evaluated: bool) -> Step:
        """Return the step with its expressions evaluated.

        A variable without a value in `values` raises `ValueError`, or stays if `partially_evaluated` is True.
        """
        return _fields_substituted(self, values, partially_evaluated)

    def faults(self, where: Declared) -> Iterator[str]:
        """Yield a text for each error in the step. The step must have numbers in place of expressions, and all its
        regions must be inside their buffers.
        """
        yield from ()

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        """Return the step's name in a timeline, without rows and columns.

        at: a function that returns "@2" for rank 2, and "" for the step's own rank.
        number: a function that evaluates an index.
        """
        return " ".join([self.kind, *(f"{a.region.buffer}{at(a.region.at)}" for a in self.accesses() if a.writes)])

    def __str__(self) -> str:
        parts = [str(access.region) for access in self.accesses()]
        return f"{self.kind:<7} {', '.join(parts)}"


def substitute(item: Any, values: Values, *, partially_evaluated: bool = False) -> Any:
    """Return a step, region, kernel or index with its expressions evaluated.

    A variable without a value in `values` raises `ValueError`. With `partially_evaluated`, the variable stays.
    """
    if type(item) in (int, str):  # the most frequent types
        return item
    if isinstance(item, Expr):
        return item.partially_evaluated(values) if partially_evaluated else item.evaluate(values)
    if isinstance(item, tuple):
        return tuple(substitute(part, values, partially_evaluated=partially_evaluated) for part in item)
    if isinstance(item, Step):
        return item.substitute(values, partially_evaluated)
    return _fields_substituted(item, values, partially_evaluated) if isinstance(item, _PLAIN) else item


def _fields_substituted(item: Any, values: Values, partially_evaluated: bool) -> Any:
    """Return a copy of `item` with the expressions in its fields evaluated; `item` itself if nothing changes."""
    kind = type(item)
    old = values_of(item)
    # Evaluate the common types here, without calling `substitute`, because a large schedule has a million fields.
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
    """Return a function that returns the attributes `names` of an object as a tuple."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda item: tuple([getattr(item, name) for name in names])


def variables_of(item: Any) -> Set[str]:
    """Return the variables in all expressions of a step, region or index, except the step's own loop index."""
    found = set[str]()
    _add_variables(item, found)
    return found


def depends(item: Any, names: Collection[str]) -> bool:
    """Return True if an expression of a step, region or index uses one of the variables `names`."""
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
    if kind is int or kind is str:  # the most frequent types
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
    """Return the `total(...)` terms in the expressions of `item`, a step that is evaluated for one rank."""
    if type(item) in (int, str):
        return []
    if isinstance(item, Expr):
        return list(item.totals()[1])
    if isinstance(item, tuple):
        return [total for part in item for total in totals_of(part)]
    if isinstance(item, (Step, *_PLAIN)):
        return [total for name in _names_of(type(item)) for total in totals_of(getattr(item, name))]
    return []


def differing_regions(src: Region, dst: Region, where: Declared) -> Iterator[str]:
    """Yield the faults of a copy from `src` to `dst` whose dtypes or shapes differ."""
    yield from differing([where.dtype(src), where.dtype(dst)])
    given, wanted = (src.rows, src.cols), (dst.rows, dst.cols)
    if given != wanted:
        yield f"src has shape {list(given)}, but dst has {list(wanted)}: both must be equal"


def differing(dtypes: Sequence[str]) -> Iterator[str]:
    if len(set(dtypes)) > 1:
        yield f"dtypes differ: {', '.join(dtypes)}; they must be equal"
