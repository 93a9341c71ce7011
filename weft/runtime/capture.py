"""Embedding calls in CUDA graphs: what a call sets up cannot be made while a graph is being captured."""

from __future__ import annotations

import torch


def is_captured(device: torch.device) -> bool:
    """Whether what is enqueued now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device) -> None:
    """Before something is set up: `ValueError` if a CUDA graph is being captured."""
    if is_captured(device):
        raise ValueError(
            "embedding_all_to_all has not been called with such tables, features and batch sizes yet, and sets up what these "
            "need: call it once before capturing it in a CUDA graph"
        )
