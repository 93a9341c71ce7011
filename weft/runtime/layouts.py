"""What a call depends on, read in one native call: to ask torch takes a call of Python for each property of each tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable

import torch

from weft import _core


def _made() -> _core.LayoutReader | None:
    try:
        return _core.LayoutReader(torch.Tensor, torch.nn.Parameter)
    except (AttributeError, RuntimeError):  # tensors of this torch do not offer it
        return None


READER = _made()
"""None where torch is asked for each property."""


def layout_of(tensors: list[torch.Tensor]) -> Hashable:
    """Where they lie, and how: what an in-place change of one would change. None if a gradient is wanted of one."""
    gradients = torch.is_grad_enabled()
    if READER is not None:
        with contextlib.suppress(RuntimeError):  # tensors without memory, which torch's compiler makes
            return READER.read(tensors, gradients)
    if gradients and any(t.requires_grad for t in tensors):
        return None
    return tuple([(t.data_ptr(), t.device, t.dtype, t.shape, t.stride()) for t in tensors])
