"""Launching `weft.kernels.move`: its variants compiled before anything waits, its tables made once per step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from weft import _core
from weft.kernels import move as device_code
from weft.runtime.kernel_call import Base, Epoch, kernel_call, loaded

_ITEMS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_ALIGNMENT = 16  # the widest access, in bytes
_BLOCK_BYTES = 16384  # in flight per program: 64 bytes a thread
MAX_PROGRAMS = 64  # of a copy, and so of the compute units that it takes away
_COPY_WARPS = 8
# A signal alone must find room beside a GEMM that fills the registers of every compute unit: with more warps it would
# have to wait for the end of the GEMM, and whoever waits for the signal with it.
_SIGNAL_WARPS = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """What a copy moves: rows of `width` bytes, and the distances between rows in source and target."""

    rows: int
    width: int
    source_pitch: int
    target_pitch: int


class Move:
    """Waits, then a copy, then signals, then waits, as one launch; any of the four may be missing.

    waits, answers: (address of a word, what to add to the epoch). sets: addresses of words. targets: addresses of further
    places for what is copied. started: address of a word that is to know the epoch at once. `epoch_word` is read on the
    device, and with `advance` written there at the end. sizes: address of (first row of the source, of the target, rows),
    which the device knows; `shape.rows` is then the most. programs: at most so many.
    """

    def __init__(
        self,
        epoch_word: torch.Tensor,
        *,
        shape: Shape | None = None,
        targets: Sequence[int] = (),
        waits: Sequence[tuple[int, int]] = (),
        sets: Sequence[int] = (),
        answers: Sequence[tuple[int, int]] = (),
        started: int = 0,
        advance: bool = False,
        sizes: int = 0,
        programs: int = MAX_PROGRAMS,
    ) -> None:
        device = epoch_word.device
        self._shape = shape = shape or Shape(0, 0, _ALIGNMENT, _ALIGNMENT)
        tables = [
            list(targets),
            [n for wait in waits for n in wait],
            list(sets),
            [n for wait in answers for n in wait],
            [0],
        ]
        words = torch.tensor([number for table in tables for number in table], dtype=torch.int64, device=device)
        begin = [0, *itertools.accumulate(len(table) for table in tables)]
        parts = [words[first:] for first in begin[:-1]]
        self._tables = (
            parts[0], len(targets), parts[1], len(waits), parts[2], len(sets), parts[3], len(answers), parts[4], epoch_word,
            started, int(advance),
        )  # fmt: skip
        self._sizes = sizes
        self._programs = max(1, min(programs, -(-shape.rows * shape.width // _BLOCK_BYTES)))
        warps = _COPY_WARPS if shape.rows else _SIGNAL_WARPS
        self._step = _greatest_power_of_two(shape.width, shape.source_pitch, shape.target_pitch, *targets)
        # Tensors of the caller may begin anywhere: the widest variant is for most, the narrow ones for odd addresses.
        self._variants = {step: _compiled_move(device, step, warps) for step in {self._step, min(self._step, 2), 1}}

    def launch(
        self, epoch_given: int, source: int = 0, target: int = 0, source_rows: int = 0, *, stream: int | None = None
    ) -> None:
        """The epoch is what the device's word says plus `epoch_given`. source_rows: with `sizes`, how many rows there are from
        `source` on. stream: its handle (default: the current one)."""
        step = self._step
        if (source | target) & (step - 1):
            step = min(step, _greatest_power_of_two(source, target))
            step = step if step in self._variants else 2 if step > 2 else 1
        compiled, constants = self._variants[step]
        arguments = self._arguments(step, source, target, epoch_given, source_rows)
        compiled[self._programs, 1, 1](*arguments, *constants, stream=stream)

    def record(
        self, program: _core.StreamProgram, stream: int, epoch: int | Epoch, source: int | Base, target: int | Base
    ) -> bool:
        """As an operation of `program`, on its stream of that number; False if only `launch` can do it."""
        calls = [
            (step, kernel_call(program, compiled, self._programs, self._arguments(step, source, target, epoch, 0)))
            for step, (compiled, _) in sorted(self._variants.items(), reverse=True)
        ]
        known = [(step, call) for step, call in calls if call is not None]
        if len(known) == len(calls):
            program.launch(stream, known)
        return len(known) == len(calls)

    def _arguments(self, step: int, source: Any, target: Any, epoch: Any, source_rows: int) -> tuple[Any, ...]:
        item, shape = min(8, step), self._shape
        return (
            source, target, shape.rows, shape.width // item, shape.source_pitch // item, shape.target_pitch // item,
            *self._tables, epoch, self._sizes, source_rows,
        )  # fmt: skip


class Stamps:
    """Times of the device's clock, in nanoseconds."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.times = torch.zeros(count, dtype=torch.int64, device=device)
        self._compiled = _compiled_small(device, "stamp_kernel")

    def launch(self, index: int, stream: int) -> None:
        self._compiled[(1, 1, 1)](self.times, index, torch.version.hip is None, stream=stream)


@lru_cache(maxsize=64)
def _compiled_move(device: torch.device, step: int, warps: int) -> tuple[Any, tuple[Any, ...]]:
    """A loaded kernel for addresses that are multiples of `step` bytes, and its constants."""
    item = min(8, step)
    constants = {
        "ITEM": _ITEMS[item],
        "BLOCK": _BLOCK_BYTES // item if warps == _COPY_WARPS else 32,
        "ALIGN": step // item,
        "PTX": torch.version.hip is None,
    }
    kernel = device_code.move_kernel
    names = kernel.arg_names[: len(kernel.arg_names) - len(constants)]
    return loaded(
        device, kernel, [torch.int64 if n in device_code.TABLES else 1 for n in names], warps, constants
    ), tuple(constants.values())


@lru_cache(maxsize=16)
def _compiled_small(device: torch.device, name: str) -> Any:
    kernel = getattr(device_code, name)
    arguments = [1 if n == "index" else torch.int64 for n in kernel.arg_names[:-1]]
    return loaded(device, kernel, arguments, 1, {"PTX": torch.version.hip is None})


def _greatest_power_of_two(*numbers: int) -> int:
    """The largest power of two, up to the widest access, that divides all of them."""
    bits = _ALIGNMENT
    for number in numbers:
        bits |= number
    return bits & -bits
