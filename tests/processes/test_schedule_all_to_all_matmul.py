"""Schedules with dynamic sizes on CPU processes."""

from __future__ import annotations

import all_to_all_matmul_schedule_ranks as ranks
import pytest
from schedule_cpu_ranks import applicable
from support.slow import slow

from weft.builders import AllToAllMatmul
from weft.launch import Pool


def problem(
    world: int, experts: int, rows: tuple[int, ...], dtype: str = "fp32", exact: bool = True, return_x: bool = False, k: int = 5
) -> AllToAllMatmul:  # fmt: skip
    return AllToAllMatmul(world, experts, rows, 7, k, dtype, most=max(rows), exact=exact, return_x=return_x)


@pytest.mark.parametrize(
    "p",
    [
        problem(1, 3, (9,)),
        problem(2, 2, (11, 6)),
        problem(2, 4, (16, 16), "bf16", exact=False),
        slow(problem(3, 2, (5, 0, 12))),
        problem(1, 3, (9,), return_x=True),
        problem(2, 4, (16, 11), exact=False, return_x=True),
        slow(problem(3, 2, (5, 0, 12), return_x=True)),
        slow(problem(4, 3, (20, 7, 13, 1), exact=False)),
        slow(problem(4, 3, (20, 7, 13, 1), return_x=True)),
        slow(problem(8, 2, (6,) * 8)),
    ],
    ids=[
        "one rank",
        "two",
        "two, room to spare",
        "three",
        "one rank, and tokens",
        "two, room to spare, and tokens",
        "three, and tokens",
        "four, room to spare",
        "four, and tokens",
        "eight",
    ],
)
def test_every_candidate_is_right_on_other_splits_than_expected(pool: Pool, p: AllToAllMatmul) -> None:
    counts = pool.run(ranks.every_candidate, p, 10, 3, ranks=p.world_size)
    assert set(counts) == {sum(1 for _ in applicable(p))}
    assert counts[0] >= (1 if p.world_size == 1 else 4)


@pytest.mark.parametrize(
    ("p", "steps"),
    [
        (problem(2, 2, (11, 6)), 5),
        (problem(2, 3, (16, 9), "bf16", return_x=True, k=40), 3),
        (problem(3, 2, (5, 0, 12), "fp64", exact=False, k=9), 4),
        slow(problem(4, 1, (20, 7, 13, 0), exact=False, return_x=True, k=16), 0),
        slow(problem(4, 3, (20, 7, 0, 13), "fp16", k=21), 2),
    ],
    ids=["a column a step", "whole 16 bytes", "three, no whole 16 bytes", "four", "four, fp16"],
)
def test_columns_add_up(pool: Pool, p: AllToAllMatmul, steps: int) -> None:
    by = ("dma", "kernel") if p.exact else ("kernel",)
    names = [
        f"ficco_2d[start={start},gemms={gemms},steps={steps},by={one}]"
        for start in ("uniform", "hetero")
        for gemms in ("fused", "unfused")
        for one in by
    ]
    assert set(pool.run(ranks.every_candidate, p, 20, 3, names, ranks=p.world_size)) == {len(names)}


def test_splits_that_do_not_fit_are_named(pool: Pool) -> None:
    with pytest.raises(
        Exception, match=r"tokens of rank . has 4 rows, but .*: pass at least . rows, or correct the sizes"
    ):
        pool.run(ranks.wrong_splits, problem(2, 2, (4, 4)), ranks=2)
