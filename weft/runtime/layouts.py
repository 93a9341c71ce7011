"""What a call depends on, read in one native call: to ask torch takes a call of Python for each property of each tensor."""

from __future__ import annotations

import torch

from weft import _core


def _made() -> _core.LayoutReader | None:
    try:
        return _core.LayoutReader(torch.Tensor, torch.nn.Parameter)
    except (AttributeError, RuntimeError):  # tensors of this torch do not offer it
        return None


READER = _made()
"""None where torch is asked for each property."""
