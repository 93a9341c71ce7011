"""The parameters of an operator's tests, and functions that derive cases from a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from support.on_ranks import BF16, F16, F32
from support.operators.call import Case
from support.slow import slow


@dataclass(frozen=True)
class Row:
    """The parameters of an operator's tests.

    results: cases by name. Each is called `calls` times in a row, on groups of each size in `worlds`.
    more: pairs (number of ranks, case) whose results are checked too.
    every: (ranks, case, builders). All schedules of the case are tried; they must come from `builders`.
    gradients: (case, for each input True if it wants a gradient). An entry may be marked as slow.
    block: the schedule that `use` selects for eager calls with gradients.
    compiled_gradients: indices in `gradients`. `make test` compiles these entries. `make test-slow` compiles all entries
        on two ranks, and the first of these on other numbers of ranks.
    compiled: names in `results` of calls that torch.compile compiles.
    many: cases that are called with many sizes.
    layouts: cases whose operands are passed in other layouts.
    small: a case whose arguments are replaced by invalid arguments.
    late: cases of calls that some ranks never make.
    steps: (case, prefixes of the names of its steps in a timeline).
    """

    results: Mapping[str, Case]
    every: Sequence[Any]
    small: Case
    layouts: Sequence[Case]
    steps: Sequence[tuple[Case, set[str]]]
    late: Sequence[Case]
    calls: int = 2
    worlds: Sequence[int] = (1, 2, 4)
    more: Sequence[Any] = ()
    gradients: Sequence[Any] = ()
    compiled_gradients: Sequence[int] = (0,)
    block: str | None = None
    compiled: Sequence[Any] = ()
    many: Sequence[Case] = ()
    opcheck: Case | None = None


def values_of(entry: Any) -> tuple[Any, ...]:
    """Return the values of an entry, whether or not it is marked as slow."""
    values = entry.values if hasattr(entry, "marks") else entry
    return values if isinstance(values, tuple) else (values,)


def by(case: Case, *schedules: str | None) -> list[Case]:
    """Return `case` with each schedule."""
    return [replace(case, schedule=schedule) for schedule in schedules]


def apart(case: Any, *schedules: str | None) -> list[Any]:
    """Return `case` with each schedule, and with different sizes for each.

    The sizes differ because weft warns of a copy only once for each name and stride.
    """
    more = [replace(case, n=case.n + 16 * i, schedule=schedule) for i, schedule in enumerate(schedules)]
    return [replace(one, shape=(one.shape[0] + 24 * i, *one.shape[1:])) for i, one in enumerate(more)]


def dtypes(builders: Any, case: Any, most: int, *fast: Any, of: Sequence[Any] = (F32, BF16, F16)) -> list[Any]:
    """Return (ranks, case, builders) for several numbers of ranks, each with the next dtype of `of`.

    The product of all ranks and dtypes is not needed: the order of waits does not depend on the dtype, and rounding
    does not depend on the number of ranks.

    case, builders: functions of the number of ranks and the dtype.
    fast: the pairs (ranks, dtype) that `make test` tries; all others are slow.
    """
    worlds = [world for world in (1, 2, 3, 4, 8) if world <= most]
    pairs = sorted(
        {(world, i % len(of)) for i, world in enumerate(worlds)} | {(w, of.index(dtype)) for w, dtype in fast}
    )
    made = [((world, case(world, of[i]), builders(world, of[i])), (world, of[i]) in fast) for world, i in pairs]
    return [values if is_fast else slow(*values) for values, is_fast in made]
