"""What embedding_all_to_all is measured against, and its own variants. An arm is one way to compute the same output.

The serial arms pool, exchange with `all_to_all_single`, and unpack; they differ in how they pool. Pooling yields
[global batch, local columns], which is the send layout as it stands, because samples are ordered by destination; rank
s's part arrives as [local batch, columns of s] and unpacking is one `torch.cat` of column runs. That is how DLRM's own
code does it, spared what can be spared: nothing is packed, splits and per-table views of the input are made beforehand.

To add an arm: write a class with `__call__(which) -> output` and put it into `ARMS`.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from weft.bench.embedding_workload import BASELINE, EmbeddingWorkload
from weft.ops.embedding_all_to_all import compiled, embedding_all_to_all
from weft.ops.embedding_pool import embedding_pool
from weft.runtime.embedding_plan import EmbeddingPlan, default_slice_size
from weft.sparse import EmbeddingSharding, as_jagged
from weft.sparse.check import check_jagged
from weft.symm import domain
from weft.timeline import Timeline

_OUTPUT_BUFFERS = 1  # no result is held across calls


class Arm(ABC):
    """One way to compute the output of a workload's input set."""

    def __init__(self, work: EmbeddingWorkload):
        self.work = work

    @abstractmethod
    def __call__(self, which: int) -> torch.Tensor:
        """The output [local batch, sum of D] for input set `which`, on the current stream."""

    def extra_bytes(self) -> int:
        """Bytes held at the worst moment beyond tables and inputs, output included, counted from the arm's buffers."""
        return self._bytes(self.work.local_batch, self.work.config.sharding.total_dim)

    def traced(self, which: int, timeline: Timeline) -> None:
        """One call whose spans go into `timeline`; CPU only, times on the monotonic clock that all ranks share."""
        raise ValueError(f"{type(self).__name__} records no timeline")

    def _bytes(self, rows: int, columns: int) -> int:
        return rows * columns * self.work.config.itemsize


class SerialArm(Arm):
    """Pool, then exchange, then unpack."""

    def __init__(self, work: EmbeddingWorkload):
        super().__init__(work)
        sharding = work.config.sharding
        dims = [sum(s.dim for s in sharding.local_slots(r)) for r in range(sharding.world_size)]
        self.send_splits = [size * work.local_dim for size in work.config.batch_sizes]
        self.receive_splits = [work.local_batch * dim for dim in dims]
        self.shapes = [(work.local_batch, dim) for dim in dims]
        self.runs = column_runs(sharding)

    @abstractmethod
    def pool(self, which: int) -> torch.Tensor:
        """This rank's pooled vectors, [global batch, local columns], contiguous."""

    def _nothing_pooled(self) -> torch.Tensor:
        """What a rank without tables pools."""
        shape = (self.work.config.global_batch, 0)
        return torch.empty(shape, dtype=self.work.config.sharding.dtype, device=self.work.ranks.device)

    def exchange(self, pooled: torch.Tensor) -> torch.Tensor:
        """What all ranks pooled for this rank's samples, rank after rank, flat."""
        received = pooled.new_empty(sum(self.receive_splits))
        dist.all_to_all_single(
            received, pooled.view(-1), self.receive_splits, self.send_splits, group=self.work.ranks.group
        )
        return received

    def unpack(self, received: torch.Tensor) -> torch.Tensor:
        parts = [p.view(s) for p, s in zip(received.split(self.receive_splits), self.shapes, strict=True)]
        return torch.cat([parts[rank][:, start:end] for rank, start, end in self.runs], dim=1)

    def __call__(self, which: int) -> torch.Tensor:
        with torch.no_grad():
            return self.unpack(self.exchange(self.pool(which)))

    def extra_bytes(self) -> int:
        pooled = self._bytes(self.work.config.global_batch, self.work.local_dim)
        output = super().extra_bytes()
        return max(pooled + output, 2 * output)  # sent and received buffers, then received and output

    def traced(self, which: int, timeline: Timeline) -> None:
        rank = self.work.ranks.rank
        marks = [time.perf_counter()]
        with torch.no_grad():
            pooled = self.pool(which)
            marks.append(time.perf_counter())
            received = self.exchange(pooled)
            marks.append(time.perf_counter())
            self.unpack(received)
            marks.append(time.perf_counter())
        wire = (self.work.config.global_batch - self.work.local_batch) * self.work.local_dim * pooled.element_size()
        for (start, end), (lane, name, sent) in zip(
            pairwise(marks),
            (("compute", "pool", 0), ("send", "all_to_all", wire), ("compute", "unpack", 0)),
            strict=True,
        ):
            timeline.add(rank, lane, name, 1e6 * start, 1e6 * end, sent)


