"""The variants of embedding pooling + all-to-all: weft's operator and baselines."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.bench.ops.embedding_data import BASELINE, EmbeddingData
from weft.bench.ops.embedding_pipelined import PipelinedVariant
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

PER_TABLE = "per-table"
ASYNCHRONOUS = "embedding_bag-async"
"""The PGAS paper's baseline: EmbeddingBagCollection, and an all-to-all with `async_op=True`."""
CHOOSES = "weft"
"""The operator with its default `transport="auto"`, which selects the transport."""
_LIMITS = r"(?:-programs([1-9]\d*))?(?:-registers([1-9]\d*))?"
_OUTPUT_BUFFERS = 1  # no caller keeps a result across calls


Pool = Callable[[int], torch.Tensor]
"""A function of an input set's number. It returns this rank's pooled vectors, [global batch, local columns], contiguous."""


class SerialVariant:
    """A variant without overlap: it pools, exchanges the vectors and unpacks them, one after the other.

    pooling: a function that prepares pooling for `work`, and returns the function that pools (a `Pool`).
    asynchronous: True to start the all-to-all with `async_op=True` and then wait for it.
    """

    def __init__(self, work: EmbeddingData, pooling: Callable[[EmbeddingData], Pool], asynchronous: bool = False):
        self.work, self.asynchronous, sharding = work, asynchronous, work.config.sharding
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
        """Exchange the `pooled` vectors. Return the vectors of this rank's samples as a 1-D tensor, in the order of
        source ranks.
        """
        received, splits = pooled.new_empty(sum(self.receive_splits)), (self.receive_splits, self.send_splits)
        how: dict[str, Any] = {"group": self.work.ranks.group, "async_op": self.asynchronous}
        running = dist.all_to_all_single(received, pooled.view(-1), *splits, **how)
        if running is not None:
            running.wait()
        return received

    def unpack(self, received: torch.Tensor) -> torch.Tensor:
        parts = [p.view(s) for p, s in zip(received.split(self.receive_splits), self.shapes, strict=True)]
        return torch.cat([parts[rank][:, start:end] for rank, start, end in self.runs], dim=1)

    def __call__(self, which: int) -> torch.Tensor:
        with torch.no_grad():
            return self.unpack(self.exchange(self.pool(which)))

    @cached_property
    def extra_bytes(self) -> tuple[int, str]:
        """The memory that the variant needs: (peak bytes on the worst rank, "measured" or "counted"). All ranks must make this
        call.

        The bytes include the output, but not tables and inputs. On GPUs they are measured. On CPU they are computed from
        the sizes of the buffers.
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
    """Return a function that pools with one `nn.EmbeddingBag` per table, as TorchRec's EmbeddingBagCollection does."""
    how: dict[str, Any] = {"freeze": True, "mode": "sum", "include_last_offset": True}
    bags = [nn.EmbeddingBag.from_pretrained(weight, **how) for weight in work.weights]
    batch, per_table = work.config.global_batch, []
    for values, offsets in work.inputs:
        cuts = enumerate(pairwise(offsets[::batch].tolist()))
        per_table.append([(values[a:b], offsets[i * batch : (i + 1) * batch + 1] - a) for i, (a, b) in cuts])
    return lambda which: torch.cat([bag(*of) for bag, of in zip(bags, per_table[which], strict=True)], dim=1)


def batched(work: EmbeddingData) -> Pool:
    """Return a function that pools all tables in one launch of weft's pooling kernel."""
    sharding = work.config.sharding
    tables = tuple(sharding.tables[t] for t in sharding.local_tables(work.ranks.rank))
    return lambda which: embedding_pool(work.weights, work.inputs[which], tables)


def fbgemm(work: EmbeddingData) -> Pool:
    """Return a function that pools with FBGEMM's table-batched kernel, as TorchRec does. It has no backward."""
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
    """Return the options in a fused variant's name, such as `put-natural-slice8`; None for other names.

    The name begins with the transport, `direct` or `put`. Optional suffixes, in this order: `-natural` for the order
    "natural", `-slice8` for a slice size of 8 instead of the preset's, and the suffixes of `limits_of`.
    """
    found = re.fullmatch(r"(direct|put)(-natural)?(?:-slice([1-9]\d*))?" + _LIMITS, name)
    if found is None:
        return None
    order: Order = "natural" if found[2] else "remote_first"
    slice_size = int(found[3]) if found[3] else None
    return EmbeddingOptions("put" if found[1] == "put" else "direct", order, slice_size, outputs=_OUTPUT_BUFFERS)


def limits_of(name: str) -> tuple[int | None, int | None] | None:
    """Return (programs per multiprocessor, registers per thread) in a fused variant's name, such as
    `put-programs4-registers64`.

    A missing limit is None. Return None if the name has neither.
    """
    found = re.fullmatch(r".*?" + _LIMITS, name)
    limits = tuple(int(text) if text else None for text in found.groups()[-2:]) if found and parse(name) else ()
    return limits if any(limits) else None  # type: ignore[return-value]


