"""Calls of many sizes on CPU processes: results are right in random order, and many sizes need no more threads and
mappings than a few.
"""

from __future__ import annotations

import re

import pytest
from support import sizes_ranks as ranks
from support.slow import slow

from weft.launch import Pool, RankDiedError


@pytest.mark.parametrize(("world", "sizes"), [slow(2, 100), (3, 100), slow(4, 200)])
def test_many_sizes_in_random_order(world: int, sizes: int) -> None:
    """Schedules with different signals and memory follow each other at random sizes. Lanes are delayed, and memory is
    poisoned.
    """
    with Pool(world) as fresh:  # ranks may still be freeing memory of earlier tests
        of_ranks = fresh.run(ranks.in_random_order, (20, sizes), timeout_s=200)
    for found in of_ranks:
        assert found["ways"] >= 4
        assert found[f"after {sizes}"] == found["after 20"]
        before, closed = found["before"], found["closed"]
        assert found["after 20"].maps - before.maps == 2 * world, (
            "what ranks agree with, and the memory of all schedules"
        )
        assert (closed.maps, closed.lanes) == (before.maps, before.lanes)


def test_a_rank_that_is_killed_among_many_sizes_is_named() -> None:
    with Pool(3) as mortals:
        answers = mortals.run(ranks.killed, 60, return_exceptions=True, timeout_s=60)
    assert isinstance(answers[1], RankDiedError)
    for rank in (0, 2):
        assert isinstance(answers[rank], list), answers[rank]
        first, second = answers[rank]
        assert re.match(r"PeerLostError: rank 1 \(pid \d+\) died", first)
        assert re.match(r"PoisonedGroupError: .*rank 1 \(pid \d+\) died", second)


def test_schedules_are_measured_once_for_sizes_within_a_factor_of_two(pool: Pool) -> None:
    """The first call measures the usual schedules. For sizes further away, only serial and the two fastest schedules
    are measured.
    """
    of_ranks = pool.run(ranks.measured_sizes, [64, 65, 50, 128, 33, 8, 9, 512, [60, 61], [70, 3], [8, 2]], ranks=2)
    assert of_ranks[0] == of_ranks[1]
    first, *near, far, near_far, farther, uneven, near_uneven, far_uneven, taken = of_ranks[0]
    assert {"serial", "gather[by=kernel]"} < set(first)
    assert near == [()] * 4
    assert "serial" in far
    assert set(far) <= set(first)
    assert len(far) <= 3
    assert near_far == near_uneven == ()
    assert set(farther) == set(far)
    assert {"serial", "gather[by=kernel]"} < set(uneven), "to which other schedules apply"
    assert len(far_uneven) <= 3
    assert set(taken) <= {*first, *uneven}
