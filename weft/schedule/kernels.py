"""Which kernel does the tiles of a step (`weft.schedule.steps.Tiles`), with its parameters: a value, which executors go by.

A step has its tiles written out beside it. These are what is verified and simulated, and what CPU processes do one after the
other. An executor with a kernel for all of them looks it up by the type of the value, and takes what it needs from the value: the
builder that writes both answers for it that they say the same, and tests/unit/test_tile_kernels.py asks all of them.

A new one is a frozen dataclass that derives from `TileKernel`, in whatever file, with words, numbers and expressions as fields.
What runs it is an entry in each executor (`weft.runtime.cpu.steps.run_tiles`, `weft.runtime.cuda.compile.emit_tiles`); GPUs
refuse one without by name. The simulator takes its tiles to be as fast as our own kernels', unless it has an entry in
`weft.sim.costs.rates`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from weft.schedule.expr import Index

SliceTransport: TypeAlias = Literal["direct", "put"]
SliceOrder: TypeAlias = Literal["remote_first", "natural"]
KERNELS: dict[str, type[TileKernel]] = {}
"""By the name that files call it by."""


class TileKernel:
    """What holds unless a kernel says otherwise."""

    __slots__ = ()
    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            KERNELS[cls.kind] = cls

    @property
    def name(self) -> str:
        """In timelines, tables and messages."""
        return self.kind

    def continues(self, before: TileKernel | None) -> bool:
        """Whether its tiles need no launch of their own behind those of `before`, with nothing but signals between."""
        return type(before) is type(self)


@dataclass(frozen=True, slots=True)
class GroupedMatmul(TileKernel):
    """GEMMs of (source, expert) segments that lie where an exchange left them, as `weft.kernels.grouped_matmul` has it.

    counts, tokens, inbox, weights, y: buffers. experts: of a rank. slot_rows: of the inbox, for each other rank. Sources are
    `n_sources` ranks from the `first_source`-th after this one on, 0 being the own; of their experts here `n_experts` are taken,
    and of k, of tokens' columns and weights' rows, `n_k` from `first_k` on. adds: to what is in y.
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
    """`GroupedMatmul` the other way round: rows that are in the order of experts, and for one expert of sources, are multiplied and
    stored by source, as `weft.kernels.grouped_matmul` has it.

    counts: a buffer [2 * ranks, experts]: rows from each source for each local expert, and below this rank's tokens for each expert
    of each rank. h, weights, y, outbox: buffers; the own rows go to y, those of others to a slot for each in the outbox of rank
    `at`. All of k is taken, and nothing added to. The rest is as for `GroupedMatmul`.
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
    """A GEMM whose tiles are stored where their steps say, in peers' memory too, and whose signals are set as soon as all tiles
    that set them are stored, while the kernel goes on (`weft.kernels.tracked_matmul`). A body is one matmul or addmm, and sets.

    rows, cols: of a tile at most; powers of two. Where there are fewer tiles than units, several do one of them, each a part of k
    that is no shorter than `least_part`, and the last of them stores the tile.
    """

    kind: ClassVar[str] = "tracked_matmul"
    least_part: ClassVar[int] = 512
    rows: int = 128
    cols: int = 256

    def continues(self, before: TileKernel | None) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class LibraryGroupedMatmul(TileKernel):
    """The library's GEMMs of rows that are in the order of experts."""

    kind: ClassVar[str] = "library_grouped_matmul"


@dataclass(frozen=True, slots=True)
class Permute(TileKernel):
    """What came by rank is put in the order of experts."""

    kind: ClassVar[str] = "permute"


@dataclass(frozen=True, slots=True)
class PooledSlices(TileKernel):
    """Embeddings are pooled and sent, a slice at a time, to all ranks in `order` (`weft.schedule.slices`): stored where they belong
    ("direct"), or staged and copied there ("put")."""

    kind: ClassVar[str] = "embedding_all_to_all"
    transport: SliceTransport
    order: SliceOrder
    slice_size: int

    @property
    def name(self) -> str:
        return f"embedding_all_to_all[slice_size={self.slice_size}]"


@dataclass(frozen=True, slots=True)
class PooledBags(TileKernel):
    """Embeddings are pooled, and nothing is sent."""

    kind: ClassVar[str] = "embedding_bag"


@dataclass(frozen=True, slots=True)
class Unpack(TileKernel):
    """Columns that came by rank are put in their order, or those in order below each other, by rank."""

    kind: ClassVar[str] = "unpack"
