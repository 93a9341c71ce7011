"""Tile kernels: the kernel that executors run for the tiles of a step (`weft.schedule.steps.Tiles`), with its parameters, as a
value.

A step has its tiles written out too. These are verified and simulated, and CPU processes run them one after the other. An
executor with a kernel for all tiles looks it up by the type of the value, and takes its arguments from the value. The builder
that writes both must make them agree; tests/unit/test_tile_kernels.py checks every builder.

A new kernel is a frozen dataclass that derives from `TileKernel`, in any file, with words, numbers and expressions as fields. To
run it, add an entry to each executor (`weft.runtime.cpu.steps.run_tiles`, `weft.runtime.cuda.compile.emit_tiles`); GPUs refuse a
kernel without an entry by name. The simulator assumes that its tiles are as fast as weft's own kernels, unless
`weft.sim.costs.rates` has an entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from weft.schedule.expr import Index

SliceTransport: TypeAlias = Literal["direct", "put"]
SliceOrder: TypeAlias = Literal["remote_first", "natural"]
KERNELS: dict[str, type[TileKernel]] = {}
"""Kernel classes by their name in files."""


class TileKernel:
    """A kernel with the defaults."""

    __slots__ = ()
    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            KERNELS[cls.kind] = cls

    @property
    def name(self) -> str:
        """The name in timelines, tables and messages."""
        return self.kind

    def continues(self, before: TileKernel | None) -> bool:
        """True if the launch of `before` may also run these tiles, if only signals are between the two steps."""
        return type(before) is type(self)


@dataclass(frozen=True, slots=True)
class GroupedMatmul(TileKernel):
    """GEMMs of (source, expert) segments in the places where an exchange stored them (`weft.kernels.grouped_matmul`).

    counts, tokens, inbox, weights, y: buffers. experts: number on each rank. slot_rows: rows of the inbox for each other rank.
    Sources are `n_sources` ranks, starting `first_source` ranks after this rank (0: this rank). The kernel multiplies the rows for
    `n_experts` local experts from `first_expert` on. k indexes the columns of tokens and the rows of weights; the kernel uses `n_k`
    of them from `first_k` on. adds: accumulate into y.
    """

    kind: ClassVar[str] = "grouped_matmul"
    counts: str
    tokens: str
    inbox: str
    weights: str
    y: str
    experts: int
    slot_rows: int
    first_source: int
    n_sources: int
    first_expert: int
    n_experts: int
    first_k: int
    n_k: int
    adds: bool


@dataclass(frozen=True, slots=True)
class ReturningMatmul(TileKernel):
    """The reverse of `GroupedMatmul`: rows sorted by expert, then by source, are multiplied and stored by source.

    See `weft.kernels.grouped_matmul`. counts: a buffer [2 * ranks, experts]: rows from each source for each local expert, and
    below this rank's tokens for each expert of each rank. h, weights, y, outbox: buffers. This rank's rows go to y, those of each
    other rank to its slot in the outbox of rank `at`. The kernel takes all of k, and does not accumulate. The other fields are as
    in `GroupedMatmul`.
    """

    kind: ClassVar[str] = "returning_matmul"
    counts: str
    h: str
    weights: str
    y: str
    outbox: str
    at: Index
    experts: int
    slot_rows: int
    first_source: int
    n_sources: int
    first_expert: int
    n_experts: int


@dataclass(frozen=True, slots=True)
class TrackedMatmul(TileKernel):
    """A GEMM that stores each tile where its step says, also in peers' memory, and signals finished tiles while it runs.

    See `weft.kernels.tracked_matmul`. A signal is set as soon as all tiles that set it are stored. A body is one matmul or addmm,
    and sets.

    rows, cols: the most of a tile; powers of two. If there are fewer tiles than compute units, several units share a tile. Each
    then computes a part of k that is no shorter than `least_part`, and the last of them stores the tile.
    """

    kind: ClassVar[str] = "tracked_matmul"
    least_part: ClassVar[int] = 512
    least_k: ClassVar[int] = 1024
    """The smallest K for which the planner may select this kernel. For a smaller K, storing tiles at peers takes longer than
    multiplying them. (2 x H100, K 512: GEMM + all-gather runs at 0.79 and GEMM + reduce-scatter at 0.84 of the speed of
    NCCL and cuBLAS.)"""
    rows: int = 128
    cols: int = 256

    def continues(self, before: TileKernel | None) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class LibraryGroupedMatmul(TileKernel):
    """cuBLAS's GEMMs of rows that are sorted by expert."""

    kind: ClassVar[str] = "library_grouped_matmul"


@dataclass(frozen=True, slots=True)
class Permute(TileKernel):
    """A kernel that reorders rows from the order of source ranks to the order of experts."""

    kind: ClassVar[str] = "permute"


@dataclass(frozen=True, slots=True)
class PooledSlices(TileKernel):
    """A kernel that pools embeddings and sends them to all ranks in `order`, a slice at a time.

    transport: "direct" stores slices at their destination; "put" stages slices and copies them."""

    kind: ClassVar[str] = "embedding_all_to_all"
    transport: SliceTransport
    order: SliceOrder
    slice_size: int

    @property
    def name(self) -> str:
        return f"embedding_all_to_all[slice_size={self.slice_size}]"


@dataclass(frozen=True, slots=True)
class PooledBags(TileKernel):
    """A kernel that pools embeddings and sends nothing."""

    kind: ClassVar[str] = "embedding_bag"


@dataclass(frozen=True, slots=True)
class Unpack(TileKernel):
    """A kernel that reorders columns from the order of ranks to the order of the result, or back."""

    kind: ClassVar[str] = "unpack"
