"""Embedding calls in CUDA graphs: a call cannot set up memory or kernels while a graph is being captured."""

from __future__ import annotations

import torch


def is_captured(device: torch.device) -> bool:
    """True if work that is enqueued now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device) -> None:
    """Raise `ValueError` if a CUDA graph is being captured. Call this before setting something up."""
    if is_captured(device):
        raise ValueError(
            "the first call of embedding_all_to_all with new tables, features or batch sizes allocates memory and loads kernels: "
            "call it once before capturing it in a CUDA graph"
        )
