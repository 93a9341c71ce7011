"""The launcher of `weft.kernels.grouped_matmul`: one GEMM for the rows of several experts. It makes tensor maps
(descriptors for the GPU's tensor memory accelerator) or pointers, and chooses the grid. It compiles all variants before
any stream waits for a peer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft import _core
from weft.kernels import grouped_matmul as device_code
from weft.runtime.cuda.grouped_config import PLAIN, Config, choose_config
from weft.runtime.cuda.kernel_call import Base, Count, Mapped, RowTiles, kernel_call, loaded, record_one_of
from weft.runtime.cuda.scratch import Scratch
from weft.runtime.cuda.tensor_maps import ALIGNMENT, TRITON_TYPE, Lent, Stand, is_aligned, tma_and_multiprocessors
from weft.symm.lasting import lasting
from weft.words import counted

__all__ = ["Config", "GroupedMatmulLauncher", "choose_config", "launch", "prepare"]

_NUMBERS = 17  # number arguments of the kernel, after its eight tensors
MAX_SEGMENTS = 1024


class GroupedVariant(NamedTuple):
    """The parameters for which the grouped GEMM kernel is compiled."""

    dtype: torch.dtype
    world_size: int
    experts: int
    k: int
    n: int
    transposed: bool
    aligned: bool
    tma: bool
    config: Config
    back: bool = False
    adds: bool = False
    merged: bool = False

    def constants(self) -> dict[str, Any]:
        c, segments = self.config, self.world_size * self.experts
        return {
            "W": self.world_size,
            "E": self.experts,
            "W_P2": triton.next_power_of_2(self.world_size),
            "E_P2": triton.next_power_of_2(self.experts),
            "SPLITS_P2": triton.next_power_of_2(segments),
            "K": self.k,
            "N": self.n,
            "DTYPE": TRITON_TYPE[self.dtype],
            "TMA": self.tma,
            "W_TRANSPOSED": self.transposed,
            "ALIGN": ALIGNMENT // self.dtype.itemsize if self.aligned else 1,
            "BLOCK_M": c.block_m,
            "BLOCK_N": c.block_n,
            "BLOCK_K": c.block_k,
            "GROUP": c.group,
            "PARTS": c.parts,
            "BACK": self.back,
            "ADDS": self.adds,
            "SPLITS": self.splits,
            "MERGED": self.merged,
            "ROUNDS": c.rounds,
            "SWAP": c.swap and self.tma and not self.adds,
        }

    @property
    def splits(self) -> int:
        """The largest number of programs that compute one tile together."""
        return self.config.splits if self.tma and not self.adds else 1

    @property
    def column_tiles(self) -> int:
        """The largest number of programs for a row of tiles."""
        return -(-self.n // self.config.block_n) * self.splits

    def options(self) -> dict[str, int]:
        return {"num_warps": self.config.warps, "num_stages": self.config.stages}

    def map(self, number: int, tensor: Any) -> Any:
        """Return `tensor` as an argument of the grouped GEMM kernel: with `tma` its tensor map (the descriptor for the GPU's
        tensor memory accelerator), else the tensor itself.

        number: the index of the kernel's argument: 0 for `own`, 1 for `slots`, 2 for `w`, 3 for `whole`.
        """
        tensor = Lent(tensor) if getattr(tensor, "is_cuda", False) else tensor
        if not self.tma:
            return tensor
        c = self.config
        if number == 2:
            w_box = [1, c.block_n, c.block_k] if self.transposed else [1, c.block_k, c.block_n]
            return TensorDescriptor.from_tensor(tensor, w_box)
        if self.is_ragged(number):
            return create_ragged_descriptor(tensor, [c.block_m, c.block_n // c.parts])
        return TensorDescriptor.from_tensor(tensor, [c.block_m, c.block_k])

    def is_ragged(self, number: int) -> bool:
        """True if the kernel stores rows of segments through this tensor map, which then masks rows outside of the segment. It does
        not depend on the number of rows.
        """
        return number != 2 and (number == 3) != self.back


def compile_variant(variant: GroupedVariant) -> Any:
    """Compile this variant of the grouped GEMM for Triton's current device, without loading the kernel."""
    v = variant
    w_shape = [v.experts, v.n, v.k] if v.transposed else [v.experts, v.k, v.n]
    address = 0 if v.aligned else v.dtype.itemsize
    apart, together = (v.n, v.k) if v.back else (v.k, v.n)
    stands = [Stand(v.dtype, shape, address) for shape in ([1, apart], [1, apart], w_shape, [1, together])]
    return device_code.grouped_matmul_kernel.warmup(
        *(v.map(i, stand) for i, stand in enumerate(stands)),
        torch.int64,
        torch.int64,
        torch.float32,
        torch.int32,
        *[1] * _NUMBERS,
        grid=(1,),
        **v.constants(),
        **v.options(),
    )


