"""The launcher of the reduction kernel, `weft.kernels.add_up`, which sums matrices element by element.

The launcher compiles all variants of the kernel before any stream waits for a peer. It allocates the table of each step's
summands once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from weft import _core, env
from weft.errors import ScheduleError
from weft.kernels import add_up as device_code
from weft.runtime.cuda.kernel_call import Base, kernel_call, loaded_kernel, record_one_of
from weft.runtime.cuda.tensor_maps import ALIGNMENT, TRITON_TYPE
from weft.symm.lasting import lasting

_ARGUMENTS = 4
"""The largest number of summands whose addresses a launch passes as arguments. If there are more, a table has the
addresses, except the addresses of the caller's tensors, which change between runs.
"""
_BLOCK_BYTES, _ROW_BYTES = 2048, 8192
"""The number of bytes of a summand that a Triton program loads at a time: without a norm, and with a norm. With a norm,
a program reduces a whole row.
"""


class Address(NamedTuple):
    """The location of a matrix in memory, for the reduction kernel: the index of a base address, an offset in bytes, and the
    row pitch in bytes. A summand with pitch 0 is one row, which is added to all rows.
    """

    base: int
    offset: int
    pitch: int


class SumNorm(NamedTuple):
    """A second result of the reduction kernel: the RMS norm of the sum, multiplied by one row of weights."""

    out: Address
    weight: Address
    eps: float


class SumVariant(NamedTuple):
    """The parameters for which the reduction kernel is compiled.

    block: the number of bytes that a program reduces at a time.
    step: the alignment of all addresses and pitches: a power of two in bytes.
    """

    dtype: torch.dtype
    parts: int
    step: int
    block: int
    adds: bool
    eps: float | None

    def constants(self) -> dict[str, Any]:
        item = self.dtype.itemsize
        return {
            "PARTS": self.parts, "DTYPE": TRITON_TYPE[self.dtype], "BLOCK": self.block // item, "ALIGN": self.step // item,
            "ADD": self.adds, "NORM": self.eps is not None, "EPS": self.eps or 0.0,
        }  # fmt: skip

    @property
    def warps(self) -> int:
        return max(1, min(8, self.block // (32 * ALIGNMENT)))


class AddUp:
    """The reduction of `parts` into `out`, on one device. Each part is [rows, cols], or one row that is added to all rows.
    If the only part is `out`, the kernel writes only the norm of `out`.

    fixed: the base addresses: `Address.base` is an index into this list. For a caller's tensor the entry is 0, because each run
        passes the tensor's address.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        size: tuple[int, int],
        out: Address,
        parts: Sequence[Address],
        *,
        fixed: Sequence[int],
        norm: SumNorm | None = None,
    ) -> None:
        (rows, cols), item = size, dtype.itemsize
        passed = [part for part in parts if len(parts) <= _ARGUMENTS or not fixed[part.base]]
        if len(passed) > _ARGUMENTS:
            raise ScheduleError(
                f"a reduction has {len(parts)} parts, of which {len(passed)} are inputs or outputs of the schedule: use at most "
                f"{_ARGUMENTS} such parts, and copy the others to scratch first"
            )
        # Without gaps between the rows, treat the matrix as one long row.
        if norm is None and all(place.pitch == cols * item for place in (out, *parts)):
            rows, cols = 1, rows * cols
        entries, number, more = [], 0, [0] * (_ARGUMENTS - len(passed))
        for part in parts:
            given = not fixed[part.base]
            number += given
            which, address = (number, 0) if given else (0, fixed[part.base] + part.offset)
            entries.append((which, address, part.pitch // item))
        self._table = lasting(device, lambda: torch.tensor(entries, dtype=torch.int64, device=device))
        following = [norm.out, norm.weight] if norm else []
        self._numbers: list[int | Base] = [*(Base(place.base, place.offset) for place in (out, *passed)), *more]
        self._numbers += [Base(place.base, place.offset) for place in following] or [0, 0]
        self._numbers += [*(place.pitch // item for place in passed), *more, out.pitch // item]
        self._numbers += [norm.out.pitch // item if norm else 0, cols]
        bits = cols * item | ALIGNMENT
        for place in (out, *parts, *following):
            bits |= place.pitch | (fixed[place.base] + place.offset if fixed[place.base] else 0)
        block = _ROW_BYTES if norm else _BLOCK_BYTES
        eps = norm.eps if norm else None
        # The caller's tensors may begin at any address.
        adds, steps = list(parts) != [out], sorted({bits & -bits, item}, reverse=True)
        self._variants = {step: SumVariant(dtype, len(parts), step, block, adds, eps) for step in steps}
        self._programs = rows if norm else rows * -(-cols * item // block)
        self._compiled = {
            step: _compiled(device, variant) for step, variant in self._variants.items() if device.type == "cuda"
        }

    def record(self, program: _core.StreamProgram, stream: int) -> bool:
        """Record the launch of the reduction kernel into `program`, on the program's stream number `stream`. Return False if
        only Triton can launch the kernel.
        """
        if not self._programs:
            return True
        calls = [
            (step, kernel_call(program, compiled, self._programs, (self._table, *self._numbers)))
            for step, compiled in self._compiled.items()
        ]
        return record_one_of(program, stream, calls)

    def launch(self, bases: Sequence[int], stream: int | None) -> None:
        """Launch the reduction kernel.

        bases: all base addresses of this run, including the addresses of the caller's tensors.
        stream: a stream's handle; None in Triton's interpreter.
        """
        if not self._programs:
            return
        numbers = [bases[n.number] + n.offset if isinstance(n, Base) else n for n in self._numbers]
        addresses = [number for number, n in zip(numbers, self._numbers, strict=True) if isinstance(n, Base)]
        step, variant = next((s, v) for s, v in self._variants.items() if all(a % s == 0 for a in addresses))
        if env.triton_interpreted():
            device_code.add_up_kernel[self._programs,](self._table, *numbers, **variant.constants())
            return
        compiled = self._compiled[step]
        compiled[self._programs, 1, 1](self._table, *numbers, *variant.constants().values(), stream=stream)


def arguments_of(variant: SumVariant) -> tuple[list[Any], int, dict[str, Any]]:
    """Return the types of the kernel's arguments, its number of warps, and its constants, to compile `variant`."""
    constants = variant.constants()
    numbers = len(device_code.add_up_kernel.arg_names) - len(constants) - 1
    return [torch.int64, *[1] * numbers], variant.warps, constants  # the first argument is the table on the device


@lru_cache(maxsize=64)
def _compiled(device: torch.device, variant: SumVariant) -> Any:
    return loaded_kernel(device, device_code.add_up_kernel, *arguments_of(variant))
