"""Test schedules on two GPUs: results against float64, graphs, late ranks, and a rank that never calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gpu_ranks
import pytest
import schedule_ranks as ranks

from weft.builders import AllGatherMatmul, named
from weft.launch import Pool
from weft.sim import NULL, simulate

pytestmark = gpu_ranks.MARKS
CASES = {
    "bf16": (AllGatherMatmul.even(512, 256, 384, 2), True),
    "bf16, weights not transposed": (AllGatherMatmul.even(256, 128, 512, 2), False),
    "fp32, odd sizes": (AllGatherMatmul(2, (37, 37), (19,), 43, "fp32"), True),
    "uneven shards": (AllGatherMatmul(2, (40, 129), (64,), 72, "fp16"), True),
    "a rank without rows": (AllGatherMatmul(2, (0, 64), (64,), 64, "bf16"), True),
    "three weights": (AllGatherMatmul(2, (128, 128), (64, 32, 32), 128, "bf16"), True),
    "the gathered input wanted": (AllGatherMatmul(2, (96, 96), (64,), 128, "bf16", True), True),
}
SHARD = "shard[chunks=2,send=in_turn,by=dma]"
KERNEL = "shard[chunks=1,send=in_turn,by=kernel]"
TWO_D = "ficco_2d[start=hetero,gemms=unfused,steps=2,by=dma]"


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_is_right(pair: Pool, name: str) -> None:
    counts = pair.run(ranks.every_candidate, *CASES[name], timeout_s=90)
    assert min(counts) >= 4


@pytest.mark.parametrize("name", [SHARD, KERNEL, TWO_D])
def test_a_graph_is_replayed_a_thousand_times(pair: Pool, name: str) -> None:
    pair.run(ranks.replays, AllGatherMatmul.even(256, 128, 256, 2), name, 1000, 100, timeout_s=60)


def test_stragglers(pair: Pool) -> None:
    pair.run(ranks.stragglers, AllGatherMatmul.even(256, 128, 256, 2), [SHARD, KERNEL, TWO_D], timeout_s=60)


def test_a_chunk_of_columns_is_one_copy(pair: Pool) -> None:
    p = AllGatherMatmul.even(256, 128, 256, 2)
    for rank, spans in enumerate(pair.run(ranks.spans, p, TWO_D, timeout_s=60)):
        copies = [span for span in spans if span.bytes]
        assert [span.bytes for span in copies] == [128 * 128 * 2] * 2
        assert all(span.name.startswith("copy") and span.rank == rank for span in copies)
        assert len({span.lane for span in spans}) == 2


@pytest.mark.parametrize("name", [SHARD, TWO_D, "ficco_1d[start=uniform,gemms=fused,steps=2,by=dma]"])
def test_what_runs_when_is_the_simulators_order(pair: Pool, name: str) -> None:
    """Compare the order of steps on each lane, without waits and sets. These are often part of a neighbouring
    operation.
    """
    p = AllGatherMatmul.even(256, 128, 256, 2)
    simulated = simulate(named(p, name).build(), NULL).timeline
    for rank, spans in enumerate(pair.run(ranks.spans, p, name, timeout_s=60)):
        wanted = [(span.lane, span.name) for span in simulated if span.rank == rank]
        for lane in {lane for lane, _ in wanted}:
            steps = [text for of, text in wanted if of == lane and not text.startswith(("wait", "set"))]
            found = sorted((span for span in spans if span.lane == lane), key=lambda span: span.start_us)
            names = [text for span in found for text in span.name.split("; ")]
            assert [text for text in names if not text.startswith(("wait", "set"))] == steps


def test_a_chain_of_gemms_is_one_schedule() -> None:
    """Run the example with two lanes that compute."""
    example = Path(__file__).parents[2] / "examples" / "gemm_chain.py"
    done = subprocess.run(
        [sys.executable, example, "--device", "cuda", "--chunks", "4"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("against float64") == 2


def test_a_rank_that_never_calls(pair: Pool) -> None:
    p = AllGatherMatmul.even(256, 128, 256, 2)
    with Pool(2, backend="nccl") as alone:
        (kind, text), (other, _) = alone.run(ranks.never_calls, p, SHARD, timeout_s=60)
    assert kind == "DeadlineError", text
    assert "waited 2" in text
    assert "for signal arrived[2] of rank 1 on lane 'compute'" in text
    assert other == "PoisonedGroupError"


def test_a_call_that_raises_in_the_middle_of_a_run(pair: Pool) -> None:
    """The group must fail: peers already have a part of the call's data, and would take it for data of the next call."""
    p = AllGatherMatmul.even(256, 128, 256, 2)
    with Pool(2, backend="nccl") as alone:
        (first, then), (_, other) = alone.run(ranks.raises_in_the_middle, p, SHARD, timeout_s=60)
    assert (first, then, other) == ("MemoryError", "PoisonedGroupError", "PoisonedGroupError")


def test_ranks_with_different_schedules(pair: Pool) -> None:
    with Pool(2, backend="nccl") as alone:
        for text in alone.run(ranks.disagree, timeout_s=60):
            assert text.startswith("DisagreementError")


@pytest.fixture
def one_queue() -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        with Pool(2, backend="nccl") as workers:
            yield workers


def test_one_hardware_queue(one_queue: Pool) -> None:
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    p = AllGatherMatmul.even(512, 256, 384, 2)
    one_queue.run(ranks.stragglers, p, [SHARD, KERNEL, TWO_D], timeout_s=60)
    one_queue.run(ranks.replays, p, SHARD, 100, 10, timeout_s=60)
