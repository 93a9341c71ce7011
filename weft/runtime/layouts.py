"""Layouts of tensors, read in one native call. torch's API needs a Python call for each property of each tensor."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from weft import _core


def _made() -> _core.LayoutReader | None:
    try:
        return _core.LayoutReader(torch.Tensor, torch.nn.Parameter)
    except (AttributeError, RuntimeError):  # tensors of this torch version do not offer it
        return None


READER = _made()
"""The native reader; None if each property must be read with torch's API."""


def layout_of(tensors: list[torch.Tensor]) -> Hashable:
    """Return a key of the tensors' layouts and addresses: lists with equal keys are equally valid for a call.

    Return None if a tensor is of another class than torch's own or needs a gradient. Also return None without a native
    reader, because the key would take as long as the checks.
    """
    if READER is None:
        return None
    try:
        return READER.read(tensors, torch.is_grad_enabled())
    except RuntimeError:  # tensors without memory, which torch.compile makes
        return None
