"""A key of the layouts and addresses of tensors. If a call has the same key as an earlier call, its tensors need not be
validated again. One native call computes the key, which is faster than torch's API.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

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
    """Return a key of a list of tensors. Lists with equal layouts and addresses have equal keys, and need not be validated
    again.

    Return None if a tensor requires a gradient, has no memory, or is of a subclass. Also return None if the native reader
    does not support this version of torch.
    """
    if READER is None:
        return None
    try:
        return READER.read(tensors, torch.is_grad_enabled())
    except RuntimeError:  # tensors without memory, such as those in a trace of torch.compile
        return None


def known_layout(known: Mapping[int, Hashable], number: int, tensors: list[torch.Tensor]) -> tuple[Hashable, bool]:
    """Return the key of `tensors` (`layout_of`), and True if the key equals `known[number]`, so that the tensors need no check."""
    layout, before = layout_of(tensors), known.get(number)
    if layout is None or layout != before:
        return layout, False
    return before, True  # the known object has already computed its hash
