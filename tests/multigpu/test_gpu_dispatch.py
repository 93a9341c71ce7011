"""Mixture of experts on two GPUs: schedules whose sizes only the run knows, against float64, and in graphs."""

from __future__ import annotations

import dispatch_ranks as ranks
import expert_ranks
import gpu_ranks
import pytest

from weft.launch import Pool
from weft.schedule import AllToAllMatmul

pytestmark = gpu_ranks.MARKS


def problem(
    rows: tuple[int, int], experts: int, n: int, k: int, dtype: str = "bf16", exact: bool = True
) -> AllToAllMatmul:
    return AllToAllMatmul(2, experts, rows, n, k, dtype, most=max(rows), exact=exact)


CASES = {
    "bf16": (problem((512, 512), 4, 256, 192), False),
    "bf16, weights transposed": (problem((512, 384), 4, 256, 192), True),
    "bf16, room to spare": (problem((300, 512), 4, 256, 192, exact=False), True),
    "fp32, odd sizes": (problem((37, 61), 3, 19, 43, "fp32"), False),
    "fp16, odd sizes, room to spare": (problem((137, 61), 3, 33, 40, "fp16", exact=False), True),
    "a rank without tokens": (problem((0, 64), 2, 64, 64), False),
    "many experts": (problem((1000, 1024), 128, 64, 128), False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_is_right(pair: Pool, name: str) -> None:
    counts = pair.run(ranks.every_candidate, *CASES[name], timeout_s=90)
    assert min(counts) >= (6 if CASES[name][0].exact else 3)


@pytest.mark.parametrize("name", ["dispatch[by=kernel,rest=each]", "dispatch_by_expert[by=kernel,chunks=2]"])
def test_a_graph_is_replayed_with_other_sizes(pair: Pool, name: str) -> None:
    pair.run(ranks.replays, problem((256, 256), 4, 128, 192, exact=False), name, 100, timeout_s=60)


@pytest.mark.parametrize("name", ["dispatch[by=kernel,rest=each]", "dispatch_by_expert[by=kernel,chunks=2]"])
def test_more_rows_come_than_were_expected(pair: Pool, name: str) -> None:
    pair.run(ranks.more_than_expected, problem((512, 384), 4, 128, 192), name, timeout_s=60)


@pytest.mark.parametrize("by", ["dma", "kernel"])
def test_what_ran_can_be_seen(pair: Pool, by: str) -> None:
    for names in pair.run(ranks.timeline, problem((256, 256), 4, 128, 192), by, timeout_s=60):
        assert sum("grouped_matmul" in name for name in names) == 2
        assert sum("tokens" in name and name.startswith("copy") for name in names) == 1


def test_timeline_of_the_librarys_calls(pair: Pool) -> None:
    steps = ["exchange splits -> received", "exchange tokens -> unordered", "permute", "library_grouped_matmul"]
    assert pair.run(expert_ranks.serial_steps, timeout_s=60) == [steps * 2, []]
