"""Test schedules of weft.all_to_all_matmul on two GPUs against float64, with dynamic sizes and in graphs."""

from __future__ import annotations

import gpu_all_to_all_matmul_ranks as ranks
import gpu_ranks
import pytest

from weft.builders import AllToAllMatmul
from weft.launch import Pool

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


# The last number is how many pieces K is cut into. Tensor maps need bf16 or fp16 pieces whose rows begin at multiples
# of 16 bytes. Other pieces are read through pointers.
COLUMNS = {
    "bf16, weights transposed": (problem((512, 384), 4, 256, 192), True, 3),
    "bf16, pieces of two sizes, room to spare": (problem((300, 512), 4, 256, 200, exact=False), False, 3),
    "bf16, large tiles": (problem((2048, 2000), 2, 512, 2048), False, 2),
    "bf16, no whole 16 bytes": (problem((137, 61), 3, 40, 41), True, 4),
    "fp16, odd sizes, room to spare": (problem((137, 61), 3, 33, 40, "fp16", exact=False), False, 2),
    "fp32, as many steps as columns": (problem((37, 61), 3, 19, 5, "fp32"), False, 5),
    "a rank without tokens": (problem((0, 64), 2, 64, 64), False, 2),
}


@pytest.mark.parametrize("start", ["uniform", "hetero"])
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_add_up(pair: Pool, name: str, start: str) -> None:
    p, transposed, steps = COLUMNS[name]
    names = [
        f"ficco_2d[start={start},gemms={gemms},steps={steps},by={by}]"
        for gemms in ("fused", "unfused")
        for by in (("dma", "kernel") if p.exact else ("kernel",))
    ]
    pair.run(ranks.every_candidate, p, transposed, False, names, timeout_s=120)


TWO_D = "ficco_2d[start=uniform,gemms=fused,steps=0,by=kernel]"
TWO_D_HETERO = "ficco_2d[start=hetero,gemms=unfused,steps=0,by=kernel]"
IN_ONE_LANE = ["dispatch_by_expert[by=kernel,chunks=1]", "dispatch_sorted[chunks=1]"]
NAMES = [
    "dispatch[by=kernel,rest=each]", "dispatch_by_expert[by=kernel,chunks=2]", "dispatch_sorted[chunks=2]", TWO_D, TWO_D_HETERO,
    *IN_ONE_LANE,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_is_replayed_with_other_sizes(pair: Pool, name: str) -> None:
    pair.run(ranks.replays, problem((256, 256), 4, 128, 192, exact=False), name, 100, timeout_s=60)


@pytest.mark.parametrize("name", NAMES)
def test_more_rows_come_than_were_expected(pair: Pool, name: str) -> None:
    pair.run(ranks.more_than_expected, problem((512, 384), 4, 128, 192), name, timeout_s=60)


@pytest.mark.parametrize("name", IN_ONE_LANE)
@pytest.mark.parametrize(
    "p", [problem((700, 300), 2, 72, 64, exact=False), problem((5, 1), 3, 7, 33, "fp32", exact=False)]
)
def test_many_exchanges_in_one_launch(pair: Pool, p: AllToAllMatmul, name: str) -> None:
    pair.run(ranks.many_calls, p, name, 400, timeout_s=60)


@pytest.mark.parametrize("name", IN_ONE_LANE)
def test_a_rank_that_never_sends_tokens(pair: Pool, name: str) -> None:
    with Pool(2, backend="nccl") as alone:
        answers = alone.run(ranks.never_calls, problem((64, 64), 3, 96, 64, exact=False), name, timeout_s=60)
    (error, lost), (other, _) = answers
    assert error.startswith("DeadlineError"), error
    assert "for signal arrived[1] of rank 1 on lane 'compute'" in error
    assert lost
    assert other.startswith("PoisonedGroupError"), other


@pytest.mark.parametrize("by", ["dma", "kernel"])
def test_what_ran_can_be_seen(pair: Pool, by: str) -> None:
    for names in pair.run(ranks.timeline, problem((256, 256), 4, 128, 192), by, timeout_s=60):
        assert sum("grouped_matmul" in name for name in names) == 2
        assert sum("tokens" in name and name.startswith("copy") for name in names) == 1
