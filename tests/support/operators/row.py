"""The parameters of an operator's tests, and cases made from a case."""

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

    results: cases by name, each called `calls` times in a row on each of `worlds` ranks. more: (ranks, case) beside them.
    every: (ranks, case, builders) of which every schedule is tried, and the builders that these come from.
    gradients: cases, and which inputs want a gradient, or such an entry marked as slow; data are made from `seeds`. block: the
    schedule for all that eager ones run.
    compiled_gradients: numbers of those that `make test` compiles; `make test-slow` compiles all on two ranks, the first of these
    on others.
    compiled: names of results that torch.compile calls.
    many, layouts: cases that are called with many sizes, and with operands that lie otherwise.
    small: a case whose arguments are replaced by wrong ones. late: calls to which ranks do not come.
    steps: cases, and how the names of their steps in a timeline begin.
    """

    results: Mapping[str, Case]
    every: Sequence[Any]
    small: Case
    layouts: Sequence[Case]
    steps: Sequence[tuple[Case, set[str]]]
    late: Sequence[Case]
    calls: int = 3
    worlds: Sequence[int] = (1, 2, 4)
    more: Sequence[Any] = ()
    gradients: Sequence[Any] = ()
    compiled_gradients: Sequence[int] = (0,)
    seeds: Sequence[int] = (1,)
    block: str | None = None
    compiled: Sequence[Any] = ()
    many: Sequence[Case] = ()
    opcheck: Case | None = None


def values_of(entry: Any) -> tuple[Any, ...]:
    """Return the values of an entry, marked or not."""
    values = entry.values if hasattr(entry, "marks") else entry
    return values if isinstance(values, tuple) else (values,)


def by(case: Case, *schedules: str | None) -> list[Case]:
    """Return `case` with each schedule."""
    return [replace(case, schedule=schedule) for schedule in schedules]


def apart(case: Any, *schedules: str | None) -> list[Any]:
    """Return `case` with each schedule, and with other sizes for each: a copy is warned of once for its name and strides."""
    more = [replace(case, n=case.n + 16 * i, schedule=schedule) for i, schedule in enumerate(schedules)]
    return [replace(one, shape=(one.shape[0] + 24 * i, *one.shape[1:])) for i, one in enumerate(more)]


def dtypes(builders: Any, case: Any, most: int, *fast: Any, of: Sequence[Any] = (F32, BF16, F16)) -> list[Any]:
    """Return (ranks, case, builders) for several numbers of ranks, the dtypes in turn; `make test` tries those that are `fast`.

    Ranks and dtypes matter apart from each other: what waits for what does not depend on a dtype, nor rounding on ranks.

    case, builders: functions of the number of ranks and the dtype.
    """
    worlds = [world for world in (1, 2, 3, 4, 8) if world <= most]
    pairs = sorted(
        {(world, i % len(of)) for i, world in enumerate(worlds)} | {(w, of.index(dtype)) for w, dtype in fast}
    )
    made = [((world, case(world, of[i]), builders(world, of[i])), (world, of[i]) in fast) for world, i in pairs]
    return [values if is_fast else slow(*values) for values, is_fast in made]
