"""weft.matmul_reduce_scatter on two GPUs: every schedule, results, gradients, layouts, CUDA graphs; most functions are those of the
CPU tests. Those with a `group` argument run on the ranks.
"""

from __future__ import annotations

import gpu_ranks
import product_ranks
import pytest
import torch
from support import scatter_ranks as ranks

from weft.builders import MatmulReduceScatter
from weft.launch import Pool

pytestmark = gpu_ranks.MARKS
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# shape of A, dimension, N, dtype, op, schedule
FORWARD = {
    "large": ((4096, 1024), 0, 2048, BF16, "sum", None),
    "small": ((32, 512), 0, 256, BF16, "avg", None),
    "odd, fp32": ((74, 43), 0, 19, F32, "sum", None),
    "a batch of sequences": ((4, 512, 512), 1, 384, F16, "avg", None),
    "batches": ((8, 100, 256), 0, 512, BF16, "sum", None),
    "no rows": ((0, 128), 0, 64, BF16, "sum", None),
    "nothing to sum over": ((64, 0), 0, 64, BF16, "sum", None),
    "serial": ((512, 512), 0, 384, BF16, "avg", "serial"),
}
WHOLE, ODD = (2048, 512, 256), (600, 19, 43)
"""M, N, K: tiles that are whole and rows that begin at multiples of 16 bytes, and neither."""
BUILDERS = [c.name for c in ranks.every(MatmulReduceScatter(2, *WHOLE, "bf16"))]
SOME = ["scatter", "direct[chunks=2,by=dma,add=gemm]", "direct[chunks=1,by=store,add=reduce]", "tracked[chunks=2,to=dma]",
        "tracked[chunks=1,to=store]", "pulled[chunks=2,by=gemm]", "pulled[chunks=1,by=tracked]"]  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_results(pair: Pool, name: str) -> None:
    pair.run(ranks.forward, *FORWARD[name], 3, timeout_s=60)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("sizes", [WHOLE, ODD], ids=["whole", "odd"])
def test_every_schedule(pair: Pool, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Run each schedule by the operator: three calls in a row with fresh data and poisoned results, behind stragglers. Results
    repeat to the bit."""
    names = pair.run(ranks.every_schedule, *sizes, dtype, 0.01, timeout_s=200)
    assert {name.split("[")[0] for name in names[0]} == {"serial", "scatter", "direct", "tracked", "pulled"}


@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_is_captured_and_replayed(pair: Pool, name: str) -> None:
    pair.run(product_ranks.on_streams, MatmulReduceScatter(2, *WHOLE, "bf16"), name, timeout_s=60)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("shape", "dim", "op", "wanted"),
    [
        ((128, 64), 0, "sum", (True, True)),
        ((3, 64, 48), 1, "avg", (True, True)),
        ((128, 64), 0, "sum", (True, False)),
        ((128, 64), 0, "avg", (False, True)),
    ],
)
def test_gradients(
    pair: Pool, shape: tuple[int, ...], dim: int, op: str, wanted: tuple[bool, bool], compiled: bool
) -> None:
    pair.run(ranks.backward, shape, dim, 40, op, wanted, compiled, None, timeout_s=120)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("schedule", [None, *SOME[:3], *SOME[4:]])
def test_many_sizes_in_a_row(pair: Pool, schedule: str | None, dtype: torch.dtype) -> None:
    pair.run(ranks.many_sizes, schedule, dtype, timeout_s=60)


@pytest.mark.parametrize("schedule", ["serial", *SOME[:3], *SOME[4:]])
def test_operands_may_lie_otherwise_on_each_rank_and_in_each_call(pair: Pool, schedule: str) -> None:
    pair.run(ranks.layouts, schedule, timeout_s=60)


@pytest.mark.parametrize("m", [64, 2048])
@pytest.mark.parametrize("schedule", [None, *SOME])
def test_two_calls_in_a_graph(pair: Pool, m: int, schedule: str | None) -> None:
    if schedule == "tracked[chunks=2,to=dma]" and m == 64:
        pytest.skip("its rows are one tile, which cannot be cut")
    for told in pair.run(ranks.captured, m, 384, 320, schedule, 10, timeout_s=60):  # which no other test has called
        assert "before capturing it" in told
