"""Timelines as JSON for trace viewers, and as pictures of when ranks compute and send."""

from weft.trace.perfetto import trace_events, write_trace
from weft.trace.picture import bytes_sent, draw_overlap

__all__ = ["bytes_sent", "draw_overlap", "trace_events", "write_trace"]
