"""Locations of a schedule's regions and words on this rank: addresses for native operations, tensors for calls of torch.

A compiled program gets new addresses in every run, because the caller's tensors may have moved. So it identifies memory by an
index into a list of base addresses, and an offset in bytes. The list has, in this order: the caller's tensors, the schedule's
scratch buffers, the ranks' symmetric memory, the ranks' signal words, and `Context.begun_word`. The last entries are
numbers of rows: of the caller's tensors with a number of rows that is known only at run time. Only the entries of the
caller's tensors, addresses and numbers of rows, change between runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from weft.runtime.cuda.context import Context, Tensors
from weft.runtime.cuda.kernel_call import Count
from weft.schedule import ITEM_BYTES, Region


class RegionView:
    """A function from a run's tensors, by name, to a region of one of them.

    fixed: the region as a tensor, if it is in memory of the schedule. Otherwise the region is in the caller's tensor `name`: all
        of it if `key` is None, or the part that the index `key` selects.
    """

    __slots__ = ("fixed", "key", "name")

    def __init__(self, name: str, *, fixed: torch.Tensor | None = None, key: Any = None) -> None:
        self.name, self.fixed, self.key = name, fixed, key

    def __call__(self, tensors: Tensors) -> torch.Tensor:
        if self.fixed is not None:
            return self.fixed
        return tensors[self.name] if self.key is None else tensors[self.name][self.key]

    def written(self, order: Mapping[str, int]) -> tuple[Any, ...]:
        """Return the view for native code (`_core.KnownRun`). order: the index of each tensor of the caller."""
        if self.fixed is not None:
            return "fixed", self.fixed
        return ("whole", order[self.name]) if self.key is None else ("part", order[self.name], self.key)


class Regions:
    """The addresses of all regions and words.

    bases: the base addresses. The bases of the caller's tensors are 0 until a run sets them.
    words: the index, in `bases`, of rank 0's signal words. The signal words of the other ranks follow.
    begun: the index, in `bases`, of `Context.begun_word`, which a run sets when it begins.
    rows_at: for each tensor of the caller whose number of rows is known only at run time, the index of this number in `bases`.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        world = context.comm.world_size
        given, own = len(context.given), [name for name, b in context.buffers.items() if b.role == "scratch"]
        self._base = {b.name: i for i, b in enumerate(context.given)} | {name: given + i for i, name in enumerate(own)}
        self._symmetric = given + len(own)
        self.words = self._symmetric + world
        fixed = [context.own[name].data_ptr() for name in own]
        fixed += [context.region.address(r) for r in range(world)] + [context.words.address(r) for r in range(world)]
        self.begun = given + len(fixed)
        self.bases = [0] * given + fixed + [context.begun_word.data_ptr()]
        unknown = [b.name for b in context.given if not isinstance(b.rows, int)]
        self.rows_at = {name: len(self.bases) + i for i, name in enumerate(unknown)}
        self.bases += [0] * len(unknown)
        # The caller's tensors that must be contiguous for native operations.
        self.without_gaps = set[str]()

    def place(self, region: Region) -> tuple[int, int, int]:
        """Return the location of a region in memory: (index of its base address, offset in bytes, row pitch in bytes)."""
        buffer, item = self._context.buffers[region.buffer], self.item_bytes(region)
        offset = (int(region.row) * buffer.cols + int(region.col)) * item
        if buffer.role == "symmetric":
            offset += self._context.layout.buffers[buffer.name]
            return self._symmetric + int(region.at), offset, buffer.cols * item
        if buffer.role != "scratch":
            self.without_gaps.add(buffer.name)
        return self._base[buffer.name], offset, buffer.cols * item

    def origin(self, region: Region) -> tuple[int, int, int]:
        """Return the location of row 0 of the columns of `region`. Unlike a dynamic first row, it is known when the schedule is
        compiled.
        """
        return self.place(replace(region, row=0, rows=0))

    def places(self, name: str, at: np.ndarray, row: np.ndarray, col: np.ndarray) -> tuple[int | None, np.ndarray, int]:
        """Return the locations of many regions of one buffer: (base, starts, row pitch in bytes).

        If the buffer is a tensor of the caller, `base` is the index of its base address, and `starts` are offsets in bytes.
        Otherwise `base` is None, and `starts` are addresses.

        name: the buffer. at, row, col: for each region, its rank, first row and first column.
        """
        buffer = self._context.buffers[name]
        item = ITEM_BYTES[buffer.dtype]
        places = (row * buffer.cols + col) * item
        if buffer.role == "symmetric":
            begins = np.array([self.bases[self._symmetric + r] for r in range(self._context.comm.world_size)], np.int64)
            return None, places + begins[at] + self._context.layout.buffers[name], buffer.cols * item
        base = self._base[name]
        if buffer.role == "scratch":
            return None, places + self.bases[base], buffer.cols * item
        self.without_gaps.add(name)
        return base, places, buffer.cols * item

    def base(self, name: str) -> int:
        """Return the index, in `bases`, of the address of a tensor of the caller."""
        return self._base[name]

    def rows(self, name: str) -> int | Count:
        """Return the number of rows of a buffer. If it is known only at run time, each run passes it."""
        rows = self._context.buffers[name].rows
        return rows if isinstance(rows, int) else Count(self.rows_at[name])

    def is_shared(self, region: Region) -> bool:
        """True if peers may read or write the region."""
        return self._context.buffers[region.buffer].role == "symmetric"

    def row_bytes(self, region: Region) -> int:
        return int(region.cols) * self.item_bytes(region)

    def item_bytes(self, region: Region) -> int:
        return ITEM_BYTES[self._context.buffers[region.buffer].dtype]

    def whole(self, region: Region) -> torch.Tensor:
        """Return the whole buffer of a region as a tensor. The buffer must be symmetric, or a scratch buffer of this rank."""
        context, name = self._context, region.buffer
        own = context.own[name]
        if (at := int(region.at)) == context.rank:
            return own
        return context.region.tensor(at, tuple(own.shape), own.dtype, context.layout.buffers[name])

    def own_part(self, region: Region) -> torch.Tensor:
        """Return a region of a scratch or symmetric buffer of this rank as a tensor."""
        row, col = int(region.row), int(region.col)
        return self.whole(region)[row : row + int(region.rows), col : col + int(region.cols)]

    def view(self, region: Region) -> RegionView:
        buffer = self._context.buffers[region.buffer]
        row, rows, col, cols = int(region.row), int(region.rows), int(region.col), int(region.cols)
        name = buffer.name
        if name in self._context.own:
            return RegionView(name, fixed=self.own_part(region))
        if (rows, cols) == (buffer.rows, buffer.cols):
            return RegionView(name)
        part = slice(row, row + rows)  # slicing is faster than `narrow`
        return RegionView(name, key=part if cols == buffer.cols else (part, slice(col, col + cols)))
