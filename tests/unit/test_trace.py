"""Timelines, and traces that are written from them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import PIL.Image
import pytest

from weft.schedule.steps import CollectiveOp
from weft.timeline import Span, Timeline
from weft.trace import bytes_sent, draw_overlap, trace_events, write_trace
from weft.trace.kinds import kind_of
from weft.trace.kineto import kineto_traces, write_kineto
from weft.trace.picture import _drawn, _lanes

ROOT = Path(__file__).parents[2]


def _serial() -> Timeline:
    spans = [
        Span(rank, lane, name, start + rank, end + rank, sent)
        for rank in (0, 1)
        for lane, name, start, end, sent in (
            ("compute", "pool", 1000.0, 1600.0, 0),
            ("send", "all_to_all", 1600.0, 1900.0, 3000),
            ("compute", "unpack", 1900.0, 2000.0, 0),
        )
    ]
    return Timeline(spans)


def _fused() -> Timeline:
    timeline = Timeline()
    for i in range(10):
        timeline.add(0, "to peers", "pool and store to a peer", 60.0 * i, 60.0 * (i + 1), 300)
    timeline.add(0, "wait", "wait for peers", 600, 640)
    return timeline


def test_a_written_trace_reads_back_without_loss(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    timeline = _serial()
    write_trace(path, {"serial": timeline}, configuration="tiny")
    trace = json.loads(path.read_text())
    assert trace["configuration"] == "tiny"
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0: serial", 1: "rank 1: serial"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    read = [
        Span(
            e["args"]["device"],
            lanes[e["pid"], e["tid"]],
            e["name"].removeprefix("Memcpy PtoP (").removesuffix(")"),
            e["ts"],
            e["ts"] + e["dur"],
            e["args"]["bytes"],
        )
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ]
    assert sorted(read, key=str) == sorted(timeline.shifted(), key=str)


def test_copies_look_like_copies_and_fused_stores_like_kernels() -> None:
    category = {e["name"]: e["cat"] for e in trace_events({"": _serial()}) if e["ph"] == "X"}
    assert category == {"pool": "kernel", "unpack": "kernel", "Memcpy PtoP (all_to_all)": "gpu_memcpy"}
    assert {e["cat"] for e in trace_events({"": _fused()}) if e["ph"] == "X"} == {"kernel"}
    assert kind_of(Span(0, "", "wait for peers", 0, 1)) == "wait"
    assert kind_of(Span(0, "", "put", 0, 1, 8)) == "send"


def test_holistic_trace_analysis_reads_a_trace(tmp_path: Path) -> None:
    """Read the trace with PyPI's `HolisticTraceAnalysis`, if it is installed. The GPU computes in 700 of 1,000 us, and
    copies in the others.
    """
    analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    path = tmp_path / "rank.json"
    write_trace(path, {"": Timeline([span for span in _serial() if span.rank == 0])})
    found = analysis.TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(tmp_path))
    (times,) = found.get_temporal_breakdown(visualize=False).to_dict("records")
    assert times["compute_time(us)"] == pytest.approx(700, abs=3)
    assert times["non_compute_time(us)"] == pytest.approx(300, abs=3)


def test_counters_end_at_the_bytes_that_left_each_rank() -> None:
    events = trace_events({"serial": _serial(), "fused": _fused()})
    last = {e["pid"]: e["args"]["bytes"] for e in events if e["ph"] == "C"}
    assert last == pytest.approx({0: 3000, 1: 3000, 2: 3000})


def test_bytes_leave_evenly_over_their_span() -> None:
    times, totals = bytes_sent(_serial(), rank=0)
    assert dict(zip(times, totals, strict=True)) == pytest.approx({1000.0: 0, 1600.0: 0, 1900.0: 3000, 2000.0: 3000})
    times, totals = bytes_sent(_serial())
    at = dict(zip(times, totals, strict=True))
    assert at[1601.0] == pytest.approx(10)  # rank 0 alone has sent for 1 us
    assert at[1901.0] == pytest.approx(6000)
    assert bytes_sent(Timeline()) == ([], [])
    instant = Timeline([Span(0, "a", "put", 5.0, 5.0, 64), Span(0, "a", "pool", 0.0, 9.0)])
    assert bytes_sent(instant)[1][-1] == pytest.approx(64)


@pytest.mark.slow
def test_the_picture_is_written_and_shows_both_kinds(tmp_path: Path) -> None:
    import matplotlib.image  # not imported at the top, because ranks and workers import this file too

    path = tmp_path / "new" / "overlap.png"
    draw_overlap(path, {"serial": _serial(), "fused": _fused()}, "tiny, 2 ranks")
    pixels = matplotlib.image.imread(path)
    height, width = pixels.shape[:2]
    assert width > 800
    assert height > 400
    colours = {tuple(c) for c in (255 * pixels[:, :, :3]).round().astype(int).reshape(-1, 3).tolist()}
    assert (0x40, 0x63, 0xA3) in colours  # compute
    assert (0xE1, 0x81, 0x2C) in colours  # the colour of "bytes leave"


def test_each_lane_of_each_rank_has_a_row() -> None:
    assert list(_lanes(_serial())) == ["rank 0  compute", "rank 0  send", "rank 1  compute", "rank 1  send"]
    two_streams = Timeline([Span(0, "GEMM 1", "matmul", 0, 2), Span(0, "GEMM 2", "matmul", 1, 3)])
    assert [len(spans) for spans in _lanes(two_streams).values()] == [1, 1], "what runs at once is not one bar"


def test_what_a_span_does_decides_its_colours() -> None:
    spans = [*_fused(), Span(0, "copies", "copy y", 0, 1, 0), Span(0, "copies", "copy x", 0, 1, 8)]
    drawn = {kind: len(found) for kind, found in _drawn(spans).items()}
    assert drawn == {
        ("compute", 0.1): 10, ("wait", 0.1): 1, ("copy within the rank", 0.1): 1, ("bytes leave", 0.1): 1,
        ("bytes leave", 0.5): 10,  # pooling that stores at peers is in the lower half
    }  # fmt: skip


def test_the_picture_of_the_readme_is_what_the_demo_drew() -> None:
    about = PIL.Image.open(ROOT / "docs" / "overlap.png").info["Description"]  # type: ignore[no-untyped-call]
    assert about.startswith("embedding_all_to_all, dcnv2, scaled by "), "make demo PICTURE=docs/overlap.png draws it"
    assert "2 ranks" in about
    assert "; commit " in about


def test_paths_may_be_texts(tmp_path: Path) -> None:
    trace, picture = str(tmp_path / "deep" / "trace.json"), str(tmp_path / "other" / "overlap.png")
    write_trace(trace, {"serial": _serial()})
    draw_overlap(picture, {"serial": _serial()}, "")
    assert Path(trace).exists()
    assert Path(picture).exists()


@pytest.mark.parametrize("write", [write_trace, partial(draw_overlap, title="")])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (_serial(), "timelines is a Timeline: pass {name: timeline}, such as"),
        ({"serial": [1]}, "timelines['serial'] is a list: pass {name: timeline}"),
    ],
)
def test_a_timeline_without_a_name_is_refused(
    tmp_path: Path, write: Callable[..., None], given: object, text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        write(tmp_path / "x.json", given)


def test_nothing_recorded_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw for 'fused'"):
        draw_overlap(tmp_path / "x.png", {"serial": _serial(), "fused": Timeline()}, "")
    with pytest.raises(ValueError, match="nothing to draw: timelines is empty"):
        draw_overlap(tmp_path / "x.png", {}, "")
    with pytest.raises(ValueError, match=r"the timelines 'fused' have no spans\. First pass each of them as timeline="):
        write_trace(tmp_path / "x.json", {"fused": Timeline()})


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


def test_lanes_keep_the_order_in_which_they_appear() -> None:
    timeline = Timeline()
    timeline.add(1, "compute", "pool", 10, 20)
    timeline.add(0, "send", "put", 12, 14, bytes=64)
    timeline.add(0, "compute", "pool", 11, 12)
    timeline.add(0, "send", "put", 15, 16, bytes=64)
    assert timeline.ranks() == [0, 1]
    assert timeline.lanes(0) == ["send", "compute"]
    assert timeline.lanes(2) == []
    assert len(timeline) == 4
    assert next(iter(timeline)).duration_us == 10


def test_shifted_starts_at_zero_and_keeps_the_rest() -> None:
    timeline = Timeline([Span(0, "a", "x", 105.0, 106.0, 3), Span(1, "a", "y", 100.0, 101.0)])
    moved = timeline.shifted()
    assert [(s.start_us, s.end_us) for s in moved] == [(5.0, 6.0), (0.0, 1.0)]
    assert [(s.rank, s.lane, s.name, s.bytes) for s in moved] == [(0, "a", "x", 3), (1, "a", "y", 0)]
    assert [s.start_us for s in timeline.shifted(origin_us=50)] == [55.0, 50.0]
    assert len(Timeline().shifted()) == 0


def test_a_span_cannot_end_before_it_starts() -> None:
    with pytest.raises(ValueError, match="'pool' of rank 3 ends at 1 us, before it starts at 2 us"):
        Timeline().add(3, "compute", "pool", 2, 1)
