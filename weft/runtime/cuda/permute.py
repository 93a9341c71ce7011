"""The launcher of `weft.kernels.permute`, a kernel that copies segments of rows. The launcher compiles all variants before
any stream waits for a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from weft import _core
from weft.kernels import permute as device_code
from weft.runtime.cuda.kernel_call import Base, Count, kernel_call, loaded_kernel, record_one_of

_ITEMS = {8: tl.int64, 2: tl.int16, 1: tl.int8}
_ALIGNMENT = 16  # the widest access, in bytes
_BLOCK_BYTES = 8192
_WARPS = 4
_PER_SM = 4  # programs per multiprocessor


class PermuteLauncher:
    """A launcher of copies of row segments from two matrices, `own` and `slots`, to a target matrix.

    segments: the device address of the segments, int64 `[n_segments, 3]`: (first row of the source, first row of the target,
        number of rows).
    n_own: the first n_own segments are read from `own`, and the others from `slots`.
    width: the number of bytes of a row. pitches: the bytes from a row to the next in own, slots and the target.
    """

    def __init__(
        self,
        device: torch.device,
        segments: int,
        n_segments: int,
        n_own: int,
        width: int,
        pitches: tuple[int, int, int],
    ) -> None:
        self._segments, self._counts, self._width, self._pitches = segments, (n_segments, n_own), width, pitches
        self._programs = _PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        most = next(step for step in (_ALIGNMENT, 2, 1) if all(n % step == 0 for n in (width, *pitches)))
        # The caller's tensors may begin at any address.
        self._variants = {
            step: _compiled(device, triton.next_power_of_2(n_segments), step)
            for step in (_ALIGNMENT, 2, 1)
            if step <= most
        }

    def launch(self, own: int, slots: int, target: int, rows: Sequence[int], stream: int | None = None) -> None:
        """Launch the kernel, which copies the segments from `own` and `slots` to `target`.

        own, slots, target: the device addresses of the matrices.
        rows: the number of rows of each.
        stream: a stream's handle; by default the current stream.
        """
        step = next(step for step in self._variants if (own | slots | target) % step == 0)
        compiled, constants = self._variants[step]
        compiled[self._programs, 1, 1](*self._arguments(step, own, slots, target, rows), *constants, stream=stream)

    def record(
        self,
        program: _core.StreamProgram,
        stream: int,
        own: Base,
        slots: Base,
        target: Base,
        rows: Sequence[int | Count],
    ) -> bool:
        """Record the launch of the kernel into `program`, on the program's stream number `stream`. Return False if only Triton
        can launch the kernel. The other arguments are as for `launch`.
        """
        calls = [
            (step, kernel_call(program, compiled, self._programs, self._arguments(step, own, slots, target, rows)))
            for step, (compiled, _) in self._variants.items()
        ]
        return record_one_of(program, stream, calls)

    def _arguments(self, step: int, own: Any, slots: Any, target: Any, rows: Sequence[Any]) -> tuple[Any, ...]:
        item = min(8, step)
        sizes = (self._width // item, *(pitch // item for pitch in self._pitches))
        return own, slots, target, self._segments, *self._counts, *rows, *sizes


@lru_cache(maxsize=64)
def _compiled(device: torch.device, segments: int, step: int) -> tuple[Any, tuple[Any, ...]]:
    """Compile and load the kernel that copies segments of rows, for addresses that are multiples of `step` bytes. Return the
    kernel and its constants.

    segments: a power of two that is at least the number of segments.
    """
    item = min(8, step)
    constants = {"SEGMENTS_P2": segments, "ITEM": _ITEMS[item], "BLOCK": _BLOCK_BYTES // item, "ALIGN": step // item}
    kernel = device_code.permute_kernel
    arguments = [1] * (len(kernel.arg_names) - len(constants))
    return loaded_kernel(device, kernel, arguments, _WARPS, constants), tuple(constants.values())
