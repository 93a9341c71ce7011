"""Schedules on three and four GPUs, or ranks that share fewer: with two there is one peer, and no order among peers."""

from __future__ import annotations

from collections.abc import Iterator

import dispatch_ranks
import gpu_ranks
import pytest
import schedule_ranks
import torch
from support import (
    gathered_gradient_ranks,
    gathered_product_ranks,
    matmul_ranks,
    output_maps,
    reduce_ranks,
    scatter_ranks,
)

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_schedule_that_scatters(ranks: Pool, dtype: torch.dtype) -> None:
    names = ranks.run(scatter_ranks.every_schedule, 300 * ranks.world_size, 136, 72, dtype, 0.01, timeout_s=240)
    assert {"scatter", "direct", "tracked", "ring", "pulled"} < {name.split("[")[0] for name in names[0]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_schedule_that_adds_up_everywhere(ranks: Pool, dtype: torch.dtype) -> None:
    for m in (300 * ranks.world_size, 300 * ranks.world_size - 1):
        names = ranks.run(reduce_ranks.every_schedule, m, 136, 72, dtype, 0.01, timeout_s=240)
        assert {"one_shot", "two_shot"} < {name.split("[")[0] for name in names[0]}


@pytest.mark.parametrize("dim", [0, -1])
def test_every_schedule_that_gathers_products(ranks: Pool, dim: int) -> None:
    names = ranks.run(gathered_product_ranks.every_schedule, 300, 136, 72, dim, torch.bfloat16, 0.01, timeout_s=240)
    assert {"direct", "tracked"} < {name.split("[")[0] for name in names[0]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [False, True])
def test_every_schedule_of_both_gradients_of_what_was_gathered(ranks: Pool, columns: bool, dtype: torch.dtype) -> None:
    names = ranks.run(gathered_gradient_ranks.every_schedule, 300, 1030, 72, columns, dtype, 0.01, timeout_s=120)
    assert len(names[0]) == 8


@pytest.mark.parametrize(
    "name",
    ["scatter", "direct[chunks=2,by=store,add=gemm]", "ring[chunks=2,by=dma]", "pulled[chunks=2,by=tracked]", "serial"],
)
def test_scattered_sizes_take_turns_in_one_memory(ranks: Pool, name: str) -> None:
    ranks.run(scatter_ranks.many_sizes, name, torch.bfloat16, timeout_s=60)


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
    ranks.run(matmul_ranks.forward, (256, 512), 0, [384], None, torch.bfloat16, False, None, 3, timeout_s=90)


def test_every_output_map(ranks: Pool) -> None:
    ranks.run(output_maps.run_library, (256, 128, 192), torch.bfloat16, timeout_s=300)
    ranks.run(output_maps.run_random, (256, 128, 192), torch.bfloat16, range(10), timeout_s=200)
