"""Schedules of the combine, which have dynamic sizes, on CPU processes."""

from __future__ import annotations

import matmul_all_to_all_schedule_ranks as ranks
import pytest
from schedule_cpu_ranks import applicable
from support.slow import slow

from weft.builders import MatmulAllToAll
from weft.launch import Pool


def problem(world: int, experts: int, rows: tuple[int, ...], dtype: str = "fp32", exact: bool = True) -> MatmulAllToAll:
    return MatmulAllToAll(world, experts, rows, 7, 5, dtype, most=max(rows), exact=exact)


@pytest.mark.parametrize(
    "p",
    [
        problem(1, 3, (9,)),
        problem(2, 2, (11, 6)),
        problem(2, 4, (16, 16), "bf16", exact=False),
        slow(problem(3, 2, (5, 0, 12))),
        slow(problem(4, 3, (20, 7, 13, 1), exact=False)),
        slow(problem(8, 2, (6,) * 8)),
    ],
    ids=["one rank", "two", "two, room to spare", "three", "four, room to spare", "eight"],
)
def test_every_candidate_is_right_on_other_splits_than_expected(pool: Pool, p: MatmulAllToAll) -> None:
    counts = pool.run(ranks.every_candidate, p, 10, 3, ranks=p.world_size)
    assert set(counts) == {sum(1 for _ in applicable(p))}
    assert counts[0] >= (1 if p.world_size == 1 else 6)


def test_rows_of_a_rank_whose_table_differs_are_spoilt(pool: Pool) -> None:
    pool.run(ranks.other_tables, problem(2, 2, (12, 12)), ranks=2)
