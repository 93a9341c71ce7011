"""Steps with a body: loops, which are unrolled before a run, and tiles of a persistent kernel, which are not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar, cast

import numpy as np

from weft.schedule.expr import Expr, Index, Values
from weft.schedule.kernels import TileKernel
from weft.schedule.steps.base import CounterId, Counters, Step, substitute
from weft.schedule.steps.computing import Compute
from weft.schedule.steps.copies import Copy
from weft.schedule.steps.signals import Set

State = TypeVar("State")
Kind = TypeVar("Kind", bound=Step)


class _Repeated(Step):
    """A step that repeats its body. In the body, the number of the repetition is a variable."""

    __slots__ = ()
    index: str
    body: tuple[Step, ...]

    @property
    def inner(self) -> tuple[Step, ...]:
        return self.body

    @property
    def own_variables(self) -> frozenset[str]:
        return frozenset({self.index})


@dataclass(frozen=True, slots=True)
class For(_Repeated):
    """A loop: run `body` for `index` = 0 .. extent - 1, in order.

    index: the name of the variable that has this number in the body.
    """

    kind: ClassVar[str] = "for"
    index: str
    extent: Index
    body: tuple[Step, ...]

    def substitute(self, values: Values, partially_evaluated: bool) -> Step:
        return self  # `unrolled` evaluates the steps of each iteration

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        raise ValueError(f"a loop has no name in a timeline: unroll it with Schedule.of_rank first: {self}")

    def __str__(self) -> str:
        return f"for {self.index} in 0..{self.extent}: {_inside(self.body)}"


@dataclass(frozen=True, slots=True)
class Tiles(_Repeated):
    """The tiles of a persistent kernel: run `body` for `index` = 0 .. extent - 1, many tiles at a time.

    Tiles start in order of their index, but nothing else orders them. The steps of one tile run in order. All tiles
    begin after the previous step of the lane and end before its next step. The body may have `Copy`, `Compute` and
    `Set` steps.

    The body cannot wait: the number of concurrent tiles is unknown, so a tile might wait for a tile that cannot start
    yet.

    kernel: the GPU kernel that runs all tiles, with its parameters (`weft.schedule.kernels`).
    """

    kind: ClassVar[str] = "tiles"
    kernel: TileKernel
    index: str
    extent: Index
    body: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, TileKernel):
            raise ValueError(
                f"tiles of {self.kernel!r}: the kernel must be a TileKernel, from weft.schedule.kernels or your own"
            )
        for step in self.body:
            if not isinstance(step, Copy | Compute | Set):
                raise ValueError(f"kernel {self.kernel.name}: tiles may only copy, compute and set, not {str(step)!r}")

    @property
    def tile_kernel(self) -> TileKernel:
        return self.kernel

    @property
    def inner_sets(self) -> tuple[Set, ...]:
        """The `Set` steps in the body."""
        return tuple(step for step in self.body if isinstance(step, Set))

    @property
    def work(self) -> tuple[Copy | Compute, ...]:
        """The copies and computations in the body."""
        return tuple(step for step in self.body if not isinstance(step, Set))  # type: ignore[misc]

    def sets(self) -> Mapping[CounterId, int]:
        found: Counters = Counter()
        for inner in self.inner_sets:
            for (at, index), times in counted(self, inner.at, inner.index):
                found[at, inner.signal, index] += times
        return found

    def only_sets(self) -> Tiles | None:
        return replace(self, body=self.inner_sets) if self.inner_sets else None

    @property
    def is_empty(self) -> bool:
        return self.extent == 0

    def substitute(self, values: Values, partially_evaluated: bool) -> Step:
        kernel, extent = (
            substitute(one, values, partially_evaluated=partially_evaluated) for one in (self.kernel, self.extent)
        )
        return replace(self, kernel=kernel, extent=extent, body=substitute(self.body, values, partially_evaluated=True))

    def tile(self, number: int) -> tuple[Step, ...]:
        """Return the steps of tile `number`, with numbers in place of expressions. This `Tiles` step must have no
        variable except the index of the tile.
        """
        body: tuple[Step, ...] = substitute(self.body, {self.index: number})
        return body

    def span(self, at: Callable[[Index], str], number: Callable[[Index], int]) -> str:
        return self.kernel.name

    def __str__(self) -> str:
        return f"tiles of {self.kernel.name}, {self.index} in 0..{self.extent}: {_inside(self.body)}"


def counted(tiles: Tiles, *numbers: Index, values: Values | None = None) -> list[tuple[tuple[int, ...], int]]:
    """Evaluate the expressions `numbers`, such as the sizes of a tile, for each tile. Count the tiles with equal
    results.

    Return a list of (values of `numbers`, number of tiles), sorted by values.

    tiles: the step. Its extent must be a number, not an expression.
    values: the values of the other variables in the body; None if the index of the tile is the only variable.
    """
    extent = cast(int, tiles.extent)
    if extent == 0:
        return []
    if not any(isinstance(number, Expr) for number in numbers):
        return [(cast(tuple[int, ...], numbers), extent)]
    # Expressions are usually periodic in the tile's index, so it is enough to evaluate one period.
    period = math.lcm(*(n.period(tiles.index) for n in numbers if isinstance(n, Expr)))
    at = np.arange(min(period, extent) or extent)
    turns = extent // len(at) + (at < extent % len(at))
    columns = [n.evaluated_over({**(values or {}), tiles.index: at}) if isinstance(n, Expr) else n for n in numbers]
    return occurring(np.stack([np.broadcast_to(column, at.shape) for column in columns]), turns)


def occurring(table: np.ndarray, times: np.ndarray) -> list[tuple[tuple[int, ...], int]]:
    """Count the tiles that have equal values. Return (values, number of tiles) for each distinct column of `table`,
    sorted by values.

    table: values of tiles. Each column stands for one or more tiles that have its values, and columns may be equal.
    times: for each column of `table`, its number of tiles.
    """
    order = np.lexsort(table[::-1])
    table = table[:, order]
    begins = np.flatnonzero(np.r_[True, (table[:, 1:] != table[:, :-1]).any(0)])
    counts = np.add.reduceat(times[order], begins).tolist()
    return [(tuple(values), n) for values, n in zip(table[:, begins].T.tolist(), counts, strict=True)]


def _inside(body: tuple[Step, ...]) -> str:
    return "; ".join(" ".join(str(step).split()) for step in body)


def walk(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield each step once: a loop, then the steps inside it. A `Tiles` step is yielded without its body."""
    for step in steps:
        yield step
        if isinstance(step, For):
            yield from walk(step.body)


