"""The order of rows of experts on CPU, with tables of counts in any layout."""

from __future__ import annotations

import torch

from weft.runtime.unfused.permutation import expert_order, in_expert_order, in_order_of_arrival
from weft.runtime.unfused.sizes import Sizes


def test_counts_may_be_a_strided_view() -> None:
    counts = torch.tensor([[2, 0, 3], [1, 4, 0]])
    strided = counts.t().contiguous().t()
    arrived = torch.randn(10, 4)
    order = expert_order(counts, 10)
    for received in (counts, strided):
        sizes = Sizes(torch.zeros(6, dtype=torch.int64), received)
        by_expert = in_expert_order(arrived, sizes)
        assert torch.equal(by_expert, arrived[order])
        assert torch.equal(in_order_of_arrival(by_expert, sizes), arrived)
