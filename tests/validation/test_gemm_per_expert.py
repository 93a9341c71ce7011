"""The rule for one cuBLAS GEMM per expert, held against recorded times of these GEMMs and of torch's grouped GEMM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.schedule.kernels import LibraryGroupedMatmul

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("machine", ["h100", "h200"])
def test_gemms_per_expert_are_faster_where_the_rule_takes_them(machine: str) -> None:
    taken, left = [], []
    for op in ("all_to_all_matmul", "matmul_all_to_all"):
        for line in (RESULTS / f"{machine}-{op}.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record.get("gemm_ms") and record.get("gemm_each_ms"):
                experts = record["experts"] // record["ranks"]
                shape = experts, record["rows"], record["k"], record["n"], 2
                ratio = record["gemm_each_ms"] / record["gemm_ms"]
                (taken if LibraryGroupedMatmul.is_one_per_expert(*shape) else left).append(ratio)
    assert len(taken) >= 10
    assert max(taken) < 1.0
    assert min(taken) < 0.8
    assert len(left) >= 5
    assert min(left) > 0.95
