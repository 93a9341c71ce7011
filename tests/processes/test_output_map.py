"""Output maps on CPU processes: weft's maps and random maps against float64, and against schedules that are written by
hand.
"""

from __future__ import annotations

import re

import pytest
import torch
from support import output_maps as maps
from support.slow import slow

from weft.launch import Pool

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = (50, 40, 24)
"""(rows that a rank owns, n, k)."""


@pytest.mark.parametrize(
    ("world", "dtype"),
    [(1, F32), slow(2, F32), (3, BF16), slow(3, F16), slow(4, F32)],
    ids=str,
)
def test_every_map_of_wefts(pool: Pool, world: int, dtype: torch.dtype) -> None:
    """Rings and direct maps of a collective must both be as close to the exact result as torch's, and therefore close
    to each other.
    """
    pool.run(maps.run_library, SIZES, dtype, ranks=world, timeout_s=200)


@pytest.mark.parametrize("world", [2, 3, slow(4)])
def test_random_maps(pool: Pool, world: int) -> None:
    pool.run(maps.run_random, SIZES, F32, range(world, world + 12), ranks=world, timeout_s=100)


@pytest.mark.parametrize(("world", "dtype"), [(2, F32), (3, BF16), slow(4, F32)], ids=str)
def test_they_give_the_bits_of_schedules_written_by_hand(pool: Pool, world: int, dtype: torch.dtype) -> None:
    for compared in pool.run(maps.like_the_hand_written, dtype, ranks=world, timeout_s=100):
        assert len(compared) == (6 if world == 2 else 7)


def test_ranks_that_disagree_on_a_map_are_told() -> None:
    with Pool(3) as alone:
        for told in alone.run(maps.another_map_on_one_rank, timeout_s=60):
            assert re.match(r"rank \d runs schedule output map .* but rank \d runs output map ", told)
