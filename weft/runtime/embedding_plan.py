"""What every call of one embedding_all_to_all shares: its options, and how the work of a rank is cut into units.

A **unit** is what a program or thread takes at a time: pooled vectors of one sample. For `put` a unit is a **slice**: up to
`slice_size` vectors whose output columns are adjacent, so that it leaves as one contiguous copy and raises one flag. For
`direct` a unit only says how much work is grabbed at once; on GPUs that is not `slice_size`, but what suits the bytes of a bag
(`weft.runtime.cuda.embedding_kernel`). The units of a sample are the same for every sample.

Transport, order and slices come from a schedule (`weft.schedule.slices`), the same value that is verified and simulated: its
tiles name their kernel (`kernel_of`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Literal, TypeAlias, get_args

from weft.errors import ScheduleError
from weft.schedule import Schedule, Tiles
from weft.schedule.kernels import PooledSlices, SliceOrder, SliceTransport
from weft.schedule.slices import Unit, units_of
from weft.sparse import EmbeddingSharding

Transport: TypeAlias = SliceTransport
Order: TypeAlias = SliceOrder
BoundsCheck = Literal["fatal", "warning", "ignore"]


@dataclass(frozen=True)
class EmbeddingPlan:
    """One operator as every rank of its group must describe it; ranks compare `fingerprint` at every call."""

    sharding: EmbeddingSharding
    transport: Transport = "direct"
    order: Order = "remote_first"
    slice_size: int = 32
    bounds_check: BoundsCheck = "warning"
    hash: bool = False
    outputs: int = 2

    def __post_init__(self) -> None:
        for name, given, legal in (
            ("transport", self.transport, get_args(Transport)),
            ("order", self.order, get_args(Order)),
            ("bounds_check", self.bounds_check, get_args(BoundsCheck)),
        ):
            if given not in legal:
                raise ValueError(f"{name}={given!r} must be one of {', '.join(map(repr, legal))}")
        if not isinstance(self.hash, bool):
            raise ValueError(f"hash={self.hash!r} must be True or False")
        if not isinstance(self.slice_size, Integral) or not 1 <= self.slice_size < 2**31:
            raise ValueError(f"slice_size={self.slice_size!r} must be at least 1 pooled vector, and less than 2**31")
        if not isinstance(self.outputs, Integral) or not 1 <= self.outputs <= 255:
            raise ValueError(
                f"outputs={self.outputs!r} must be between 1 and 255: how many result buffers each rank keeps"
            )

    def __hash__(self) -> int:
        return self.fingerprint

    @cached_property
    def text(self) -> dict[str, str]:
        """Everything that ranks must agree on, by name, as text that fits into an error message."""
        tables = {
            f"table {number}": f"{t.name} [{t.num_embeddings}, {t.embedding_dim}] {t.dtype} {t.pooling} of "
            f"{', '.join(t.feature_names)} on rank {rank}"
            for number, (t, rank) in enumerate(zip(self.sharding.tables, self.sharding.rank_of_table, strict=True))
        }
        names = ("transport", "order", "slice_size", "bounds_check", "hash", "outputs")
        options = {name: str(getattr(self, name)) for name in names}
        return {"world_size": str(self.sharding.world_size)} | options | tables

    @cached_property
    def fingerprint(self) -> int:
        """A number in [0, 2**62) that differs (but for chance) when `text` does, the same in every process."""
        return int.from_bytes(hashlib.sha256(json.dumps(self.text).encode()).digest()[:8], "big") >> 2

    def slices(self, rank: int) -> tuple[Unit, ...]:
        """The slices of one sample on `rank`: runs of adjacent columns, cut into at most `slice_size` vectors."""
        return units_of([(slot.column, slot.dim) for slot in self.sharding.local_slots(rank)], self.slice_size)

    @cached_property
    def slices_per_sample(self) -> tuple[int, ...]:
        """For every rank, how many slices it sends per sample: what lays out the flags of `put`."""
        return tuple(len(self.slices(rank)) for rank in range(self.sharding.world_size))


def kernel_of(schedule: Schedule) -> PooledSlices:
    """The kernel of all tiles; `ScheduleError` if there is none, or another one, and the schedule none of the operator's."""
    kernels = dict.fromkeys(step.kernel for lane in schedule.lanes for step in lane.steps if isinstance(step, Tiles))
    match [*kernels]:
        case [PooledSlices() as kernel]:
            return kernel
    raise ScheduleError(
        f"schedule {schedule.name} is none of the operator's: one kernel, {PooledSlices.kind}, for the samples of all ranks; "
        f"found {', '.join(kernel.name for kernel in kernels) or 'none'}"
    )


def default_slice_size(sharding: EmbeddingSharding) -> int:
    """Vectors per slice when nobody says: about 2 KiB of them, 4 to 32.

    On H200s that was the best of 4 to 32 vectors in four configurations (benchmarks/results/h200-tuning.json); on CPUs longer
    slices leave room for fewer samples in the staging area, so that tables are visited again more often.
    """
    mean_dim = sharding.total_dim / len(sharding.slots)
    return max(4, min(32, round(2048 / (mean_dim * sharding.dtype.itemsize))))
