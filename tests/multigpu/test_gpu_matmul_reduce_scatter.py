"""weft.matmul_reduce_scatter on two GPUs: every schedule, results, gradients, layouts, CUDA graphs; most functions are those of the
CPU tests. Those with a `group` argument run on the ranks.
"""

from __future__ import annotations

import gpu_ranks
import pytest
import scatter_ranks as ranks
import torch
import torch.distributed as dist

from weft import symm
from weft.launch import Pool
from weft.runtime.cuda.schedule import CudaSchedule
from weft.schedule import MatmulReduceScatter, named

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
        "tracked[chunks=1,to=store]"]  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_results(pair: Pool, name: str) -> None:
    pair.run(ranks.forward, *FORWARD[name], 3, timeout_s=60)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("sizes", [WHOLE, ODD], ids=["whole", "odd"])
def test_every_schedule(pair: Pool, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """By the operator, three calls in a row with fresh data and poisoned results, behind stragglers, and to the bit again."""
    names = pair.run(ranks.every_schedule, *sizes, dtype, 0.01, timeout_s=200)
    assert {name.split("[")[0] for name in names[0]} == {"serial", "scatter", "direct", "tracked"}


def on_streams(group: dist.ProcessGroup, name: str, dtype: torch.dtype) -> None:
    """With its own memory poisoned at first; then captured, and replayed."""
    rank, world, (m, n, k) = group.rank(), group.size(), WHOLE
    device = torch.device("cuda", torch.cuda.current_device())
    schedule = named(MatmulReduceScatter(world, m, n, k, ranks.NAMES[dtype]), name).build()
    made = CudaSchedule(schedule, symm.domain(group, device))
    for own in made.context.own.values():
        own.fill_(torch.nan)
    torch.cuda.synchronize()
    dist.barrier(group)
    cases = [ranks.Operands(world, (m, k), 0, n, dtype, "sum", seed) for seed in range(6)]

    def tensors(case: ranks.Operands) -> dict[str, torch.Tensor]:
        y = torch.full((m // world, n), torch.nan, dtype=dtype, device=device)
        return {"x": case.As[rank], "w": case.Bs[rank], "y": y}

    given = [tensors(case) for case in cases]
    for number, one in enumerate(given):
        if number % 3 == 2 and rank == number // 3 % 2:
            ranks.late(0.005)
        made.run(one)
    torch.cuda.synchronize()
    usual = [case.usual(group) for case in cases]
    for one, case, library in zip(given, cases, usual, strict=True):
        ranks.close(one["y"], case.exact(rank), library)
    graph, stream, one = torch.cuda.CUDAGraph(), torch.cuda.Stream(), given[0]
    with torch.cuda.graph(graph, stream=stream):
        made.run(one)
    for case, library in zip(cases[1:], usual[1:], strict=True):
        one["x"].copy_(case.As[rank])
        one["w"].copy_(case.Bs[rank])
        one["y"].fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        ranks.close(one["y"], case.exact(rank), library)
    made.check()
    made.close()


@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_is_captured_and_replayed(pair: Pool, name: str) -> None:
    pair.run(on_streams, name, BF16, timeout_s=60)


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
