"""weft.scaled_matmul_reduce_scatter on two GPUs: every schedule, torch's fused op, CUDA graphs; the functions are those of the CPU
tests, where results may be off by twice what torch._scaled_mm and NCCL's all-reduce are.

With scales of rows results are bf16 here, as some GPUs have such GEMMs for that alone.
"""

from __future__ import annotations

from dataclasses import replace

import gpu_ranks
import product_ranks
import pytest
import torch
from support import scaled_scatter_ranks as ranks
from support import scatter_ranks
from support.scaled_scatter_ranks import Case

from weft.builders import ScaledMatmulReduceScatter
from weft.launch import Pool

FP8_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [*gpu_ranks.MARKS, pytest.mark.skipif(not FP8_GPU, reason="fp8 GEMMs need compute capability 8.9")]
SCATTER, DIRECT = "scatter", "direct[chunks=2,by=dma,add=reduce]"
KERNEL, STORE = "direct[chunks=1,by=kernel,add=reduce]", "direct[chunks=1,by=store,add=reduce]"
FORWARD = {
    "large": Case((4096, 1024), n=2048),
    "large, by row": Case((4096, 1024), n=2048, by="row", schedule=DIRECT),
    "large, fast": Case((4096, 1024), n=512, fast=True, schedule=STORE),
    "large, by row, fast": Case((4096, 1024), n=512, by="row", fast=True, op="avg", schedule=SCATTER),
    "small": Case((32, 512), n=256, op="avg", schedule=SCATTER),
    "biases": Case((512, 512), n=256, biased=True, schedule=DIRECT),
    "biases, by row": Case((512, 512), n=256, biased=True, by="row", schedule=DIRECT),
    "biases in fp16": Case((512, 512), n=256, biased=True, out=torch.float16, schedule=KERNEL),
    "fp32": Case((512, 512), n=256, out=torch.float32, schedule=DIRECT),
    "odd rows": Case((74, 48), n=16, schedule=STORE),
    "odd rows, by row": Case((74, 48), n=16, by="row", schedule=DIRECT),
    "one row each": Case((2, 256), n=128, by="row", schedule=SCATTER),
    "batches": Case((256, 4, 512), n=384, by="row", schedule=DIRECT),
    "a batch of sequences": Case((4, 256, 512), dim=1, n=384, by="row", op="avg", schedule=DIRECT),
    "a batch of sequences, serial": Case((4, 256, 512), dim=1, n=384, by="row", op="avg", schedule="serial"),
    "a batch of sequences, a scale for all": Case((4, 256, 512), dim=1, n=384, schedule=STORE),
    "flattened": Case((4, 256, 512), dim=1, n=384, by="row", flat=True, schedule=DIRECT),
    "no rows": Case((0, 128), n=64, by="row"),
}
KINDS = {
    "tensor": ScaledMatmulReduceScatter(2, 2048, 512, 256, "bf16", "tensor", True, False),
    "row": ScaledMatmulReduceScatter(2, 2048, 512, 256, "bf16", "row", False, True),
}
BUILDERS = [candidate.name for candidate in scatter_ranks.every(KINDS["tensor"])]


@pytest.mark.parametrize("name", FORWARD)
def test_results(pair: Pool, name: str) -> None:
    pair.run(ranks.forward, FORWARD[name], 3, timeout_s=60)


@pytest.mark.parametrize("by", ["tensor", "row"])
@pytest.mark.parametrize("rows", [512, 100], ids=["", "chunks of rows that are no multiple of 4"])
def test_every_schedule(pair: Pool, rows: int, by: str) -> None:
    """Run each schedule by the operator: three calls in a row with fresh data and poisoned results, behind stragglers. Results
    repeat to the bit."""
    case = Case((rows, 512), n=256, by=by)  # type: ignore[arg-type]
    names = pair.run(ranks.every_schedule, case, 0.01, timeout_s=200)[0]
    assert {name.split("[")[0] for name in names} == {"serial", "scatter", "direct"}


@pytest.mark.parametrize("by", KINDS)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_is_captured_and_replayed(pair: Pool, name: str, by: str) -> None:
    pair.run(product_ranks.on_streams, KINDS[by], name, timeout_s=60)


@pytest.mark.parametrize("schedule", [None, "serial", SCATTER, DIRECT, KERNEL, STORE])
@pytest.mark.parametrize("by", ["tensor", "row"])
def test_a_graph_is_replayed_behind_stragglers(pair: Pool, by: str, schedule: str | None) -> None:
    case = Case((512, 512), n=256, by=by, schedule=schedule)  # type: ignore[arg-type]
    pair.run(ranks.captured, case, 40, timeout_s=60)


@pytest.mark.parametrize("schedule", [None, SCATTER, DIRECT, STORE])
def test_many_sizes_in_a_row(pair: Pool, schedule: str | None) -> None:
    pair.run(ranks.many_sizes, Case(n=96, by="row", schedule=schedule), timeout_s=60)


@pytest.mark.parametrize(
    "name", ["large", "large, by row", "large, fast", "biases", "batches", "a batch of sequences", "fp32"]
)
def test_as_the_fused_op_of_torch(pair: Pool, name: str) -> None:
    pair.run(ranks.as_torch, FORWARD[name], timeout_s=60)


@pytest.mark.parametrize(("schedule", "rows", "n"), [("serial", 448, 144), (DIRECT, 480, 208)])
def test_operands_may_lie_otherwise_on_each_rank(pair: Pool, schedule: str, rows: int, n: int) -> None:
    """Sizes, and so strides, of no other test, as each is warned of once."""
    first, second = pair.run(ranks.copies, Case((rows, 256), n=n, schedule=schedule), timeout_s=60)
    assert sum("A is copied at every call" in text for text in first) == 1
    assert sum("B is copied at every call" in text for text in first) == 1
    assert not second


def test_autotuned(pair: Pool) -> None:
    pair.run(ranks.forward, Case((1024, 512), n=512, by="row", schedule="autotune"), 2, timeout_s=120)


@pytest.mark.parametrize("name", ["biases", "a batch of sequences", "flattened"])
def test_compiled(pair: Pool, name: str) -> None:
    pair.run(ranks.compiled, replace(FORWARD[name], schedule=None), timeout_s=120)