class EmbeddingBagArm(SerialArm):
    """One `nn.EmbeddingBag` per table: what a user of plain torch writes. (The PGAS paper starts from TorchRec's
    EmbeddingBagCollection and an asynchronous all-to-all; here nothing could run beside the exchange.)"""

    def __init__(self, work: EmbeddingWorkload):
        super().__init__(work)
        self.bags = [
            nn.EmbeddingBag.from_pretrained(weight, freeze=True, mode="sum", include_last_offset=True)
            for weight in work.weights
        ]
        batch = work.config.global_batch
        self.per_table = []
        for values, offsets in work.inputs:
            cuts = offsets[::batch].tolist()
            self.per_table.append(
                [
                    (values[start:end], offsets[i * batch : (i + 1) * batch + 1] - start)
                    for i, (start, end) in enumerate(pairwise(cuts))
                ]
            )

    def pool(self, which: int) -> torch.Tensor:
        if not self.bags:
            return self._nothing_pooled()
        with torch.no_grad():
            pooled = [bag(*inputs) for bag, inputs in zip(self.bags, self.per_table[which], strict=True)]
            return torch.cat(pooled, dim=1)

    def extra_bytes(self) -> int:
        return max(2 * self._bytes(self.work.config.global_batch, self.work.local_dim), super().extra_bytes())


class BatchedArm(SerialArm):
    """Our own kernel pools all tables in one launch; then the same exchange. The honest strong baseline."""

    def __init__(self, work: EmbeddingWorkload):
        super().__init__(work)
        sharding = work.config.sharding
        self.tables = tuple(sharding.tables[t] for t in sharding.local_tables(work.ranks.rank))

    def pool(self, which: int) -> torch.Tensor:
        if not self.tables:
            return self._nothing_pooled()
        return embedding_pool(self.work.weights, self.work.inputs[which], self.tables)


class FbgemmArm(SerialArm):
    """FBGEMM's table-batched kernel (the one under TorchRec) with tables on the device, forward only."""

    def __init__(self, work: EmbeddingWorkload):
        super().__init__(work)
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        precision = SparseType.from_dtype(work.config.sharding.dtype)
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(*weight.shape, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for weight in work.weights],
            optimizer=EmbOptimType.EXACT_SGD,  # no state beside the tables
            pooling_mode=PoolingMode.SUM,
            weights_precision=precision,
            output_dtype=precision,
            device=work.ranks.device,
        )
        for theirs, ours in zip(self.kernel.split_embedding_weights(), work.weights, strict=True):
            theirs.copy_(ours)

    def pool(self, which: int) -> torch.Tensor:
        with torch.no_grad():
            return self.kernel(*self.work.inputs[which])


@dataclass(frozen=True)
class Variant:
    """A fused variant, written as its name: `direct`, `put`, with `-natural` and `-slice8` as wanted."""

    transport: Literal["direct", "put"]
    order: Literal["remote_first", "natural"] = "remote_first"
    slice_size: int | None = None  # None: the preset's

    @classmethod
    def parse(cls, name: str) -> Variant | None:
        found = re.fullmatch(r"(direct|put)(-natural)?(?:-slice([1-9]\d*))?", name)
        if found is None:
            return None
        transport: Literal["direct", "put"] = "put" if found[1] == "put" else "direct"
        return cls(transport, "natural" if found[2] else "remote_first", int(found[3]) if found[3] else None)