@lru_cache(maxsize=256)
def _compiled(device: torch.device, variant: GroupedVariant) -> Any:
    """Compile and load the grouped GEMM kernel. Loading it later, while a stream waits for a peer, could hang the device."""
    return loaded(device, lambda: compile_variant(variant))


def prepare(
    w: torch.Tensor, *, world_size: int, config: Config, back: bool = False, adds: bool = False, merged: bool = False
) -> None:
    """Compile and load the kernels of the grouped GEMM for weights `w` of shape `[E, K, N]`, for any alignment of the rows.
    This takes seconds.

    Without this call, the first launch would compile the kernel, which must not happen while a stream waits for a peer.

    back, adds, merged: as for `GroupedMatmulLauncher`.
    """
    if w.device.type == "cuda":
        for aligned in (True, False):
            _compiled(w.device, _variant(w, w.device, world_size, config, aligned, back, adds, merged))


def _variant(
    w: torch.Tensor, device: torch.device, world_size: int, config: Config, rows_aligned: bool, back: bool, adds: bool,
    merged: bool,
) -> GroupedVariant:  # fmt: skip
    experts, k, n = w.shape
    transposed = w.stride(2) != 1
    if transposed and w.stride(1) != 1:
        raise ValueError(f"w has strides {w.stride()} for [E, K, N] = {tuple(w.shape)}: K or N must have stride 1")
    # The hardware rounds a tensor map's innermost extent to 16 bytes.
    aligned = rows_aligned and is_aligned(w.mT if transposed else w) and (n | k) * w.element_size() % ALIGNMENT == 0
    tma = aligned and w.element_size() == 2 and tma_and_multiprocessors(device)[0]
    if not aligned and config.tile > PLAIN.tile:
        # Rows without alignment are rare, and a kernel of large tiles would take three times as long to compile as that for
        # aligned rows.
        config = PLAIN
    return GroupedVariant(w.dtype, world_size, experts, k, n, transposed, aligned, tma, config, back, adds, merged)


class Operand(NamedTuple):
    """A tensor of a recorded launch, whose address and number of rows may differ in each run.

    like: a tensor on the device "meta" with the same dtype, strides and columns. rows: the number of rows.
    """

    like: torch.Tensor
    address: int | Base
    rows: int | Count

    @classmethod
    def of(cls, tensor: torch.Tensor, address: int | Base, rows: int | Count) -> Operand:
        return cls(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), address, rows)

    def argument(self, number: int, variant: GroupedVariant) -> Any:
        """Return the argument of the grouped GEMM kernel with the index `number`, as `GroupedVariant.map` does."""
        if not variant.tma:
            return self.address
        like, is_counted = self.like, isinstance(self.rows, Count)
        if is_counted:
            like = torch.empty_strided((1, *like.shape[1:]), like.stride(), dtype=like.dtype, device="meta")
        is_sized = is_counted and not variant.is_ragged(number)
        return Mapped(variant.map(number, like), self.address, self.rows, is_sized, instead=int(number != 1))


