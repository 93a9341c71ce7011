"""The data of an embedding + all-to-all configuration, and its variants: weft's operator and baselines."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from weft.bench.core.harness import Ranks
from weft.bench.core.measure import Workload
from weft.bench.ops.embedding_presets import EmbeddingConfig, jagged_input
from weft.embedding import as_jagged
from weft.embedding.check import check_jagged
from weft.embedding.options import EmbeddingOptions, Order
from weft.embedding.plan import plan_of
from weft.embedding.tables import column_runs
from weft.ops.embedding_all_to_all import embedding_all_to_all
from weft.ops.embedding_pool import embedding_pool
from weft.ops.embedding_release import calls_with
from weft.runtime.embedding import executor_of
from weft.symm import communicator
from weft.timeline import Timeline

BASELINE = "embedding_bag"
PER_TABLE = "per-table"
CHOOSES = "weft"
"""The operator with its default `transport="auto"`, which selects the transport."""
_OUTPUT_BUFFERS = 1  # no caller keeps a result across calls
_CHUNK_BYTES = 128 << 20  # bytes of float64 rows per block of the reference


class EmbeddingData(Workload):
    """This rank's tables, uniform in [-1, 1), and `input_sets` inputs of its features for the global batch."""

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
        """Allocate this rank's tables."""
        return [torch.empty(shape, dtype=self.dtype, device=self.ranks.device) for shape in shapes]

    def fill_tables(self) -> None:
        """Fill the tables with the same numbers each time."""
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

    def limit(self, name: str, errors: Mapping[str, float]) -> float:
        """Return the error limit: the larger of twice the error of `nn.EmbeddingBag` in the same dtype, and one
        rounding of the largest element.

        The limit of `nn.EmbeddingBag` itself is one rounding per row of the longest bag.
        """
        eps = torch.finfo(self.dtype).eps
        if name == BASELINE:
            return eps * max(2 * bag.mean for bag in self.config.bags)
        return max(2 * errors[BASELINE], eps)

    def reference(self, which: int) -> torch.Tensor:
        """Return the expected output of this rank, float64 [local batch, sum of D]. All ranks must make this call.

        In round i every rank pools and exchanges only its i-th slot, to save memory.
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
            arriving, leaving = [self.local_batch * dim for dim in dims], [size * mine for size in config.batch_sizes]
            dist.all_to_all_single(received, pooled, arriving, leaving, group=self.ranks.group)
            for slot, part in zip(current, received.split(arriving), strict=True):
                if slot is not None:
                    output[:, slot.column : slot.column + slot.dim] = part.view(self.local_batch, slot.dim)
        return output


def pooled_float64(weight: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the sums of bags in float64, [len(offsets) - 1, D]: `values[offsets[b]:offsets[b + 1]]` are the rows of bag b."""
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


Pool = Callable[[int], torch.Tensor]
"""A function of an input set's number. It returns this rank's pooled vectors, [global batch, local columns], contiguous."""


