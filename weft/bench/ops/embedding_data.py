"""The tables, inputs and expected outputs of an embedding benchmark on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weft.bench.core.harness import Ranks
from weft.bench.core.measure import Workload
from weft.bench.ops.embedding_presets import EmbeddingConfig, jagged_input

BASELINE = "embedding_bag"
_CHUNK_BYTES = 128 << 20  # bytes of float64 rows per block of the reference


class RowsRead(NamedTuple):
    """The table rows that a rank reads in a call.

    bytes: the bytes of all reads. distinct: the number of distinct rows. distinct_bytes: the bytes of the distinct rows.
    """

    bytes: float
    distinct: float
    distinct_bytes: float


class EmbeddingData(Workload):
    """This rank's tables, uniform in [-1, 1), and `input_sets` inputs: the ids of its tables for the global batch."""

    def __init__(self, config: EmbeddingConfig, ranks: Ranks, *, input_sets: int):
        self.config, self.ranks, self.input_sets = config, ranks, input_sets
        self.name, self.about, self.dtype = config.preset.name, config.preset.about, config.sharding.dtype
        sharding, rank = config.sharding, ranks.rank
        self.slots = sharding.local_slots(rank)
        self.local_dim = sum(slot.dim for slot in self.slots)
        self.local_batch = config.batch_sizes[rank]
        self.owned = list(sharding.local_tables(rank))
        self.weights = self.new_tables(
            [(sharding.tables[t].num_embeddings, sharding.tables[t].embedding_dim) for t in self.owned]
        )
        self.fill_tables()
        self.draw_inputs()

    def new_tables(self, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Allocate this rank's tables, uninitialised. shapes: the shape of each table, as (rows, columns)."""
        return [torch.empty(shape, dtype=self.dtype, device=self.ranks.device) for shape in shapes]

    def fill_tables(self) -> None:
        """Fill the tables with random rows, from fixed seeds."""
        generator = torch.Generator(self.ranks.device)
        for t, weight in zip(self.owned, self.weights, strict=True):
            weight.uniform_(-1, 1, generator=generator.manual_seed(77 + t))

    def draw_inputs(self) -> None:
        config, device, owned = self.config, self.ranks.device, self.owned
        bags, rows, law = (
            [config.bags[t] for t in owned],
            [len(weight) for weight in self.weights],
            config.preset.indices,
        )
        drawn = [(bags, rows, law, config.global_batch, owned, i, device) for i in range(self.input_sets)]
        self.inputs = [jagged_input(*of_set) for of_set in drawn]

    def rows_read(self) -> RowsRead:
        """Return the number and the bytes of the rows that this rank reads in a call, averaged over the input sets."""
        nbytes = distinct = distinct_bytes = 0.0
        for values, offsets in self.inputs:
            cuts = pairwise(offsets[:: self.config.global_batch].tolist())
            for slot, weight, (start, end) in zip(self.slots, self.weights, cuts, strict=True):
                seen = torch.zeros(len(weight), dtype=torch.bool, device=values.device)
                seen[values[start:end]] = True
                nbytes += (end - start) * slot.dim * self.config.itemsize
                distinct += float(seen.sum())
                distinct_bytes += float(seen.sum()) * slot.dim * self.config.itemsize
        return RowsRead(nbytes / self.input_sets, distinct / self.input_sets, distinct_bytes / self.input_sets)

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """Return the error limit. The limit of the baseline, `nn.EmbeddingBag`, is 2 L times the dtype's epsilon. L is the mean
        bag length of the table with the longest bags. The limit of other variants is twice the baseline's error, but at least
        the epsilon.
        """
        eps = torch.finfo(self.dtype).eps
        if name == BASELINE:
            return eps * max(2 * bag.mean for bag in self.config.bags)
        return max(2 * errors[BASELINE], eps)

    def reference(self, which: int) -> torch.Tensor:
        """Return the expected output of this rank, float64 [local batch, sum of D]. All ranks must make this call."""
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
            arriving, leaving = [self.local_batch * dim for dim in dims], [size * mine for size in config.batch_sizes]
            dist.all_to_all_single(received, pooled, arriving, leaving, group=self.ranks.group)
            for slot, part in zip(current, received.split(arriving), strict=True):
                if slot is not None:
                    output[:, slot.column : slot.column + slot.dim] = part.view(self.local_batch, slot.dim)
        return output


def pooled_float64(weight: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the sum of each bag's rows in float64, [number of bags, D]. The ids of bag b are
    `values[offsets[b]:offsets[b + 1]]`.
    """
    bags, ends = offsets.numel() - 1, offsets.cpu()
    gathered = 8 * weight.shape[1] * int(ends[-1] - ends[0])
    pooled = []
    for part in torch.arange(bags).chunk(1 + gathered // _CHUNK_BYTES):
        first, last = int(part[0]), int(part[-1]) + 1
        rows = weight[values[ends[first] : ends[last]]].double()
        which = torch.arange(rows.shape[0], device=weight.device)
        begins = offsets[first : last + 1] - ends[first]
        pooled.append(F.embedding_bag(which, rows, begins, mode="sum", include_last_offset=True))
    return torch.cat(pooled)
