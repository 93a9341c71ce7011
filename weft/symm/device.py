"""Synchronisation with a device: on GPUs work is enqueued, on CPU work is complete when a call returns."""

from __future__ import annotations

import torch


def synchronize(device: torch.device) -> None:
    """Wait for all work that has been enqueued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
