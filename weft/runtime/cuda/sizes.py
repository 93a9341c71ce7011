"""Reads of dynamic sizes from a buffer. There are three kinds of `Read` steps (`weft.schedule.steps`):

- by="device": one small kernel computes the first rows and row counts of all copies of the lane, and stores them where the
  copies read them.
- by="host" or "known": the CPU waits until the buffer's contents have arrived; the watching thread keeps the deadline. Then the CPU
  passes the sizes to copy engines, and allocates outputs with exactly the arrived rows.
- by="meanwhile": the CPU allocates outputs for an estimated number of rows plus a margin, issues the GEMMs, and only then
  waits for the sizes. If an output is too small, the CPU allocates a larger output and issues the GEMMs again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from weft import _core
from weft.kernels import totals as device_code
from weft.runtime.cuda.context import Context, Tensors
from weft.runtime.cuda.kernel_call import Base, kernel_call, loaded_kernel
from weft.schedule import Compute, Copy, Expr, Index, Tiles
from weft.schedule.expr import Total
from weft.schedule.steps import substitute, variables_of
from weft.symm.lasting import lasting

_BLOCK = 128


def is_dynamic(step: Any) -> bool:
    """True if a size or an offset of `step` is known only at run time."""
    return isinstance(step, Copy | Compute | Tiles) and bool(variables_of(step))


class Totals:
    """A kernel that computes dynamic sizes and positions on the device.

    held: the int64 device tensor of counts from which the kernel computes the sizes.
    indices: the expressions of the sizes to compute. Each is a constant plus sums over elements of `held`.
    tables: (address, number of elements) of one or two tables of the caller, with which the same launch fills `held`. With no
        table, `held` is already filled.
    numbers: the results, int64 on the device, one for each index.
    """

    def __init__(self, held: torch.Tensor, indices: Sequence[Index], tables: Sequence[tuple[Base, int]] = ()) -> None:
        parts = [index.totals() if isinstance(index, Expr) else (index, ()) for index in indices]
        most = max((len(terms) for _, terms in parts), default=0)
        rows = [[_term(t) for t in terms] + [(0, 0, 1)] * (most - len(terms)) for _, terms in parts]
        device = held.device
        listed = rows, [constant for constant, _ in parts], [0] * len(parts)
        self._terms, self._constants, self.numbers = lasting(
            device, lambda: [torch.tensor(one, dtype=torch.int64, device=device) for one in listed]
        )
        self.tables = tables
        self._compiled = _compiled_totals(device, bool(tables))
        self._arguments = (held, self._terms, self._constants, self.numbers, most)

    def launch(self, bases: list[int], stream: int) -> None:
        filled = self._filled([(bases[base.number] + base.offset, count) for base, count in self.tables])
        self._compiled[len(self.numbers), 1, 1](*self._arguments, *filled, _BLOCK, bool(self.tables), stream=stream)

    def record(self, program: _core.StreamProgram, stream: int) -> bool:
        """Record the launch of the kernel into `program`, on the program's stream number `stream`. Return False if only Triton
        can launch the kernel.
        """
        arguments = (*self._arguments, *self._filled(self.tables))
        call = kernel_call(program, self._compiled, len(self.numbers), arguments)
        if call is not None:
            program.launch(stream, [(1, call)])
        return call is not None

    def address(self, number: int) -> int:
        return self.numbers.data_ptr() + 8 * number

    def _filled(self, tables: Sequence[tuple[Any, int]]) -> tuple[Any, ...]:
        """Return the kernel's arguments for `tables`: addresses and numbers of elements."""
        return (*itertools.chain(*tables), *[0] * (4 - 2 * len(tables)))


