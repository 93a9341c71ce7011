"""Schedules whose sizes only the run knows, on CPU processes."""

from __future__ import annotations

import dispatch_cpu_ranks as ranks
import pytest
from schedule_cpu_ranks import applicable
from slow import slow

from weft.launch import Pool
from weft.schedule import AllToAllMatmul


def problem(
    world: int, experts: int, rows: tuple[int, ...], dtype: str = "fp32", exact: bool = True, return_x: bool = False
) -> AllToAllMatmul:
    return AllToAllMatmul(world, experts, rows, 7, 5, dtype, most=max(rows), exact=exact, return_x=return_x)


@pytest.mark.parametrize(
    "p",
    [
        problem(1, 3, (9,)),
        problem(2, 2, (11, 6)),
        problem(2, 4, (16, 16), "bf16", exact=False),
        problem(3, 2, (5, 0, 12)),
        problem(1, 3, (9,), return_x=True),
        problem(2, 4, (16, 11), exact=False, return_x=True),
        problem(3, 2, (5, 0, 12), return_x=True),
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


def test_splits_that_do_not_fit_are_named(pool: Pool) -> None:
    with pytest.raises(Exception, match=r"is outside tokens of 4 x 5, by the sizes of this run"):
        pool.run(ranks.wrong_splits, problem(2, 2, (4, 4)), ranks=2)