def of_kind(steps: Iterable[Step], kind: type[Kind]) -> list[Kind]:
    """Return the steps that are instances of `kind`."""
    return [step for step in steps if isinstance(step, kind)]


def map_steps(steps: Iterable[Step], change: Callable[[Step], Step | None]) -> tuple[Step, ...]:
    """Return `steps` with each step replaced by `change(step)`, or removed if the result is None.

    `change` is called for the steps inside loops, not for the loops themselves. A `Tiles` step is passed as a whole.
    """
    changed = (
        replace(step, body=map_steps(step.body, change)) if isinstance(step, For) else change(step) for step in steps
    )
    return tuple(step for step in changed if step is not None)


def flattened(
    steps: Iterable[Step], state: State, turns: Callable[[For, State], Iterable[State]]
) -> Iterator[tuple[Step, State]]:
    """Yield (step, state) for each execution of each step, with loops unrolled. A `Tiles` step is yielded without its
    body.

    A state is a value of the caller that describes the iterations around a step, such as the values of the loop indices.

    state: the state outside of all loops.
    turns: a function that returns the state in each iteration of a loop, given the loop and the state around it.
    """
    for step in steps:
        if isinstance(step, For):
            for inside in turns(step, state):
                yield from flattened(step.body, inside, turns)
        else:
            yield step, state


def iterations(steps: Iterable[Step], values: Values) -> Iterator[tuple[Step, Values]]:
    """Yield (step, values of its variables) for each execution of each step, with loops unrolled.

    The variables are the keys of `values` and the indices of the loops around the step. A `Tiles` step is yielded
    without its body.
    """

    def turns(loop: For, around: Values) -> Iterator[Values]:
        return ({**around, loop.index: i} for i in range(substitute(loop.extent, around)))

    return flattened(steps, values, turns)


def unrolled(steps: Iterable[Step], values: Values, *, partially_evaluated: bool = False) -> tuple[Step, ...]:
    """Return `steps` with loops unrolled and expressions evaluated. `Tiles` steps are kept.

    A variable without a value in `values` raises `ValueError`. With `partially_evaluated`, the variable stays.
    """
    return tuple(
        substitute(step, known, partially_evaluated=partially_evaluated) for step, known in iterations(steps, values)
    )
