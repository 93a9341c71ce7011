"""Autocast has no effect on modules with embedding tables.

Inside autocast, `torch.cat` raises an error for 16-bit tensors whose dtype is not autocast's, such as rows of fp16 tables under
bf16.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

_NOTHING = contextlib.nullcontext()


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast is disabled on `device`."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return _NOTHING
    return torch.autocast(device.type, enabled=False)
