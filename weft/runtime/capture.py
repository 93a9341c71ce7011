"""Checks for CUDA graph capture. While a graph is being captured, a call cannot allocate symmetric memory or load kernels."""

from __future__ import annotations

import torch


def is_captured(device: torch.device) -> bool:
    """True if a CUDA graph on `device` is being captured: work that is enqueued now becomes part of the graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_OF_GRAPHS: list[torch.Tensor] = []


def keep_for_graphs(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`. If a CUDA graph is being captured, also keep the tensor until the process ends.

    Use it for a small cached tensor that every replay of the graph reads. The cache may then drop its own reference.
    """
    if is_captured(tensor.device) and not any(tensor is one for one in _OF_GRAPHS):
        _OF_GRAPHS.append(tensor)
    return tensor


def refuse_capture(device: torch.device) -> None:
    """Raise `ValueError` if a CUDA graph is being captured. Call it before a call allocates memory or loads kernels."""
    if is_captured(device):
        raise ValueError(
            "the first call of embedding_all_to_all with new tables, features or batch sizes allocates memory and loads kernels: "
            "call it once before capturing it in a CUDA graph"
        )
