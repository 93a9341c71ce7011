"""The plan that all calls of an embedding_all_to_all with the same tables and options share. It has the options, and
the division of a rank's work into units.

A **unit** consists of some vectors of one sample. All samples are divided into units in the same way. A Triton program
takes one unit at a time. A CPU thread takes a block of samples. The transport determines what a unit is:

    put      a **slice** of up to `slice_size` vectors with adjacent output columns. It is sent to the sample's rank as one
             contiguous copy, followed by a flag for the receiver
    direct   vectors that are stored directly into the memory of the sample's rank, without a flag for each unit. On GPUs the
             size of a unit follows from the bytes of a bag, not from `slice_size` (`weft.runtime.cuda.embedding_kernel`)

Transport, order and slices come from a schedule (`weft.builders.embedding_all_to_all`), which is also verified and
simulated. Its `Tiles` steps name the kernel and the kernel's parameters (`kernel_of`).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import get_args

import torch

from weft.builders import EmbeddingAllToAll
from weft.builders import embedding_all_to_all as slices
from weft.builders.embedding_all_to_all import Unit, units_of, usual_slice_size
from weft.embedding.options import EmbeddingOptions, Transport
from weft.embedding.tables import DTYPE_NAMES, EmbeddingSharding
from weft.errors import ScheduleError
from weft.schedule import Schedule
from weft.schedule.kernels import PooledSlices, SliceTransport


@dataclass(frozen=True)
class EmbeddingPlan:
    """The options and the division of work of an embedding_all_to_all.

    Plans must be equal on all ranks. So in every call, ranks compare the text `said`.
    """

    sharding: EmbeddingSharding
    options: EmbeddingOptions

    def __post_init__(self) -> None:
        size = self.options.slice_size
        size = usual_slice_size(_problem(self.sharding)) if size is None else int(size)
        object.__setattr__(self, "options", replace(self.options, slice_size=size))

    def __hash__(self) -> int:
        return self.fingerprint

    @cached_property
    def text(self) -> dict[str, str]:
        """All properties that must be equal on all ranks, as short texts for error messages: {name of the property: its value}."""
        tables = {
            f"table {number}": f"{t.name} [{t.num_embeddings}, {t.embedding_dim}] {t.dtype} {t.pooling} of "
            f"{', '.join(t.feature_names)} on rank {rank}"
            for number, (t, rank) in enumerate(zip(self.sharding.tables, self.sharding.rank_of_table, strict=True))
        }
        options = {name: str(value) for name, value in asdict(self.options).items()}
        return {"world_size": str(self.sharding.world_size)} | options | tables

    @cached_property
    def said(self) -> str:
        """The text that ranks compare: one line "name: value" for each entry of `text`."""
        return "\n".join(f"{name}: {value}" for name, value in self.text.items())

    @cached_property
    def fingerprint(self) -> int:
        """A hash of `text` in [0, 2**62), the same in all processes."""
        return int.from_bytes(hashlib.sha256(json.dumps(self.text).encode()).digest()[:8], "big") >> 2

    @cached_property
    def checked_tables(self) -> dict[int, Hashable]:
        """The addresses and layouts of each rank's tables when they were last checked: {rank: layout}
        (`weft.runtime.layouts`). Unchanged tables are not checked again.
        """
        return {}

    @cached_property
    def intact_tables(self) -> dict[int, list[Hashable]]:
        """For each rank, the layouts of tables and optimizer states that its recent backward calls have found valid: {rank:
        layouts}. Tables and states with one of these layouts are not checked again.
        """
        return {}

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule for one sample per rank. Larger batches use the same kernels and parameters."""
        p, transport = _problem(self.sharding), self.options.transport
        if transport == "serial":
            return slices.serial(p)
        builder = slices.put if transport == "put" else slices.direct
        return builder(p, slice_size=self.slice_size, order=self.options.order)

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype in which pooled vectors are sent and returned."""
        of_name = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        return of_name.get(self.options.output_dtype, self.sharding.dtype)

    @property
    def slice_size(self) -> int:
        assert self.options.slice_size is not None
        return self.options.slice_size

    def slices(self, rank: int) -> tuple[Unit, ...]:
        """Return the slices into which `rank` divides the vectors of a sample: adjacent columns of at most `slice_size`
        vectors.
        """
        return units_of([(slot.column, slot.dim) for slot in self.sharding.local_slots(rank)], self.slice_size)

    def sent_by(self, transport: Transport) -> EmbeddingPlan:
        """Return the same plan with another transport."""
        return plan_of(self.sharding, replace(self.options, transport=transport))

    @cached_property
    def candidates(self) -> dict[str, Transport]:
        """The schedules among which transport="auto" chooses: {name, such as "put[slice_size=8]": transport}."""
        given = (
            [] if self.slice_size == usual_slice_size(_problem(self.sharding)) else [f"slice_size={self.slice_size}"]
        )
        given += [] if self.options.order == "remote_first" else [f"order={self.options.order}"]
        suffix = f"[{','.join(given)}]" if given else ""
        sliced: dict[str, Transport] = {f"{transport}{suffix}": transport for transport in get_args(SliceTransport)}
        return {"serial": "serial", **sliced}

    def alone(self, rank: int) -> EmbeddingPlan | None:
        """Return a plan with only the tables of `rank`, for a group of one rank; None if the rank has no tables."""
        tables = tuple(self.sharding.tables[i] for i in self.sharding.local_tables(rank))
        if not tables:
            return None
        options = replace(self.options, transport="direct", slice_size=None)
        return EmbeddingPlan(EmbeddingSharding(tables, (0,) * len(tables), 1), options)

    @cached_property
    def slices_per_sample(self) -> tuple[int, ...]:
        """For each rank, the number of slices that it sends per sample. The positions of the flags of transport "put" depend on
        these numbers.
        """
        return tuple(len(self.slices(rank)) for rank in range(self.sharding.world_size))


@functools.lru_cache(maxsize=64)
def plan_of(sharding: EmbeddingSharding, options: EmbeddingOptions) -> EmbeddingPlan:
    """Return the plan of embedding_all_to_all for a sharding and options. For the transports "put" and "direct", the plan gets
    its order and its slice size from the kernel of the schedule.
    """
    plan = EmbeddingPlan(sharding, options)
    if options.transport in ("auto", "serial"):
        return plan
    kernel = kernel_of(plan.schedule)
    read = replace(options, transport=kernel.transport, order=kernel.order, slice_size=kernel.slice_size)
    return EmbeddingPlan(sharding, read)


def _problem(sharding: EmbeddingSharding) -> EmbeddingAllToAll:
    """Return the problem (sizes and options) of an embedding call with one sample per rank. Larger batches use the same
    kernels.
    """
    return problem_of(sharding, (1,) * sharding.world_size)


def problem_of(sharding: EmbeddingSharding, batch_sizes: Sequence[int], zipf: float | None = None) -> EmbeddingAllToAll:
    """Return the problem of a call with these batch sizes, for builders such as
    `weft.builders.embedding_all_to_all.direct`.

    The mean number of rows per bag follows from `sharding.rows_read` (default: one row).

    batch_sizes: the number of samples of each rank.
    zipf: the exponent of Zipf's law for ids; 0 for uniform ids. None: unknown, so predictions assume that no row is in
        a cache.
    """
    local = [sharding.local_slots(rank) for rank in range(sharding.world_size)]
    rows: tuple[tuple[float, ...], ...] = ()
    if (read := sharding.rows_read) is not None:
        of_table = [mean / len(table.feature_names) for mean, table in zip(read, sharding.tables, strict=True)]
        rows = tuple(tuple(of_table[slot.table] for slot in of_rank) for of_rank in local)
    places = tuple(tuple((slot.column, slot.dim) for slot in of_rank) for of_rank in local)
    ids = (
        ()
        if zipf is None
        else tuple(
            tuple((float(sharding.tables[slot.table].num_embeddings), zipf) for slot in of_rank) for of_rank in local
        )
    )
    return EmbeddingAllToAll(sharding.world_size, tuple(batch_sizes), places, rows, DTYPE_NAMES[sharding.dtype], ids)


def kernel_of(schedule: Schedule) -> PooledSlices:
    """Return the kernel that all tiles of an embedding schedule name. Raise `ScheduleError` unless all tiles have the same
    `PooledSlices` kernel.
    """
    kernels = dict.fromkeys(kernel for step in schedule.walk() if (kernel := step.tile_kernel))
    match [*kernels]:
        case [PooledSlices() as kernel]:
            return kernel
    raise ScheduleError(
        f"schedule {schedule.name} is not a schedule of embedding_all_to_all: it must have one kernel, {PooledSlices.kind}, "
        f"for the samples of all ranks, but has {', '.join(kernel.name for kernel in kernels) or 'none'}"
    )
