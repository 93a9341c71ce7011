"""The steps of a schedule, counted: how often a rank runs each distinct step. The planner prices each of them once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from weft.schedule import Region, Schedule, Step, Tiles
from weft.schedule.expr import Values
from weft.schedule.steps import iterations, substitute
from weft.sim.uses import Operand
from weft.sim.vectorised import key_of, values_of_ranks


@dataclass(frozen=True)
class Priced:
    """A step with the sizes of its operands, but without offsets: all that determines the step's cost."""

    step: Step
    operands: tuple[Operand, ...]


class Counts:
    """The number of occurrences of each distinct step in the lanes of rank 0, without steps on empty regions.

    Steps that differ only in offsets are not distinct.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.steps = 0
        self.grouped = 0  # the number of executions of `Tiles` steps with matmuls
        self.even = True  # True while no size depends on the rank
        self._values, self._world = values_of_ranks(schedule)[0], schedule.world_size
        self._buffers = {buffer.name: buffer for buffer in schedule.buffers}
        self._operands: dict[tuple, Operand] = {}
        self._known: dict[tuple, Priced | None] = {}  # by `key_of`
        self._first: dict[tuple, Priced] = {}  # by kind, settings and operands

    def of_lane(self, steps: Sequence[Step]) -> Counter[Priced]:
        times: Counter[int] = Counter()  # keys are ids, because hashing a step visits all its fields
        for step, values in iterations(steps, self._values):
            if step.tile_kernel:
                if not substitute(cast(Tiles, step).extent, values):
                    continue
                self.grouped += any(inner.multiplies for inner in step.inner)
            # Test `copies_by` and `multiplies` first for speed: most steps are copies or GEMMs, and `decisive` is
            # slower.
            elif step.copies_by or step.multiplies or step.decisive:
                if (priced := self._priced(step, values)) is None:
                    continue
                times[id(priced)] += 1
            self.steps += 1
        return Counter({priced: times[id(priced)] for priced in self._first.values() if id(priced) in times})

    def _priced(self, step: Step, values: Values) -> Priced | None:
        """Return the step as a `Priced`; None if it has nothing to do."""
        if values is not self._values:
            return self._in_numbers(step, values)
        key = key_of(step)
        if key not in self._known:
            self._known[key] = self._in_numbers(step, values)
        return self._known[key]

    def _in_numbers(self, step: Step, values: Values) -> Priced | None:
        operands = tuple(self._operand(region, values) for region in step.regions)
        if not step.meets and any(0 in (operands[number].rows, operands[number].cols) for number in step.decisive):
            return None
        sent = enumerate(substitute(step.sizes, values))
        operands += tuple(operands[0]._replace(rows=rows, at=to) for to, rows in sent)
        kind = (type(step), step.settings, operands)
        return self._first.setdefault(kind, Priced(step, operands))

    def _operand(self, region: Region, values: Values) -> Operand:
        key = (region.buffer, region.rows, region.cols, region.at)
        if (known := self._operands.get(key)) is not None:
            return known
        buffer = self._buffers[region.buffer]
        self.even &= isinstance(region.rows, int) and isinstance(region.cols, int)
        rows, cols, at = (substitute(n, values) for n in (region.rows, region.cols, region.at))
        found = Operand(rows, cols, buffer.dtype, at % self._world, cols == buffer.cols)
        if values is self._values:
            self._operands[key] = found
        return found