def _term(total: Total) -> tuple[int, int, int]:
    return total.first, max(0, -(-(total.end - total.first) // total.step)), total.step


@lru_cache(maxsize=16)
def _compiled_totals(device: torch.device, tables: bool) -> Any:
    constants = {"BLOCK": _BLOCK, "TABLES": tables}
    return loaded_kernel(device, device_code.totals_kernel, [torch.int64] * 4 + [1] * 5, 1, constants)


class HostRead:
    """A `Read` step in which the CPU reads a buffer, once in a run. The CPU waits for the buffer's contents, then allocates the
    outputs whose number of rows they determine.

    rows_at: as for `Regions`.
    """

    def __init__(self, context: Context, buffer: str, rows_at: Mapping[str, int]) -> None:
        self.context, self.run, self.buffer, self._held = context, context.run, buffer, context.own[buffer]
        self._rows_at = rows_at
        self._copy = torch.zeros(self._held.shape, dtype=torch.int64, pin_memory=True)
        self._come = torch.cuda.Event()

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        context, run = self.context, self.run
        if self.buffer in run.known:
            return
        self._copy.copy_(self._held, non_blocking=True)
        self._come.record()
        self._come.synchronize()  # at the deadline, the watching thread ends this wait
        context.check()
        run.known[self.buffer] = tuple(self._copy.flatten().tolist())
        # Allocate outputs on the caller's stream, whichever lane reads. This stream orders the work that fills them
        # before the next use of their memory.
        with torch.cuda.stream(run.caller):
            for i, buffer in enumerate(context.given):
                make = tensors[buffer.name]
                if callable(make) and variables_of(buffer.rows) <= run.known.keys():
                    tensors[buffer.name] = run.made[buffer.name] = made = make(substitute(buffer.rows, run.known))
                    bases[i], bases[self._rows_at[buffer.name]] = made.data_ptr(), made.shape[0]


class ReadAhead:
    """A read of dynamic sizes for which the CPU waits only after it has issued the GEMMs.

    `begin` allocates outputs for an estimated number of rows plus a margin. Then the GEMMs are issued. `settle` waits for the
    sizes, and slices the outputs to the rows that arrived. If an output is too small, `settle` allocates a larger output and
    issues the GEMMs again. The operands of the GEMMs are still intact, because the lane allows peers to overwrite them only
    later.

    rows_at: as for `Regions`.
    """

    def __init__(self, context: Context, buffer: str, rows_at: Mapping[str, int]) -> None:
        self.context, self.run, self.buffer, self._held = context, context.run, buffer, context.own[buffer]
        self.gemms: list[Callable[[Tensors, list[int]], None]] = []
        self._copy = torch.zeros(self._held.shape, dtype=torch.int64, pin_memory=True)
        self._come = torch.cuda.Event()
        expected = next(held.expected[context.rank] for held in context.schedule.contents if held.buffer == buffer)
        self._outputs = [
            (i, rows_at[b.name], b.name, b.rows)
            for i, b in enumerate(context.given)
            if variables_of(b.rows) == {buffer}
        ]
        self._inputs = {b.name: b.rows for b in context.given if b.role == "input" and variables_of(b.rows) == {buffer}}
        given = sum(substitute(rows, {buffer: expected}) for rows in self._inputs.values())
        # For each output, its rows for a number of input rows. Runs with more or fewer input rows get proportionally more or fewer.
        self._room = {
            name: (_with_room(substitute(rows, {buffer: expected})), given) for *_, name, rows in self._outputs
        }
        self._makers: dict[str, Callable[[int], torch.Tensor]] = {}  # the functions for outputs of this run
        self._given = 0  # the number of input rows of this run

    def begin(self, tensors: Tensors, bases: list[int]) -> None:
        self._copy.copy_(self._held, non_blocking=True)
        self._come.record()
        given: dict[str, Any] = {name: tensors[name] for *_, name, _ in self._outputs}
        self._makers = {name: make for name, make in given.items() if callable(make)}
        self._given = sum(len(tensors[name]) for name in self._inputs)
        self._make(tensors, bases, {name: self._rows_for(*room) for name, room in self._room.items()})

    def settle(self, tensors: Tensors, bases: list[int]) -> None:
        context, run = self.context, self.run
        self._come.synchronize()  # at the deadline, the watching thread ends this wait
        context.check()
        run.known[self.buffer] = tuple(self._copy.flatten().tolist())
        came = {name: substitute(rows, run.known) for *_, name, rows in self._outputs if name in self._makers}
        lacking = {name: rows for name, rows in came.items() if rows > tensors[name].shape[0]}
        if lacking:
            self._make(tensors, bases, lacking)
            for gemms in self.gemms:
                gemms(tensors, bases)
        for name, rows in came.items():
            run.made[name] = tensors[name][:rows]
            # Keep the number of rows as long as it is large enough, because the allocator has a block of this size.
            room = self._rows_for(*self._room[name])
            if not room // 2 <= rows <= room:
                self._room[name] = _with_room(rows), self._given
        self._makers = {}

    def _rows_for(self, rows: int, given: int) -> int:
        """Return the number of rows of an output in this run, given that it has `rows` rows for `given` input rows."""
        return -(-rows * self._given // given) if given and self._given else rows

    def _make(self, tensors: Tensors, bases: list[int], rows: dict[str, int]) -> None:
        with torch.cuda.stream(self.run.caller):  # see HostRead
            for i, rows_at, name, _ in self._outputs:
                if name in self._makers and name in rows:
                    tensors[name] = made = self._makers[name](rows[name])
                    bases[i], bases[rows_at] = made.data_ptr(), made.shape[0]


def _with_room(rows: int) -> int:
    return rows + rows // 8 + 16


class DynamicCopy:
    """A copy by a copy engine, of a dynamic size that the CPU has read."""

    def __init__(
        self, context: Context, step: Copy, source: tuple[int, int, int], target: tuple[int, int, int]
    ) -> None:
        """source, target: the positions of the two buffers, each (index of the base address, offset in bytes, row pitch in
        bytes).
        """
        self.context, self.run, self.step, self.source, self.target = context, context.run, step, source, target

    def __call__(self, tensors: Tensors, bases: list[int]) -> None:
        known, context, (src, dst) = self.run.known, self.context, (self.step.src, self.step.dst)
        first, rows, begin = (n.evaluate(known) if isinstance(n, Expr) else n for n in (src.row, src.rows, dst.row))
        context.require_inside(src.buffer, first, rows, tensors)
        context.require_inside(dst.buffer, begin, rows, tensors)
        if not rows:
            return
        (source, begins, pitch), (target, to_begins, to_pitch) = self.source, self.target
        program = _core.StreamProgram(2, 1, 0)
        width = int(src.cols) * pitch // context.buffers[src.buffer].cols
        program.copy(0, 1, to_begins + begin * to_pitch, to_pitch, 0, begins + first * pitch, pitch, width, rows)
        stream = torch._C._cuda_getCurrentRawStream(context.device.index)
        program.run(0, 1, [bases[source], bases[target]], [stream])
