"""A picture of overlap: bars show when each rank computes and sends, and a curve below shows the total bytes sent.

A serial schedule computes, then sends: its curve is flat, then steep. An overlapped schedule sends while it computes: its curve
rises steadily ("Accelerating Multi-GPU Embedding Retrieval with PGAS-Style Communication", figures 7 and 10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.timeline import Span, Timeline
from weft.trace.kinds import kind_of
from weft.trace.pyplot import pyplot
from weft.words import kind as kind_of_object

_COLOURS = {"compute": "#4063a3", "bytes leave": "#e1812c", "copy within the rank": "#f3c9a0", "wait": "#c8c8c8"}
_VARIANT_COLOURS = ("#7a7a7a", "#b8432f", "#2f7d5b", "#6a4c93")


def bytes_sent(timeline: Timeline, rank: int | None = None) -> tuple[list[float], list[float]]:
    """Return (times in us, total bytes that `rank` has sent at each time). rank: None for all ranks together.

    A span is assumed to send its bytes at a constant rate. If a rank fetches bytes from a peer, they count for the rank
    that fetches. The curve covers the whole timeline, and starts with 0 bytes.
    """
    spans = [s for s in timeline if rank is None or s.rank == rank]
    sending = [s for s in spans if s.bytes > 0]
    if not spans:
        return [], []
    # The slope of the curve increases by a span's rate at its start, and decreases at its end. Spans last at least 1 ns.
    edges: dict[float, float] = {min(s.start_us for s in spans): 0.0, max(s.end_us for s in spans): 0.0}
    for span in sending:
        end = max(span.end_us, span.start_us + 1e-3)
        rate = span.bytes / (end - span.start_us)
        edges[span.start_us] = edges.get(span.start_us, 0.0) + rate
        edges[end] = edges.get(end, 0.0) - rate
    times = np.array(sorted(edges))
    rates = np.cumsum([edges[t] for t in times])
    totals = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(times))])
    return times.tolist(), totals.tolist()


def draw_overlap(path: str | Path, timelines: Mapping[str, Timeline], title: str) -> None:
    """Write a PNG with a panel for each timeline, and a panel with curves of the bytes sent, all on one time axis.

    In a timeline's panel, each lane of each rank has a row.

    timelines: the timelines to draw, by the name of the variant.
    title: a description of the run; also stored as the file's description.

    Missing folders are created. Raise `ValueError` if a timeline is empty.
    """
    require_named(timelines)
    for variant, timeline in timelines.items():
        if not timeline:
            raise ValueError(
                f"nothing to draw for {variant!r}: its timeline has no spans. First pass it as timeline= to a call"
            )
    if not timelines:
        raise ValueError(
            "nothing to draw: timelines is empty. Pass a timeline as timeline= to a call, and then {name: timeline} here"
        )
    plt = pyplot()
    from matplotlib.patches import Patch

    shifted = {variant: timeline.shifted() for variant, timeline in timelines.items()}
    end_ms = max(span.end_us for timeline in shifted.values() for span in timeline) / 1e3
    lanes = {variant: _lanes(timeline) for variant, timeline in shifted.items()}
    heights = [0.6 + 0.34 * len(rows) for rows in lanes.values()]
    figure, axes = plt.subplots(
        len(shifted) + 1,
        1,
        sharex=True,
        figsize=(11, sum(heights) + 3.4),
        height_ratios=[*heights, 2.2],
        layout="constrained",
        squeeze=False,
    )
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    for axis, (variant, rows) in zip(axes[:, 0], lanes.items(), strict=False):
        finish = max(span.end_us for span in shifted[variant]) / 1e3
        axis.set_title(f"{variant}: {finish:.2f} ms", fontsize=10, loc="left", fontweight="bold")
        for y, spans in enumerate(rows.values()):
            for (kind, top), drawn in _drawn(spans).items():
                bars = _merged(drawn, pixel_us=end_ms)  # about a thousandth of the axis
                axis.broken_barh(bars, (y + top, 0.9 - top), facecolors=_COLOURS[kind], edgecolor="none")
        axis.set_yticks([y + 0.5 for y in range(len(rows))], list(rows), fontsize=8)
        axis.set_ylim(len(rows), 0)
        axis.axvline(finish, color="black", linewidth=0.8, linestyle=":")
        axis.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    kinds = {kind for rows in lanes.values() for spans in rows.values() for kind, _ in _drawn(spans)}
    legend = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items() if kind in kinds]
    axes[0, 0].legend(handles=legend, ncol=4, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    curve = axes[-1, 0]
    for i, (variant, timeline) in enumerate(shifted.items()):
        times, totals = bytes_sent(timeline)
        style = "--" if i == 0 and len(shifted) > 1 else "-"
        curve.plot(
            np.array(times) / 1e3,
            np.array(totals) / 1e6,
            style,
            color=_VARIANT_COLOURS[i % 4],
            label=variant,
            linewidth=2,
        )
    curve.set_xlabel("time since the call, ms")
    curve.set_ylabel("MB sent,\nall ranks", fontsize=9)
    curve.set_xlim(0, end_ms * 1.01)
    curve.set_ylim(bottom=0)
    curve.grid(alpha=0.3)
    curve.legend(fontsize=9, frameon=False, ncol=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    for side in ("top", "right"):
        curve.spines[side].set_visible(False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Description": title})
    plt.close(figure)


def _lanes(timeline: Timeline) -> dict[str, list[Span]]:
    """Return {label: spans} for each lane of each rank, in the order from top to bottom."""
    return {
        f"rank {rank}  {lane}": [s for s in timeline if (s.rank, s.lane) == (rank, lane)]
        for rank in timeline.ranks()
        for lane in timeline.lanes(rank)
    }


def _drawn(spans: Sequence[Span]) -> dict[tuple[str, float], list[Span]]:
    """Return the bars of a row: {(kind of span, top edge of the bar within its row): spans that are drawn there}. A
    span that computes and sends at the same time is drawn as two bars.
    """
    found: dict[tuple[str, float], list[Span]] = {}
    for span in spans:
        kind = kind_of(span)
        if kind == "send":
            found.setdefault(("bytes leave" if span.bytes else "copy within the rank", 0.1), []).append(span)
        else:
            found.setdefault((kind, 0.1), []).append(span)
            if span.bytes:
                found.setdefault(("bytes leave", 0.5), []).append(span)
    return dict(sorted(found.items(), key=lambda item: item[0][1]))


def _merged(spans: Sequence[Span], pixel_us: float) -> list[tuple[float, float]]:
    """Return (start, width) of each bar in ms. Bars are at least one pixel wide, and bars that touch are merged."""
    bars: list[list[float]] = []
    for span in sorted(spans, key=lambda s: s.start_us):
        end = max(span.end_us, span.start_us + pixel_us)
        if bars and span.start_us <= bars[-1][1] + pixel_us / 2:
            bars[-1][1] = max(bars[-1][1], end)
        else:
            bars.append([span.start_us, end])
    return [(start / 1e3, (end - start) / 1e3) for start, end in bars]


def require_named(timelines: Any) -> None:
    """Raise `ValueError` unless `timelines` is a dict of timelines."""
    fix = 'pass {name: timeline}, such as {"serial": timeline}'
    if not isinstance(timelines, Mapping):
        raise ValueError(f"timelines is {kind_of_object(timelines)}: {fix}")
    for name, timeline in timelines.items():
        if not isinstance(timeline, Timeline):
            raise ValueError(f"timelines[{name!r}] is {kind_of_object(timeline)}: {fix}")
