"""A baseline for fused embedding + all-to-all: pooling in chunks, where the all-to-all of a chunk overlaps with pooling
the next chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from weft.bench.ops.embedding_data import EmbeddingData
from weft.ops.embedding_pool import embedding_pool
from weft.timeline import Timeline


class PipelinedVariant:
    """A variant of embedding + all-to-all without a fused kernel: NCCL exchanges a chunk while weft's pooling kernel pools the
    next chunk.

    A chunk is a number of adjacent tables of each rank. Pooling, exchange, and the copies that unpack a chunk into the
    output run on three streams. The fused embedding paper (sections 2.2 and 5) argues against such pipelines, because
    they need more launches and streams.
    """

    extra_bytes: tuple[int, str]

    def __init__(self, work: EmbeddingData, chunks: int):
        self.work, config, rank = work, work.config, work.ranks.rank
        sharding, world, batch = config.sharding, work.ranks.world_size, config.global_batch
        cuts = [_shares(len(sharding.local_slots(r)), chunks) for r in range(world)]
        self.send_splits, self.receive_splits, self.places = [], [], []
        for number in range(chunks):
            of_ranks = [sharding.local_slots(r)[slice(*cuts[r][number])] for r in range(world)]
            dims = [sum(slot.dim for slot in slots) for slots in of_ranks]
            self.send_splits.append([size * dims[rank] for size in config.batch_sizes])
            self.receive_splits.append([work.local_batch * dim for dim in dims])
            self.places.append([_runs(slots) for slots in of_ranks])
        tables = [sharding.tables[t] for t in sharding.local_tables(rank)]
        self._tables = [tuple(tables[slice(*cut)]) for cut in cuts[rank]]
        self._weights = [work.weights[slice(*cut)] for cut in cuts[rank]]
        self._inputs = []
        for values, offsets in work.inputs:
            borders = offsets[::batch].tolist()
            self._inputs.append([
                (values[borders[a] : borders[b]], offsets[a * batch : b * batch + 1] - borders[a]) for a, b in cuts[rank]
            ])  # fmt: skip
        on_gpu = work.ranks.device.type == "cuda"
        self._unpacking = torch.cuda.Stream(work.ranks.device) if on_gpu else None
        width = config.itemsize * (batch * work.local_dim + 2 * work.local_batch * sharding.total_dim)
        self.extra_bytes = width, "counted"

    def __call__(self, which: int) -> torch.Tensor:
        work, running = self.work, []
        out = torch.empty(work.local_batch, work.config.sharding.total_dim, dtype=work.dtype, device=work.ranks.device)
        with torch.no_grad():
            for number, features in enumerate(self._inputs[which]):
                if self._tables[number]:
                    pooled = embedding_pool(self._weights[number], features, self._tables[number])
                else:
                    pooled = out.new_empty(work.config.global_batch, 0)
                splits = self.receive_splits[number], self.send_splits[number]
                received = pooled.new_empty(sum(splits[0]))
                how: dict[str, Any] = {"group": work.ranks.group, "async_op": True}
                running.append((pooled, received, dist.all_to_all_single(received, pooled.view(-1), *splits, **how)))
            if self._unpacking is None:
                self._unpack(out, running)
            else:
                here = torch.cuda.current_stream(work.ranks.device)
                with torch.cuda.stream(self._unpacking):
                    self._unpack(out, running)
                here.wait_stream(self._unpacking)
        return out

    def _unpack(self, out: torch.Tensor, running: list[Any]) -> None:
        for number, (_, received, exchange) in enumerate(running):
            exchange.wait()
            for part, runs in zip(received.split(self.receive_splits[number]), self.places[number], strict=True):
                rows = part.view(self.work.local_batch, -1) if part.numel() else part
                for first, column, width in runs:
                    out[:, column : column + width].copy_(rows[:, first : first + width])

    def traced(self, which: int, timeline: Timeline) -> None:
        raise NotImplementedError("a pipelined variant has no timeline: its steps overlap on streams")


def _shares(count: int, parts: int) -> list[tuple[int, int]]:
    """Split the numbers 0 to `count` - 1 into `parts` nearly equal ranges. Return (first, end) of each range."""
    ends = [count * i // parts for i in range(parts + 1)]
    return list(pairwise(ends))


def _runs(slots: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Return the copies that unpack a received chunk into the output. Each is (first column in the chunk, first column in the
    output, number of columns).

    slots: the features whose columns are in the chunk.
    """
    runs: list[tuple[int, int, int]] = []
    taken = 0
    for slot in slots:
        if runs and runs[-1][1] + runs[-1][2] == slot.column:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + slot.dim)
        else:
            runs.append((taken, slot.column, slot.dim))
        taken += slot.dim
    return runs
