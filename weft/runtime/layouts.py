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
    """Where they lie, and how: for two lists the same only if whatever is right of one is right of the other. None if one is of
    another class than torch's own, if a gradient is wanted of one, and where torch would be asked for each property, which takes
    as long as to check it."""
    if READER is not None:
        with contextlib.suppress(RuntimeError):  # tensors without memory, which torch's compiler makes
            return READER.read(tensors, torch.is_grad_enabled())
    return None
