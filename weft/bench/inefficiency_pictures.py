"""Losses as pictures, after figures 7 to 10 of the FiCCO paper.

    python -m weft.bench.inefficiency_pictures RESULTS.jsonl DIRECTORY

draws them from recorded results. A bar begins at 1, which is no loss, and goes down where a loss is below it.

Source: "Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap", IV-C to IV-E.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.bench import records
from weft.bench.inefficiency_measure import PIECES, cut_name, gather_beside, gather_name, gemm_beside
from weft.bench.inefficiency_results import Row, rows_of
from weft.bench.inefficiency_sides import TRANSPORTS
from weft.trace.pyplot import pyplot
from weft.words import counted

_COLOURS = {"dma": "#2f7d5b", "kernel": "#e1812c", "library": "#b8432f", "rows": "#4063a3", "columns": "#e1812c"}
_LOSSES = {"decomposition": "#4063a3", "contention": "#e1812c"}


def draw(directory: Path, rows: Sequence[Row], title: str) -> list[Path]:
    """Write the four pictures as PNG files into `directory`, made if need be. `title`: what ran where."""
    if not rows:
        raise ValueError("nothing to draw: no GEMM was measured")
    plt = pyplot()
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, panels, drawing in (
        ("figure-7-gemm-decomposition", 2, _gemms_cut),
        ("figure-8-gather-decomposition", 1, _gathers_cut),
        ("figure-9-contention", 2, _contention),
        ("figure-10-shares", 3, _shares),
    ):
        figure, axes = plt.subplots(panels, 1, figsize=(11, 1 + 2.9 * panels), layout="constrained", squeeze=False)
        drawing(axes[:, 0], rows)
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        written.append(directory / f"{name}.png")
        figure.savefig(written[-1], dpi=130)
        plt.close(figure)
    return written


def shares(decomposition: float, contention: float) -> tuple[float, float]:
    """Which part of what is lost each of two losses is; a gain counts as no loss, and without loss both are 0."""
    lost = max(0.0, decomposition - 1), max(0.0, contention - 1)
    total = sum(lost)
    return (lost[0] / total, lost[1] / total) if total else (0.0, 0.0)


def _gemms_cut(axes: Any, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda r: r.op_to_byte)
    for axis, pieces in zip(axes, (8, 64), strict=True):
        bars = {cut: [r.loss(cut_name(cut, pieces)) for r in ordered] for cut in ("rows", "columns")}
        labels = [f"{r.name}\n{r.op_to_byte:.0f}{' *' if r.gemm.m < r.gemm.k else ''}" for r in ordered]
        _bars(axis, f"GEMM in {pieces} pieces over the whole", labels, bars)
    axes[-1].set_xlabel("GEMM and its op-to-byte; * M < K")


def _gathers_cut(axes: Any, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda r: r.gathered_bytes)
    bars = {by: [r.loss(gather_name(by)) for r in ordered] for by in TRANSPORTS}
    labels = [f"{r.name}\n{r.gathered_bytes / 1e6:.3g}" for r in ordered]
    _bars(axes[0], f"all-gather in {PIECES} pieces over one piece", labels, bars)
    axes[0].set_xlabel("GEMM and the size of its A, MB")


def _contention(axes: Any, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda r: r.traffic)
    labels = [f"{r.name}\n{r.traffic / 1e6:.3g}" for r in ordered]
    for axis, what, variant in zip(
        axes, (f"GEMM in {PIECES} beside an all-gather", "all-gather beside that GEMM"), (gemm_beside, gather_beside), strict=True
    ):  # fmt: skip
        bars = {by: [r.loss(variant(by)) for r in ordered] for by in TRANSPORTS}
        _bars(axis, f"{what}, over alone", labels, bars)
    axes[-1].set_xlabel("GEMM and its memory traffic, MB")


def _shares(axes: Any, rows: Sequence[Row]) -> None:
    """Of the schedule that copies by engines and cuts by rows; the contention of 64 pieces is taken from 8."""
    panels: tuple[tuple[str, Callable[[Row], tuple[float, float]], Callable[[Row], float]], ...] = (
        (
            "GEMM in 8 by rows, dma",
            lambda r: (r.loss(cut_name("rows", 8)), r.loss(gemm_beside("dma"))),
            lambda r: r.op_to_byte * r.traffic,
        ),
        (
            "GEMM in 64 by rows, contention as in 8",
            lambda r: (r.loss(cut_name("rows", 64)), r.loss(gemm_beside("dma"))),
            lambda r: r.op_to_byte * r.traffic,
        ),
        (
            f"all-gather in {PIECES}, dma",
            lambda r: (r.loss(gather_name("dma")), r.loss(gather_beside("dma"))),
            lambda r: r.traffic,
        ),
    )
    for axis, (what, losses, along) in zip(axes, panels, strict=True):
        ordered = sorted(rows, key=along)
        parts = np.array([shares(*losses(r)) for r in ordered])
        base = np.zeros(len(ordered))
        for (loss, colour), part in zip(_LOSSES.items(), parts.T, strict=True):
            axis.bar([r.name for r in ordered], 100 * part, bottom=base, color=colour, label=f"{loss} loss", width=0.7)
            base += 100 * part
        axis.set_ylabel("share of what is lost, %", fontsize=9)
        axis.set_ylim(0, 100)
        _finish(axis, what, columns=2)
    axes[1].set_xlabel("GEMMs by op-to-byte times traffic, the least first", fontsize=9)
    axes[2].set_xlabel("GEMMs by traffic, the least first", fontsize=9)


def _bars(axis: Any, what: str, labels: Sequence[str], bars: Mapping[Any, Sequence[float]]) -> None:
    """A group of bars for each label, on a logarithmic axis where losses differ much."""
    width, highest = 0.8 / len(bars), max(max(heights) for heights in bars.values())
    fits = width * len(labels) < 16  # numbers between bars can be read
    if highest > 4:
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
    for i, (name, heights) in enumerate(bars.items()):
        places = np.arange(len(labels)) + (i - (len(bars) - 1) / 2) * width
        drawn = axis.bar(places, np.array(heights) - 1, width, bottom=1, color=_COLOURS[name], label=name)
        if fits:
            texts = [f"{height:.2f}" for height in heights]
            axis.bar_label(drawn, texts, fontsize=6, rotation=90, padding=2)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylabel("loss (1: none)", fontsize=9)
    axis.margins(x=0.01, y=0.18)
    _finish(axis, what, columns=len(bars))


def _finish(axis: Any, what: str, columns: int) -> None:
    axis.set_title(what, fontsize=10, loc="left", fontweight="bold")
    axis.legend(fontsize=8, ncol=columns, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0.1)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def title_of(record: Mapping[str, Any]) -> str:
    """What ran where, from any record of a run."""
    return f"{counted(record['ranks'], 'rank')}, {record['dtype']}, {record['machine']}; {record['date'][:10]}, {record['commit']}"


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 2:
        raise SystemExit("usage: python -m weft.bench.inefficiency_pictures RESULTS.jsonl DIRECTORY")
    found = [r for r in records.read([Path(arguments[0])]) if r["op"] == "inefficiency"]
    if not found:
        raise SystemExit(
            f"{arguments[0]} has no records of inefficiency: weft bench inefficiency --json {arguments[0]}"
        )
    for path in draw(Path(arguments[1]), rows_of(found), title_of(found[-1])):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
