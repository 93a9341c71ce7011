"""A key of the layouts and addresses of tensors, computed in one native call. Reading them by torch's API would take a
Python call for each property of each tensor.
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
    """Return a key of the tensors' layouts and addresses. If two lists have equal keys, it is enough to validate one list.

    Return None if there is no key: a tensor requires a gradient, or is of a subclass, or `READER` does not support this
    version of torch. Computing the key with torch's API would take as long as the validation.
    """
    if READER is None:
        return None
    try:
        return READER.read(tensors, torch.is_grad_enabled())
    except RuntimeError:  # tensors without memory, such as those in a trace of torch.compile
        return None
