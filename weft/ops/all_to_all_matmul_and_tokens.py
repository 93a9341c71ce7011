"""`weft.all_to_all_matmul` with the received tokens as a third result, for modules that need them in backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.operator.calls import made
from weft.operator.replay import replayed
from weft.ops.all_to_all_matmul import OPERATOR


@replayed
def all_to_all_matmul_and_tokens(
    tokens: torch.Tensor,
    w_experts: torch.Tensor,
    splits: torch.Tensor,
    *,
    group: dist.ProcessGroup | str,
    capacity: int | None,
    schedule: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make a call of `all_to_all_matmul` without max_rows. Return (y, received, x), where x [rows, K] are the received tokens, by
    source rank and then by expert. y has the same bits as in a call of `all_to_all_matmul`. No gradients.
    """

    def form(group: dist.ProcessGroup | str | None) -> tuple[Any, ...]:
        return OPERATOR.form(tokens, w_experts, splits, None, capacity, True)

    y, received, x = made(OPERATOR, group, tokens, form, schedule=schedule)
    return y, received, x
