"""The launcher of `weft.kernels.agree`, the kernel that compares the numbers of rows that peers sent with the expected numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from weft import _core
from weft.kernels import agree as device_code
from weft.runtime.cuda.kernel_call import Base, Count, kernel_call, loaded_kernel

_ITEMS = {4: tl.int32, 2: tl.int16}
_BLOCK = 128


class Agreeing:
    """The launcher of an `Agree` step (`weft.schedule.steps`): compare the numbers of rows that peers sent with the numbers
    that this rank expected.

    W is the world size, and C is the number of counts per pair of ranks: one for each expert.

    expected: the numbers of rows that this rank expects from each rank, int64 [W, C].
    sent: the numbers of rows that all ranks sent, int64 [W * W, C]: a table [W, C] from each rank. Row q of the table of
        rank r is for the rows that rank r sent to rank q.
    differs_at: an address in pinned memory, where the kernel stores 1 + the number of a rank whose counts differ.
    row: this rank's number, which selects its row in each table of `sent`.
    width, item_bytes: the number of elements of a received row, and the number of bytes of an element.
    """

    def __init__(
        self, expected: torch.Tensor, sent: torch.Tensor, differs_at: int, row: int, width: int, item_bytes: int
    ) -> None:
        self._tables, self._numbers = (expected, sent, differs_at), (width, expected.shape[1], row)
        self._ranks, self._constants = len(expected), (_ITEMS[item_bytes], _BLOCK)
        self._compiled = _compiled(expected.device, item_bytes)

    def launch(self, out: int, out_rows: int) -> None:
        """Enqueue the comparison of row counts on the current stream. out: the address of the `out_rows` received rows."""
        self._compiled[self._ranks, 1, 1](*self._tables, out, out_rows, *self._numbers, *self._constants)

    def record(self, program: _core.StreamProgram, stream: int, out: Base, out_rows: int | Count) -> bool:
        """Record the launch of the comparison into `program`, on the program's stream number `stream`. Return False if only
        Triton can launch the kernel.
        """
        call = kernel_call(program, self._compiled, self._ranks, (*self._tables, out, out_rows, *self._numbers))
        if call is not None:
            program.launch(stream, [(1, call)])
        return call is not None


@lru_cache(maxsize=16)
def _compiled(device: torch.device, item_bytes: int) -> Any:
    constants = {"ITEM": _ITEMS[item_bytes], "BLOCK": _BLOCK}
    return loaded_kernel(
        device, device_code.agree_kernel, [torch.int64, torch.int64, torch.int32, *[1] * 5], 1, constants
    )
