"""Code that the launchers of weft's GEMMs share: tensor maps (descriptors for the GPU's tensor memory accelerator) of callers'
tensors, placeholder tensors for compilation, and device properties.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from triton.runtime.jit import MockTensor

from weft import env

TRITON_TYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
ALIGNMENT = 16
"""The alignment in bytes that tensor maps and wide loads need for addresses and row strides."""


class Lent:
    """The address and layout of a caller's tensor. A tensor map (the descriptor for the GPU's tensor memory accelerator) that
    is made from this object does not keep the tensor alive.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape, self._strides, self._address = (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.data_ptr(),
        )

    def data_ptr(self) -> int:
        return self._address

    def stride(self, dim: int | None = None) -> Any:
        return self._strides if dim is None else self._strides[dim]


class Stand(MockTensor):
    """A contiguous placeholder tensor without memory, for compilation. Its address has the alignment of the real tensor."""

    def __init__(self, dtype: torch.dtype, shape: list[int], address: int) -> None:
        super().__init__(dtype, shape)
        self._address = address

    def data_ptr(self) -> int:
        return self._address

    def stride(self, dim: int | None = None) -> Any:
        strides = super().stride()
        return strides if dim is None else strides[dim]


@lru_cache(maxsize=16)
def tma_and_multiprocessors(device: torch.device) -> tuple[bool, int]:
    """Return two values: True if the device supports tensor maps, and its number of multiprocessors (2 in Triton's
    interpreter).
    """
    if device.type != "cuda":
        return env.triton_interpreted(), 2
    properties = torch.cuda.get_device_properties(device)
    return torch.version.hip is None and properties.major >= 9, properties.multi_processor_count


def is_aligned(tensor: torch.Tensor) -> bool:
    """True if the rows begin at multiples of 16 bytes. The last dimension of the tensor must have unit stride."""
    bits = tensor.data_ptr()
    for stride in tensor.stride()[:-1]:
        bits |= stride * tensor.element_size()
    return bits % ALIGNMENT == 0
