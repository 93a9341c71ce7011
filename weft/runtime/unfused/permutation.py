"""The order of tokens on the rank of their experts: tokens arrive sorted by source rank, but GEMMs need them sorted by expert."""

from __future__ import annotations

import numpy as np
import torch

from weft.runtime.unfused.sizes import Sizes


def in_expert_order(arrived: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Return the rows `arrived`, which are in the order of arrival, sorted by expert, and then by source rank."""
    if 1 in sizes.received.shape:
        return arrived
    return arrived.index_select(0, expert_order(sizes.received, arrived.shape[0]))


def expert_order(received: torch.Tensor, came: int) -> torch.Tensor:
    """Return the permutation that sorts received rows by expert, and then by source rank: [came], int64. Entry i is the
    index, in the order of arrival, of row i of the sorted rows.

    received: the number of rows from each rank for each local expert, [ranks, experts]. came: their sum.
    """
    if not received.is_cuda:  # NumPy takes a third of torch's time
        of_cells = received.numpy()
        counts = of_cells.T.ravel()
        shifts = (of_cells.cumsum() - of_cells.ravel()).reshape(of_cells.shape).T.ravel() - (counts.cumsum() - counts)
        return torch.from_numpy(np.repeat(shifts, counts) + np.arange(came))
    world, experts = received.shape
    by_source, by_expert = received.flatten(), received.t().flatten()
    begins_in_arrival = (by_source.cumsum(0) - by_source).view(world, experts).t().flatten()
    begins_in_order = by_expert.cumsum(0) - by_expert
    shift = torch.repeat_interleave(begins_in_arrival - begins_in_order, by_expert, output_size=came)
    return shift.add_(torch.arange(came, device=received.device))
