"""The schedule that a call of all_to_all_matmul takes on CPU processes. Its outputs are functions of the number of
rows.
"""

import pytest
from support import choosing_ranks as ranks
from support.slow import slow

from weft.launch import Pool


@pytest.mark.parametrize("exact", [True, slow(False)], ids=["exact", "bounded"])
def test_without_a_model_schedules_are_run_and_all_ranks_take_one(pool: Pool, exact: bool) -> None:
    found = pool.run(ranks.chooses_for_experts, exact, False, ranks=3, timeout_s=100)
    assert len(set(found)) == 1
    ((_, captured),) = set(found)
    assert bool(captured) == (not exact)  # if y has exactly the arriving rows, the CPU reads their number


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "bounded"])
def test_with_a_model_the_plan_is_taken(pool: Pool, exact: bool) -> None:
    found = pool.run(ranks.chooses_for_experts, exact, True, ranks=2, timeout_s=100)
    assert len(set(found)) == 1
    ((_, captured),) = set(found)
    assert captured.startswith("dispatch") == (not exact)