class GroupedMatmulLauncher:
    """A launcher of GEMMs that multiply rows by the weights of their experts. The rows come from sources: a source is a
    rank that has sent rows. W is the world size, and E is the number of local experts.

    slots: the rows from peers, `[at least (W - 1) * slot_rows, K]`. Rows of the n-th source after this rank begin at row
        `(n - 1) * slot_rows`.
    counts: the number of rows from each source for each local expert, int64 `[W, E]`. Any strides are allowed.
    splits: the number of this rank's rows for each global expert, int64 `[W * E]`.
    first_source, n_sources: the sources to compute: `n_sources` consecutive ranks (default: up to the last source), the first
        of which is `(rank + first_source) % W`.
    first_expert, n_experts: the local experts to compute: `n_experts` experts (default: up to the last) from `first_expert`
        on.
    spare: the number of multiprocessors left to other kernels.
    back: True to multiply rows that are ordered by expert, and send the products back to their sources. `slots` then has N
        columns, and each product is stored in the block of its source.
    adds: True to add the products to the rows of y, in fp32. Not together with `back`.
    merged: True if a tile has rows of all sources, and all sources are computed. Without `back`, x has the rows of all
        sources, sorted by expert, and `slots` is not read. Not together with `adds`.
    config: the tile sizes of the kernel that `prepare` has compiled.
    scratch: memory shared with other launches on the same stream.
    """

    def __init__(
        self,
        slots: torch.Tensor,
        counts: torch.Tensor,
        splits: torch.Tensor,
        *,
        rank: int,
        slot_rows: int,
        config: Config,
        first_source: int = 0,
        n_sources: int | None = None,
        first_expert: int = 0,
        n_experts: int | None = None,
        spare: int = 0,
        back: bool = False,
        adds: bool = False,
        merged: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        if back and adds:
            raise ValueError("back=True stores rows and cannot add to them: pass back or adds, not both")
        if merged and (adds or n_sources not in (None, counts.shape[0])):
            raise ValueError(
                f"merged=True needs adds=False and all {counts.shape[0]} sources in a launch, but n_sources={n_sources} and "
                f"adds={adds}"
            )
        self._world, experts = counts.shape
        n_sources = self._world - first_source if n_sources is None else n_sources
        n_experts = experts - first_expert if n_experts is None else n_experts
        self._slots, self._counts, self._splits, self._config = slots, counts, splits, config
        self._numbers = (slot_rows, rank, first_source, n_sources, first_expert, n_experts, counts.stride(0))
        self._segments = n_sources * n_experts
        self._multiprocessors = tma_and_multiprocessors(counts.device)[1] - spare
        self._back, self._adds, self._merged = back, adds, merged
        self._scratch = scratch or Scratch()
        shares = config.splits > 1 and not adds
        programs = config.per_sm * self._multiprocessors
        self._scratch.require(counts.device, config.rounds * programs * config.tile if shares else 1)
        count = programs if shares else 1  # for each shared tile, the number of finished programs
        self._arrived = lasting(counts.device, lambda: torch.zeros(count, dtype=torch.int32, device=counts.device))

    def launch(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        """Enqueue the GEMMs on the current stream.

        x: this rank's rows ordered by global expert, `[rows, K]`. With `back` or `merged`: rows ordered by local expert.
        w: the weights of the local experts, `[E, K, N]`. K or N has stride 1.
        y: the memory for the products, `[y_rows, N]`, ordered by local expert. With `back`: for the results of this rank's
            own rows. Rows beyond `y_rows` are dropped.

        All tensors have the dtype of the slots: bfloat16, float16 or float32. x, slots and y have contiguous rows.
        """
        _check(x, self._slots, w, y, self._counts, self._splits, self._back)
        own, whole = (y, x) if self._back else (x, y)
        if 0 in (w.numel(), whole.numel(), own.numel() + self._slots.numel()):
            if y.numel() and x.shape[0]:  # K is 0
                raise ValueError(f"w has shape {tuple(w.shape)}: pass at least one expert, and K and N of at least 1")
            return
        numbers = (
            own.shape[0], self._slots.shape[0], whole.shape[0], *self._numbers, own.stride(0), self._slots.stride(0),
            whole.stride(0), w.stride(0), w.stride(1 if w.stride(2) == 1 else 2), y.data_ptr(), self._slots.data_ptr(),
        )  # fmt: skip
        # A tensor map of an empty tensor cannot be made, and is not needed.
        slots = self._slots if self._slots.numel() else own
        own = own if own.numel() else slots
        aligned = all(is_aligned(t) for t in (own, slots, whole))
        variant = _variant(w, w.device, self._world, self._config, aligned, self._back, self._adds, self._merged)
        tiles = self._tiles(variant, len(whole))
        operands = (own, slots, w.mT if variant.transposed else w, whole)
        maps = [variant.map(i, operand) for i, operand in enumerate(operands)]
        given = (*maps, self._counts, self._splits, self._scratch.memory, self._arrived, *numbers)
        grid, constants = (tiles.blocks(), 1, 1), variant.constants()
        if w.device.type == "cuda":
            _compiled(w.device, variant)[grid](*given, *constants.values())
        else:
            device_code.grouped_matmul_kernel[grid](*given, **constants)

    def _tiles(self, variant: GroupedVariant, rows: int | Count) -> RowTiles:
        """Return the grid of a launch of `variant`. rows: the number of rows of `whole`."""
        config = variant.config
        programs = config.per_sm * self._multiprocessors
        return RowTiles(programs, rows, config.block_m, self._segments, variant.column_tiles)

    def record(
        self, program: _core.StreamProgram, stream: int, x: Operand, w: Operand, y: Operand, partials: Base
    ) -> bool:
        """Record the launch into `program`, on the program's stream number `stream`, and load its kernels. Return False if only
        `launch` can launch it.

        x, w, y: the tensors, as for `launch`. partials: the address of the scratch memory.
        """
        slots, device = Operand.of(self._slots, self._slots.data_ptr(), len(self._slots)), self._counts.device
        own, whole = (y, x) if self._back else (x, y)
        if device.type != "cuda" or 0 in (w.like.numel(), whole.rows) or own.rows == slots.rows == 0:
            return False
        _check(x.like, slots.like, w.like, y.like, self._counts, self._splits, self._back)
        # Without rows in both own and slots, or in whole, there is nothing to multiply.
        needed = (whole,) if slots.rows else (whole, own)
        only_if = [operand.rows for operand in needed if isinstance(operand.rows, Count)]
        calls = []
        for aligned in (True, False):
            variant = _variant(w.like, device, self._world, self._config, aligned, self._back, self._adds, self._merged)
            if aligned and not (variant.aligned and all(is_aligned(one.like) for one in (own, slots, whole))):
                continue
            weights = w._replace(like=w.like.mT) if variant.transposed else w
            operands = (own if own.rows else slots, slots if slots.rows else own, weights, whole)
            strides = [one.like.stride(0) for one in (own, slots, whole, w)]
            numbers = (
                own.rows, slots.rows, whole.rows, *self._numbers, *strides, w.like.stride(2 if variant.transposed else 1),
                y.address, slots.address,
            )  # fmt: skip
            arguments = [operand.argument(i, variant) for i, operand in enumerate(operands)]
            arguments += [self._counts, self._splits, partials, self._arrived, *numbers]
            grid = self._tiles(variant, whole.rows)
            call = kernel_call(program, _compiled(device, variant), grid, arguments, only_if)
            calls.append((ALIGNMENT if aligned else 1, call))
        return record_one_of(program, stream, calls)


def launch(
    x: torch.Tensor,
    slots: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    counts: torch.Tensor,
    splits: torch.Tensor,
    **how: Any,
) -> None:
    """Multiply rows by the weights of their experts: make a `GroupedMatmulLauncher` with these tensors, and launch it once.
    how: further arguments of the launcher.
    """
    GroupedMatmulLauncher(slots, counts, splits, **how).launch(x, w, y)


def _check(
    x: torch.Tensor,
    slots: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    counts: torch.Tensor,
    splits: torch.Tensor,
    back: bool,
) -> None:
    experts, k, n = w.shape
    if counts.shape[1:] != (experts,) or splits.shape != (counts.numel(),) or counts.numel() > MAX_SEGMENTS:
        raise ValueError(
            f"counts is {tuple(counts.shape)} and splits {tuple(splits.shape)}, but w has {counted(experts, 'expert')}: pass "
            f"counts [W, {experts}] and splits [W * {experts}], with W * {experts} at most {MAX_SEGMENTS}"
        )
    for name, t, columns in (("x", x, k), ("slots", slots, n if back else k), ("y", y, n)):
        if t.dtype != w.dtype or t.dtype not in TRITON_TYPE or t.shape[1:] != (columns,) or t.stride(1) != 1:
            raise ValueError(
                f"{name} is {t.dtype} {tuple(t.shape)} with strides {t.stride()}: make it {w.dtype} [rows, {columns}] with "
                f"contiguous rows, like w, whose type must be one of {[str(t) for t in TRITON_TYPE]}"
            )
    for name, table in (("counts", counts), ("splits", splits)):
        if table.dtype != torch.int64 or table.stride(-1) != 1:
            raise ValueError(
                f"{name} is {table.dtype} with strides {table.stride()}: make it int64 with contiguous rows"
            )
