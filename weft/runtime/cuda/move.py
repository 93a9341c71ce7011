"""The launcher of `weft.kernels.move`, a kernel that copies, waits for signals and sets signals. The launcher compiles all
variants before any stream waits for a peer. It allocates its tables of addresses once for each step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl

from weft import _core
from weft.kernels import move as device_code
from weft.runtime.cuda.kernel_call import Base, Count, kernel_call, loaded_kernel, record_one_of
from weft.schedule.steps import COPY_UNITS, ITEM_BYTES
from weft.symm.lasting import lasting

_ITEMS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_ADDED = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
_ALIGNMENT = 16  # the widest access, in bytes
_BLOCK_BYTES = 16384  # bytes in flight per program: 64 per thread
MAX_PROGRAMS = COPY_UNITS  # most programs of a copy, and so the most compute units that it occupies
_COPY_WARPS = 8


@dataclass(frozen=True, slots=True)
class CopyShape:
    """The shape of a copy: rows of `width` bytes, and the row pitches of source and target in bytes."""

    rows: int
    width: int
    source_pitch: int
    target_pitch: int


class Part(NamedTuple):
    """A further copy that a `CopyLaunch` makes after its first copy, with the same `CopyShape`.

    source: the offset of this copy's source from the first copy's source, in bytes.
    target: the address of this copy's target. With `relative`, the offset from the first copy's target, in bytes.
    sizes: for a dynamic size, the device address of the rows to copy (see `CopyLaunch`); 0 for a fixed size.
    """

    source: int
    target: int
    relative: bool = False
    sizes: int = 0


class CopyLaunch:
    """A launch of one kernel that sets signals, waits for signals, copies, sets signals, and waits again. All sets and
    waits are optional.

    sets_before, waits, sets, waits_after: the addresses of the flags (`weft.runtime.cuda.flags`) that the kernel sets or
        awaits, before and after the copy.
    targets: addresses of further targets for the same source.
    parts: further copies from the source's buffer, never together with `targets`.
    begins, passes, ends: pairs (address, number) for the thread that watches deadlines. The kernel stores the numbers, in
        32 bits, when it begins, when `waits` have ended, and when it ends.
    sizes: for a dynamic size, the device address of three numbers: first row of the source, first row of the target, and
        number of rows. `shape.rows` is then the number of rows of the target. 0 for a fixed size.
    early: True if the kernel may read the source before its waits end. This is allowed if no awaited signal stands for a write
        to the source.
    programs: the largest number of programs of the kernel.
    adds: the dtype of the elements if the copy adds to the target, otherwise "".
    """

    def __init__(
        self,
        device: torch.device,
        *,
        shape: CopyShape,
        targets: Sequence[int] = (),
        parts: Sequence[Part] = (),
        sets_before: Sequence[int] = (),
        waits: Sequence[int] = (),
        sets: Sequence[int] = (),
        waits_after: Sequence[int] = (),
        begins: Sequence[tuple[int, int]] = (),
        passes: Sequence[tuple[int, int]] = (),
        ends: Sequence[tuple[int, int]] = (),
        sizes: int = 0,
        early: bool = False,
        programs: int = MAX_PROGRAMS,
        adds: str = "",
    ) -> None:
        self._shape, self._item = shape, ITEM_BYTES[adds] if adds else 8
        numbers = [int(number) for part in parts for number in part]
        tables: list[Sequence[int]] = [targets, numbers, sets_before, waits, sets, waits_after]
        tables += [[number for pair in pairs for number in pair] for pairs in (begins, passes, ends)]
        listed = [*itertools.chain(*tables), 0]
        words = lasting(device, lambda: torch.tensor(listed, dtype=torch.int64, device=device))
        first = itertools.accumulate((len(table) for table in tables), initial=0)
        *listings, arrivals = [words[at:] for at in first]
        counts = [len(n) for n in (targets, parts, sets_before, waits, sets, waits_after, begins, passes, ends)]
        self._tables = (*itertools.chain(*zip(listings, counts, strict=True)), arrivals)
        self._sizes, self._early = sizes, int(early)
        blocks = (1 + len(parts)) * -(-shape.rows * shape.width // _BLOCK_BYTES)
        self._programs = max(1, min(programs, blocks))
        offsets = [offset for part in parts for offset in part[:2]]
        self._step = _greatest_power_of_two(shape.width, shape.source_pitch, shape.target_pitch, *targets, *offsets)
        # The caller's tensors may begin at any address. The widest variant handles most addresses, and the narrow
        # variants handle the others.
        narrow = {self._item} if adds else {min(self._step, 2), 1}
        self._variants = {step: _compiled_move(device, step, adds) for step in {self._step, *narrow}}

    def launch(
        self,
        source: int = 0,
        target: int = 0,
        source_rows: int = 0,
        target_rows: int | None = None,
        *,
        stream: int | None = None,
    ) -> None:
        """Launch the kernel.

        source, target: the addresses of the first copy.
        source_rows, target_rows: the number of rows in the buffers at `source` and `target`, needed with `sizes`. By default
            the target has `shape.rows`.
        stream: a stream's handle; by default the current stream.
        """
        step = self._step
        if (source | target) & (step - 1):
            step = min(step, _greatest_power_of_two(source, target))
            step = step if step in self._variants else max(one for one in self._variants if one <= step)
        compiled, constants = self._variants[step]
        arguments = self._arguments(step, source, target, source_rows, target_rows)
        compiled[self._programs, 1, 1](*arguments, *constants, stream=stream)

    def record(
        self,
        program: _core.StreamProgram,
        stream: int,
        source: int | Base,
        target: int | Base,
        source_rows: int | Count = 0,
        target_rows: int | Count | None = None,
    ) -> bool:
        """Record the launch of the copy kernel into `program`, on the program's stream number `stream`. Return False if only
        Triton can launch the kernel.

        source, target: addresses, or offsets from base addresses that each run sets. source_rows, target_rows: as for `launch`.
        """
        rows = source_rows, target_rows
        calls = [
            (step, kernel_call(program, compiled, self._programs, self._arguments(step, source, target, *rows)))
            for step, (compiled, _) in sorted(self._variants.items(), reverse=True)
        ]
        return record_one_of(program, stream, calls)

    def _arguments(
        self, step: int, source: Any, target: Any, source_rows: Any = 0, target_rows: Any = None
    ) -> tuple[Any, ...]:
        item, shape = min(self._item, step), self._shape
        rows = shape.rows if target_rows is None else target_rows
        return (
            source, target, rows, shape.width // item, shape.source_pitch // item, shape.target_pitch // item, *self._tables,
            self._sizes, source_rows, self._early,
        )  # fmt: skip


def prepare(device: torch.device) -> None:
    """Compile and load the kernels for copies of any size and alignment. This takes seconds, once per machine."""
    for step in (_ALIGNMENT, 2, 1):
        _compiled_move(device, step)


class Stamps:
    """Memory into which kernels write time stamps: times of the device's clock, in nanoseconds."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.times = lasting(device, lambda: torch.zeros(count, dtype=torch.int64, device=device))
        self._compiled = _compiled_small(device, "stamp_kernel")

    def launch(self, index: int, stream: int) -> None:
        self._compiled[(1, 1, 1)](self.times, index, torch.version.hip is None, stream=stream)