class SerialVariant:
    """A variant that pools, exchanges and unpacks in sequence."""

    def __init__(self, work: EmbeddingData, pooling: Callable[[EmbeddingData], Pool]):
        self.work, sharding = work, work.config.sharding
        dims = sharding.columns_of_ranks
        self.send_splits = [size * work.local_dim for size in work.config.batch_sizes]
        self.receive_splits = [work.local_batch * dim for dim in dims]
        self.shapes = [(work.local_batch, dim) for dim in dims]
        self.runs = column_runs(sharding)
        nothing = torch.empty((work.config.global_batch, 0), dtype=work.dtype, device=work.ranks.device)
        self._pool = pooling(work) if work.weights else lambda which: nothing
        self.pooled_twice = pooling is embedding_bags

    def pool(self, which: int) -> torch.Tensor:
        with torch.no_grad():
            return self._pool(which)

    def exchange(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return the vectors that all ranks pooled for this rank's samples, flat, in rank order."""
        received, group = pooled.new_empty(sum(self.receive_splits)), self.work.ranks.group
        dist.all_to_all_single(received, pooled.view(-1), self.receive_splits, self.send_splits, group=group)
        return received

    def unpack(self, received: torch.Tensor) -> torch.Tensor:
        parts = [p.view(s) for p, s in zip(received.split(self.receive_splits), self.shapes, strict=True)]
        return torch.cat([parts[rank][:, start:end] for rank, start, end in self.runs], dim=1)

    def __call__(self, which: int) -> torch.Tensor:
        with torch.no_grad():
            return self.unpack(self.exchange(self.pool(which)))

    @cached_property
    def extra_bytes(self) -> tuple[int, str]:
        """Return (peak bytes on the worst rank, how they are known). All ranks must make this call.

        The bytes include the output, but not tables and inputs. On GPUs they are measured; on CPU they are the buffers'
        sizes.
        """
        work, config = self.work, self.work.config
        if work.ranks.device.type != "cuda":
            pooled = config.global_batch * work.local_dim * config.itemsize
            received = work.local_batch * config.sharding.total_dim * config.itemsize
            # The three peaks: pooling per table and concatenating, exchanging, unpacking.
            most = max(2 * pooled * self.pooled_twice, pooled + received, 2 * received)
            return int(work.ranks.most(most)), "counted"
        self(0)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = self(0)
        torch.cuda.synchronize()
        del output
        return int(work.ranks.most(torch.cuda.max_memory_allocated() - before)), "measured"

    def traced(self, which: int, timeline: Timeline) -> None:
        work = self.work
        wire = (work.config.global_batch - work.local_batch) * work.local_dim * work.config.itemsize
        steps = (
            ("compute", "pool", 0, self.pool), ("send", "all_to_all", wire, self.exchange),
            ("compute", "unpack", 0, self.unpack),
        )  # fmt: skip
        done: Any = which
        for lane, name, sent, step in steps:
            start = time.perf_counter()
            done = step(done)
            timeline.add(work.ranks.rank, lane, name, 1e6 * start, 1e6 * time.perf_counter(), sent)


def embedding_bags(work: EmbeddingData) -> Pool:
    """Pool with one `nn.EmbeddingBag` per table.

    The PGAS paper's baseline is TorchRec's EmbeddingBagCollection with an asynchronous all-to-all. In this benchmark
    the all-to-all is synchronous, because no other work could overlap with it.
    """
    how: dict[str, Any] = {"freeze": True, "mode": "sum", "include_last_offset": True}
    bags = [nn.EmbeddingBag.from_pretrained(weight, **how) for weight in work.weights]
    batch, per_table = work.config.global_batch, []
    for values, offsets in work.inputs:
        cuts = enumerate(pairwise(offsets[::batch].tolist()))
        per_table.append([(values[a:b], offsets[i * batch : (i + 1) * batch + 1] - a) for i, (a, b) in cuts])
    return lambda which: torch.cat([bag(*of) for bag, of in zip(bags, per_table[which], strict=True)], dim=1)


def batched(work: EmbeddingData) -> Pool:
    """Pool all tables in one launch of weft's own kernel, before the same exchange: the strong baseline."""
    sharding = work.config.sharding
    tables = tuple(sharding.tables[t] for t in sharding.local_tables(work.ranks.rank))
    return lambda which: embedding_pool(work.weights, work.inputs[which], tables)


def fbgemm(work: EmbeddingData) -> Pool:
    """Pool with FBGEMM's table-batched kernel, as TorchRec does, forward only, with tables on the device."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen as Bags

    precision, sgd = SparseType.from_dtype(work.dtype), EmbOptimType.EXACT_SGD  # SGD adds no state to the tables
    of_tables = [(*weight.shape, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for weight in work.weights]
    types = {"weights_precision": precision, "output_dtype": precision}
    kernel = Bags(of_tables, optimizer=sgd, pooling_mode=PoolingMode.SUM, device=work.ranks.device, **types)
    for theirs, ours in zip(kernel.split_embedding_weights(), work.weights, strict=True):
        theirs.copy_(ours)
    return lambda which: kernel(*work.inputs[which])


def parse(name: str) -> EmbeddingOptions | None:
    """Return the options in a fused variant's name: `direct` or `put`, optionally with `-natural` and `-slice8`.

    The slice size is the preset's unless the name has one."""
    found = re.fullmatch(r"(direct|put)(-natural)?(?:-slice([1-9]\d*))?", name)
    if found is None:
        return None
    order: Order = "natural" if found[2] else "remote_first"
    slice_size = int(found[3]) if found[3] else None
    return EmbeddingOptions("put" if found[1] == "put" else "direct", order, slice_size, outputs=_OUTPUT_BUFFERS)


class FusedVariant:
    """weft's operator. per_table: True to launch its kernel once per table, False to launch it once.

    (The fused embedding paper launches per table within a node, with a non-persistent kernel; weft's kernel is
    persistent.)
    """

    def __init__(self, work: EmbeddingData, options: EmbeddingOptions, per_table: bool = False):
        self.work, self.per_table, config, rank = work, per_table, work.config, work.ranks.rank
        self.options = replace(options, slice_size=options.slice_size or config.preset.slice_size)
        if per_table:
            self.inputs = [as_jagged(features) for features in work.inputs]
            self.checked = check_jagged(self.inputs[0], config.sharding, rank, config.batch_sizes, work.weights)
            self.launching: Any = executor_of(
                plan_of(config.sharding, self.options), communicator(work.ranks.group, work.ranks.device)
            )

    def __call__(self, which: int, timeline: Timeline | None = None) -> torch.Tensor:
        work = self.work
        if self.per_table:
            tensors = {"tables": work.weights, "bags": (self.inputs[which], self.checked)}
            output: torch.Tensor = self.launching.run(tensors, timeline=timeline, launch_per_table=True)["out"]
            return output
        return embedding_all_to_all(
            work.weights, work.inputs[which], work.config.sharding, group=work.ranks.group,
            batch_sizes=work.config.batch_sizes, timeline=timeline, **vars(self.options),
        )  # fmt: skip

    @property
    def transport(self) -> str:
        """The transport that the calls have selected."""
        work = self.work
        plan = plan_of(work.config.sharding, self.options)
        known = calls_with(plan, communicator(work.ranks.group, work.ranks.device))
        if not known:
            raise RuntimeError(f"no call of {work.name} was made with transport={self.options.transport!r}")
        return known[-1].taken[0]

    @property
    def extra_bytes(self) -> tuple[int, str]:
        config = self.work.config
        output = max(config.batch_sizes) * config.sharding.total_dim * config.itemsize
        return _OUTPUT_BUFFERS * output, "counted"

    def traced(self, which: int, timeline: Timeline) -> None:
        self(which, timeline)


Variant = SerialVariant | FusedVariant
"""A variant computes the output of an input set, [local batch, sum of D], on the current stream.

`traced` (CPU only) records the spans of a call in a timeline, on the monotonic clock that all ranks share."""

POOLS: Mapping[str, Callable[[EmbeddingData], Pool]] = {
    BASELINE: embedding_bags, "batched": batched, "fbgemm": fbgemm,
}  # fmt: skip


def why_not(name: str, device: torch.device) -> str | None:
    """Return the reason why variant `name` cannot run here; None if it can. Raise ValueError for an unknown name."""
    if name not in (*POOLS, PER_TABLE, CHOOSES) and parse(name) is None:
        raise ValueError(
            f"no variant {name!r}: give {', '.join((*POOLS, PER_TABLE, CHOOSES))}, or direct or put, optionally with -natural and "
            f"-sliceN, such as put-natural-slice8"
        )
    if name == PER_TABLE and device.type != "cuda":
        return "only GPUs launch kernels"
    if name == "fbgemm":
        if device.type != "cuda":
            return "it is a baseline only on GPUs"
        try:
            import fbgemm_gpu  # noqa: F401
        except Exception as error:  # loading its shared objects can fail in many ways
            return f"fbgemm_gpu does not import ({type(error).__name__})"
    return None


def make_variant(name: str, work: EmbeddingData) -> Variant:
    if name in POOLS:
        return SerialVariant(work, POOLS[name])
    options = parse(name) or EmbeddingOptions("auto" if name == CHOOSES else "direct", outputs=_OUTPUT_BUFFERS)
    return FusedVariant(work, options, per_table=name == PER_TABLE)
