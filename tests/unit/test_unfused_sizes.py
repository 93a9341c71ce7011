"""The numbers of rows of an exchange on the CPU: equal from splits that the CPU has read, and from both tables."""

from __future__ import annotations

import pytest
import torch

from weft.runtime.unfused.sizes import Sizes


@pytest.mark.parametrize(("world", "experts"), [(1, 3), (2, 1), (3, 4)])
def test_splits_of_all_ranks_give_the_rows_of_a_rank(world: int, experts: int) -> None:
    counts = torch.randint(9, (world, world, experts), generator=torch.Generator().manual_seed(world))
    for rank in range(world):
        splits, received = counts[rank].flatten(), counts[:, rank].contiguous()
        read = Sizes.of_read(splits, received, counts.flatten().tolist(), rank)
        assert read.host == Sizes(splits, received).host
