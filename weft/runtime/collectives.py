"""torch's collectives under the names that this torch has for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# From torch 2.13 on `all_gather_into_tensor` is deprecated in favour of this name.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def sendable(x: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that every library moves: gloo and older NCCLs know no fp8."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.itemsize == 1 else x
