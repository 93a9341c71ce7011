"""Timelines as Chrome / Perfetto JSON, in the layout of Kineto's traces. Open the file at https://ui.perfetto.dev.

The file has a process for each rank (and for each variant, if there are several timelines), and a thread for each lane.
Spans are complete events ("X") in microseconds, with the category `kernel`. Spans that only move bytes have the
category `gpu_memcpy` and a name that begins with "Memcpy". A counter ("C") for each rank shows the total of the bytes
that it has sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.files import write_whole
from weft.timeline import Timeline
from weft.trace.kinds import kind_of
from weft.trace.picture import bytes_sent, require_named


def trace_events(timelines: Mapping[str, Timeline]) -> list[dict[str, Any]]:
    """Return the events of all timelines.

    timelines: the timelines, by the name of the variant.

    Each timeline is shifted to start at time 0.

    Raise `ValueError` if all timelines are empty.
    """
    require_named(timelines)
    if not any(timelines.values()):
        names = ", ".join(map(repr, timelines))
        raise ValueError(
            f"nothing to trace: the timelines {names} have no spans. First pass each of them as timeline= to a call"
            if names
            else "nothing to trace: timelines is empty. Pass a timeline as timeline= to a call, and then {name: timeline} here"
        )
    events: list[dict[str, Any]] = []
    pid = 0
    for variant, recorded in timelines.items():
        timeline = recorded.shifted()
        for rank in timeline.ranks():
            name = f"rank {rank}: {variant}" if variant else f"rank {rank}"
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
            tid_of = {lane: tid for tid, lane in enumerate(timeline.lanes(rank))}
            for lane, tid in tid_of.items():
                events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
            for span in timeline:
                if span.rank != rank:
                    continue
                sends = kind_of(span) == "send"
                events.append(
                    {
                        "ph": "X",
                        "cat": "gpu_memcpy" if sends else "kernel",
                        "name": f"Memcpy PtoP ({span.name})" if sends else span.name,
                        "pid": pid,
                        "tid": tid_of[span.lane],
                        "ts": span.start_us,
                        "dur": span.duration_us,
                        "args": {"device": rank, "stream": tid_of[span.lane], "bytes": span.bytes}
                        | ({"program": span.program} if span.program >= 0 else {}),
                    }
                )
            for time_us, total in zip(*bytes_sent(timeline, rank), strict=True):
                events.append({"ph": "C", "name": "bytes sent", "pid": pid, "ts": time_us, "args": {"bytes": total}})
            pid += 1
    return events


def write_trace(path: str | Path, timelines: Mapping[str, Timeline], **about: str) -> None:
    """Write the timelines {name of the variant: timeline} as one trace file. Create missing folders.

    about: metadata, such as machine and configuration. Raise `ValueError` if all timelines are empty.
    """
    trace = {"schemaVersion": 1, "displayTimeUnit": "ms", **about, "traceEvents": trace_events(timelines)}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(trace))
