"""Test sorts by captured graphs: each result must equal torch's stable sort, whatever sizes come in between."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


@pytest.mark.parametrize(("dtype", "pairs"), [(torch.int32, False), (torch.int64, False), (torch.int32, True)])
def test_sorts_equal_torchs(dtype: torch.dtype, pairs: bool) -> None:
    from weft.runtime.cuda.radix_sort import sorts_pairs
    from weft.runtime.cuda.sort_graphs import SortGraphs

    if pairs and not sorts_pairs():
        pytest.skip("torch's library has no sort of pairs")

    stream, generator = torch.cuda.Stream(), torch.Generator("cuda").manual_seed(3)
    graphs = SortGraphs(dtype, stream, pairs)
    for count in (5, 5, 5, 70_001, 70_001, 69_800, 5, 70_001, 1, 1, 1, 300_000, 300_000, 300_000, 70_001, 70_001, 5):
        given = torch.randint(0, max(2, count // 3), (count,), dtype=dtype, device="cuda", generator=generator)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            memory, values = graphs.memory(count)
            memory.copy_(given)
            if values is not None:
                values.copy_(torch.arange(count, dtype=torch.int32, device="cuda"))
            keys, order = graphs.sort(count, count)
        torch.cuda.synchronize()
        wanted = torch.sort(given, stable=True)
        assert torch.equal(keys[:count], wanted[0]), count
        assert torch.equal(order[:count], wanted[1]), count
    assert any(graphs._graphs.values())