def chunks_of(name: str) -> int | None:
    """Return the number of chunks in the name of a pipelined variant, such as 4 for `pipelined-4`; None for other names."""
    found = re.fullmatch(r"pipelined-([1-9]\d*)", name)
    return None if found is None else int(found[1])


class FusedVariant:
    """A variant that calls weft's operator.

    how: further arguments of `EmbeddingAllToAllCuda.run`, on GPUs only. `launch_per_table=True` launches the kernel
    once per table, as the fused embedding paper does within a node. `occupancy` limits how many programs run at the
    same time.
    """

    def __init__(self, work: EmbeddingData, options: EmbeddingOptions, how: Mapping[str, Any] | None = None):
        self.work, self.how, config, rank = work, how or {}, work.config, work.ranks.rank
        self.options = replace(options, slice_size=options.slice_size or config.preset.slice_size)
        if self.how:
            self.inputs = [as_jagged(features) for features in work.inputs]
            self.checked = check_jagged(self.inputs[0], config.sharding, rank, config.batch_sizes, work.weights)

    def __call__(self, which: int, timeline: Timeline | None = None) -> torch.Tensor:
        work = self.work
        if self.how:
            tensors = {"tables": work.weights, "bags": (self.inputs[which], self.checked)}
            output: torch.Tensor = self.executor.run(tensors, timeline=timeline, **self.how)["out"]
            return output
        return embedding_all_to_all(
            work.weights, work.inputs[which], work.config.sharding, group=work.ranks.group,
            batch_sizes=work.config.batch_sizes, timeline=timeline, **vars(self.options),
        )  # fmt: skip

    @property
    def executor(self) -> Any:
        """The executor that runs the calls. Only for variants whose name gives the transport, `direct` or `put`."""
        work = self.work
        return executor_of(
            plan_of(work.config.sharding, self.options), communicator(work.ranks.group, work.ranks.device)
        )

    @property
    def transport(self) -> str:
        """The transport that weft selected in the variant's last call, such as "direct" or "put"."""
        work = self.work
        plan = plan_of(work.config.sharding, self.options)
        known = calls_with(plan, communicator(work.ranks.group, work.ranks.device))
        if not known:
            raise RuntimeError(
                f"no call of {work.name} was made with transport={self.options.transport!r}: call the variant first"
            )
        return known[-1].taken[0]

    @property
    def extra_bytes(self) -> tuple[int, str]:
        config = self.work.config
        output = max(config.batch_sizes) * config.sharding.total_dim * config.itemsize
        return _OUTPUT_BUFFERS * output, "counted"

    def traced(self, which: int, timeline: Timeline) -> None:
        self(which, timeline)


Variant = SerialVariant | FusedVariant | PipelinedVariant
"""An implementation to measure. Called with the number of an input set, it computes the output [local batch, columns of
all tables] on the current stream.

Its method `traced` (CPU only) records the spans of a call in a timeline. Times are from the monotonic clock, which all
ranks share.
"""

POOLS: Mapping[str, Callable[[EmbeddingData], Pool]] = {
    BASELINE: embedding_bags, "batched": batched, "fbgemm": fbgemm,
}  # fmt: skip


def why_not(name: str, device: torch.device) -> str | None:
    """Return the reason why variant `name` cannot run here; None if it can. Raise ValueError for an unknown name."""
    if name not in (*POOLS, ASYNCHRONOUS, PER_TABLE, CHOOSES) and parse(name) is None and chunks_of(name) is None:
        raise ValueError(
            f"no variant {name!r}: give {', '.join((*POOLS, ASYNCHRONOUS, PER_TABLE, CHOOSES))}, pipelined-N, or direct or put, "
            f"optionally with -natural, -sliceN, -programsN and -registersN, such as put-natural-slice8"
        )
    if name == PER_TABLE and device.type != "cuda":
        return "only GPUs launch kernels"
    if limits_of(name) and device.type != "cuda":
        return "only GPUs have an occupancy"
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
    if name == ASYNCHRONOUS:
        return SerialVariant(work, embedding_bags, asynchronous=True)
    if chunks := chunks_of(name):
        return PipelinedVariant(work, chunks)
    options = parse(name) or EmbeddingOptions("auto" if name == CHOOSES else "direct", outputs=_OUTPUT_BUFFERS)
    how: dict[str, Any] = {"launch_per_table": True} if name == PER_TABLE else {}
    if limits := limits_of(name):
        from weft.runtime.cuda.embedding_kernel import Occupancy  # needs Triton, which a CPU machine may lack

        how["occupancy"] = Occupancy(*limits)
    return FusedVariant(work, options, how)
