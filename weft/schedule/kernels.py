"""Tile kernels: descriptions of the GPU kernels that run all tiles of a `weft.schedule.steps.Tiles` step.

A `Tiles` step describes its work twice. Its body lists the steps of one tile: `verify` checks these steps, the
simulator times them, and CPU processes run them tile by tile. Its `kernel` is a `TileKernel` with the parameters of a
GPU kernel. The executor finds the implementation by the type of `kernel`. The builder must make both descriptions agree
(tests/unit/test_tile_kernels.py).

To add a kernel, derive a frozen dataclass from `TileKernel`, in any file, with strings, numbers and expressions as fields. To
run the kernel, add an entry to each executor (`weft.runtime.cpu.steps.run_tiles`, `weft.runtime.cuda.tile_kernels.tiles_call`).
Without an entry, the GPU executor refuses the kernel, and CPU processes run its tiles one after the other. There is one
exception: if a base class of the kernel has an entry, CPU processes refuse the kernel too.

The simulator assumes that several compute units share each tile of the step. If the kernel computes each tile on one
compute unit, set `unit_per_tile`. Otherwise the predicted time may be too short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from weft import _core
from weft.schedule.expr import Index

SliceTransport: TypeAlias = Literal["direct", "put"]
SliceOrder: TypeAlias = Literal["remote_first", "natural"]
FEW_ROWS = 192
"""Rows of several source ranks share tiles if the mean number of rows for each (source rank, expert) is at most this
number.
"""
KERNELS: dict[str, type[TileKernel]] = {}
"""The kernel classes, by the name that JSON files use for them."""


class TileKernel:
    """The base class of tile kernels."""

    __slots__ = ()
    kind: ClassVar[str]
    unit_per_tile: ClassVar[bool] = False
    """True if the kernel computes each tile of the step on one compute unit, and does not cut the tile into smaller tiles."""
    divides_tiles: ClassVar[bool] = False
    """True if the kernel has one program for each compute unit, and divides the tiles between them in advance. Each step is then a
    launch of its own. A program for which no unit is free computes its tiles later."""
    least_part: ClassVar[int] = 0
    """The smallest part of K that a compute unit computes if several units share a tile. With 0, units never share a tile."""

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            KERNELS[cls.kind] = cls

    @property
    def name(self) -> str:
        """The kernel's name in timelines, tables and error texts."""
        return self.kind

    def continues(self, before: TileKernel | None) -> bool:
        """Return True if one launch may run the tiles of `before` and then the tiles of this kernel.

        before: the kernel of the preceding step in the lane, signals aside; None if the preceding step has no tile kernel.
        """
        return type(before) is type(self) and not self.divides_tiles


@dataclass(frozen=True, slots=True)
class GroupedMatmul(TileKernel):
    """Grouped GEMM over the rows that a rank has received, with one group for each (source rank, local expert).

    The kernel reads the rows where the exchange stored them, without sorting them (`weft.kernels.grouped_matmul`).

    counts: the name of the buffer with the number of tokens that each rank sends for each expert.
    tokens, inbox: the names of the buffers with this rank's own tokens, and with the tokens from peers.
    weights, y: the names of the buffers of the experts' weights, and of the result.
    experts: the number of experts of each rank.
    slot_rows: the number of inbox rows that are reserved for each peer.
    first_source, n_sources: the ranks whose rows are multiplied: `n_sources` consecutive ranks. The first is
        `first_source` ranks after this rank.
    first_expert, n_experts: the range of local experts whose rows are multiplied, as (first, number).
    first_k, n_k: the range of the inner dimension that is multiplied, as (first, number). It selects columns of the
        tokens, and rows of the weights.
    adds: True to accumulate into y.
    """

    kind: ClassVar[str] = "grouped_matmul"
    divides_tiles: ClassVar[bool] = True
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
class SortedMatmul(TileKernel):
    """Grouped GEMM over rows sorted by expert, with one group for each local expert.

    Rows of several source ranks can share a tile, so this kernel has fewer tiles than `GroupedMatmul` if each source
    rank sends few rows.

    x: the name of the buffer with the sorted rows. The other fields are as in `GroupedMatmul`.
    """

    kind: ClassVar[str] = "sorted_matmul"
    divides_tiles: ClassVar[bool] = True
    counts: str
    x: str
    weights: str
    y: str
    experts: int
    first_expert: int
    n_experts: int


