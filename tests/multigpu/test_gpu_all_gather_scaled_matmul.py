"""weft.all_gather_scaled_matmul on two GPUs: every schedule, torch's fused op, CUDA graphs; the functions are those of the CPU
tests, where results may be off by twice what torch._scaled_mm is on gathered rows."""

from __future__ import annotations

from dataclasses import replace

import gpu_ranks
import pytest
import torch
from support import scaled_ranks as ranks
from support.scaled_ranks import FP8, Case

from weft.launch import Pool

FP8_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [*gpu_ranks.MARKS, pytest.mark.skipif(not FP8_GPU, reason="fp8 GEMMs need compute capability 8.9")]
FORWARD = {
    "large": Case((2048, 1024), widths=(512,), return_A=False),
    "large, by row": Case((2048, 1024), widths=(512,), by="row", return_A=False),
    "large, fast": Case((2048, 1024), widths=(512,), fast=True, return_A=False),
    "small, three weights": Case((16, 512), widths=(256, 128, 128), by="row", return_A=False),
    "A wanted": Case((512, 512), widths=(256,), by="row"),
    "scales of all rows on every rank": Case((512, 512), widths=(256,), by="row of all"),
    "biases": Case((256, 512), widths=(256, 64), biased=True),
    "biases, by row": Case((256, 512), widths=(256, 64), biased=True, by="row"),
    "biases in fp16": Case((256, 512), widths=(256,), biased=True, out=torch.float16),
    "fp32": Case((256, 512), widths=(256,), out=torch.float32),
    "fp8": Case((256, 512), widths=(256, 64), out=FP8),
    "fp8, biases": Case((256, 512), widths=(256,), out=FP8, biased=True, return_A=False),
    "odd rows": Case((37, 48), widths=(16,)),
    "odd rows, by row": Case((37, 48), widths=(16,), by="row", return_A=False),
    "one row": Case((1, 256), widths=(128,), return_A=False),
    "one row, by row": Case((1, 256), widths=(128,), by="row", return_A=False),
    "uneven": Case((64, 256), widths=(128,), rows=(64, 300)),
    "uneven, by row": Case((64, 256), widths=(128,), rows=(64, 301), by="row"),
    "a batch of sequences": Case((4, 256, 512), gather_dim=1, widths=(384,), by="row"),
    "no rows": Case((0, 128), widths=(64,), by="row"),
}


@pytest.mark.parametrize("name", FORWARD)
def test_results(pair: Pool, name: str) -> None:
    pair.run(ranks.forward, FORWARD[name], 3, timeout_s=60)


@pytest.mark.parametrize("by", ["tensor", "row"])
@pytest.mark.parametrize("rows", [256, 50], ids=["", "rows that are no multiple of 4"])
def test_every_schedule(pair: Pool, rows: int, by: str) -> None:
    case = Case((rows, 512), widths=(256, 64), by=by, return_A=False)  # type: ignore[arg-type]
    names = pair.run(ranks.every_schedule, case, timeout_s=300)[0]
    assert {name.split("[")[0] for name in names} >= {"serial", "gather", "shard", "ficco_1d"}


SHARD, KERNEL = "shard[chunks=2,send=in_turn,by=dma]", "shard[chunks=1,send=in_turn,by=kernel]"


@pytest.mark.parametrize("schedule", [None, "serial", "gather[by=kernel]", SHARD, KERNEL])
@pytest.mark.parametrize("by", ["tensor", "row"])
def test_a_graph_is_replayed_behind_stragglers(pair: Pool, by: str, schedule: str | None) -> None:
    case = Case((256, 512), widths=(256,), by=by, return_A=False, options={"schedule": schedule})  # type: ignore[arg-type]
    pair.run(ranks.captured, case, 40, timeout_s=60)


@pytest.mark.parametrize(
    "name",
    ["large", "large, by row", "large, fast", "A wanted", "biases", "a batch of sequences", "fp8", "fp8, biases"],
)
def test_as_the_fused_op_of_torch(pair: Pool, name: str) -> None:
    pair.run(ranks.as_torch, replace(FORWARD[name], return_A=True), timeout_s=60)


def test_weights_by_rows_are_copied_and_warned_about_once(pair: Pool) -> None:
    for told in pair.run(ranks.copies, timeout_s=60):
        assert sum("Bs[0] is copied at every call" in text for text in told) == 1


def test_compiled(pair: Pool) -> None:
    pair.run(ranks.compiled, FORWARD["A wanted"], timeout_s=120)
