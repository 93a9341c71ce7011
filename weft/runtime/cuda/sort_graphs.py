"""Sorts of up to a few million keys, as captured CUDA graphs.

torch's sort is a dozen launches and allocations, which take more CPU time than a small sort takes on the GPU. A graph replays
them in one launch. It always sorts the same memory. So the caller writes the keys into that memory, and uses the result on
the same stream, before the next sort.
"""

from __future__ import annotations

import functools
import threading

import torch

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
    """The sorts of one thread at a time, on one stream. Hold `lock` from `keys` until all work on the result is enqueued."""

    def __init__(self, dtype: torch.dtype, stream: torch.cuda.Stream) -> None:
        self.lock = threading.Lock()
        self._dtype, self._stream = dtype, stream
        self._keys = self._sorted = self._order = torch.empty(0)
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle()  # one for all graphs, because they never run at the same time

    def keys(self, count: int) -> torch.Tensor:
        """Return the memory for `count` keys. The current stream must be the stream of this object."""
        size = size_of(count)
        if size > len(self._keys):
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()  # torch refuses a pool whose last graph is gone
            shape, device, dtype = 1 << (size - 1).bit_length(), self._stream.device, self._dtype
            self._keys, self._sorted, self._order = lasting(
                device, lambda: [torch.empty(shape, dtype=one, device=device) for one in (dtype, dtype, torch.int64)]
            )
        return self._keys[:count]

    def sort(self, count: int, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort the `count` keys stably. Return the sorted keys and the index of each, of which the first `count` are valid.

        largest: a number that no key exceeds.
        """
        size = size_of(count)
        keys, out = self._keys[:size], (self._sorted[:size], self._order[:size])
        if size > count:
            keys[count:].fill_(largest)  # at the end after the sort, because it is stable
        if size not in self._graphs:
            # The first sort of a size runs without a graph, because a capture must not load kernels.
            self._graphs[size] = None
            torch.sort(keys, stable=True, out=out)
            return out
        graph = self._graphs[size]
        if graph is None:
            # On the thread of `lasting`: a temporary pool would lend the graph memory that it must not write when it is replayed.
            graph = self._graphs[size] = lasting(self._stream.device, lambda: self._captured(keys, out))
        graph.replay()
        return out

    def _captured(self, keys: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]) -> torch.cuda.CUDAGraph:
        """Return a graph that sorts `keys` into `out`."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            torch.sort(keys, stable=True, out=out)
        finally:
            graph.capture_end()
        return graph


@functools.cache
def sort_graphs(dtype: torch.dtype, stream: torch.cuda.Stream) -> SortGraphs:
    """Return the sorts of keys of this dtype on `stream`."""
    return SortGraphs(dtype, stream)
