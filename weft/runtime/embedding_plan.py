"""What every call of one embedding_all_to_all shares: its options, and how the work of a rank is cut into units.

A **unit** is what a program or thread takes at a time: up to `slice_size` pooled vectors of one sample. For `put` a unit
is a **slice**: its output columns are adjacent, so that it leaves as one contiguous copy and raises one flag. For
`direct` a unit only says how much work is grabbed at once. The units of a sample are the same for every sample.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Literal, get_args

from weft.sparse import EmbeddingSharding, Slot

Transport = Literal["direct", "put"]
Order = Literal["remote_first", "natural"]
BoundsCheck = Literal["fatal", "warning", "ignore"]


@dataclass(frozen=True, slots=True)
class Unit:
    """Local slots `first` to `end` of a sample; they cover `width` columns from `column` on (with gaps, for `direct`)."""

    first: int
    end: int
    column: int
    width: int


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
        for name, value, legal in (
            ("transport", self.transport, get_args(Transport)),
            ("order", self.order, get_args(Order)),
            ("bounds_check", self.bounds_check, get_args(BoundsCheck)),
        ):
            if value not in legal:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, legal))}")
        if not isinstance(self.hash, bool):
            raise ValueError(f"hash={self.hash!r} must be True or False")
        if not isinstance(self.slice_size, Integral) or not 1 <= self.slice_size < 2**31:
            raise ValueError(f"slice_size={self.slice_size!r} must be at least 1 pooled vector, and less than 2**31")
        if not isinstance(self.outputs, Integral) or not 1 <= self.outputs <= 255:
            raise ValueError(
                f"outputs={self.outputs!r} must be between 1 and 255: how many result buffers each rank keeps"
            )

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
        return slices_of(self.sharding.local_slots(rank), self.slice_size)

    @cached_property
    def slices_per_sample(self) -> tuple[int, ...]:
        """For every rank, how many slices it sends per sample: what lays out the flags of `put`."""
        return tuple(len(self.slices(rank)) for rank in range(self.sharding.world_size))


def slices_of(slots: tuple[Slot, ...], slice_size: int) -> tuple[Unit, ...]:
    units: list[Unit] = []
    for number, slot in enumerate(slots):
        last = units[-1] if units else None
        if last and last.column + last.width == slot.column and last.end - last.first < slice_size:
            units[-1] = Unit(last.first, number + 1, last.column, last.width + slot.dim)
        else:
            units.append(Unit(number, number + 1, slot.column, slot.dim))
    return tuple(units)


def default_slice_size(sharding: EmbeddingSharding) -> int:
    """Vectors per slice when nobody says: about 2 KiB of them, 4 to 32.

    On H200s that was the best of 4 to 32 vectors in four configurations (benchmarks/results/h200-tuning.json); on CPUs longer
    slices leave room for fewer samples in the staging area, so that tables are visited again more often.
    """
    mean_dim = sharding.total_dim / len(sharding.slots)
    return max(4, min(32, round(2048 / (mean_dim * sharding.dtype.itemsize))))
