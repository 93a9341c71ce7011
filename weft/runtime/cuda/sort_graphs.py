"""Sorts of up to a few million keys, as captured CUDA graphs.

A sort is a dozen launches and allocations, which take more CPU time than a small sort takes on the GPU. A graph replays
them in one launch. It always sorts the same memory. So the caller writes the keys into that memory, and uses the result on
the same stream, before the next sort.
"""

from __future__ import annotations

import functools
import threading

import torch

from weft.runtime.cuda.radix_sort import sort_pairs
from weft.symm.lasting import lasting

MOST = 1 << 22
"""The largest number of keys. With more keys, the GPU time of a sort exceeds its CPU time, and the memory would be large."""
_FEWEST = 1 << 12
_PARTS = 16  # graphs for an octave of sizes


def size_of(count: int) -> int:
    """Return the number of keys that the graph for `count` keys sorts: up to a tenth more."""
    unit = max(_FEWEST, 1 << (count.bit_length() - 1)) // _PARTS
    return -(-count // unit) * unit


class SortGraphs:
    """The sorts of one thread at a time, on one stream. Hold `lock` from `memory` until all work on the result is enqueued."""

    def __init__(self, dtype: torch.dtype, stream: torch.cuda.Stream, pairs: bool) -> None:
        self.lock, self.pairs = threading.Lock(), pairs
        self._dtype, self._stream = dtype, stream
        self._keys = self._values = self._sorted = self._order = torch.empty(0)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle()  # one for all graphs, because they never run at the same time

    def memory(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the memory for `count` keys, and with `pairs` for as many values, else None. The current stream must be the
        stream of this object.
        """
        size = size_of(count)
        if size > len(self._keys):
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()  # torch refuses a pool whose last graph is gone
            shape, device, dtype = 1 << (size - 1).bit_length(), self._stream.device, self._dtype
            of_order = torch.int32 if self.pairs else torch.int64
            dtypes = dtype, dtype, of_order, *([torch.int32] if self.pairs else [])
            self._keys, self._sorted, self._order, *values = lasting(
                device, lambda: [torch.empty(shape, dtype=one, device=device) for one in dtypes]
            )
            self._values = values[0] if self.pairs else self._order
        return self._keys[:count], self._values[:count] if self.pairs else None

    def sort(self, count: int, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort the `count` keys stably. Return the sorted keys, and with `pairs` the value, else the index, of each. The first
        `count` of both are valid.

        largest: a number that no key exceeds.
        """
        size, bits = size_of(count), largest.bit_length()
        out = self._sorted[:size], self._order[:size]
        if size > count:
            self._keys[count:size].fill_(largest)  # at the end after the sort, because it is stable
        key = size, bits if self.pairs else 0
        if key not in self._graphs:
            # The first sort of a size runs without a graph, because a capture must not load kernels.
            self._graphs[key] = None
            self._sort(*key)
            return out
        graph = self._graphs[key]
        if graph is None:
            # On the thread of `lasting`: a temporary pool would lend the graph memory that it must not write when it is replayed.
            graph = self._graphs[key] = lasting(self._stream.device, lambda: self._captured(*key))
        graph.replay()
        return out

    def _sort(self, size: int, bits: int) -> None:
        """Sort the first `size` keys. bits: with `pairs`, the number of bits of the largest key."""
        keys, ordered, order = (tensor[:size] for tensor in (self._keys, self._sorted, self._order))
        if self.pairs:
            sort_pairs(keys, self._values[:size], ordered, order, bits)
        else:
            torch.sort(keys, stable=True, out=(ordered, order))

    def _captured(self, size: int, bits: int) -> torch.cuda.CUDAGraph:
        """Return a graph of `_sort`."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            self._sort(size, bits)
        finally:
            graph.capture_end()
        return graph


@functools.cache
def sort_graphs(dtype: torch.dtype, stream: torch.cuda.Stream, pairs: bool) -> SortGraphs:
    """Return the sorts of keys of this dtype on `stream`. pairs: True to sort them together with values, both of 32 bits."""
    return SortGraphs(dtype, stream, pairs)