@dataclass(frozen=True, slots=True)
class ReturningMatmul(TileKernel):
    """Grouped GEMM over rows sorted by expert, then by source rank. It stores the products grouped by the rank that
    sent the rows.

    This is the GEMM before MoE combine, which sends the products to these ranks. `GroupedMatmul` is the GEMM after MoE
    dispatch (`weft.kernels.grouped_matmul` runs both). This kernel always multiplies over all of k, and never
    accumulates. If it multiplies the rows of all source ranks, and each sends few rows (`FEW_ROWS`), rows of several
    source ranks share a tile.

    counts: the name of a buffer `[2 * ranks, experts]`. Its row r has the number of rows from rank r for each local expert. Its
        row `ranks + r` has the number of rows that this rank sent to each expert of rank r.
    h, weights: the names of the buffers of the rows, and of the experts' weights.
    y: the name of the buffer in which products for this rank are stored.
    outbox: the name of the buffer in which products for peers are stored, with `slot_rows` rows for each peer.
    at: the rank whose `outbox` is written.

    The other fields are as in `GroupedMatmul`.
    """

    kind: ClassVar[str] = "returning_matmul"
    divides_tiles: ClassVar[bool] = True
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
class OnlyExpertMatmul(TileKernel):
    """The GEMM of a rank's only expert, over the rows of all source ranks: one cuBLAS GEMM.

    cuBLAS needs the number of rows on the CPU, which knows only the number of rows of the tensor h. The GEMM also
    multiplies the rows of h after the last arrived row, and their products are not used. If h has many more rows than
    expected, a grouped GEMM runs instead, which reads the number of rows on the device.

    counts: the name of a buffer, `[ranks or more, 1]`, whose first rows have the number of rows from each rank.
    h, weights, made: the names of the buffers of the rows, of the weights, and of the products.
    rows: the number of rows of `made` that products may fill.
    """

    kind: ClassVar[str] = "only_expert_matmul"
    counts: str
    h: str
    weights: str
    made: str
    rows: int


@dataclass(frozen=True, slots=True)
class TrackedMatmul(TileKernel):
    """A GEMM that signals finished tiles while it runs. It may store tiles in peers' memory
    (`weft.kernels.tracked_matmul`).

    The body of the `Tiles` step is one matmul or addmm, followed by `Set` steps. If several tiles set the same signal,
    the kernel sets the signal as soon as the last of these tiles is stored.

    rows, cols: the maximum numbers of rows and columns of a tile; powers of two.
    least_part: the minimum length of a part of k, in elements. If there are fewer tiles than compute units, several units
        share a tile, and each multiplies a part of k.
    """

    kind: ClassVar[str] = "tracked_matmul"
    unit_per_tile: ClassVar[bool] = True
    divides_tiles: ClassVar[bool] = True
    least_part: ClassVar[int] = 512
    least_k: ClassVar[int] = 1024
    """The smallest K for which the planner may select this kernel. For a smaller K, storing a tile in a peer's memory
    takes longer than computing the tile. (With K = 512 on two H100, GEMM + all-gather reaches 0.79 of the speed of NCCL
    and cuBLAS, and GEMM + reduce-scatter 0.84.)
    """
    rows: int = 128
    cols: int = 256


@dataclass(frozen=True, slots=True)
class LibraryGroupedMatmul(TileKernel):
    """The GEMMs of all local experts, over rows sorted by expert: torch's grouped GEMM, or one cuBLAS GEMM per expert."""

    kind: ClassVar[str] = "library_grouped_matmul"

    @staticmethod
    def is_one_per_expert(experts: int, rows: float, k: int, n: int, itemsize: int) -> bool:
        """Return True if one cuBLAS GEMM per expert is faster than torch's grouped GEMM: if the GEMMs are few and long.

        In the records of two H100s and two H200s, single GEMMs take 0.62 to 0.99 times as long as the grouped GEMM if this
        function returns True. Otherwise they take 0.97 to 3.6 times as long.

        experts: the number of local experts.
        rows: the number of rows of all experts.
        itemsize: bytes of an element.
        """
        return _core.one_gemm_each(experts, rows, k, n, itemsize)


@dataclass(frozen=True, slots=True)
class Permute(TileKernel):
    """A kernel that sorts rows by expert. Its input is sorted by source rank, and each tile copies the rows of one
    expert.

    On GPUs all copies of one step may read at most two buffers, and must write the same buffer.
    """

    kind: ClassVar[str] = "permute"


@dataclass(frozen=True, slots=True)
class PooledSlices(TileKernel):
    """A kernel that pools embeddings and sends each slice (a group of pooled vectors of one sample) to the rank that
    owns the sample.

    transport: "direct" stores vectors in the destination's memory. "put" pools a slice into local memory, then copies
        it.
    order: "remote_first" pools the slices of other ranks' samples first; "natural" follows the order of the batch.
    found: for the simulator, the fraction of reads of table rows that hit a cache, for each cache size in
        `weft.builders.row_reuse`. An empty tuple: unknown.
    """

    kind: ClassVar[str] = "embedding_all_to_all"
    transport: SliceTransport
    order: SliceOrder
    slice_size: int
    found: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return f"embedding_all_to_all[slice_size={self.slice_size}]"


@dataclass(frozen=True, slots=True)
class PooledBags(TileKernel):
    """A kernel that pools embeddings into this rank's memory, for a collective to send.

    found: for the simulator, the fraction of reads of table rows that hit a cache, for each cache size in
        `weft.builders.row_reuse`. An empty tuple: unknown.
    """

    kind: ClassVar[str] = "embedding_bag"
    found: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Unpack(TileKernel):
    """A kernel that permutes columns. One side has the columns grouped by rank, and the other side has them in the
    order of the result.
    """

    kind: ClassVar[str] = "unpack"
