"""The launcher of `weft.kernels.tracked_matmul`, a GEMM that counts its finished tiles and sets signals. It makes the
kernel's tables on the device, and tensor maps or pointers. It compiles all variants before any stream waits for a peer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from weft import env
from weft.kernels import tracked_matmul as device_code
from weft.runtime.cuda.kernel_call import loaded
from weft.runtime.cuda.tensor_maps import ALIGNMENT, TRITON_TYPE, Lent, Stand, is_aligned, tma_and_multiprocessors
from weft.schedule.kernels import TrackedMatmul as Tracked
from weft.symm.lasting import lasting

_LARGE = 128 * 256  # elements from which a tile needs eight warps


class TrackedVariant(NamedTuple):
    """The parameters for which the kernel of the tracked GEMM is compiled. rows, cols: the size of a tile."""

    dtype: torch.dtype
    k: int
    n: int
    transposed: bool
    aligned: bool
    tma: bool
    rows: int
    cols: int
    sets: int
    adds: bool = False
    splits: int = 1
    ptx: bool = torch.version.hip is None and not env.triton_interpreted()

    @property
    def block_k(self) -> int:
        return 32 if self.dtype.itemsize == 4 else 64

    @property
    def part_k(self) -> int:
        """If several programs share a tile, the length of the part of K that each of them multiplies: a multiple of the block
        size. The last program multiplies the rest of K.
        """
        return max(1, -(-self.k // (self.splits * self.block_k))) * self.block_k

    def split(self, most: int) -> TrackedVariant:
        """Return the variant in which up to `most` programs share a tile. Each multiplies a part of k, of at least
        `TrackedMatmul.least_part` elements.
        """
        wanted = self._replace(splits=max(1, min(most, self.k // Tracked.least_part)))
        return self._replace(splits=max(1, -(-self.k // wanted.part_k)))  # whole blocks may need fewer parts

    def constants(self) -> dict[str, Any]:
        return {
            "K": self.k, "N": self.n, "DTYPE": TRITON_TYPE[self.dtype], "TMA": self.tma, "W_TRANSPOSED": self.transposed,
            "ALIGN": ALIGNMENT // self.dtype.itemsize if self.aligned else 1, "BLOCK_M": self.rows, "BLOCK_N": self.cols,
            "BLOCK_K": self.block_k, "SETS": self.sets, "ADDS": self.adds, "SPLITS": self.splits, "PART_K": self.part_k,
            "PTX": self.ptx,
        }  # fmt: skip

    def options(self) -> dict[str, int]:
        return {"num_warps": 8 if self.rows * self.cols >= _LARGE else 4, "num_stages": 3 if self.tma else 2}

    def operands(self, a: Any, w: Any) -> tuple[Any, Any]:
        """Return the operands a and w as arguments of the kernel: tensor maps, or the tensors themselves."""
        if not self.tma:
            return a, w
        from triton.tools.tensor_descriptor import TensorDescriptor

        box = [self.cols, self.block_k] if self.transposed else [self.block_k, self.cols]
        return TensorDescriptor.from_tensor(a, [self.rows, self.block_k]), TensorDescriptor.from_tensor(w, box)


def compile_variant(variant: TrackedVariant) -> Any:
    """Compile this variant of the tracked GEMM for Triton's current device, without loading the kernel."""
    v, address = variant, 0 if variant.aligned else variant.dtype.itemsize
    w = Stand(v.dtype, [v.n, v.k] if v.transposed else [v.k, v.n], address)
    tables, numbers = [torch.int64] * 3 + [torch.float32, torch.int32], [1] * 5
    operands = v.operands(Stand(v.dtype, [1, v.k], address), w)
    return device_code.tracked_matmul_kernel.warmup(
        *operands, *tables, *numbers, grid=(1,), **v.constants(), **v.options()
    )


@lru_cache(maxsize=64)
def _compiled(device: torch.device, variant: TrackedVariant) -> Any:
    """Compile and load the kernel of the tracked GEMM. Loading it later, while a stream waits for a peer, could hang the
    device.
    """
    return loaded(device, lambda: compile_variant(variant))


