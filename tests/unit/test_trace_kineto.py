"""Kineto traces for each rank: names and times of kernels, and HolisticTraceAnalysis as a reader."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from weft.schedule.steps import CollectiveOp
from weft.timeline import Timeline
from weft.trace.kinds import kind_of
from weft.trace.kineto import kineto_traces, write_kineto


def _timeline() -> Timeline:
    timeline = Timeline()
    for rank in (0, 1):
        timeline.add(rank, "compute", "matmul y", 100.0 + rank, 300.0 + rank)
        timeline.add(rank, "copies", "copy x -> y", 150.0 + rank, 250.0 + rank, 4096)
        timeline.add(rank, "compute", "wait for peers", 300.0 + rank, 350.0 + rank)
        timeline.add(rank, "compute", "all_reduce y -> y", 350.0 + rank, 450.0 + rank, 8192)
    return timeline


def test_names_say_what_a_kernel_does_and_waits_are_left_out() -> None:
    traces = kineto_traces(_timeline())
    assert [*traces] == ["rank-0.json", "rank-1.json"]
    events = traces["rank-1.json"]["traceEvents"]
    assert [(one["cat"], one["name"], one["ts"], one["dur"]) for one in events] == [
        ("kernel", "matmul y", 1.0, 200.0),
        ("gpu_memcpy", "Memcpy PtoP (copy x -> y)", 51.0, 100.0),
        ("kernel", "ncclDevKernel_all_reduce y -> y", 251.0, 100.0),
    ]
    assert [one["args"]["stream"] for one in events] == [1, 2, 1]
    assert len({one["args"]["correlation"] for one in events}) == 3


@pytest.mark.parametrize("op", get_args(CollectiveOp))
def test_every_collective_counts_as_communication(op: str) -> None:
    timeline = Timeline()
    timeline.add(0, "compute", f"{op} x -> y", 0.0, 1.0, 8)
    assert kind_of(timeline.spans[0]) == "send"
    (event,) = kineto_traces(timeline)["rank-0.json"]["traceEvents"]
    assert event["name"].startswith("nccl")


def test_an_empty_timeline_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to trace: the timeline has no spans"):
        kineto_traces(Timeline())


def test_holistic_trace_analysis_reads_the_folder(tmp_path: Path) -> None:
    """It finds half of the GEMM's time hidden behind the copy, and the collective after it (`make test-formats`)."""
    analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    write_kineto(tmp_path, _timeline())
    found = analysis.TraceAnalysis(trace_dir=str(tmp_path))
    kinds, _ = found.get_gpu_kernel_breakdown(visualize=False)
    sums = dict(zip(kinds["kernel_type"], kinds["sum"], strict=True))
    assert sums["COMMUNICATION"] == pytest.approx(200, abs=4)  # of two ranks; times are rounded to us
    assert sums["COMPUTATION overlapping MEMORY"] == pytest.approx(200, abs=4)
    assert sums["COMPUTATION"] == pytest.approx(200, abs=4)
    times = found.get_temporal_breakdown(visualize=False)
    assert list(times["rank"]) == [0, 1]
    assert list(times["idle_time(us)"]) == pytest.approx([50, 50], abs=2)