def _constants(step: int, adds: str) -> dict[str, Any]:
    item = ITEM_BYTES[adds] if adds else min(8, step)
    return {
        "ITEM": _ADDED[adds] if adds else _ITEMS[item],
        "BLOCK": _BLOCK_BYTES // item,
        "ALIGN": step // item,
        "ADD": bool(adds),
        "PTX": torch.version.hip is None,
    }


@lru_cache(maxsize=64)
def _compiled_move(device: torch.device, step: int, adds: str = "") -> tuple[Any, tuple[Any, ...]]:
    """Compile and load the copy kernel for addresses that are multiples of `step` bytes. Return the kernel and its constants.

    adds: the dtype of the elements if the copy adds to the target, otherwise "".
    """
    constants = _constants(step, adds)
    kernel = device_code.move_kernel
    names = kernel.arg_names[: len(kernel.arg_names) - len(constants)]
    return loaded_kernel(
        device, kernel, [torch.int64 if n in device_code.TABLES else 1 for n in names], _COPY_WARPS, constants
    ), tuple(constants.values())


@lru_cache(maxsize=16)
def _compiled_small(device: torch.device, name: str) -> Any:
    kernel = getattr(device_code, name)
    arguments = [1 if n == "index" else torch.int64 for n in kernel.arg_names[:-1]]
    return loaded_kernel(device, kernel, arguments, 1, {"PTX": torch.version.hip is None})


def _greatest_power_of_two(*numbers: int) -> int:
    """Return the largest power of two that divides all of `numbers`, but at most `_ALIGNMENT`."""
    bits = _ALIGNMENT
    for number in numbers:
        bits |= number
    return bits & -bits
