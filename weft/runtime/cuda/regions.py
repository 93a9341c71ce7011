"""Where a schedule's regions and words lie on this rank: as addresses for native operations, as tensors for the library.

A compiled program is told addresses anew in every run, since the caller's tensors may lie elsewhere: it knows memory by the
number of a base address and bytes from there. The bases are, in this order: the tensors that the caller gives; the schedule's
scratch buffers; the ranks' symmetric memory; the ranks' words for signals; the word that tells the watchdog of a run. All
but the first stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from weft.runtime.cuda.context import Context, Tensors
from weft.schedule import ITEM_BYTES, Region

View: TypeAlias = Callable[[Tensors], torch.Tensor]
"""Of a run's tensors, by name, to a region of one of them."""


class Regions:
    """bases: the addresses; 0 for the caller's tensors, until a run says theirs. words, begun: the numbers of the bases of rank 0's
    words and of the watchdog's."""

    def __init__(self, context: Context) -> None:
        self._context = context
        world = context.domain.world_size
        given, own = len(context.given), [name for name, b in context.buffers.items() if b.role == "scratch"]
        self._base = {b.name: i for i, b in enumerate(context.given)} | {name: given + i for i, name in enumerate(own)}
        self._symmetric = given + len(own)
        self.words = self._symmetric + world
        fixed = [context.own[name].data_ptr() for name in own]
        fixed += [context.region.address(r) for r in range(world)] + [context.words.address(r) for r in range(world)]
        self.begun = given + len(fixed)
        self.bases = [0] * given + fixed + [context.begun_word.data_ptr()]

    def place(self, region: Region) -> tuple[int, int, int]:
        """(number of its base address, bytes from there, bytes from row to row)."""
        buffer, item = self._context.buffers[region.buffer], self.item_bytes(region)
        offset = (int(region.row) * buffer.cols + int(region.col)) * item
        if buffer.role == "symmetric":
            offset += self._context.layout.buffers[buffer.name]
            return self._symmetric + int(region.at), offset, buffer.cols * item
        return self._base[buffer.name], offset, buffer.cols * item

    def fixed_pitch(self, region: Region) -> int | None:
        """Bytes from row to row, for a region in memory of the schedule's own."""
        known = region.buffer in self._context.own
        return self._context.buffers[region.buffer].cols * self.item_bytes(region) if known else None

    def row_bytes(self, region: Region) -> int:
        return int(region.cols) * self.item_bytes(region)

    def item_bytes(self, region: Region) -> int:
        return ITEM_BYTES[self._context.buffers[region.buffer].dtype]

    def view(self, region: Region) -> View:
        buffer = self._context.buffers[region.buffer]
        row, rows, col, cols = int(region.row), int(region.rows), int(region.col), int(region.cols)
        if buffer.name in self._context.own:
            fixed = self._context.own[buffer.name][row : row + rows, col : col + cols]
            return lambda tensors: fixed
        name = buffer.name
        if (rows, cols) == (buffer.rows, buffer.cols):
            return lambda tensors: tensors[name]
        if cols == buffer.cols:
            part = slice(row, row + rows)
            return lambda tensors: tensors[name][part]  # sooner there than `narrow` is
        return lambda tensors: tensors[name][row : row + rows, col : col + cols]
