"""Where a schedule's regions and words lie on this rank: as addresses for native operations, as tensors for the library.

A compiled program is told addresses anew in every run, since the caller's tensors may lie elsewhere: it knows memory by the
number of a base address and bytes from there. The bases are, in this order: the tensors that the caller gives; the schedule's
scratch buffers; the ranks' symmetric memory; the ranks' words for signals; the word that tells the watchdog of a run. All
but the first stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch

from weft.schedule import ITEM_BYTES, Region

if TYPE_CHECKING:
    from weft.runtime.cuda.schedule import CudaSchedule

Tensors: TypeAlias = dict[str, torch.Tensor]
View: TypeAlias = Callable[[Tensors], torch.Tensor]
"""Of a run's tensors, by name, to a region of one of them."""


class Regions:
    """bases: the addresses; 0 for the caller's tensors, until a run says theirs. words, begun: the numbers of the bases of rank 0's
    words and of the watchdog's."""

    def __init__(self, owner: CudaSchedule) -> None:
        self._owner = owner
        world = owner.domain.world_size
        given, own = len(owner.given), [name for name, b in owner.buffers.items() if b.role == "scratch"]
        self._base = {b.name: i for i, b in enumerate(owner.given)} | {name: given + i for i, name in enumerate(own)}
        self._symmetric = given + len(own)
        self.words = self._symmetric + world
        fixed = [owner.own[name].data_ptr() for name in own]
        fixed += [owner.region.address(r) for r in range(world)] + [owner.words.address(r) for r in range(world)]
        self.begun = given + len(fixed)
        self.bases = [0] * given + fixed + [owner.begun_word.data_ptr()]

    def place(self, region: Region) -> tuple[int, int, int]:
        """(number of its base address, bytes from there, bytes from row to row)."""
        buffer, item = self._owner.buffers[region.buffer], self.item_bytes(region)
        offset = (int(region.row) * buffer.cols + int(region.col)) * item
        if buffer.role == "symmetric":
            offset += self._owner.layout.buffers[buffer.name]
            return self._symmetric + int(region.at), offset, buffer.cols * item
        return self._base[buffer.name], offset, buffer.cols * item

    def fixed_pitch(self, region: Region) -> int | None:
        """Bytes from row to row, for a region in memory of the schedule's own."""
        known = region.buffer in self._owner.own
        return self._owner.buffers[region.buffer].cols * self.item_bytes(region) if known else None

    def row_bytes(self, region: Region) -> int:
        return int(region.cols) * self.item_bytes(region)

    def item_bytes(self, region: Region) -> int:
        return ITEM_BYTES[self._owner.buffers[region.buffer].dtype]

    def view(self, region: Region) -> View:
        buffer = self._owner.buffers[region.buffer]
        row, rows, col, cols = int(region.row), int(region.rows), int(region.col), int(region.cols)
        if buffer.name in self._owner.own:
            fixed = self._owner.own[buffer.name][row : row + rows, col : col + cols]
            return lambda tensors: fixed
        name = buffer.name
        if (rows, cols) == (buffer.rows, buffer.cols):
            return lambda tensors: tensors[name]
        if cols == buffer.cols:
            part = slice(row, row + rows)
            return lambda tensors: tensors[name][part]  # sooner there than `narrow` is
        return lambda tensors: tensors[name][row : row + rows, col : col + cols]
