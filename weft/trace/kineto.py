"""A timeline as a folder with a Kineto trace for each rank, for HolisticTraceAnalysis and other tools that compare
ranks.

Each file has the rank and the number of ranks (`distributedInfo`), and a complete event ("X") for each span except
waits. A lane becomes a stream. HolisticTraceAnalysis classifies kernels by their names. So NCCL's collectives get names
that begin with "nccl", and other spans that only move bytes get names that begin with "Memcpy".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from weft.files import require_no_others, write_whole
from weft.schedule.steps import CollectiveOp
from weft.timeline import Span, Timeline
from weft.trace.kinds import kind_of

_COLLECTIVES = get_args(CollectiveOp)


def kineto_traces(timeline: Timeline) -> dict[str, dict[str, Any]]:
    """Return {file name: trace} with a trace for each rank. Raise `ValueError` if the timeline is empty."""
    shifted = timeline.shifted()
    ranks = shifted.ranks()
    if not ranks:
        raise ValueError("nothing to trace: the timeline has no spans. First pass it as timeline= to a call")
    return {
        f"rank-{rank}.json": {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": len(ranks)},
            "traceEvents": _events(shifted, rank),
        }
        for rank in ranks
    }


def write_kineto(folder: Path, timeline: Timeline) -> None:
    """Write the traces of all ranks into `folder`; create it if needed.

    Raise `ValueError` if the timeline is empty, or if the folder has traces of ranks that the timeline does not have:
    tools would read them too.
    """
    files = kineto_traces(timeline)
    require_no_others(folder, "rank-*.json", files)
    folder.mkdir(parents=True, exist_ok=True)
    for name, trace in files.items():
        write_whole(folder / name, json.dumps(trace))


def _events(timeline: Timeline, rank: int) -> list[dict[str, Any]]:
    streams = {lane: number for number, lane in enumerate(timeline.lanes(rank), 1)}
    spans = [span for span in timeline if span.rank == rank and kind_of(span) != "wait"]
    return [
        {
            "ph": "X",
            "cat": "gpu_memcpy" if name.startswith("Memcpy") else "kernel",
            "name": name,
            "pid": rank,
            "tid": streams[span.lane],
            "ts": span.start_us,
            "dur": span.duration_us,
            "args": {"device": rank, "stream": streams[span.lane], "correlation": number, "bytes": span.bytes},
        }
        for number, span in enumerate(spans, 1)
        for name in (_name(span),)
    ]


def _name(span: Span) -> str:
    if span.name.startswith(_COLLECTIVES):
        return f"ncclDevKernel_{span.name}"
    return f"Memcpy PtoP ({span.name})" if kind_of(span) == "send" else span.name
