"""Device memory for partial sums, which consecutive launches on one stream share."""

from __future__ import annotations

import torch

from weft.symm.lasting import lasting


class Scratch:
    """fp32 device memory for partial sums, which the launches of one lane share."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def require(self, device: torch.device, numbers: int) -> None:
        """Make the memory large enough for `numbers` fp32 numbers. Call this before any stream waits for a peer."""
        if self.memory.numel() < numbers:
            self.memory = lasting(device, lambda: torch.empty(numbers, dtype=torch.float32, device=device))
