"""weft.matmul_all_gather on two GPUs: every schedule, results, gradients, layouts, CUDA graphs; most functions are those of the
CPU tests. Those with a `group` argument run on the ranks.
"""

from __future__ import annotations

import gpu_ranks
import product_ranks
import pytest
import torch
from support import gathered_product_ranks as ranks

from weft.builders import MatmulAllGather
from weft.launch import Pool

pytestmark = gpu_ranks.MARKS
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# shape of x, N, dtype, dimension, schedule
FORWARD = {
    "large": ((4096, 1024), 2048, BF16, 0, None),
    "large, columns": ((4096, 1024), 2048, BF16, -1, None),
    "one token": ((1, 1, 512), 256, BF16, -1, "direct[chunks=1,by=kernel]"),
    "odd, fp32": ((75, 43), 19, F32, 0, None),
    "odd, columns": ((75, 43), 19, F32, -1, "direct[chunks=2,by=dma]"),
    "a batch of sequences": ((4, 511, 512), 384, F16, 1, "direct[chunks=2,by=dma]"),
    "no rows": ((0, 128), 64, BF16, 0, None),
    "nothing to sum over": ((64, 0), 64, BF16, -1, None),
    "serial": ((512, 512), 384, BF16, -1, "serial"),
}
WHOLE, ODD = (2048, 512, 256), (601, 19, 43)
"""M, N, K: tiles that are whole and rows that begin at multiples of 16 bytes, and neither."""
BUILDERS = [c.name for c in ranks.every(MatmulAllGather(2, *WHOLE, "bf16")) if c.name != "serial"]
SOME = ["direct[chunks=1,by=kernel]", "direct[chunks=4,by=dma]", "tracked[chunks=2]"]


@pytest.mark.parametrize("name", FORWARD)
def test_results(pair: Pool, name: str) -> None:
    pair.run(ranks.forward, *FORWARD[name], 3, timeout_s=60)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("sizes", [WHOLE, ODD], ids=["whole", "odd"])
def test_every_schedule(pair: Pool, sizes: tuple[int, int, int], dim: int, dtype: torch.dtype) -> None:
    """Run each schedule by the operator: three calls in a row with fresh data and poisoned results, behind stragglers. Results
    repeat to the bit, and are the same bits on both ranks."""
    names = pair.run(ranks.every_schedule, *sizes, dim, dtype, 0.01, timeout_s=200)
    assert {name.split("[")[0] for name in names[0]} == {"serial", "direct", "tracked"}


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_is_captured_and_replayed(pair: Pool, name: str, columns: bool) -> None:
    pair.run(product_ranks.on_streams, MatmulAllGather(2, *WHOLE, "bf16", columns), name, timeout_s=60)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("shape", "dim", "wanted"),
    [
        ((128, 64), 0, (True, True)),
        ((3, 65, 48), -1, (True, True)),
        ((3, 65, 48), 1, (True, False)),
        ((128, 64), -1, (False, True)),
    ],
)
def test_gradients(pair: Pool, shape: tuple[int, ...], dim: int, wanted: tuple[bool, bool], compiled: bool) -> None:
    pair.run(ranks.backward, shape, 40, dim, wanted, compiled, None, timeout_s=120)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("schedule", [None, *SOME[:2]])
def test_many_sizes_in_a_row(pair: Pool, schedule: str | None, dim: int, dtype: torch.dtype) -> None:
    pair.run(ranks.many_sizes, dim, schedule, dtype, timeout_s=60)


@pytest.mark.parametrize("schedule", ["serial", *SOME[:2]])
def test_operands_may_lie_otherwise_on_each_rank_and_in_each_call(pair: Pool, schedule: str) -> None:
    pair.run(ranks.layouts, schedule, timeout_s=60)


@pytest.mark.parametrize("m", [64, 2048])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("schedule", [None, *SOME])
def test_two_calls_in_a_graph(pair: Pool, m: int, dim: int, schedule: str | None) -> None:
    if schedule == "tracked[chunks=2]" and m == 64:
        pytest.skip("its rows are one tile, which cannot be cut")
    for told in pair.run(
        ranks.captured, m, 384, 320, dim, schedule, 10, timeout_s=60
    ):  # which no other test has called
        assert "before capturing it" in told
