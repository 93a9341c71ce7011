"""Layouts of tensors, read in one native call, because torch's API needs a Python call for each property of each
tensor.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from weft import _core


def _made() -> _core.LayoutReader | None:
    try:
        return _core.LayoutReader(torch.Tensor, torch.nn.Parameter)
    except (AttributeError, RuntimeError):  # this torch version does not support it
        return None


READER = _made()
"""The C++ class that reads the layouts of a list of tensors in one call; None if it does not support this version of torch."""


def layout_of(tensors: list[torch.Tensor]) -> Hashable:
    """Return a key of the tensors' layouts and addresses. Lists with equal keys need to be validated only once.

    Return None if a tensor has a class other than torch's own or requires a gradient. Also return None if READER is None:
    computing the key with torch's API would take as long as the validation.
    """
    if READER is None:
        return None
    try:
        return READER.read(tensors, torch.is_grad_enabled())
    except RuntimeError:  # tensors without memory, such as those in a trace of torch.compile
        return None