class FusedArm(Arm):
    """weft's operator."""

    def __init__(self, work: EmbeddingWorkload, variant: Variant):
        super().__init__(work)
        self.variant = variant
        preset = work.config
        self.slice_size = variant.slice_size or preset.slice_size or default_slice_size(preset.sharding)

    def __call__(self, which: int, timeline: Timeline | None = None) -> torch.Tensor:
        return embedding_all_to_all(
            self.work.weights,
            self.work.inputs[which],
            self.work.config.sharding,
            group=self.work.ranks.group,
            batch_sizes=self.work.config.batch_sizes,
            transport=self.variant.transport,
            order=self.variant.order,
            slice_size=self.slice_size,
            outputs=_OUTPUT_BUFFERS,
            timeline=timeline,
        )

    def extra_bytes(self) -> int:
        return _OUTPUT_BUFFERS * self._bytes(max(self.work.config.batch_sizes), self.work.config.sharding.total_dim)

    def traced(self, which: int, timeline: Timeline) -> None:
        self(which, timeline)

    def operator(self) -> Any:
        """What runs the calls. Collective where there has been no call yet."""
        variant, ranks = self.variant, self.work.ranks
        plan = EmbeddingPlan(
            self.work.config.sharding, variant.transport, variant.order, self.slice_size, outputs=_OUTPUT_BUFFERS
        )
        return compiled(plan, domain(ranks.group, ranks.device))

    def kernel(self) -> dict[str, int] | None:
        """GPU: what the compiler made of the kernel that the calls launch, and how many programs of it are resident."""
        if self.work.ranks.device.type != "cuda":
            return None
        used = (o for key, o in self.operator().kernel.occupancy.items() if self._launches(key.enter, key.leave))
        return asdict(next(used))

    def _launches(self, enter: bool, leave: bool) -> bool:
        """Whether its calls have launches that open (`enter`) and close the call as given."""
        return enter and leave

    def slices_sent(self) -> int:
        """Slices that this rank puts to its peers in a call."""
        if self.variant.transport == "direct":
            return 0
        per_sample: int = self.operator().plan.slices_per_sample[self.work.ranks.rank]
        return (self.work.config.global_batch - self.work.local_batch) * per_sample


class PerTableArm(FusedArm):
    """weft's kernel launched once for each table instead of once for all. (So does the fused paper within a node, by a kernel
    that is not persistent; this one is.)"""

    def __init__(self, work: EmbeddingWorkload):
        super().__init__(work, Variant("direct"))
        config, rank = work.config, work.ranks.rank
        self.inputs = [as_jagged(features) for features in work.inputs]
        self.checked = check_jagged(self.inputs[0], config.sharding, rank, config.batch_sizes, work.weights)
        self.launching = self.operator()

    def __call__(self, which: int, timeline: Timeline | None = None) -> torch.Tensor:
        output: torch.Tensor = self.launching(
            self.work.weights, self.inputs[which], self.checked, timeline=timeline, launch_per_table=True
        )
        return output

    def _launches(self, enter: bool, leave: bool) -> bool:
        return enter and leave == (len(self.work.slots) == 1)


ARMS: dict[str, type[Arm]] = {
    BASELINE: EmbeddingBagArm,
    "batched": BatchedArm,
    "fbgemm": FbgemmArm,
    "per-table": PerTableArm,
}
BASELINES = tuple(name for name, arm in ARMS.items() if issubclass(arm, SerialArm))
DEFAULT_VARIANTS = ("batched", "fbgemm", "direct", "put")


def why_not(name: str, device: torch.device) -> str | None:
    """Why arm `name` cannot run here, None if it can. Raises ValueError on a name that is no arm."""
    if name not in ARMS and Variant.parse(name) is None:
        raise ValueError(
            f"no variant {name!r}: give {', '.join(ARMS)}, or direct or put, optionally with -natural and -sliceN, "
            f"such as put-natural-slice8"
        )
    if name == "per-table" and device.type != "cuda":
        return "only GPU kernels are launched"
    if name == "fbgemm":
        if device.type != "cuda":
            return "it is compared on GPUs"
        try:
            import fbgemm_gpu  # noqa: F401
        except Exception as error:  # it loads shared objects: many things can be wrong with those
            return f"fbgemm_gpu does not import ({type(error).__name__})"
    return None


def make_arm(name: str, work: EmbeddingWorkload) -> Arm:
    variant = Variant.parse(name)
    return ARMS[name](work) if variant is None else FusedArm(work, variant)


def column_runs(sharding: EmbeddingSharding) -> list[tuple[int, int, int]]:
    """The output's columns in order as (rank, first, end) runs of what each rank pooled, adjacent slots merged."""
    taken = [0] * sharding.world_size
    runs: list[tuple[int, int, int]] = []
    for slot in sharding.slots:
        start, end = taken[slot.rank], taken[slot.rank] + slot.dim
        taken[slot.rank] = end
        if runs and runs[-1][0] == slot.rank and runs[-1][2] == start:
            runs[-1] = (slot.rank, runs[-1][1], end)
        else:
            runs.append((slot.rank, start, end))
    return runs
