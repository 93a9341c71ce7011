"""The torch functions by which all executors run elementwise steps (`weft.schedule.steps.computing.OPS`).

A new operation needs an entry in `OPS`, with its cost, and an entry in `ELEMENTWISE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Elementwise(NamedTuple):
    """Two torch functions for one elementwise operation: `call` returns a new tensor, and `into` writes into its argument
    `out=`.
    """

    call: Callable[..., torch.Tensor]
    into: Callable[..., torch.Tensor]


ELEMENTWISE = {
    "add": Elementwise(torch.add, torch.add),
    "relu": Elementwise(torch.relu, lambda x, out: torch.clamp_min(x, 0, out=out)),  # because relu.out allocates memory
    "silu": Elementwise(torch.nn.functional.silu, torch.ops.aten.silu.out),
    "gelu": Elementwise(torch.nn.functional.gelu, torch.ops.aten.gelu.out),
}
