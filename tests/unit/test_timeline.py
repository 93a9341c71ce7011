"""Timelines: spans with a rank and a lane, on one clock, which can be shifted to begin at zero."""

import pytest

from weft.timeline import Span, Timeline


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
