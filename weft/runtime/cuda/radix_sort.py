"""CUB's radix sort of pairs (key, value), both of 32 bits, as compiled into torch's library.

`torch.sort` sorts all bits of the keys, together with indices of 64 bits. For the update of embeddings, fewer bits are often
enough, and a 32-bit number must be moved with each key. So this sort moves half the bytes or less. `ATen/cuda/cub.h` declares the
function for extensions of torch. If torch's library has no such function, use `torch.sort`.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from weft import _core, env

_NAME = "_ZN2at4cuda3cub6detail21radix_sort_pairs_implIiLi4EEEvPKT_PS4_PKNS2_10OpaqueTypeIXT0_EEEPS9_lbll"
"""void at::cuda::cub::detail::radix_sort_pairs_impl<int, 4>(const int* keys_in, int* keys_out, const OpaqueType<4>* values_in,
OpaqueType<4>* values_out, int64_t n, bool descending, int64_t begin_bit, int64_t end_bit)
"""


@functools.cache
def _address() -> int | None:
    """Return the address of the function `_NAME`; None if torch's library does not have it."""
    if env.triton_interpreted() or not torch.version.cuda:
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        return ctypes.cast(getattr(library, _NAME), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def sorts_pairs() -> bool:
    """True if `sort_pairs` can be called."""
    return _address() is not None


def sort_pairs(
    keys: torch.Tensor, values: torch.Tensor, sorted_keys: torch.Tensor, sorted_values: torch.Tensor, bits: int
) -> None:
    """Sort pairs of an int32 key, at least 0, and an int32 value by key, stably, on the current stream. The tensors' device must
    be the current device.

    bits: the number of bits of the largest key.
    """
    function = _address()
    assert function is not None
    at = [tensor.data_ptr() for tensor in (keys, sorted_keys, values, sorted_values)]
    _core.sort_pairs(function, *at, count=keys.numel(), bits=bits)
