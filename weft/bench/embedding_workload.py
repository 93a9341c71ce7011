"""One rank's share of an embedding + all-to-all benchmark: its tables, several input sets, the float64 result, traffic.

The reference is computed by the owner of each table in float64 (`nn.EmbeddingBag`'s own definition on a copy of the
rows that are read), exchanged in float64 and put together slot by slot: it shares no code with what is timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weft.bench.ceilings import Ceilings
from weft.bench.embedding_inputs import jagged_input
from weft.bench.embedding_presets import EmbeddingConfig
from weft.bench.harness import Ranks
from weft.bench.measure import Workload

BASELINE = "embedding_bag"
_CHUNK_BYTES = 128 << 20  # of gathered rows in float64 while the reference is computed


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank must move in a call, whatever the algorithm.

    Every row read counts, repeated or not (caches may do better: `distinct_rows` counts each row once); ids and offsets
    are read; pooled vectors are written, here or at a peer; `wire` is the part of them that leaves the rank.
    """

    rows: float
    distinct_rows: float
    ids: float
    offsets: float
    outputs: float
    wire: float

    @property
    def memory(self) -> float:
        return self.rows + self.ids + self.offsets + self.outputs

    def roofline_ms(self, ceilings: Ceilings) -> float:
        """The larger of memory traffic and wire traffic over what this rank was measured to do. Rows that are read again may come
        from a cache, and then a call takes less."""
        return 1e3 * max(self.memory / ceilings.memory, self.wire / ceilings.link)


class EmbeddingWorkload(Workload):
    """Tables (uniform in [-1, 1)), `input_sets` inputs of the global batch for this rank's features."""

    def __init__(self, config: EmbeddingConfig, ranks: Ranks, *, input_sets: int, seed: int = 0):
        self.config, self.ranks, self.input_sets = config, ranks, input_sets
        self.name, self.dtype = config.name, config.sharding.dtype
        sharding, device, rank = config.sharding, ranks.device, ranks.rank
        self.slots = sharding.local_slots(rank)
        self.local_dim = sum(slot.dim for slot in self.slots)
        self.local_batch = config.batch_sizes[rank]
        owned = sharding.local_tables(rank)
        generator = torch.Generator(device)
        self.weights: list[torch.Tensor] = []
        for t in owned:
            shape = (sharding.tables[t].num_embeddings, sharding.tables[t].embedding_dim)
            weight = torch.empty(shape, dtype=sharding.dtype, device=device)
            self.weights.append(weight.uniform_(-1, 1, generator=generator.manual_seed(77 + t)))
        bags = [config.bags[t] for t in owned]
        rows = [sharding.tables[t].num_embeddings for t in owned]
        self.inputs = [
            jagged_input(bags, rows, config.indices, config.global_batch, list(owned), seed + i, device)
            for i in range(input_sets)
        ]

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """A variant may err at most twice as much as plain torch in the same dtype (`nn.EmbeddingBag`), or by one rounding
        of the largest element; plain torch by one rounding for each row of the longest bag."""
        eps = torch.finfo(self.dtype).eps
        if name == BASELINE:
            return eps * max(2 * bag.mean for bag in self.config.bags)
        return max(2 * errors[BASELINE], eps)

    def traffic(self) -> Traffic:
        """This rank's bytes, exact for its inputs, in the mean over the input sets."""
        sharding, itemsize = self.config.sharding, self.config.itemsize
        rows = distinct = 0.0
        for values, offsets in self.inputs:
            cuts = offsets[:: self.config.global_batch].tolist()
            for slot, start, end in zip(self.slots, cuts, cuts[1:], strict=False):
                rows += (end - start) * slot.dim * itemsize
                seen = torch.zeros(sharding.tables[slot.table].num_embeddings, dtype=torch.bool, device=values.device)
                seen[values[start:end]] = True
                distinct += float(seen.sum()) * slot.dim * itemsize
        values, offsets = self.inputs[0]
        count = sum(v.numel() for v, _ in self.inputs) / self.input_sets
        pooled = self.local_dim * itemsize
        return Traffic(
            rows=rows / self.input_sets,
            distinct_rows=distinct / self.input_sets,
            ids=count * values.element_size(),
            offsets=offsets.numel() * offsets.element_size(),
            outputs=self.config.global_batch * pooled,
            wire=(self.config.global_batch - self.local_batch) * pooled,
        )

    def reference(self, which: int) -> torch.Tensor:
        """float64 [local batch, sum of D]: what this rank must receive. Collective.

        In round i every rank pools its i-th slot and sends it off, which keeps the memory for it small.
        """
        config, (values, offsets) = self.config, self.inputs[which]
        batch, device = config.global_batch, self.ranks.device
        output = torch.empty(self.local_batch, config.sharding.total_dim, dtype=torch.float64, device=device)
        slots_of_rank = [config.sharding.local_slots(r) for r in range(self.ranks.world_size)]
        for i in range(max(len(slots) for slots in slots_of_rank)):
            current = [slots[i] if i < len(slots) else None for slots in slots_of_rank]
            dims = [0 if slot is None else slot.dim for slot in current]
            mine = dims[self.ranks.rank]
            pooled = torch.empty(0, dtype=torch.float64, device=device)
            if mine:
                pooled = pooled_float64(self.weights[i], values, offsets[i * batch : (i + 1) * batch + 1]).view(-1)
            received = torch.empty(self.local_batch * sum(dims), dtype=torch.float64, device=device)
            dist.all_to_all_single(
                received,
                pooled,
                output_split_sizes=[self.local_batch * dim for dim in dims],
                input_split_sizes=[size * mine for size in config.batch_sizes],
                group=self.ranks.group,
            )
            for slot, part in zip(current, received.split([self.local_batch * dim for dim in dims]), strict=True):
                if slot is not None:
                    output[:, slot.column : slot.column + slot.dim] = part.view(self.local_batch, slot.dim)
        return output


def pooled_float64(weight: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums of bags in float64: `values[offsets[b]:offsets[b + 1]]` name the rows of bag b. [len(offsets) - 1, D]."""
    bags, dim = offsets.numel() - 1, weight.shape[1]
    pooled = torch.zeros(bags, dim, dtype=torch.float64, device=weight.device)
    ends = offsets.cpu()
    limit = max(1, _CHUNK_BYTES // (8 * dim))
    first = 0
    while first < bags:
        last = min(bags, max(first + 1, int(torch.searchsorted(ends, ends[first] + limit, right=True)) - 1))
        rows = weight[values[ends[first] : ends[last]]].double()
        pooled[first:last] = F.embedding_bag(
            torch.arange(rows.shape[0], device=weight.device),
            rows,
            offsets[first : last + 1] - ends[first],
            mode="sum",
            include_last_offset=True,
        )
        first = last
    return pooled