class TrackedMatmulLauncher:
    """A launcher of a @ w. Its table says where each tile of the product is stored, and which counters the tile increments.

    table: a row for each tile: int64 [tiles, 6 + sets], or [tiles, 8 + sets] with `adds`. The format is as in
        `weft.kernels.tracked_matmul`, except that addresses, offsets and pitches are in bytes.
    counters: for each counter, the number of its tiles and the addresses of the words to set when they are done.
    relative: True if tiles are stored at offsets from the caller's tensor, not at addresses.
    splits: the largest number of programs that share a tile (default: all idle programs).
    """

    def __init__(
        self,
        device: torch.device,
        table: np.ndarray,
        counters: Sequence[tuple[int, Sequence[int]]],
        *,
        rows: int,
        cols: int,
        sets: int,
        itemsize: int,
        relative: bool,
        adds: bool = False,
        splits: int | None = None,
    ) -> None:
        table = table.copy()
        places = [table[:, 4], table[:, 5], table[:, 3] * itemsize, *(table[:, 6 + sets :].T if adds else ())]
        self._out_aligned = not bool((np.bitwise_or.reduce(places) % ALIGNMENT).any())
        table[:, 5] = table[:, 5] // itemsize * (-1 if relative else 1)
        if adds:
            table[:, 7 + sets] //= itemsize
        ends = np.cumsum([len(words) for _, words in counters], dtype=np.int64)
        of_counters = [
            (0, come, end - len(words), end) for (come, words), end in zip(counters, ends.tolist(), strict=True)
        ]
        words = [word for _, of_one in counters for word in of_one]
        self._tables = lasting(
            device,
            lambda: tuple(
                torch.tensor(rows_, dtype=torch.int64, device=device)
                for rows_ in (table, of_counters or [(0,) * 4], words or [0])
            ),
        )
        self._tiles, self._shape, self._device = len(table), (rows, cols, sets, adds), device
        # Programs without their own tile multiply parts of other programs' tiles.
        self._units = tma_and_multiprocessors(device)[1]
        self._most_splits = self._units // max(1, len(table)) if splits is None else splits
        self._arrived = lasting(device, lambda: torch.zeros(max(1, len(table)), dtype=torch.int32, device=device))
        self._partials = torch.empty(0, device=device)
        self._places: tuple[Any, ...] = ()
        self._kernel: Any = None
        self._operands: tuple[Any, ...] = ()

    def prepare(self, a: torch.Tensor, w: torch.Tensor) -> None:
        """Compile and load the kernels that `launch` needs for such operands, for any alignment of their rows. This takes
        seconds.
        """
        for aligned in (True, False):
            variant = self._variant(a, w, aligned)
            if self._device.type == "cuda":
                _compiled(self._device, variant)
            room = self._tiles * variant.splits * variant.rows * variant.cols if variant.splits > 1 else 0
            if room > self._partials.numel():
                partials = functools.partial(torch.empty, room, dtype=torch.float32, device=self._device)
                self._partials = lasting(self._device, partials)

    def launch(self, a: torch.Tensor, w: torch.Tensor, y: int) -> None:
        """Enqueue the GEMM a @ w on the current stream.

        a: the left operand, [rows, K] with contiguous rows. w: the right operand, [K, N], where K or N has stride 1.
        y: the address of the caller's tensor for the product if `relative`, else 0.
        """
        if not self._tiles:
            return
        places = (a.data_ptr(), a.shape, a.stride(), w.data_ptr(), w.stride(), y % ALIGNMENT)
        if places != self._places:
            self._bind(a, w, y)
            self._places = places
        self._kernel(y, self._tiles, a.shape[0], a.stride(0), w.stride(1 if w.stride(1) != 1 else 0))

    def _variant(self, a: torch.Tensor, w: torch.Tensor, aligned: bool) -> TrackedVariant:
        (k, n), item = w.shape, w.element_size()
        transposed = w.stride(1) != 1
        if (transposed and w.stride(0) != 1) or a.stride(1) != 1 or a.dtype != w.dtype or a.dtype not in TRITON_TYPE:
            raise ValueError(
                f"a tracked matmul of {a.dtype} {tuple(a.shape)} with strides {a.stride()} and {w.dtype} {tuple(w.shape)} with "
                f"{w.stride()}: use one floating-point dtype, a with contiguous rows, w with contiguous rows or columns"
            )
        aligned = (
            aligned and self._out_aligned and is_aligned(w.mT if transposed else w) and (n | k) * item % ALIGNMENT == 0
        )
        tma = aligned and item == 2 and tma_and_multiprocessors(w.device)[0]
        return TrackedVariant(w.dtype, k, n, transposed, aligned, tma, *self._shape).split(self._most_splits)

    def _bind(self, a: torch.Tensor, w: torch.Tensor, y: int) -> None:
        """Make the kernel's arguments again, because a tensor has a new address."""
        variant = self._variant(a, w, is_aligned(a) and y % ALIGNMENT == 0)
        constants = variant.constants()
        w, programs = w.mT if variant.transposed else w, min(self._tiles * variant.splits, self._units)
        tables = (*self._tables, self._partials, self._arrived)
        if w.device.type != "cuda":
            operands = (*variant.operands(a, w), *tables)
            self._kernel = lambda *numbers: device_code.tracked_matmul_kernel[programs,](
                *operands, *numbers, **constants
            )
            return
        compiled, values = _compiled(w.device, variant), tuple(constants.values())
        self._operands = operands = (*variant.operands(Lent(a), Lent(w)), *tables)
        self._kernel = lambda *numbers: compiled[programs, 1, 1](*operands, *numbers, *values)
