"""Test schedules with three and four ranks, on that many GPUs or on fewer. Two ranks would not test an order of peers."""

from __future__ import annotations

from collections.abc import Iterator

import gpu_all_to_all_matmul_ranks as dispatch_ranks
import gpu_ranks
import pytest
import schedule_ranks
import torch
from support import output_maps
from support.on_ranks import BF16, F32
from support.operators import suite
from support.operators.call import Case
from support.operators.gemms import Gathered, Gemm

from weft.builders import AllGatherMatmul, AllToAllMatmul
from weft.launch import Pool

pytestmark = gpu_ranks.MARKS


@pytest.fixture(scope="module", params=[3, 4], ids=["3 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest, deadline: None) -> Iterator[Pool]:
    with Pool(request.param, backend="nccl") as workers:
        yield workers


GATHERED = {
    "even": lambda world: AllGatherMatmul.even(192 * world, 128, 256, world),
    "uneven, the gathered input wanted": lambda world: AllGatherMatmul(
        world, tuple(40 * rank for rank in range(world)), (64, 32), 72, "fp16", True
    ),
}


@pytest.mark.parametrize("name", GATHERED)
def test_every_schedule_that_gathers(ranks: Pool, name: str) -> None:
    counts = ranks.run(schedule_ranks.every_candidate, GATHERED[name](ranks.world_size), True, timeout_s=180)
    assert min(counts) >= 4


@pytest.mark.parametrize("exact", [True, False], ids=["exactly the rows that come", "room to spare"])
def test_every_schedule_of_experts(ranks: Pool, exact: bool) -> None:
    rows = tuple(100 * rank + 7 for rank in range(ranks.world_size))
    p = AllToAllMatmul(ranks.world_size, 4, rows, 128, 192, "bf16", most=max(rows), exact=exact)
    counts = ranks.run(dispatch_ranks.every_candidate, p, False, timeout_s=120)
    assert min(counts) >= 3
    by = "dma" if exact else "kernel"
    starts, gemms = ("uniform", "hetero"), ("fused", "unfused")
    columns = [f"ficco_2d[start={start},gemms={how},steps=0,by={by}]" for start in starts for how in gemms]
    ranks.run(dispatch_ranks.every_candidate, p, False, False, columns, timeout_s=180)


def builders(ranks: Pool, operator: str, case: Case) -> set[str]:
    """Run every schedule of the operator. Return the names of the schedules' builders."""
    names = ranks.run(suite.every_schedule, operator, case, 0.01, timeout_s=240)
    return {name.split("[")[0] for name in names[0]}


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_every_schedule_of_reduce_scatter(ranks: Pool, dtype: torch.dtype) -> None:
    case = Gemm((300 * ranks.world_size, 72), 136, dtype)
    assert {"scatter", "direct", "tracked", "ring", "pulled"} < builders(ranks, "matmul_reduce_scatter", case)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_every_schedule_of_all_reduce(ranks: Pool, dtype: torch.dtype) -> None:
    for m in (300 * ranks.world_size, 300 * ranks.world_size - 1):
        assert {"one_shot", "two_shot"} < builders(ranks, "matmul_all_reduce", Gemm((m, 72), 136, dtype))


@pytest.mark.parametrize("dim", [0, -1])
def test_every_schedule_of_all_gather(ranks: Pool, dim: int) -> None:
    assert {"direct", "tracked"} < builders(ranks, "matmul_all_gather", Gemm((300, 72), 136, BF16, dim))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
def test_every_schedule_of_both_gradients_of_all_gather(ranks: Pool, dim: int, dtype: torch.dtype) -> None:
    case = Gemm((300, 72), 1030, dtype, dim)
    assert builders(ranks, "matmul_all_gather_gradients", case) == {"serial", "direct"}


@pytest.mark.parametrize(
    "name",
    ["scatter", "direct[chunks=2,by=store,add=gemm]", "ring[chunks=2,by=dma]", "pulled[chunks=2,by=tracked]", "serial"],
)
def test_scattered_sizes_take_turns_in_one_memory(ranks: Pool, name: str) -> None:
    ranks.run(suite.many_sizes, "matmul_reduce_scatter", Gemm(dtype=BF16, schedule=name), timeout_s=60)


@pytest.mark.parametrize(
    "name",
    [
        "shard[chunks=2,send=in_turn,by=dma]",
        "shard[chunks=1,send=at_once,by=kernel]",
        "ficco_2d[start=hetero,gemms=unfused,steps=2,by=dma]",
        "gather[by=kernel]",
    ],
)
def test_stragglers_and_graphs(ranks: Pool, name: str) -> None:
    p = AllGatherMatmul.even(192 * ranks.world_size, 128, 256, ranks.world_size)
    ranks.run(schedule_ranks.stragglers, p, [name], timeout_s=60)
    ranks.run(schedule_ranks.replays, p, name, 100, 10, timeout_s=60)


def test_the_operator(ranks: Pool) -> None:
    ranks.run(suite.results, "all_gather_matmul", Gathered((256, 512), 384, BF16), 3, timeout_s=90)


def test_every_output_map(ranks: Pool) -> None:
    ranks.run(output_maps.run_library, (256, 128, 192), BF16, timeout_s=300)
    ranks.run(output_maps.run_random, (256, 128, 192), BF16, range(10), timeout_s=200)
