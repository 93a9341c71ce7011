"""The distinct ids that `RowDist` sends: marks in an array give the same result as a sort."""

from __future__ import annotations

import pytest
import torch

from weft.nn.row_dist import distinct


@pytest.mark.parametrize("end", [50, 100_000])  # a short array of marks, and a sort
@pytest.mark.parametrize("count", [0, 1, 40])
def test_distinct_keys_and_their_indices(end: int, count: int) -> None:
    keys = torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(count))
    found, index = distinct(keys, end)
    assert found.tolist() == sorted(set(keys.tolist()))
    assert torch.equal(found[index], keys)
