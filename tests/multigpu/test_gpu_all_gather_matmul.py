"""weft.all_gather_matmul on two GPUs: results, gradients, layouts, CUDA graphs; the functions are those of the CPU tests."""

from __future__ import annotations

import gpu_ranks
import pytest
import torch
from support import matmul_ranks as ranks

from weft.launch import Pool

pytestmark = gpu_ranks.MARKS
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# shape of a shard, dimension, widths, rows of each rank, dtype, whether A is wanted, schedule
FORWARD = {
    "large": ((2048, 1024), 0, [512], None, BF16, False, None),
    "small": ((16, 512), 0, [256, 128], None, BF16, False, None),
    "A wanted": ((512, 512), 0, [256], None, F16, True, None),
    "odd, fp32": ((37, 43), 0, [19], None, F32, True, None),
    "uneven": ((64, 256), 0, [128], [64, 300], BF16, True, None),
    "a batch of sequences": ((4, 256, 512), 1, [384], None, BF16, True, None),
    "no rows": ((0, 128), 0, [64], None, BF16, False, None),
    "pinned": ((256, 512), 0, [384], None, BF16, False, "gather[by=kernel]"),
}


@pytest.mark.parametrize("name", FORWARD)
def test_results(pair: Pool, name: str) -> None:
    pair.run(ranks.forward, *FORWARD[name], 3, timeout_s=60)


@pytest.mark.parametrize("return_A", [False, True], ids=["", "A wanted"])
@pytest.mark.parametrize("rows", [[50, 50], [4, 90]], ids=["even", "uneven"])
def test_gradients(pair: Pool, rows: list[int], return_A: bool) -> None:
    pair.run(ranks.backward, rows, [6, 3], return_A, False, F32, timeout_s=60)


def test_many_sizes_in_a_row(pair: Pool) -> None:
    pair.run(ranks.many_sizes, 12, timeout_s=60)


@pytest.mark.parametrize("schedule", [None, "serial", "gather[by=kernel]", "shard[chunks=2,send=in_turn,by=dma]"])
def test_weights_may_lie_otherwise_on_each_rank_and_in_each_call(pair: Pool, schedule: str | None) -> None:
    pair.run(ranks.layouts, schedule, timeout_s=60)


def test_the_heuristics_schedule_runs_or_a_warning_says_why_not(pair: Pool) -> None:
    for found, warned in pair.run(ranks.by_heuristic, timeout_s=60):
        assert [names[0].split(",steps")[0] for names in found[:2]] == [
            "ficco_1d[start=uniform,gemms=fused", "ficco_2d[start=uniform,gemms=fused",
        ]  # fmt: skip
        assert all(first == again for first, again in found)
        assert len(warned) == 2


def test_layouts_that_cost_a_copy_are_warned_about_once(pair: Pool) -> None:
    for told in pair.run(ranks.copies, timeout_s=60):
        assert sum("A_shard is copied at every call" in text for text in told) == 1
        assert sum("neither its rows nor its columns are in one piece" in text for text in told) == 1


def test_timeline_of_the_librarys_calls(pair: Pool) -> None:
    steps = ["all_gather x_shard -> x: 384", "matmul y0: 0", "matmul y1: 0"]
    assert pair.run(ranks.serial_steps, timeout_s=60) == [steps * 2, []]


@pytest.mark.parametrize("m", [8, 1024])
def test_two_calls_in_a_graph(pair: Pool, m: int) -> None:
    for told in pair.run(ranks.captured, m, 512, 1024, 20, timeout_s=60):
        assert "before capturing it" in told
