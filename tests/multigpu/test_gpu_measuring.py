"""Test on two GPUs schedules that are selected by measurement on demand, in repeated calls and beside graphs.

The functions are shared with the CPU tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gpu_ranks
import pytest
from support import measuring_ranks as ranks

from weft.launch import Pool

pytestmark = gpu_ranks.MARKS


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Return a pool for this test only. Its ranks read WEFT_CACHE_DIR, the folder of measured times, when they start."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("WEFT_QUIET", "1")
    with Pool(2, backend="nccl") as workers:
        yield workers


def test_on_demand(pool: Pool) -> None:
    """One test for everything, because a pool takes seconds to start."""
    for timed in pool.run(ranks.on_demand_everywhere, timeout_s=200):
        assert {"serial", "gather[by=dma]", "gather[by=kernel]"} < set(timed)
    found = pool.run(ranks.on_demand_with_a_model, False, timeout_s=100)
    assert found[0] == found[1]
    assert found[0]["timed"] == found[0]["promising"]
    assert found[0]["later"] == 0
    assert set(found[0]["taken"]) == {found[0]["explained"]}
    for told in pool.run(ranks.on_demand_and_captured, timeout_s=100):
        assert "before capturing it" in told
