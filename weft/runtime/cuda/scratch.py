"""Device memory for partial sums of launches that follow each other on one stream, and so may share it."""

from __future__ import annotations

import torch

from weft.symm.lasting import lasting


class Scratch:
    """fp32 memory of the launches of one lane."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def require(self, device: torch.device, numbers: int) -> None:
        """Make room for `numbers` fp32 numbers, before any stream waits for a peer."""
        if self.memory.numel() < numbers:
            self.memory = lasting(device, lambda: torch.empty(numbers, dtype=torch.float32, device=device))
