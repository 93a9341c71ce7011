"""Synchronisation with a device. On CPUs it does nothing, because work is complete when its call returns."""

from __future__ import annotations

import torch


def synchronize(device: torch.device) -> None:
    """Wait for all work that this process has enqueued on a GPU. Return immediately for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
