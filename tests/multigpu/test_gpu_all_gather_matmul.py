"""Test the schedules that FiCCO's heuristic chooses for weft.all_gather_matmul on two GPUs.

Other tests of the operator are in `test_gpu_operators.py`.
"""

from __future__ import annotations

import gpu_ranks
from support.all_gather_matmul_ranks import by_heuristic

from weft.launch import Pool

pytestmark = gpu_ranks.MARKS


def test_the_heuristics_schedule_runs_or_a_warning_says_why_not(pair: Pool) -> None:
    for found, warned in pair.run(by_heuristic, timeout_s=60):
        assert [names[0].split(",steps")[0] for names in found[:2]] == [
            "ficco_1d[start=uniform,gemms=fused", "ficco_2d[start=uniform,gemms=fused",
        ]  # fmt: skip
        assert all(first == again for first, again in found)
        assert len(warned) == 2
